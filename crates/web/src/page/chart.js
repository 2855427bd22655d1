// Charts as SVG: one path for each series, so that drawing costs the same for any data.

import { asTable, bytes, count, el, fill, moment, table, time } from "./dom.js";

const WIDTH = 1200;
const LEFT = 70;
const RIGHT = 10;
const PANEL = 120;
const GAP = 34;

const each = (bucket, value) => value / Math.max(1, bucket.count);

/** The panels of a timeline, from top to bottom. */
const PANELS = [
  {
    title: "Pause by phase (the longest, if several checkpoints share a point)", write: time,
    series: [
      ["stop", (b) => b.pause.stop], ["device state", (b) => b.pause.device_state], ["scan", (b) => b.pause.scan],
      ["copy", (b) => b.pause.copy], ["resume", (b) => b.pause.resume],
    ],
  },
  {
    title: "Dirty pages of a checkpoint", write: count,
    series: [
      ["stored", (b) => each(b, b.stored_pages)], ["deduplicated", (b) => each(b, b.dedup_pages)],
      ["unchanged", (b) => each(b, b.unchanged_pages)], ["zero", (b) => each(b, b.zero_pages)],
    ],
  },
  { title: "Bytes that a checkpoint added to the store", write: bytes, series: [["added", (b) => each(b, b.added_bytes)]] },
  { title: "Interval and backlog", write: time, lines: true, series: [["interval", (b) => b.interval_ns], null, null, ["backlog", (b) => b.backlog_ns]] },
];

/** A round number at or above `value`. */
function ceiling(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * unit).find((step) => step >= value);
}

/** The text of a point on the timeline. */
function sentence(bucket) {
  const one = bucket.count === 1;
  const name = one ? `Checkpoint ${bucket.first_id}` : `Checkpoints ${bucket.first_id} to ${bucket.last_id} (${bucket.count})`;
  const p = bucket.pause;
  return `${name}, ${moment(bucket.first_at)}: ${one ? "pause" : "longest pause"} ${time(bucket.pause_ns)} (stop ${time(p.stop)}, device state ` +
    `${time(p.device_state)}, scan ${time(p.scan)}, copy ${time(p.copy)}, resume ${time(p.resume)}); ${count(bucket.dirty_pages)} dirty pages: ` +
    `${count(bucket.zero_pages)} zero, ${count(bucket.dedup_pages)} deduplicated, ${count(bucket.unchanged_pages)} unchanged, ` +
    `${count(bucket.stored_pages)} stored; ${bytes(bucket.added_bytes)} added; interval ${time(bucket.interval_ns)}, backlog ${time(bucket.backlog_ns)}.`;
}

function legend(series) {
  return el("ul", { class: "legend" }, series.map((one, at) => one && el("li", {},
    el("svg", { viewBox: "0 0 8 8", "aria-hidden": "true" }, el("rect", { width: 8, height: 8, class: `s${at}` })), one[0])));
}

/** A timeline. `show(data)` redraws it; it calls `onOpen(id)` and `onZoom(from, to)` (no arguments: all). */
export class Timeline {
  constructor({ onOpen, onZoom }) {
    this.onOpen = onOpen;
    this.onZoom = onZoom;
    this.buckets = [];
    this.from = null;
    this.at = null;
    this.readout = el("p", { class: "readout", id: "readout", role: "status" });
    this.chart = el("div", {
      class: "chart", tabindex: 0, role: "application", id: "timeline", "aria-describedby": "timeline-help readout", "aria-label": "Timeline of checkpoints",
      onkeydown: (event) => this.key(event), onpointermove: (event) => this.hover(event), onpointerdown: (event) => this.press(event),
      onpointerup: (event) => this.release(event), onpointerleave: () => { this.from = null; this.drawCursor(); },
    });
    const button = (text, action) => el("button", { type: "button", onclick: action }, text);
    this.node = el("section", { "aria-label": "Timeline" },
      el("div", { class: "buttons" }, button("Zoom in", () => this.zoom(0.5)), button("Zoom out", () => this.zoom(2)), button("Show all", () => this.onZoom()),
        el("span", { class: "soft", id: "timeline-help" }, "Drag to zoom. Keys: ← → move, Home End, + − zoom, Enter opens, Escape shows all.")),
      this.chart, this.readout, this.tableOf());
  }

  tableOf() {
    const columns = [["Checkpoints"], ["Taken"], ["Pause", 1], ["Dirty", 1], ["Zero", 1], ["Dedup", 1], ["Unchanged", 1], ["Stored", 1], ["Added", 1], ["Interval", 1], ["Backlog", 1]];
    const row = (b) => [b.count === 1 ? b.first_id : `${b.first_id}–${b.last_id}`, moment(b.first_at), time(b.pause_ns), count(b.dirty_pages), count(b.zero_pages),
      count(b.dedup_pages), count(b.unchanged_pages), count(b.stored_pages), bytes(b.added_bytes), time(b.interval_ns), time(b.backlog_ns)];
    return asTable(() => table("What the charts show", columns, this.buckets.map(row)));
  }

