// Routes: chooses the page, and passes events to it.

import { api, listen, token } from "./data.js";
import { fill } from "./dom.js";
import { replication } from "./replication.js";
import * as views from "./views.js";

const main = document.getElementById("main");
const live = document.getElementById("live");
let shown = null;
let turn = 0;

/** The page of the address: `#/vm/STORE/NAME` and so on. */
function page() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  switch (name) {
    case "": return [views.overview, [], "VMs and stores", "overview"];
    case "vm": return [views.vm, rest, rest[1], "overview"];
    case "replication": return [replication, rest, rest[0], "overview"];
    case "checkpoint": return [views.checkpoint, [rest[0], Number(rest[1])], `Checkpoint ${rest[1]}`, "overview"];
    case "store": return [views.store, rest, "Store", "overview"];
    case "recordings": return [views.recordings, [], "Recordings", "recordings"];
    default: return [views.overview, [], "VMs and stores", "overview"];
  }
}

async function show(focus = true) {
  const mine = ++turn;
  shown?.end?.();
  shown = null;
  const [view, args, title, current] = page();
  document.title = `${title} · Keyframe`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.page === current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  // Drawn into a detached element: if the user has left meanwhile, it is dropped.
  const place = document.createElement("div");
  try {
    const made = await view(place, ...args);
    if (mine !== turn) return made.end?.();
    shown = made;
  } catch (error) {
    if (mine !== turn) return;
    fill(place, views.problem(error));
    if (error.status === 401) askForToken();
  }
  fill(main, place);
  main.dataset.shown = location.hash || "#/";
  if (focus) main.focus({ preventScroll: true });
}

// The token.

const dialog = document.getElementById("token-dialog");
const input = document.getElementById("token-input");

function askForToken() {
  input.value = "";
  if (!dialog.open) dialog.showModal();
}

function useToken() {
  token.set(input.value.trim());
  dialog.close();
  show();
}

document.getElementById("token").addEventListener("click", askForToken);
document.getElementById("token-set").addEventListener("click", useToken);
document.getElementById("token-cancel").addEventListener("click", () => dialog.close());
input.addEventListener("keydown", (event) => { if (event.key === "Enter") useToken(); });

// Events.

const STATES = { live: "live", lost: "connection lost", refused: "needs the token" };

function told(event, data) {
  if (event === "reload") show(false);
  else shown?.update(event, data);
}

window.addEventListener("hashchange", () => show());
show(false);
listen(told, (state) => {
  live.dataset.state = state === "live" ? "live" : "lost";
  live.textContent = STATES[state];
});
api.server().then((server) => { document.getElementById("version").textContent = `Keyframe ${server.version}`; }, () => {});
