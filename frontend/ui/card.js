// One worker as a card of the drawing: a name, what runs, how full its KV is.

import { num, s, say, set } from "./dom.js";

/** Heights, by how much is told. */
export const SIZES = { full: 78, compact: 50, mini: 26 };

/** Return what a worker is doing, in a word, and whether that is fine. */
export function standing(worker) {
  if (worker.state === "refused") return ["refused", "bad"];
  if (worker.state !== "ready") return ["connecting", "bad"];
  if (worker.draining || worker.leaving) return ["leaving", "warn"];
  if (worker.sleeping) return ["asleep", "warn"];
  if (worker.busy) return [worker.busy, "warn"];
  if (worker.paused) return ["paused", "warn"];
  if (worker.reason) return ["not used", "bad"];
  return ["ready", "ok"];
}

function cut(text, width, perChar = 7) {
  const most = Math.max(3, Math.floor(width / perChar));
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}

function bar(name) {
  const fillBar = s("rect", { class: `fill ${name}`, rx: 2, height: 4, width: 0 });
  const track = s("rect", { class: "track", rx: 2, height: 4 });
  return { track, fill: fillBar };
}

/** One worker's card. */
export class Card {
  constructor(worker) {
    this.title = s("title");
    this.box = s("rect", { class: "box", rx: 7 });
    this.edge = s("rect", { class: "edge", rx: 2, width: 4, x: 0 });
    this.dot = s("circle", { class: "dot", r: 3.5 });
    this.name = s("text", { class: "name" });
    this.right = s("text", { class: "state", "text-anchor": "end" });
    this.line = s("text", { class: "small" });
    this.lineRight = s("text", { class: "small", "text-anchor": "end" });
    this.kv = s("text", { class: "small" });
    this.kvRight = s("text", { class: "small", "text-anchor": "end" });
    this.run = bar("run");
    this.mem = bar("mem");
    this.node = s(
      "g",
      { class: "card" },
      this.title, this.box, this.edge, this.dot, this.name, this.right, this.line, this.lineRight,
      this.kv, this.kvRight, this.run.track, this.run.fill, this.mem.track, this.mem.fill,
    );
    this.id = worker.id;
  }

  place({ x, y, w, size }) {
    this.x = x;
    this.y = y;
    this.w = w;
    this.h = SIZES[size];
    this.size = size;
    set(this.node, "transform", `translate(${x} ${y})`);
    set(this.box, "width", w);
    set(this.box, "height", this.h);
    set(this.edge, "height", this.h - 12);
    set(this.edge, "y", 6);
    const base = size === "mini" ? 17 : 19;
    set(this.dot, "cx", 16);
    set(this.dot, "cy", base - 4);
    for (const [text, left, top] of [
      [this.name, 26, base], [this.right, w - 10, base], [this.line, 14, 37], [this.lineRight, w - 10, 37],
      [this.kv, 14, 61], [this.kvRight, w - 10, 61],
    ]) {
      set(text, "x", left);
      set(text, "y", top);
    }
    const rows = size === "full" ? [43, 67] : size === "compact" ? [43, 43] : [base + 4, base + 4];
    const half = (w - 30) / 2;
    for (const [index, one] of [this.run, this.mem].entries()) {
      const isWide = size === "full";
      const left = isWide || !index ? 14 : 14 + half + 6;
      const width = isWide ? w - 24 : half;
      for (const part of [one.track, one.fill]) {
        set(part, "x", left);
        set(part, "y", rows[index]);
      }
      set(one.track, "width", width);
      one.width = width;
    }
    const isMini = size === "mini";
    for (const part of [this.line, this.lineRight]) set(part, "visibility", isMini ? "hidden" : "visible");
    for (const part of [this.kv, this.kvRight]) set(part, "visibility", size === "full" ? "visible" : "hidden");
    for (const one of [this.run, this.mem]) {
      for (const part of [one.track, one.fill]) set(part, "visibility", isMini ? "hidden" : "visible");
    }
  }

  show(worker, stepsPerS) {
    const [word, tone] = standing(worker);
    set(this.node, "data-role", worker.role || "unknown");
    set(this.node, "data-tone", tone);
    const kv = `${Math.round(100 * (worker.kv_usage ?? 0))} %`;
    const running = worker.running ?? 0;
    const waiting = worker.waiting ?? 0;
    const aside = tone === "ok" ? "" : word;
    const beside = this.size === "mini" ? `${running} · ${kv}` : aside;
    say(this.right, cut(beside, this.w / 2));
    say(this.name, cut(worker.id, this.w - 44 - 6.2 * beside.length));
    say(this.line, worker.slots ? `${num(running)} of ${num(worker.slots)} run` : `${num(running)} run`);
    say(this.lineRight, this.size === "full" ? (waiting ? `${num(waiting)} wait` : "none wait") : `KV ${kv}`);
    say(this.kv, `KV ${kv}`);
    say(this.kvRight, stepsPerS === null ? "" : `${num(stepsPerS)} steps/s`);
    set(this.run.fill, "width", (this.run.width * Math.min(1, running / (worker.slots || 256))).toFixed(1));
    set(this.mem.fill, "width", (this.mem.width * Math.min(1, worker.kv_usage ?? 0)).toFixed(1));
    say(this.title, `${worker.id}, ${worker.role || "role unknown"}, ${word}${worker.reason ? `: ${worker.reason}` : ""}`);
  }
}
