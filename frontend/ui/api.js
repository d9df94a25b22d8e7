// Calls of the frontend, with the key if there is one; and its event streams.

const STORED = "tokenwire-key";

let key = "";
try {
  key = sessionStorage.getItem(STORED) ?? "";
} catch {
  // Storage may be forbidden: then the key lives as long as the page.
}

/** Whether a key is sent. */
export function hasKey() {
  return key !== "";
}

/** Send *value* from now on; empty: nothing. It is kept for this tab alone. */
export function useKey(value) {
  key = value;
  try {
    if (value) sessionStorage.setItem(STORED, value);
    else sessionStorage.removeItem(STORED);
  } catch {
    // As above.
  }
}

/** An answer other than success. */
export class Refused extends Error {
  constructor(status, error, body) {
    super(error.message || `status ${status}`);
    this.status = status;
    this.code = error.code || error.type || "";
    this.body = body;
  }
}

/** Told of every 401: somebody has to be asked for a key. */
export const unauthorized = new EventTarget();

/** Return the answer of a route, by its path below the page's own place. */
export async function call(path, { body, headers, ...rest } = {}) {
  const sent = new Headers(headers);
  if (key) sent.set("Authorization", `Bearer ${key}`);
  if (body !== undefined) sent.set("Content-Type", "application/json");
  const answer = await fetch(new URL(path, document.baseURI), {
    ...rest,
    method: body === undefined ? "GET" : "POST",
    headers: sent,
    body: body === undefined ? undefined : JSON.stringify(body),
    credentials: "same-origin",
    cache: "no-store",
  });
  if (answer.ok) return answer;
  let said = {};
  try {
    said = await answer.json();
  } catch {
    // A proxy's page, maybe: the status says enough.
  }
  if (answer.status === 401) unauthorized.dispatchEvent(new Event("needed"));
  throw new Refused(answer.status, said.error ?? {}, said);
}

/** Yield each whole event of a stream, as {id, data}; one that was cut off never comes. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let id = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line === "") {
          if (data.length) yield { id, data: data.join("\n") };
          data = [];
          continue;
        }
        const colon = line.indexOf(":");
        const name = colon < 0 ? line : line.slice(0, colon);
        const text = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
        if (name === "data") data.push(text);
        else if (name === "id") id = text;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
