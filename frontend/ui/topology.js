// Who is there, drawn: the frontend, its workers, and what moves between them.

import { Card, SIZES, standing } from "./card.js";
import { at, calm, num, s, say, set } from "./dom.js";

const NARROW = 560; // below it, workers stand under each other
const MAX_DRAWN = 24; // of one role; the table has all
const GAP = 10;
const LANE = 30; // where the wires to decode workers pass the prefill workers
const MAX_PULSES = 48;
const PULSE_MS = 750;
const NAMES = new Intl.Collator("en", { numeric: true }); // decode-9 before decode-10

/** The drawing. */
export class Topology {
  #box = at("graph");
  #edges = s("g", { class: "edges" });
  #moving = s("g", { class: "moving" });
  #cards = s("g", {});
  #labels = s("g", {});
  #title = s("title", { id: "graph-title" });
  #svg;
  #known = new Map();
  #wires = new Map(); // by name: {path, count}
  #pulses = [];
  #frame = 0;
  #last = null;
  #shape = "";
  #steps = new Map();
  #front;

  constructor() {
    this.#svg = s(
      "svg", { role: "img", "aria-labelledby": "graph-title", class: "drawing" },
      this.#title, this.#edges, this.#moving, this.#cards, this.#labels,
    );
    this.#box.append(this.#svg);
    const box = s("rect", { class: "box", rx: 7 });
    const name = s("text", { class: "name" }, "frontend");
    const first = s("text", { class: "small" });
    const second = s("text", { class: "small" });
    this.#front = { node: s("g", { class: "card front" }, box, name, first, second), box, name, first, second };
    new ResizeObserver(() => {
      if (this.#last) this.#lay(this.#last);
    }).observe(this.#box);
  }

  /** Show a moment. */
  show(now) {
    now.workers.sort((a, b) => a.role?.localeCompare(b.role ?? "") || NAMES.compare(a.id, b.id));
    const before = this.#last;
    this.#last = now;
    this.#count(now);
    const shape = now.workers.map((worker) => `${worker.id}/${worker.role}`).join() + this.#box.clientWidth;
    if (shape !== this.#shape) this.#lay(now);
    this.#paint(now);
    if (before && document.visibilityState === "visible") this.#send(before, now);
    this.#table(now);
  }

  #count(now) {
    for (const worker of now.workers) {
      const steps = worker.steps ?? 0;
      const known = this.#steps.get(worker.id);
      if (!known || steps < known.steps) {
        this.#steps.set(worker.id, { steps, at: now.at, rate: null });
      } else if (steps !== known.steps || now.at - known.at > 2.5) {
        const rate = (steps - known.steps) / Math.max(0.001, now.at - known.at);
        this.#steps.set(worker.id, { steps, at: now.at, rate });
      }
    }
    if (this.#steps.size > 2 * now.workers.length + 64) this.#steps.clear();
  }

  #rate(worker) {
    return this.#steps.get(worker.id)?.rate ?? null;
  }

  #lay(now) {
    const width = this.#box.clientWidth || 600;
    this.#shape = now.workers.map((worker) => `${worker.id}/${worker.role}`).join() + this.#box.clientWidth;
    const groups = ["prefill", "decode"].map((role) =>
      now.workers.filter((worker) => (worker.role === "prefill") === (role === "prefill")).slice(0, MAX_DRAWN),
    );
    const drawn = new Set(groups.flat().map((worker) => worker.id));
    for (const [id, card] of this.#known) {
      if (!drawn.has(id)) {
        card.node.remove();
        this.#known.delete(id);
      }
    }
    for (const worker of groups.flat()) {
      if (this.#known.has(worker.id)) continue;
      const card = new Card(worker);
      this.#known.set(worker.id, card);
      this.#cards.append(card.node);
    }
    if (!this.#front.node.parentNode) this.#cards.append(this.#front.node);
    this.#labels.replaceChildren();
    this.#edges.replaceChildren();
    this.#wires.clear();
    this.#pulses = [];
    this.#moving.replaceChildren();
    const height = width < NARROW ? this.#stack(groups, width) : this.#spread(groups, width);
    set(this.#svg, "viewBox", `0 0 ${width} ${height}`);
    set(this.#svg, "width", width);
    set(this.#svg, "height", height);
  }

  #size(count) {
    return count <= 4 ? "full" : count <= 9 ? "compact" : "mini";
  }

  #spread([prefill, decode], width) {
    const size = this.#size(Math.max(prefill.length, decode.length));
    const cardH = SIZES[size];
    const gap = size === "mini" ? 5 : GAP;
    const tall = (count) => count * cardH + Math.max(0, count - 1) * gap;
    const laneH = prefill.length ? LANE : 0;
    const inner = Math.max(tall(prefill.length) + laneH, tall(decode.length), 96);
    const height = inner + 28;
    const frontW = Math.min(150, width * 0.2);
    const columns = prefill.length ? 2 : 1;
    const cardW = Math.min(250, (width - frontW - columns * Math.max(56, width * 0.07)) / columns);
    const spare = (width - frontW - columns * cardW) / columns;
    const middle = 20 + inner / 2;
    this.#placeFront(0, middle - 32, frontW, 64);
    const columnX = columns === 2 ? [frontW + spare, width - cardW] : [width - cardW];
    const put = (workers, x, top, label) => {
      this.#label(label, x, 10);
      workers.forEach((worker, index) => {
        this.#known.get(worker.id).place({ x, y: top + index * (cardH + gap), w: cardW, size });
      });
    };
    const from = { x: frontW, y: middle };
    const prefillTop = 20 + (inner - laneH - tall(prefill.length)) / 2;
    const lane = prefillTop + tall(prefill.length) + laneH - 10;
    if (prefill.length) put(prefill, columnX[0], prefillTop, "Prefill");
    put(decode, columnX[columns - 1], 20 + (inner - tall(decode.length)) / 2, title(decode));
    for (const worker of prefill) {
      const card = this.#known.get(worker.id);
      this.#wire(`>${worker.id}`, curve(from, { x: card.x, y: card.y + card.h / 2 }), "ask prefill");
    }
    for (const worker of decode) {
      const card = this.#known.get(worker.id);
      const to = { x: card.x, y: card.y + card.h / 2 };
      const path = prefill.length
        ? `${curve(from, { x: columnX[0] - 6, y: lane })}L${columnX[0] + cardW + 6} ${lane}${curve({ x: columnX[0] + cardW + 6, y: lane }, to, false)}`
        : curve(from, to);
      this.#wire(`>${worker.id}`, path, `ask ${worker.role || "unknown"}`);
      for (const source of prefill) {
        const start = this.#known.get(source.id);
        const path2 = curve({ x: start.x + start.w, y: start.y + start.h / 2 }, { x: to.x, y: to.y - card.h / 5 });
        this.#wire(`${source.id}>${worker.id}`, path2, "kv");
      }
    }
    return height;
  }

  #stack([prefill, decode], width) {
    const size = this.#size(Math.max(prefill.length, decode.length));
    const cardH = SIZES[size];
    const inset = 18;
    this.#placeFront(inset, 0, width - 2 * inset, 54);
    const from = { x: width / 2, y: 54 };
    let top = 92;
    const rows = (workers, label) => {
      this.#label(label, inset, top - 8);
      const perRow = workers.length === 1 || width < 340 ? 1 : 2;
      const cardW = (width - 2 * inset - (perRow - 1) * GAP) / perRow;
      workers.forEach((worker, index) => {
        const x = inset + (index % perRow) * (cardW + GAP);
        const y = top + Math.floor(index / perRow) * (cardH + GAP);
        this.#known.get(worker.id).place({ x, y, w: cardW, size });
      });
      top += Math.ceil(workers.length / perRow) * (cardH + GAP) + 30;
    };
    if (prefill.length) rows(prefill, "Prefill");
    if (decode.length) rows(decode, title(decode));
    for (const worker of prefill.length ? prefill : decode) {
      const card = this.#known.get(worker.id);
      this.#wire(`>${worker.id}`, drop(from, { x: card.x + card.w / 2, y: card.y }), `ask ${worker.role || "unknown"}`);
    }
    if (prefill.length) {
      for (const worker of decode) {
        const card = this.#known.get(worker.id);
        const isLeft = card.x + card.w / 2 <= width / 2;
        const lane = isLeft ? 5 : width - 5;
        const edge = isLeft ? inset : width - inset;
        const side = isLeft ? card.x : card.x + card.w;
        const to = card.y + card.h / 2;
        this.#wire(`>${worker.id}`, `M${edge} 27Q${lane} 27 ${lane} 40L${lane} ${to - 12}Q${lane} ${to} ${side} ${to}`, "ask decode");
        for (const source of prefill) {
          const start = this.#known.get(source.id);
          this.#wire(
            `${source.id}>${worker.id}`,
            drop({ x: start.x + start.w / 2, y: start.y + start.h }, { x: card.x + card.w / 2, y: card.y }), "kv",
          );
        }
      }
    }
    return top - 20;
  }

  #placeFront(x, y, w, height) {
    const { node, box, name, first, second } = this.#front;
    set(node, "transform", `translate(${x} ${y})`);
    set(box, "width", w);
    set(box, "height", height);
    set(name, "x", 14);
    set(name, "y", 22);
    set(first, "x", 14);
    set(first, "y", 40);
    set(second, "x", height < 60 ? w - 14 : 14);
    set(second, "y", height < 60 ? 40 : 54);
    set(second, "text-anchor", height < 60 ? "end" : "start");
  }

