// The playground: what is asked, what comes, and whether a broken stream lost anything.

import { Refused, call } from "./api.js";
import { Chat } from "./chat.js";
import { at, duration, enable, h, pressed, say, set } from "./dom.js";
import { Tokens, facts, fromVocabulary, visible } from "./tokens.js";

const MAX_SEED = 2 ** 31 - 1; // JavaScript's numbers hold it, and so do checkpoints

/** Return the index of the first id that differs; -1: none does. */
export function difference(ours, theirs) {
  const length = Math.max(ours.length, theirs.length);
  for (let index = 0; index < length; index += 1) {
    if (ours[index] !== theirs[index]) return index;
  }
  return -1;
}

/** The form and what stands below it. */
export class Playground {
  #chat = null;
  #begunAt = 0;
  #breakAfter = 0;
  #running = false;
  #onResponse;
  #frame = 0;
  #tokens = new Tokens(at("tokens"), (index) => this.#describe(index));
  #prompt = new Tokens(at("prompt"));

  constructor(onResponse) {
    this.#onResponse = onResponse;
    at("form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (at("send").getAttribute("aria-disabled") !== "true") this.#send();
    });
    at("message").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("form").requestSubmit();
    });
    pressed(at("break"), () => this.#break());
    pressed(at("resume"), () => this.#run());
    pressed(at("compare"), () => this.#compare());
    facts(at("token"), [["Token", "choose one, with a click or the arrow keys"]]);
  }

  #request() {
    const form = at("form");
    for (const field of form.querySelectorAll("input, textarea")) {
      if (field.checkValidity()) {
        set(field, "aria-invalid", null);
        continue;
      }
      set(field, "aria-invalid", "true");
      field.focus();
      throw new Error(`${form.querySelector(`label[for=${field.id}]`).textContent}: ${field.validationMessage}`);
    }
    const messages = [{ role: "user", content: at("message").value }];
    if (at("system").value.trim()) messages.unshift({ role: "system", content: at("system").value });
    const temperature = Number(at("temperature").value);
    const request = { messages, max_tokens: Number(at("max-tokens").value), temperature };
    if (temperature > 0) {
      // Chosen here where none was given: without one nothing could be repeated.
      request.seed = at("seed").value === "" ? Math.floor(Math.random() * MAX_SEED) : Number(at("seed").value);
    }
    const tools = at("toolbox").value.trim();
    if (tools) {
      try {
        request.tools = JSON.parse(tools);
      } catch (error) {
        set(at("toolbox"), "aria-invalid", "true");
        throw new Error(`Tools are no JSON: ${error.message}`);
      }
    }
    return request;
  }

  #send() {
    let request;
    try {
      request = this.#request();
    } catch (error) {
      this.#verdict("bad", error.message);
      return;
    }
    this.#tokens.clear();
    this.#prompt.clear();
    at("story").replaceChildren();
    at("parsed").replaceChildren();
    facts(at("facts"), []);
    say(at("prompt-count"), "");
    say(at("kv-count"), "");
    say(at("kv"), "Comes with the end of an output, if its connector has something to say.");
    facts(at("token"), [["Token", "choose one, with a click or the arrow keys"]]);
    this.#begunAt = performance.now();
    this.#breakAfter = Number(at("break-after").value);
    const chat = new Chat(request, at("on-break").value, (what, data) => {
      if (chat === this.#chat) this.#told(what, data);
    });
    this.#chat = chat;
    this.#note(`Sent: ${request.max_tokens} tokens at most, ${request.temperature > 0 ? `temperature ${request.temperature}, seed ${request.seed}` : "greedy"}`);
    this.#run();
  }

  async #run() {
    const chat = this.#chat;
    this.#running = true;
    this.#buttons();
    this.#verdict("busy", chat.tokens.length ? "Going on." : "Waiting for the first token.");
    if (chat.breaks.length) this.#tokens.gap(`broken after ${chat.tokens.length}`);
    await chat.run();
    this.#running = false;
    this.#draw();
    this.#buttons();
    if (chat.failure) {
      this.#failed(chat.failure);
    } else if (chat.isBroken) {
      this.#note(`Broken after ${chat.tokens.length} tokens`);
      this.#verdict("warn", `Broken after ${chat.tokens.length} tokens. Resume to go on behind them.`);
    } else {
      this.#note(`Ended: ${chat.finish}, ${chat.tokens.length} tokens`);
      this.#verdict("done", `Ended with ${chat.finish}: ${chat.tokens.length} tokens.`);
      this.#ended(chat);
      if (chat.breaks.length) await this.#compare();
    }
  }

  #failed(error) {
    const resumable = this.#chat.tokens.length > 0 && !(error instanceof Refused && error.status === 401);
    const text = error instanceof Refused ? `${error.message}${error.code ? ` (${error.code})` : ""}` : `The connection failed: ${error.message}`;
    this.#note(text);
    this.#verdict("bad", resumable ? `${text} Resume to go on.` : text);
  }

  #break() {
    this.#breakAfter = 0;
    this.#chat.break();
  }

  async #compare() {
    const chat = this.#chat;
    this.#running = true;
    this.#buttons();
    this.#verdict("busy", "Running the same request once more, unbroken.");
    try {
      const theirs = await chat.unbroken();
      if (chat !== this.#chat) return;
      const ours = chat.ids;
      const index = difference(ours, theirs);
      const how = chat.breaks.length ? `broken after ${chat.breaks.join(", ")} and gone on with` : "streamed unbroken";
      if (index < 0) {
        this.#verdict("good", `All ${ours.length} ids equal those of an unbroken run (${how}).`);
        this.#note(`Compared: ${ours.length} of ${ours.length} ids are equal`);
      } else {
        this.#tokens.differ(index);
        this.#verdict("bad", `Token ${index} differs: ${ours[index] ?? "none"} here, ${theirs[index] ?? "none"} in an unbroken run.`);
        this.#note(`Compared: ${index} of ${Math.max(ours.length, theirs.length)} ids are equal, then they differ`);
      }
    } catch (error) {
      if (chat === this.#chat) this.#failed(error);
    } finally {
      if (chat === this.#chat) {
        this.#running = false;
        this.#buttons();
      }
    }
  }

  #buttons() {
    const chat = this.#chat;
    const isDone = Boolean(chat?.isDone);
    enable(at("send"), !this.#running);
    enable(at("break"), this.#running && !isDone);
    enable(at("resume"), !this.#running && Boolean(chat) && !isDone && chat.tokens.length > 0);
    enable(at("compare"), !this.#running && isDone);
  }

  #told(what, data) {
    if (what === "note") {
      this.#note(data);
      return;
    }
    if (what === "cut") {
      this.#tokens.cut(data);
      return;
    }
    if (what === "token") {
      this.#tokens.add({ text: visible(data.text), id: data.id, logprob: data.logprob, part: data.part });
      if (data.index === 0) this.#verdict("busy", "Streaming.");
      if (this.#breakAfter && this.#chat.tokens.length >= this.#breakAfter) this.#break();
      return;
    }
    if (this.#chat.generationId) this.#onResponse(this.#chat.generationId);
    if (!at("prompt").childElementCount && this.#chat.promptIds) this.#showPrompt(this.#chat);
    // Once a frame, however many chunks one brings.
    if (!this.#frame) this.#frame = requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const chat = this.#chat;
    const number = chat.tokens.length;
    const breaks = chat.breaks.length;
    say(at("tokens-summary"), `${number} of at most ${chat.request.max_tokens}${breaks ? `, ${breaks} ${breaks === 1 ? "break" : "breaks"}` : ""}`);
    say(at("finish"), chat.finish ? `finish_reason: ${chat.finish}` : "As it is parsed");
    const { content, reasoning, calls } = chat.message;
    const box = at("parsed");
    const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    this.#part(box, "reasoning", "Reasoning", reasoning);
    this.#part(box, "content", "Content", content);
    calls.forEach((one, index) => this.#part(box, `call-${index}`, `Tool call: ${one.name}`, `${one.arguments}`, one.id));
    if (isAtEnd) box.scrollTop = box.scrollHeight;
  }

  #part(box, name, title, text, id = "") {
    let part = box.querySelector(`[data-part="${name}"]`);
    if (!part) {
      if (!text) return;
      part = h("div", { class: "part", "data-part": name }, h("p", { class: "part-title" }), h("div", { class: "part-text" }));
      box.append(part);
    }
    say(part.firstElementChild, id ? `${title} (${id})` : title);
    say(part.lastElementChild, text);
  }

  async #showPrompt(chat) {
    const ids = chat.promptIds;
    say(at("prompt-count"), `${ids.length}`);
    let texts = [];
    try {
      const { messages, tools } = chat.request;
      const body = { messages, add_generation_prompt: true, return_token_strs: true };
      if (tools) body.tools = tools;
      const answer = await (await call("tokenize", { body })).json();
      if (difference(answer.tokens, ids) < 0) texts = answer.token_strs;
    } catch {
      // Ids alone will do.
    }
    if (chat !== this.#chat || this.#prompt.length) return;
    ids.forEach((id, index) => this.#prompt.add({ id, text: fromVocabulary(texts[index] ?? "·") }));
  }

  #ended(chat) {
    const { end, usage } = chat;
    const workers = end.worker_id ?? {};
    const timing = end.timing ?? {};
    const route = [workers.prefill_worker_id, workers.decode_worker_id].filter(Boolean).join(" → ");
    const ms = (name) => (timing[name] === undefined ? null : duration(timing[name] / 1000));
    facts(at("facts"), [
      ["Response", chat.generations.join(", then ")],
      ["Workers", route],
      ["Prompt", usage ? `${usage.prompt_tokens} tokens, ${usage.prompt_tokens_details?.cached_tokens ?? 0} cached` : null],
      ["Queue", ms("queue_ms")],
      ["Prefill", ms("prefill_ms")],
      ["First token", ms("ttft_ms")],
      ["Whole", ms("total_ms")],
      ["Goes on", chat.exactness.replace("_", " ")],
      ["Weights", end.weight_version],
      ["Stop", end.stop_reason],
    ]);
    const kv = end.kv_transfer_params;
    say(at("kv-count"), kv ? "" : "none");
    say(at("kv"), kv ? JSON.stringify(kv, null, 2) : "None: the connector has nothing to say to clients of this output.");
  }

  #describe(index) {
    const token = this.#chat?.tokens[index];
    if (!token) return;
    const before = this.#chat.tokens[index - 1];
    const share = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
    const others = token.top.filter((one) => one.token !== token.text).map((one) => `${visible(one.token)} ${share(one.logprob)}`);
    facts(at("token"), [
      ["Token", `${index}, id ${token.id}, ${JSON.stringify(token.text)}`],
      ["Bytes", token.bytes?.map((byte) => byte.toString(16).padStart(2, "0")).join(" ")],
      ["Probability", token.logprob === null ? null : share(token.logprob)],
      ["Instead", others.join(", ")],
      ["Came", before ? `${duration((token.at - before.at) / 1000)} after the one before, event ${token.seq}` : `${duration((token.at - this.#begunAt) / 1000)} after it was sent, event ${token.seq}`],
    ]);
  }

  #note(text) {
    const seconds = ((performance.now() - this.#begunAt) / 1000).toFixed(2);
    at("story").append(h("li", {}, h("span", { class: "when" }, `${seconds} s`), " ", text));
  }

  #verdict(state, text) {
    const box = at("verdict");
    set(box, "data-state", state);
    say(box.firstElementChild, text);
  }
}
