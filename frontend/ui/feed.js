// The stream of moments: watched while the page is seen, tried again while it fails.

import { Refused, call, events } from "./api.js";

const FIRST_MS = 500;
const LONGEST_MS = 8000;
const SILENCE_MS = 5000; // twenty moments of a frontend that lives

/** Calls *onMoment* with each moment, and *onState* with how it goes. */
export class Feed {
  #onMoment;
  #onState;
  #abort = null;
  #timer = 0;
  #waitMs = FIRST_MS;
  #wanted = false;

  constructor(onMoment, onState) {
    this.#onMoment = onMoment;
    this.#onState = onState;
    document.addEventListener("visibilitychange", () => this.#look());
  }

  /** Watch, while the page can be seen. */
  start() {
    this.#wanted = true;
    this.#waitMs = FIRST_MS;
    this.#look();
  }

  /** Watch no more. */
  stop() {
    this.#wanted = false;
    this.#look();
  }

  #look() {
    const watch = this.#wanted && document.visibilityState === "visible";
    if (watch && !this.#abort) this.#run();
    if (!watch) {
      clearTimeout(this.#timer);
      this.#abort?.abort();
      this.#abort = null;
    }
  }

  async #run() {
    clearTimeout(this.#timer);
    const abort = (this.#abort = new AbortController());
    let silence = 0;
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => abort.abort(), SILENCE_MS);
    };
    let why = "The frontend has closed the stream";
    try {
      heard();
      const answer = await call("ui/events", { signal: abort.signal });
      for await (const event of events(answer)) {
        heard();
        this.#waitMs = FIRST_MS;
        this.#onMoment(JSON.parse(event.data));
        this.#onState("live", "Live");
      }
    } catch (error) {
      if (error instanceof Refused) why = error.message;
      else why = "The frontend does not answer";
      if (error instanceof Refused && error.status === 401) {
        if (this.#abort === abort) this.#abort = null;
        this.#wanted = false;
        this.#onState("key", "An API key is needed");
        return;
      }
    } finally {
      clearTimeout(silence);
    }
    if (this.#abort !== abort) return; // stopped, or begun anew
    this.#abort = null;
    this.#onState("lost", why);
    const waitMs = this.#waitMs * (0.75 + Math.random() / 2);
    this.#waitMs = Math.min(2 * this.#waitMs, LONGEST_MS);
    this.#timer = setTimeout(() => this.#look(), waitMs);
  }
}