  #label(text, x, y) {
    this.#labels.append(s("text", { class: "label", x, y }, text));
  }

  #wire(name, d, kind) {
    if (this.#wires.size >= 700) return; // beyond it nobody could follow one
    const path = s("path", { d, class: `wire ${kind}` });
    this.#wires.set(name, { path, d });
    this.#edges.append(path);
  }

  #paint(now) {
    const { first, second } = this.#front;
    say(first, `${num(now.inflight)} in flight`);
    say(second, `${num(now.waiting)} queued`);
    const handing = new Map();
    for (const request of now.requests) {
      if (request.stage !== "handover") continue;
      const pair = `${request.prefill}>${request.decode}`;
      handing.set(pair, (handing.get(pair) ?? 0) + 1);
    }
    for (const worker of now.workers) {
      this.#known.get(worker.id)?.show(worker, this.#rate(worker));
      const wire = this.#wires.get(`>${worker.id}`);
      if (wire) this.#thicken(wire, worker.open ?? 0, worker.role !== "prefill");
    }
    for (const [name, wire] of this.#wires) {
      if (!name.startsWith(">")) this.#thicken(wire, handing.get(name) ?? 0, false);
    }
    const roles = Object.entries(Object.groupBy?.(now.workers, (worker) => worker.role || "unknown") ?? {});
    const counts = roles.map(([role, workers]) => `${workers.length} ${role}`).join(", ");
    const troubled = now.workers.filter((worker) => standing(worker)[1] !== "ok").length;
    const health = troubled ? `${troubled} not ready` : "all ready";
    const isAll = now.num_workers === now.workers.length;
    const hidden = now.workers.length > this.#known.size ? `, ${this.#known.size} are drawn` : "";
    const more = `${isAll ? "" : `, ${now.num_workers} in all`}${hidden}`;
    const text = now.workers.length ? `${counts}${more}; ${health}` : "No worker is known";
    say(at("topology-summary"), text);
    say(this.#title, `Frontend with workers: ${text}`);
  }

  #thicken(wire, count, flows) {
    const level = count ? Math.min(4, 1 + Math.log2(count + 1) / 2) : 1;
    set(wire.path, "stroke-width", level.toFixed(2));
    wire.path.classList.toggle("busy", count > 0);
    wire.path.classList.toggle("flows", flows && count > 0);
  }

  /** Let what has happened between two moments move. */
  #send(before, now) {
    if (calm.matches) return;
    const old = new Map(before.workers.map((worker) => [worker.id, worker.sent ?? 0]));
    for (const worker of now.workers) {
      const fresh = (worker.sent ?? 0) - (old.get(worker.id) ?? 0);
      this.#pulse(`>${worker.id}`, fresh, worker.role === "prefill" ? "prefill" : "request");
    }
    const handed = new Map(before.handovers.map((pair) => [`${pair.prefill}>${pair.decode}`, pair.count]));
    for (const pair of now.handovers) {
      const name = `${pair.prefill}>${pair.decode}`;
      this.#pulse(name, pair.count - (handed.get(name) ?? 0), "kv");
    }
  }

  #pulse(name, count, kind) {
    const wire = this.#wires.get(name);
    if (!wire || count <= 0) return;
    const number = Math.min(count, 4);
    for (let index = 0; index < number && this.#pulses.length < MAX_PULSES; index += 1) {
      const dot = s("circle", { class: `pulse ${kind}`, r: kind === "kv" ? 4 : 3, visibility: "hidden" });
      this.#moving.append(dot);
      this.#pulses.push({ dot, path: wire.path, length: wire.path.getTotalLength(), from: performance.now() + (index * 250) / number });
    }
    if (!this.#frame) this.#frame = requestAnimationFrame(() => this.#move());
  }

  #move() {
    const now = performance.now();
    this.#pulses = this.#pulses.filter((pulse) => {
      const share = (now - pulse.from) / PULSE_MS;
      if (share >= 1) {
        pulse.dot.remove();
        return false;
      }
      if (share >= 0) {
        const eased = share < 0.5 ? 2 * share * share : 1 - 2 * (1 - share) * (1 - share);
        const spot = pulse.path.getPointAtLength(eased * pulse.length);
        set(pulse.dot, "cx", spot.x.toFixed(1));
        set(pulse.dot, "cy", spot.y.toFixed(1));
        set(pulse.dot, "visibility", "visible");
      }
      return true;
    });
    this.#frame = this.#pulses.length ? requestAnimationFrame(() => this.#move()) : 0;
  }

  #table(now) {
    if (!at("worker-details").open) return;
    const rows = now.workers.map((worker) => {
      const [word, tone] = standing(worker);
      const rate = this.#rate(worker);
      return [
        [worker.id], [worker.role || "–", "role"], [word, `tone ${tone}`],
        [`${num(worker.running ?? 0)}${worker.slots ? ` / ${num(worker.slots)}` : ""}`, "num"],
        [`${num(worker.waiting ?? 0)}${worker.waiting_tokens ? ` (${num(worker.waiting_tokens)} tokens)` : ""}`, "num"],
        [`${Math.round(100 * (worker.kv_usage ?? 0))} %`, "num"], [num(worker.open ?? 0), "num"],
        [rate === null ? "–" : num(rate), "num"], [num(worker.index_blocks ?? 0), "num"],
        [worker.engine || "–"], [(worker.exactness || "as a prompt").replace("_", " ")], [worker.weights || "–"],
      ];
    });
    const body = at("workers");
    while (body.rows.length > rows.length) body.deleteRow(-1);
    rows.forEach((cells, index) => {
      const row = body.rows[index] ?? body.insertRow();
      set(row, "title", now.workers[index].reason ?? null);
      cells.forEach(([text, kind = ""], column) => {
        const cell = row.cells[column] ?? row.insertCell();
        if (cell.className !== kind) cell.className = kind;
        say(cell, text);
      });
    });
  }
}

/** Return what a group of workers is called. */
function title(workers) {
  const roles = [...new Set(workers.map((worker) => worker.role || "not known yet"))].join(", ");
  return roles.charAt(0).toUpperCase() + roles.slice(1);
}

function curve(from, to, moves = true) {
  const bend = Math.max(20, (to.x - from.x) / 2);
  const start = moves ? `M${from.x} ${from.y}` : "";
  return `${start}C${from.x + bend} ${from.y} ${to.x - bend} ${to.y} ${to.x} ${to.y}`;
}

function drop(from, to) {
  const bend = Math.max(14, (to.y - from.y) / 2);
  return `M${from.x} ${from.y}C${from.x} ${from.y + bend} ${to.x} ${to.y - bend} ${to.x} ${to.y}`;
}
