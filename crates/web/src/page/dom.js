// Elements and texts. All content goes through `el`, which sets text as text: a name of a VM, tag or
// path is never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";
const SVG_NAMES = new Set(["svg", "g", "path", "rect", "line", "text", "title", "polyline"]);

/** Creates an element with attributes (`on…` are listeners) and children (elements, strings, numbers). */
export function el(name, attributes = {}, ...children) {
  const node = SVG_NAMES.has(name) ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false).map((child) =>
    child instanceof Node ? child : document.createTextNode(String(child))));
  return node;
}

/** Replaces the children of `node` with `children`. */
export function fill(node, ...children) {
  node.replaceChildren(...children.flat().filter(Boolean));
  return node;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** `1.5 MiB`. */
export function bytes(count) {
  if (count === null || count === undefined) return "–";
  let unit = 0;
  while (count >= 1024 && unit < UNITS.length - 1) { count /= 1024; unit += 1; }
  return `${unit === 0 ? count : count.toFixed(1)} ${UNITS[unit]}`;
}

/** Nanoseconds: `1.73 ms`. */
export function time(ns) {
  if (ns === null || ns === undefined) return "–";
  if (ns < 1e6) return `${Math.round(ns / 1000)} µs`;
  if (ns < 1e9) return `${(ns / 1e6).toFixed(2)} ms`;
  if (ns < 120e9) return `${(ns / 1e9).toFixed(1)} s`;
  return `${Math.floor(ns / 60e9)} min`;
}

/** `12,345`. */
export function count(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en");
}

/** `4.2x`. */
export function times(value) {
  return value === null || value === undefined ? "–" : `${value.toFixed(1)}x`;
}

/** A local time: `14:03:12`, with the date if that is not today. */
export function moment(text) {
  const at = new Date(text);
  if (Number.isNaN(at.getTime())) return text;
  const clock = at.toLocaleTimeString("en-GB");
  return at.toDateString() === new Date().toDateString() ? clock : `${at.toISOString().slice(0, 10)} ${clock}`;
}

/** The time since a moment. */
export function ago(text) {
  const at = new Date(text).getTime();
  return Number.isNaN(at) ? "–" : `${time(Math.max(0, Date.now() - at) * 1e6)} ago`;
}

/** A table: a caption, columns `[title, isNumber]`, rows of cells. */
export function table(caption, columns, rows) {
  const kind = (at) => (columns[at][1] ? "number" : null);
  return el("div", { class: "wide" }, el("table", {},
    el("caption", {}, caption),
    el("thead", {}, el("tr", {}, columns.map(([title], at) => el("th", { scope: "col", class: kind(at) }, title)))),
    el("tbody", {}, rows.map((row) => el("tr", row.attributes ?? {}, (row.cells ?? row).map((cell, at) => el("td", { class: kind(at) }, cell)))))));
}

/** Key figures. */
export function cards(pairs) {
  return el("div", { class: "cards" }, pairs.filter(Boolean).map(([name, value, kind]) =>
    el("dl", { class: "card" }, el("dt", {}, name), el("dd", { class: kind ?? null }, value))));
}

/** A table that is built when the user opens it. */
export function asTable(make) {
  const details = el("details", {}, el("summary", {}, "As a table"));
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(make());
  });
  return details;
}
