// Requests in flight: how many wait for what, and each by itself.

import { at, duration, h, num, say, set } from "./dom.js";

export const STAGES = [
  ["receiving", "Receiving", "the rest of its body"],
  ["tokenizing", "Tokenizing", "template, tokenizer and checks, in the frontend"],
  ["queued", "Queued", "room at the workers"],
  ["prefill", "Prefill", "its prompt to be computed"],
  ["handover", "Hand-over", "the decode worker to read its KV"],
  ["decode", "Decode", "the next token"],
  ["streaming", "Streaming", "its client, who has yet to read what is there"],
  ["moving", "Moving", "another worker: its own has failed"],
];
const TITLES = new Map(STAGES.map(([name, title]) => [name, title]));
const LEAVES_MS = 350;

/** The stages and the table. */
export class Requests {
  #rows = new Map();
  #counts = new Map();
  #own = "";

  constructor() {
    for (const [name, title, waits] of STAGES) {
      const count = h("span", { class: "count" }, "0");
      this.#counts.set(name, count);
      at("stages").append(
        h("li", { class: "stage", "data-stage": name, title: `Waits for ${waits}` }, count, h("span", { class: "stage-name" }, title)),
      );
    }
  }

  /** Take note of the response that the playground has asked for. */
  owns(responseId) {
    this.#own = responseId;
  }

  /** Show a moment. */
  show(now) {
    for (const [name, count] of this.#counts) {
      const number = now.stages[name] ?? 0;
      say(count, num(number));
      set(count.parentNode, "data-any", number ? "" : null);
    }
    const seen = new Set();
    const body = at("rows");
    for (const request of now.requests) {
      const key = request.log_id || `${request.process ?? 0} ${request.kind} ${(now.at - request.age_s).toFixed(1)}`;
      seen.add(key);
      let row = this.#rows.get(key);
      if (!row) {
        row = this.#made(request);
        this.#rows.set(key, row);
        body.append(row.node);
      }
      this.#fill(row, request, now);
    }
    for (const [key, row] of this.#rows) {
      if (seen.has(key)) continue;
      this.#rows.delete(key);
      row.node.classList.add("leaves");
      setTimeout(() => row.node.remove(), LEAVES_MS);
    }
    at("no-requests").hidden = seen.size > 0;
    const all = now.inflight;
    let text = all ? num(all) : "None";
    if (all > now.requests.length) text = `${num(now.requests.length)} of ${num(all)}, those that are here longest`;
    const { num_processes: processes } = now.about;
    if (processes > 1) {
      text += now.processes.length === processes
        ? `; of all ${processes} processes`
        : `; of ${now.processes.length} of ${processes} processes, the others have not answered`;
    }
    say(at("requests-summary"), text);
  }

  #made(request) {
    const id = h("span", { class: "id" });
    const mark = h("span", { class: "mine", hidden: true }, "yours");
    const plain = h("span", { class: "plain" });
    const beside = h("span", { class: "route" });
    const kind = h("span", { class: "kind" }, plain, beside);
    const stage = h("span", { class: "pill" });
    const workers = h("td", { class: "route" });
    const prompt = h("span", {});
    const cached = h("span", { class: "cached" });
    const tokens = h("span", {});
    const gauge = h("span", { class: "gauge", "aria-hidden": "true" });
    const age = h("td", { class: "num" });
    const node = h(
      "tr", {}, h("td", {}, id, mark, kind), h("td", {}, stage), workers, h("td", { class: "num" }, prompt, cached),
      h("td", { class: "num wide" }, tokens, gauge), age,
    );
    return { node, id, mark, plain, beside, stage, workers, prompt, cached, tokens, gauge, age, request };
  }

  #fill(row, request, now) {
    say(row.id, request.id || "not yet");
    const isMine = Boolean(this.#own && request.id && isShort(request.id, this.#own));
    row.mark.hidden = !isMine;
    row.node.classList.toggle("own", isMine);
    const process = now.about.num_processes > 1 ? `, process ${request.process ?? 0}` : "";
    const choices = (request.choices ?? 1) > 1 ? `, ${request.choices} outputs` : "";
    say(row.plain, `${request.kind}${request.stream ? ", streamed" : ""}${choices}${process}`);
    set(row.node, "title", request.log_id ? `In the logs: ${request.log_id}` : null);
    set(row.stage, "data-stage", request.stage);
    say(row.stage, TITLES.get(request.stage) ?? request.stage);
    const route = [request.prefill, request.decode].filter(Boolean).join(" → ");
    say(row.workers, route || "–");
    say(row.beside, route || request.kind); // where the page is narrow, in place of the column
    say(row.prompt, request.prompt_tokens ? num(request.prompt_tokens) : "–");
    say(row.cached, request.cached_tokens ? ` (${num(request.cached_tokens)} cached)` : "");
    const most = (request.max_tokens ?? 0) * (request.choices ?? 1);
    const tokens = request.tokens ?? 0;
    say(row.tokens, most ? `${num(tokens)} / ${num(most)}` : num(tokens));
    row.gauge.style.setProperty("--share", most ? Math.min(1, tokens / most).toFixed(3) : "0");
    say(row.age, duration(request.age_s));
  }
}

/** Whether an id that was cut short is the beginning of a whole one. */
function isShort(short, whole) {
  const dash = short.lastIndexOf("-");
  return whole.startsWith(short) && dash >= 0 && whole.lastIndexOf("-") === dash;
}
