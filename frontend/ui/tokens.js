// A row of tokens, each a chip with its text and id; arrow keys go along it.

import { h, say, set } from "./dom.js";

const MARKS = { "\n": "⏎", "\t": "⇥", " ": "␣", "\r": "␍" };

/** Return a token's text with what cannot be seen made visible. */
export function visible(text) {
  return text.replace(/[\n\t\r]| $|^ /g, (char) => MARKS[char]) || "∅";
}

/** Return a token's text as vocabularies write it, readable: of byte-level ones. */
export function fromVocabulary(text) {
  return text.replaceAll("Ġ", "␣").replaceAll("Ċ", "⏎").replaceAll("▁", "␣");
}

/** A list of chips. *onChoose* hears of the one that was chosen. */
export class Tokens {
  #box;
  #onChoose;
  #chips = [];
  #chosen = -1;

  constructor(box, onChoose = () => {}) {
    this.#box = box;
    this.#onChoose = onChoose;
    box.addEventListener("keydown", (event) => this.#key(event));
    box.addEventListener("click", (event) => {
      const index = this.#chips.indexOf(event.target.closest("[role=option]"));
      if (index >= 0) this.choose(index);
    });
  }

  get length() {
    return this.#chips.length;
  }

  clear() {
    this.#box.replaceChildren();
    this.#chips = [];
    this.#chosen = -1;
    set(this.#box, "aria-activedescendant", null);
  }

  /** Add a chip; what is seen stays at the end if it was there. */
  add({ text, id, logprob = null, part = 1 }) {
    const chip = h(
      "span", { class: "chip", role: "option", id: `${this.#box.id}-${this.#chips.length}`, "aria-selected": "false", "data-part": part > 1 ? "later" : null },
      h("span", { class: "chip-text" }, text), h("span", { class: "chip-id" }, String(id)),
    );
    if (logprob !== null) set(chip, "data-sure", String(Math.min(4, Math.floor(5 * Math.exp(logprob)))));
    this.#append(chip);
    this.#chips.push(chip);
  }

  /** Take away all chips behind the first *number*. */
  cut(number) {
    for (const chip of this.#chips.splice(number)) chip.remove();
    if (this.#chosen >= number) {
      this.#chosen = -1;
      set(this.#box, "aria-activedescendant", null);
    }
  }

  /** Mark where the stream was broken. */
  gap(text) {
    this.#append(h("span", { class: "gap", role: "presentation" }, text));
  }

  #append(node) {
    const box = this.#box;
    const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    box.append(node);
    if (isAtEnd) box.scrollTop = box.scrollHeight;
  }

  /** Mark the chips from *index* on as different from another run's. */
  differ(index) {
    for (const chip of this.#chips.slice(index)) set(chip, "data-differs", "");
  }

  choose(index) {
    const chip = this.#chips[index];
    if (!chip) return;
    const before = this.#chips[this.#chosen];
    if (before) set(before, "aria-selected", "false");
    this.#chosen = index;
    set(chip, "aria-selected", "true");
    set(this.#box, "aria-activedescendant", chip.id);
    chip.scrollIntoView({ block: "nearest" });
    this.#onChoose(index);
  }

  #key(event) {
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 8, ArrowUp: -8, Home: -Infinity, End: Infinity };
    const move = moves[event.key];
    if (move === undefined || !this.#chips.length || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const from = this.#chosen < 0 ? (move > 0 ? -1 : this.#chips.length) : this.#chosen;
    const step = this.#chosen < 0 && Math.abs(move) === 8 ? Math.sign(move) : move;
    this.choose(Math.max(0, Math.min(this.#chips.length - 1, from + step)));
  }
}

/** Fill a list of names and values: <dt> and <dd> pairs, in place. */
export function facts(list, pairs) {
  const shown = pairs.filter(([, value]) => value !== undefined && value !== null && value !== "");
  while (list.children.length > shown.length) list.lastElementChild.remove();
  shown.forEach(([name, value], index) => {
    let group = list.children[index];
    if (!group) {
      group = h("div", {}, h("dt"), h("dd"));
      list.append(group);
    }
    say(group.firstElementChild, name);
    say(group.lastElementChild, value);
    group.classList.toggle("whole", String(value).length > 34);
  });
}
