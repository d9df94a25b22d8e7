// One chat as a resumable generation: its ids, through breaks; see docs/resume.md.

import { Refused, call, events } from "./api.js";

const ROUTE = "v1/chat/completions";
const FIELDS = [
  "completion_token_ids", "prompt_token_ids", "kv_transfer_params", "worker_id", "timing", "stop_reason",
  "weight_version",
];
const TOP = 3; // alternatives of each token
const CHECKPOINT_EVERY = 16; // tokens; the least that may be asked for

/** What a stream says that cannot be. */
export class BadStream extends Error {}

/** A message, joined of the deltas so far. */
export class Message {
  content = "";
  reasoning = "";
  calls = [];

  /** Return how long its parts are. */
  get size() {
    const calls = this.calls.map((one) => [one.name.length, one.arguments.length]);
    return { content: this.content.length, reasoning: this.reasoning.length, calls };
  }

  /** Go back to what it was when it had this size. */
  cut({ content, reasoning, calls }) {
    this.content = this.content.slice(0, content);
    this.reasoning = this.reasoning.slice(0, reasoning);
    this.calls = calls.map(([name, length], index) => {
      const known = this.calls[index];
      return { ...known, name: known.name.slice(0, name), arguments: known.arguments.slice(0, length) };
    });
  }

  add(delta) {
    this.content += delta.content ?? "";
    this.reasoning += delta.reasoning ?? delta.reasoning_content ?? "";
    for (const part of delta.tool_calls ?? []) {
      while (this.calls.length <= part.index) this.calls.push({ id: "", name: "", arguments: "" });
      const known = this.calls[part.index];
      known.id = part.id ?? known.id;
      known.name += part.function?.name ?? "";
      known.arguments += part.function?.arguments ?? "";
    }
  }
}

/**
 * One chat. It calls *told* with ("token", token), ("chunk"), ("note", text), and with
 * ("cut", number) when it goes back to that many tokens. *how* it goes on after a break is
 * "ids", "checkpoint" or "replay".
 */
export class Chat {
  constructor(request, how, told) {
    this.request = request;
    this.outlives = how === "replay";
    this.byCheckpoint = how === "checkpoint";
    this.told = told;
    this.tokens = []; // {id, text, logprob, top, bytes, seq, at, part}
    this.parts = 0; // of the stream: a break begins a new one
    this.breaks = [];
    this.promptIds = null;
    this.message = new Message();
    this.generations = [];
    this.seq = 0;
    this.contract = "";
    this.checkpoint = null;
    this.exactness = "";
    this.finish = null;
    this.usage = null;
    this.end = {}; // nvext of the last chunk
    this.claims = [];
    this.abort = null;
    this.isDone = false;
    this.isBroken = false;
  }

  get ids() {
    return this.tokens.map((token) => token.id);
  }

  get generationId() {
    return this.generations.at(-1) ?? "";
  }

  /** The request's body, of a stream or of a whole answer that nobody breaks. */
  body(resumeFrom = null) {
    const nvext = { extra_fields: FIELDS, resumable: this.outlives ? { on_disconnect: "continue" } : true };
    if (this.byCheckpoint) nvext.checkpoint = { every_tokens: CHECKPOINT_EVERY };
    if (resumeFrom) nvext.resume_from = resumeFrom;
    return { ...this.request, stream: true, stream_options: { include_usage: true }, logprobs: true, top_logprobs: TOP, nvext };
  }

  /** Begin, or go on behind what has come; returns when the stream has ended. */
  async run() {
    this.abort = new AbortController();
    this.isBroken = false;
    this.failure = null;
    try {
      const answer = await this.#open(this.abort.signal);
      if (answer) await this.#read(answer);
      else this.isDone = true;
    } catch (error) {
      if (!this.abort.signal.aborted) this.failure = error;
      this.isBroken = true;
    }
    if (!this.isDone) {
      this.isBroken = true;
      this.breaks.push(this.tokens.length);
    }
    this.abort = null;
  }

  /** Break the connection, as a network would. */
  break() {
    this.abort?.abort();
  }