  show(data) {
    const selected = this.at === null ? null : this.buckets[this.at]?.first_id;
    this.data = data;
    this.buckets = data.buckets;
    const again = this.buckets.findIndex((bucket) => bucket.first_id === selected);
    this.at = again < 0 ? null : again;
    this.chart.dataset.checkpoints = data.shown;
    this.chart.dataset.buckets = this.buckets.length;
    const height = PANELS.length * (PANEL + GAP);
    const svg = el("svg", { viewBox: `0 0 ${WIDTH} ${height}`, "aria-hidden": "true" });
    PANELS.forEach((panel, at) => this.panel(svg, panel, at * (PANEL + GAP) + GAP - 12));
    this.marks(svg, height);
    this.cursor = el("rect", { class: "span", y: 0, height, width: 0 });
    svg.append(this.cursor);
    this.svg = svg;
    fill(this.chart, el("div", {}, PANELS.slice(0, 2).map((panel) => legend(panel.series))), svg);
    this.drawCursor();
  }

  x(at) {
    return LEFT + (at * (WIDTH - LEFT - RIGHT)) / Math.max(1, this.buckets.length);
  }

  panel(svg, panel, top) {
    const values = panel.series.map((one) => one && this.buckets.map(one[1]));
    const sums = this.buckets.map((_, at) => (panel.lines ? Math.max(...values.map((v) => v?.[at] ?? 0)) : values.reduce((sum, v) => sum + (v?.[at] ?? 0), 0)));
    const most = ceiling(Math.max(0, ...sums));
    const y = (value) => top + PANEL - (value / most) * PANEL;
    svg.append(el("text", { x: LEFT, y: top - 6 }, panel.title));
    for (const part of [0, 0.5, 1]) {
      svg.append(el("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(most * part), y2: y(most * part) }));
      svg.append(el("text", { x: LEFT - 6, y: y(most * part) + 4, "text-anchor": "end" }, panel.write(most * part)));
    }
    const wide = Math.max(0.6, (this.x(1) - this.x(0)) * 0.9);
    const below = this.buckets.map(() => 0);
    values.forEach((all, series) => {
      if (!all) return;
      if (panel.lines) {
        const points = all.map((value, at) => `${(this.x(at) + wide / 2).toFixed(1)},${y(value).toFixed(1)}`);
        svg.append(el("polyline", { class: `line s${series}`, points: points.join(" ") }));
        return;
      }
      const path = all.map((value, at) => {
        const from = y(below[at]);
        below[at] += value;
        return value > 0 ? `M${this.x(at).toFixed(1)} ${from.toFixed(1)}h${wide.toFixed(1)}V${y(below[at]).toFixed(1)}h-${wide.toFixed(1)}z` : "";
      });
      svg.append(el("path", { class: `s${series}`, d: path.join("") }));
    });
  }

  marks(svg, height) {
    for (const { id, tags, pinned } of this.data.tagged) {
      const at = this.buckets.findIndex((bucket) => bucket.first_id <= id && id <= bucket.last_id);
      const text = [...tags, ...(pinned ? ["pinned"] : [])].join(", ");
      svg.append(el("path", { class: "mark", d: `M${this.x(at)} ${height - 2}l5 -8l5 8z` }, el("title", {}, `${id}: ${text}`)));
    }
  }

  place(event) {
    const box = this.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    const at = Math.floor(((x - LEFT) / (WIDTH - LEFT - RIGHT)) * this.buckets.length);
    return at >= 0 && at < this.buckets.length ? at : null;
  }

  hover(event) {
    const at = this.svg ? this.place(event) : null;
    if (at !== null && at !== this.at) this.select(at);
    else if (this.from !== null) this.drawCursor();
  }

  press(event) {
    this.from = this.place(event);
  }

  release(event) {
    const [from, to] = [this.from, this.place(event)];
    this.from = null;
    if (from === null || to === null) return;
    if (from === to) this.open();
    else this.onZoom(this.buckets[Math.min(from, to)].first_id, this.buckets[Math.max(from, to)].last_id);
  }

  key(event) {
    const last = this.buckets.length - 1;
    const move = { ArrowLeft: (this.at ?? last + 1) - 1, ArrowRight: (this.at ?? -1) + 1, Home: 0, End: last }[event.key];
    if (last >= 0 && move !== undefined) this.select(Math.min(last, Math.max(0, move)));
    else if (event.key === "Enter") this.open();
    else if (event.key === "Escape") this.onZoom();
    else if (event.key === "+") this.zoom(0.5);
    else if (event.key === "-") this.zoom(2);
    else return;
    event.preventDefault();
  }

  select(at) {
    this.at = at;
    this.drawCursor();
    this.readout.textContent = sentence(this.buckets[at]);
  }

  drawCursor() {
    if (!this.cursor) return;
    const from = this.from ?? this.at;
    if (this.at === null) return this.cursor.setAttribute("width", 0);
    const [a, b] = [Math.min(from, this.at), Math.max(from, this.at)];
    this.cursor.setAttribute("x", this.x(a));
    this.cursor.setAttribute("width", this.x(b + 1) - this.x(a));
  }

  open() {
    const bucket = this.buckets[this.at];
    if (!bucket) return;
    if (bucket.count === 1) this.onOpen(bucket.first_id);
    else this.onZoom(bucket.first_id, bucket.last_id);
  }

  zoom(factor) {
    const count = this.buckets.length;
    if (count === 0) return;
    if (factor > 1) return this.onZoom();
    const half = Math.max(1, Math.floor((count * factor) / 2));
    const middle = this.at ?? count - half;
    const [from, to] = [Math.max(0, middle - half), Math.min(count - 1, middle + half)];
    this.onZoom(this.buckets[from].first_id, this.buckets[to].last_id);
  }
}

/** A small line chart of pauses. */
export function spark(buckets) {
  const most = Math.max(1, ...buckets.map((bucket) => bucket.pause_ns));
  const wide = 160 / Math.max(1, buckets.length);
  const path = buckets.map((bucket, at) => `M${(at * wide).toFixed(1)} 30V${(30 - (bucket.pause_ns / most) * 28).toFixed(1)}h${(wide * 0.8).toFixed(1)}V30z`);
  const label = buckets.length ? `Pauses of ${buckets.reduce((sum, bucket) => sum + bucket.count, 0)} checkpoints, at most ${time(most)}` : "No checkpoints";
  return el("svg", { class: "spark", viewBox: "0 0 160 30", preserveAspectRatio: "none", role: "img", "aria-label": label }, el("path", { class: "s0", d: path.join("") }));
}

/** Lines over the same points. A series is `[name, value of a point]`. */
export function lines(title, points, series, write) {
  const most = ceiling(Math.max(0, ...points.flatMap((point) => series.map((one) => one[1](point)))));
  const [height, top] = [PANEL * 1.6, 14];
  const y = (value) => top + height - (value / most) * height;
  const x = (at) => LEFT + (at * (WIDTH - LEFT - RIGHT)) / Math.max(1, points.length - 1);
  const svg = el("svg", { viewBox: `0 0 ${WIDTH} ${height + top + 8}`, role: "img", "aria-label": title });
  for (const part of [0, 0.5, 1]) {
    svg.append(el("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(most * part), y2: y(most * part) }));
    svg.append(el("text", { x: LEFT - 6, y: y(most * part) + 4, "text-anchor": "end" }, write(most * part)));
  }
  const kinds = [0, 3, 2];
  series.forEach(([, value], at) => svg.append(el("polyline", { class: `line s${kinds[at]}`, points: points.map((point, i) => `${x(i).toFixed(1)},${y(value(point)).toFixed(1)}`).join(" ") })));
  const named = [series[0], null, series[2] ?? null, series[1] ?? null];
  return el("div", { class: "chart" }, legend(named), svg);
}

/** The changed pages in memory: a square for each piece, darker for more pages. */
export function heat(region, piecePages) {
  const [side, across] = [12, 64];
  const rows = Math.ceil(region.changed.length / across);
  const squares = region.changed.map((changed, at) => {
    const pages = Math.min(piecePages, region.pages - at * piecePages);
    const part = changed / Math.max(1, pages);
    const kind = changed > 0 ? { "fill-opacity": (0.2 + 0.8 * Math.sqrt(part)).toFixed(2) } : { class: "empty", "fill-opacity": region.nonzero[at] > 0 ? 0.9 : 0.3 };
    const said = `pages ${at * piecePages} to ${at * piecePages + pages - 1}: ${changed} changed, ${region.nonzero[at]} not zero`;
    return el("rect", { x: (at % across) * side, y: Math.floor(at / across) * side, width: side - 1, height: side - 1, ...kind }, el("title", {}, said));
  });
  const label = `${region.name}: ${region.changed_pages} of ${region.pages} pages changed`;
  return el("div", { class: "heat" }, el("svg", { viewBox: `0 0 ${across * side} ${rows * side}`, role: "img", "aria-label": label }, squares));
}

/** Pieces in a row, with lengths in proportion to `size`. Each is `[kind, size, text]`. */
export function strip(label, pieces) {
  const sum = pieces.reduce((all, piece) => all + piece[1], 0) || 1;
  let x = 0;
  const rects = pieces.map(([kind, size, said]) => {
    const wide = (size / sum) * WIDTH;
    x += wide;
    return el("rect", { class: kind, x: (x - wide).toFixed(2), y: 0, width: Math.max(0.5, wide - 0.6).toFixed(2), height: 22 }, el("title", {}, said));
  });
  return el("svg", { class: "strip", viewBox: `0 0 ${WIDTH} 22`, preserveAspectRatio: "none", role: "img", "aria-label": label }, rects);
}
