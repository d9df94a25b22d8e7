// Puts the page together: the feed of moments, its views, the playground, theme and key.

import { hasKey, unauthorized, useKey } from "./api.js";
import { at, say, set } from "./dom.js";
import { Feed } from "./feed.js";
import { Playground } from "./playground.js";
import { Requests } from "./requests.js";
import { Topology } from "./topology.js";
import { Traffic } from "./traffic.js";

const traffic = new Traffic();
const topology = new Topology();
const requests = new Requests();
new Playground((responseId) => requests.owns(responseId));

function status(state, text) {
  set(at("status"), "data-state", state);
  say(at("status"), text);
}

let wasReady = null;

const feed = new Feed(
  (moment) => {
    const { about } = moment;
    say(at("model"), about.model);
    const several = about.num_processes > 1 ? `, process ${about.process} of ${about.num_processes} answers` : "";
    say(at("about"), `${about.frontend}${several}, ${about.version}`);
    traffic.show(moment);
    topology.show(moment);
    requests.show(moment);
    wasReady = moment.draining ? "draining" : moment.ready ? "ready" : "not ready";
  },
  (state, text) => {
    if (state !== "live") status(state, text);
    else if (wasReady === "ready") status("live", "Live, ready");
    else status("warn", wasReady === "draining" ? "Live, draining" : "Live, no worker is ready");
    if (state === "key") askForKey();
  },
);

// --- pause -------------------------------------------------------------------------------

at("pause").addEventListener("click", () => {
  const paused = at("pause").getAttribute("aria-pressed") !== "true";
  set(at("pause"), "aria-pressed", String(paused));
  if (paused) {
    feed.stop();
    status("paused", "Paused");
  } else {
    feed.start();
    status("waiting", "Connecting");
  }
});

// --- theme -------------------------------------------------------------------------------

const THEMES = ["system", "light", "dark"];

function theme() {
  return document.documentElement.dataset.theme ?? "system";
}

at("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  say(at("theme"), `Theme: ${next}`);
  try {
    if (next === "system") localStorage.removeItem("tokenwire-theme");
    else localStorage.setItem("tokenwire-theme", next);
  } catch {
    // Then it is chosen until the page is left.
  }
});
say(at("theme"), `Theme: ${theme()}`);

// --- key ---------------------------------------------------------------------------------

const dialog = at("key-dialog");

function askForKey() {
  at("key").hidden = false;
  if (!dialog.open) dialog.showModal();
}

at("key").addEventListener("click", askForKey);
at("key").hidden = !hasKey();
unauthorized.addEventListener("needed", askForKey);
dialog.addEventListener("close", () => {
  const given = at("key-value").value.trim();
  at("key-value").value = "";
  if (dialog.returnValue !== "use" || !given) return;
  useKey(given);
  status("waiting", "Connecting");
  if (at("pause").getAttribute("aria-pressed") !== "true") feed.start();
});

feed.start();