  async #open(signal) {
    this.parts += 1;
    if (!this.generationId) return call(ROUTE, { body: this.body(), signal });
    if (this.outlives) {
      try {
        const path = `v1/generations/${encodeURIComponent(this.generationId)}/stream`;
        const answer = await call(path, { headers: { "Last-Event-ID": `${this.generationId}:${this.seq}` }, signal });
        if (answer.status === 204 && this.finish) return null;
        if (answer.status !== 204) {
          this.told("note", `Reads on behind event ${this.seq} of the same generation, which its worker keeps`);
          return answer;
        }
      } catch (error) {
        if (!(error instanceof Refused) || ![404, 410].includes(error.status)) throw error;
        this.told("note", `No worker keeps it any more (${error.code}): goes on from its ids`);
      }
    }
    return this.#resume(signal);
  }

  #resume(signal) {
    if (!this.promptIds) return call(ROUTE, { body: this.body(), signal });
    const held = this.checkpoint?.state?.output?.ids;
    if (this.byCheckpoint && held) this.#goBack(held.length);
    const ids = this.ids;
    const isHeld = held && held.length === ids.length && held.every((id, index) => id === ids[index]);
    const from = isHeld
      ? { checkpoint: this.checkpoint }
      : { output_token_ids: ids, prompt_token_ids: this.promptIds, contract: this.contract };
    this.told("note", `Sends the same request with nvext.resume_from: ${isHeld ? "its checkpoint" : `${ids.length} ids`}`);
    this.seq = 0;
    this.generations.push("");
    return call(ROUTE, { body: this.body(from), signal });
  }

  /** Forget what came behind a checkpoint: it comes again. */
  #goBack(number) {
    if (number === this.tokens.length) return;
    this.tokens.length = number;
    this.message.cut(this.tokens.at(-1).size);
    this.told("cut", number);
    this.told("note", `Goes back to its checkpoint, of ${number} ids`);
  }

  async #read(answer) {
    const id = answer.headers.get("X-Generation-Id");
    if (id) {
      if (this.generations.length && !this.generationId) this.generations.pop();
      if (this.generationId !== id) {
        this.generations.push(id);
        this.seq = 0;
      }
    }
    for await (const event of events(answer)) {
      this.#take(event);
      if (this.isDone) return;
      if (this.abort.signal.aborted) throw this.abort.signal.reason;
    }
  }

  #take({ id, data }) {
    if (data === "[DONE]") {
      this.isDone = this.finish !== null;
      return;
    }
    const body = JSON.parse(data);
    if (body.error) {
      this.checkpoint = body.nvext?.checkpoint ?? this.checkpoint;
      throw new Refused(200, body.error, body);
    }
    if (id !== `${this.generationId}:${this.seq + 1}`) throw new BadStream(`event ${id} in place of ${this.seq + 1}`);
    this.seq += 1;
    this.usage = body.usage ?? this.usage;
    const [choice] = body.choices ?? [];
    if (!choice) return;
    const nvext = body.nvext ?? {};
    if (nvext.token_offset !== this.tokens.length) {
      throw new BadStream(`ids from ${nvext.token_offset} on, where ${this.tokens.length} have come`);
    }
    this.promptIds = nvext.prompt_token_ids ?? this.promptIds;
    this.checkpoint = nvext.checkpoint ?? this.checkpoint;
    if (nvext.generation) {
      this.contract = nvext.generation.contract ?? this.contract;
      this.exactness = nvext.generation.exactness ?? "";
    }
    if (nvext.resume) {
      this.claims.push(nvext.resume);
      const { exactness, cached_tokens: cached, recomputed_tokens: computed } = nvext.resume;
      this.told("note", `Goes on behind ${nvext.resume.prefix_tokens} ids: ${exactness}; ${cached} tokens cached, ${computed} computed again`);
    }
    const entries = choice.logprobs?.content ?? [];
    nvext.completion_token_ids.forEach((tokenId, index) => {
      const entry = entries[index];
      const token = {
        id: tokenId,
        index: this.tokens.length,
        text: entry?.token ?? choice.delta?.content ?? "",
        logprob: entry?.logprob ?? null,
        bytes: entry?.bytes ?? null,
        top: entry?.top_logprobs ?? [],
        seq: this.seq,
        at: performance.now(),
        part: this.parts,
      };
      this.tokens.push(token);
      this.told("token", token);
    });
    if (this.finish === null) {
      this.message.add(choice.delta ?? {});
      this.finish = choice.finish_reason ?? null;
    }
    if (this.byCheckpoint && this.tokens.length) this.tokens.at(-1).size = this.message.size;
    if (this.finish) this.end = nvext;
    this.told("chunk");
  }

  /** Return the ids of the same request, in one unbroken answer. */
  async unbroken(signal) {
    const body = { ...this.request, stream: false, nvext: { extra_fields: ["completion_token_ids"] } };
    const answer = await (await call(ROUTE, { body, signal })).json();
    return answer.nvext.completion_token_ids;
  }
}
