// The numbers at the top, from counts that only rise: rates and quantiles of the last seconds.

import { at, duration, h, num, s, say, set } from "./dom.js";

const WINDOW_S = 30; // of quantiles: some requests are in it even where few come
const RATE_S = 2;
const KEPT_S = 120; // of sparklines
const SPARK = { width: 96, height: 22 };

const TILES = [
  ["inflight", "In flight", "requests being served, of as many as the workers have room for"],
  ["queued", "Queued", "sequences that wait for room"],
  ["tokens", "Tokens/s", "delivered to clients"],
  ["ttft", "First token", "median and 95 % of 30 s"],
  ["itl", "Between tokens", "median and 95 % of 30 s"],
  ["handovers", "Hand-overs/s", "from prefill to decode"],
];

/** Return the quantile of a histogram's counts, by its bounds; null: nothing is in it. */
export function quantile(counts, bounds, q) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (!total) return null;
  let left = q * total;
  for (let index = 0; index < counts.length; index += 1) {
    if (counts[index] && left <= counts[index]) {
      const low = index ? bounds[index - 1] : 0;
      const high = index < bounds.length ? bounds[index] : low;
      return low + (high - low) * (left / counts[index]);
    }
    left -= counts[index];
  }
  return bounds.at(-1);
}

function sum(handovers) {
  return handovers.reduce((total, pair) => total + pair.count, 0);
}

/** The tiles. */
export class Traffic {
  #tiles = {};
  #past = []; // moments, the oldest first
  #points = { inflight: [], queued: [], tokens: [], ttft: [], itl: [], handovers: [] };
  #pointAt = 0;

  constructor() {
    for (const [name, title, help] of TILES) {
      const value = h("span", { class: "value" }, "–");
      const aside = h("span", { class: "aside" });
      const line = s("path", { class: "line" });
      const area = s("path", { class: "area" });
      const spark = s(
        "svg",
        { class: "spark", viewBox: `0 0 ${SPARK.width} ${SPARK.height}`, preserveAspectRatio: "none", "aria-hidden": "true" },
        area,
        line,
      );
      this.#tiles[name] = { value, aside, line, area };
      at("tiles").append(
        h("div", { class: "tile", title: help }, h("dt", {}, title), h("dd", {}, value, aside), h("dd", { class: "chart" }, spark)),
      );
    }
  }

  /** Show a moment. */
  show(now) {
    const past = this.#past;
    const last = past.at(-1);
    if (last && (now.tokens < last.tokens || now.processes.length !== last.processes.length)) {
      past.length = 0; // of another process, or it was started again
    }
    past.push(now);
    while (now.at - past[0].at > WINDOW_S) past.shift();
    const recent = past.find((moment) => now.at - moment.at <= RATE_S) ?? now;
    const seconds = now.at - recent.at;
    const rate = (read) => (seconds > 0 ? Math.max(0, read(now) - read(recent)) / seconds : 0);
    const values = {
      inflight: now.inflight,
      queued: now.waiting,
      tokens: rate((moment) => moment.tokens),
      handovers: rate((moment) => sum(moment.handovers)),
    };
    const old = past[0];
    for (const name of ["ttft", "itl"]) {
      const counts = now[name].map((count, index) => count - old[name][index]);
      const bounds = now.about[`${name}_bounds`];
      const median = quantile(counts, bounds, 0.5);
      values[name] = median ?? 0;
      say(this.#tiles[name].value, duration(median));
      say(this.#tiles[name].aside, median === null ? "" : duration(quantile(counts, bounds, 0.95)));
    }
    say(this.#tiles.inflight.value, num(values.inflight));
    const hasLimit = now.limit > 0 && now.limit < 1e6;
    say(this.#tiles.inflight.aside, hasLimit ? `of ${num(now.limit)}` : "");
    say(this.#tiles.queued.value, num(values.queued));
    say(this.#tiles.queued.aside, now.waiting_tokens ? `${num(now.waiting_tokens)} tokens` : "");
    say(this.#tiles.tokens.value, num(values.tokens));
    say(this.#tiles.handovers.value, values.handovers < 10 ? values.handovers.toFixed(1) : num(values.handovers));
    if (now.at - this.#pointAt >= 1 || now.at < this.#pointAt) {
      this.#pointAt = now.at;
      for (const [name, value] of Object.entries(values)) this.#draw(name, value);
    }
  }

  #draw(name, value) {
    const points = this.#points[name];
    points.push(value);
    if (points.length > KEPT_S) points.shift();
    const most = Math.max(...points) || 1;
    const { width, height } = SPARK;
    const step = width / (KEPT_S - 1);
    const first = KEPT_S - points.length;
    const spots = points.map((point, index) => {
      const x = ((first + index) * step).toFixed(1);
      return `${x},${(height - 1.5 - (point / most) * (height - 3)).toFixed(1)}`;
    });
    set(this.#tiles[name].line, "d", `M${spots.join("L")}`);
    const start = (first * step).toFixed(1);
    set(this.#tiles[name].area, "d", `M${start},${height}L${spots.join("L")}L${width},${height}Z`);
  }
}
