// Elements are made here, and all text goes in as text nodes: nothing is ever markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== undefined && child !== null));
  return element;
}

/** Return a new HTML element with attributes and children. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** Return a new SVG element. */
export function s(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

/** Set an element's text, unless it has that already. */
export function say(element, text) {
  const value = String(text);
  if (element.textContent !== value) element.textContent = value;
}

/** Set an attribute, unless it is so already; null removes it. */
export function set(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** Return the element of an id that the page has. */
export function at(id) {
  return document.getElementById(id);
}

/** Let a button do something, or nothing: it keeps its focus either way. */
export function enable(button, is) {
  set(button, "aria-disabled", String(!is));
}

/** Call *act* when a button that is enabled is pressed. */
export function pressed(button, act) {
  button.addEventListener("click", (event) => {
    if (button.getAttribute("aria-disabled") === "true") {
      event.preventDefault();
      return;
    }
    act(event);
  });
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const one = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

/** Return a number, short. */
export function num(value) {
  if (value >= 1e6) return `${one.format(value / 1e6)} M`;
  if (value >= 1e5) return `${whole.format(value / 1e3)} k`;
  return whole.format(value);
}

/** Return a duration in s as people read it. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds < 0.001) return "<1 ms";
  if (seconds < 1) return `${whole.format(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} m ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} m`;
}

/** Whether the reader has asked for no motion. */
export const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
