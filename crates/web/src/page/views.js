// The pages. Each is a function of its address that draws into `main` and returns
// `{ update(event, data) }`, which receives events.

import { api, token } from "./data.js";
import { ago, asTable, bytes, cards, count, el, fill, moment, table, time, times } from "./dom.js";
import { Timeline, heat, lines, spark, strip } from "./chart.js";
import { inShort, replicationLink } from "./replication.js";

const part = encodeURIComponent;
const vmLink = (store, vm) => `#/vm/${part(store)}/${part(vm)}`;
const checkpointLink = (store, id) => `#/checkpoint/${part(store)}/${id}`;

/** Draws, and measures the time until the result is on the screen: see `performance.getEntriesByName("update")`. */
async function drawn(action) {
  const start = performance.now();
  await action();
  requestAnimationFrame(() => setTimeout(() => {
    if (performance.getEntriesByName("update").length >= 100) performance.clearMeasures("update");
    performance.measure("update", { start });
  }));
}

/** Calls `action` at most once in `ms` milliseconds, and once more after the last call. */
function calmly(ms, action) {
  let waits = null;
  let last = 0;
  return () => {
    if (waits !== null) return;
    waits = setTimeout(() => { waits = null; last = Date.now(); drawn(action); }, Math.max(0, last + ms - Date.now()));
  };
}

/** Shows an error, also to screen readers. */
export function problem(error) {
  return el("p", { class: "problem", role: "alert" }, error.message ?? String(error));
}

function tags(names, pinned) {
  return [...names.map((name) => el("span", { class: "tag" }, name)), pinned && el("span", { class: "tag" }, "pinned")];
}

// All VMs and stores.

export async function overview(main) {
  const vms = new Map();
  const stores = new Map();
  const sparks = new Map();
  const [vmsPlace, storesPlace] = [el("div", {}), el("div", {})];
  fill(main, el("h2", {}, "VMs"), vmsPlace, el("h2", {}, "Stores"), storesPlace);

  // Running VMs, and VMs with checkpoints.
  const rows = () => {
    const all = [...vms.values()].map((vm) => ({ name: vm.name, store: vm.store, vm }));
    for (const store of stores.values()) {
      for (const name of store.vms) {
        if (!vms.has(name)) all.push({ name, store: store.id, vm: null });
      }
    }
    return all;
  };
  const row = ({ name, store, vm }) => {
    const status = vm?.status ?? {};
    const last = status.last;
    const state = vm ? (vm.problem ? "unknown" : status.state) : "ended";
    const chart = sparks.get(`${store} ${name}`) ?? el("span", {});
    sparks.set(`${store} ${name}`, chart);
    const failed = status.failing ? el("span", { class: "problem", title: status.last_error ?? "" }, `${status.failed}: ${status.failing}`) : status.failed > 0 ? el("span", { class: "problem", title: status.last_error ?? "" }, status.failed) : status.failed ?? "–";
    const replicated = status.replication;
    if (replicated) {
      const told = inShort(replicated);
      return { attributes: { "data-vm": name }, cells: [el("a", { href: replicationLink(name) }, name), el("span", { class: `state-${told.kind}` }, told.state), told.what, "", told.newest, "–",
        time(replicated.pause_ns), count(replicated.pages), bytes(replicated.wire_bytes), "–", count(replicated.epochs), "–"] };
    }
    return { attributes: { "data-vm": name }, cells: [
      store ? el("a", { href: vmLink(store, name) }, name) : name,
      el("span", { class: `state-${state}`, title: vm?.problem ?? "" }, vm?.problem ? `no answer: ${vm.problem}` : state),
      stores.get(store)?.place ?? status.store ?? "", chart, last ? el("a", { href: checkpointLink(store, last.id) }, last.id) : "–",
      last ? ago(last.taken_at) : "–", time(last?.pause_ns), last ? count(last.dirty_pages) : "–", bytes(last?.stored_bytes),
      status.backlog_ns > 1e6 ? time(status.backlog_ns) : "–", status.sealed ?? "–", failed] };
  };
  const columns = [["VM"], ["State"], ["Store"], ["Pauses"], ["Newest", 1], ["Taken", 1], ["Pause", 1], ["Dirty", 1], ["Stored", 1], ["Backlog", 1], ["Sealed", 1], ["Failed", 1]];
  const draw = () => {
    const all = rows();
    fill(vmsPlace, all.length ? table(`${vms.size} running`, columns, all.map(row))
      : el("p", {}, "Nothing runs. Start with ", el("code", {}, "keyframe run --store STORE -- qemu-system-x86_64 …")));
    const row2 = (s) => [s.problem && !s.newest ? s.place : el("a", { href: `#/store/${part(s.id)}` }, s.place), count(s.checkpoints), s.newest ?? "–", s.vms.length,
      s.problem ? el("span", { class: "problem" }, s.problem) : "in order"];
    fill(storesPlace, stores.size ? table(`${stores.size} shown`, [["Store"], ["Checkpoints", 1], ["Newest", 1], ["VMs", 1], ["State"]], [...stores.values()].map(row2))
      : el("p", {}, "No store is shown: name one, as in ", el("code", {}, "keyframe serve STORE")));
  };
  const drawSparks = async () => {
    const wanted = rows().filter(({ store }) => store && stores.has(store));
    await Promise.all(wanted.map(async ({ name, store }) => {
      const { buckets } = await api.timeline(store, { vm: name, points: 60 });
      const chart = spark(buckets);
      sparks.get(`${store} ${name}`)?.replaceWith(chart);
      sparks.set(`${store} ${name}`, chart);
    }));
  };
  const calm = calmly(1000, draw);
  const calmSparks = calmly(5000, () => drawSparks().catch(() => {}));
  const load = async () => {
    for (const vm of await api.vms()) vms.set(vm.name, vm);
    for (const store of await api.stores()) stores.set(store.id, store);
    draw();
    await drawSparks();
  };
  await load();
  const timer = setInterval(calm, 5000);
  return {
    update(event, data) {
      if (event === "vm") vms.set(data.name, data);
      else if (event === "vm_gone") vms.delete(data.name);
      else if (event === "store") { stores.set(data.id, data); calmSparks(); }
      else if (event === "store_gone") stores.delete(data.id);
      else return;
      calm();
    },
    end: () => clearInterval(timer),
  };
}

// One VM.

function vmCards(vm) {
  const status = vm.status ?? {};
  const last = status.last ?? {};
  return cards([
    ["State", status.state ?? "unknown", `state-${status.state ?? "unknown"}`],
    status.failing && ["Failing", status.failing, "problem"],
    ["Interval", status.interval_ns ? time(status.interval_ns) : "by command only"],
    ["Sealed", count(status.sealed)],
    ["Failed", count(status.failed), status.failed > 0 ? "problem" : null],
    ["Newest", last.taken_at ? ago(last.taken_at) : "–"],
    ["Its pause", time(last.pause_ns)],
    ["Taken because", last.reason ?? "–"],
    ["Backlog", status.backlog_ns > 1e6 ? time(status.backlog_ns) : "none"],
    ["Capture", status.phase ?? "–"],
    ["Encoder", status.encoder ?? "–"],
    status.tuned && ["Budget", status.tuned],
    status.recorder && ["Recorder", `keeps ${time(status.recorder.keep_within_ns)}: ${count(status.recorder.kept)} kept, ${count(status.recorder.forgotten)} forgotten`],
    status.recompressor && ["Recompression", status.recompressor.off ?? `${count(status.recompressor.recompressed_packs)} packs, ${bytes(status.recompressor.cold_bytes)} to go`],
    status.last_error && ["Last error", status.last_error, "problem"],
  ]);
}

export async function vm(main, store, name) {
  const state = el("div", {});
  const list = el("div", {});
  const range = {};
  const draw = async () => chart.show(await api.timeline(store, { vm: name, points: 300, ...range }));
  const chart = new Timeline({
    onOpen: (id) => { location.hash = checkpointLink(store, id); },
    onZoom: (from, to) => { Object.assign(range, { from, to }); draw().catch(() => {}); },
  });
  fill(main, el("h2", {}, name), state, el("h3", {}, "Checkpoints over time"), chart.node, el("h3", {}, "Newest checkpoints"), list);

  const rows = [];
  let before = null;
  const drawList = () => {
    const row = (c) => ({ attributes: { "data-checkpoint": c.id }, cells: [el("a", { href: checkpointLink(store, c.id) }, c.id), moment(c.taken_at), c.reason, time(c.pause_ns), count(c.dirty_pages),
      count(c.zero_pages), count(c.dedup_pages + c.unchanged_pages), bytes(c.added_bytes), tags(c.tags, c.pinned)] });
    const columns = [["Checkpoint"], ["Taken"], ["Why"], ["Pause", 1], ["Dirty", 1], ["Zero", 1], ["Dedup", 1], ["Added", 1], ["Tags"]];
    fill(list, table(`${rows.length} shown`, columns, rows.map(row)), before && el("button", { type: "button", onclick: () => more().catch(() => {}) }, "Older ones"));
  };
  const more = async (anew = false) => {
    const page = await api.checkpoints(store, { vm: name, before: anew ? null : before, limit: anew ? Math.min(500, Math.max(50, rows.length)) : 50 });
    if (anew) rows.length = 0;
    rows.push(...page.checkpoints);
    before = page.next_before;
    drawList();
  };
  const drawVm = (one) => {
    if (!one) return fill(state, el("p", { class: "soft" }, "It does not run; these are the checkpoints that it left."));
    fill(state, one.problem ? problem(one.problem) : vmCards(one));
  };
  drawVm((await api.vms()).find((one) => one.name === name));
  await Promise.all([draw(), more(true)]);
  const calm = calmly(1000, () => Promise.all([draw(), more(true)]).catch(() => {}));
  return {
    update(event, data) {
      if (event === "vm" && data.name === name) drawVm(data);
      else if (event === "vm_gone" && data.name === name) drawVm(null);
      else if (event === "store" && data.id === store) calm();
    },
  };
}

// One checkpoint.

/** A command to copy and, with a token, to perform. */
function command({ name, command: text }, act) {
  const code = el("code", {}, text);
  const copy = async (event) => {
    try { await navigator.clipboard.writeText(text); event.target.textContent = "Copied"; } catch { getSelection().selectAllChildren(code); }
  };
  return el("p", { class: "command", "data-command": name }, el("strong", {}, name), code, el("button", { type: "button", onclick: copy }, "Copy"),
    act && token.get() && el("button", { type: "button", onclick: act }, "Do it"));
}

export async function checkpoint(main, store, id) {
  const c = await api.checkpoint(store, id);
  const said = el("p", { role: "status", class: "said" });
  const act = (work) => async () => {
    try { said.textContent = (await work()).done; } catch (error) { said.textContent = error.message; }
  };
  const ask = (question, work) => act(() => (!question || confirm(question) ? work() : { done: "nothing was done" }));
  const runs = c.commands.some((one) => one.name === "rollback");
  const actions = { pin: act(() => api.pin(store, id, true)), unpin: act(() => api.pin(store, id, false)), branch: act(() => api.branch(store, id)),
    restore: ask(runs && `VM ${c.vm} runs. Start it a second time, beside itself, as it was at checkpoint ${id}?`, () => api.restore(store, id)),
    rollback: ask(`Put VM ${c.vm} back to checkpoint ${id}? What it is now becomes a checkpoint first.`, () => api.rollback(store, id)) };
  const link = (to, text) => to && el("a", { href: checkpointLink(store, to) }, text);
  const screenPlace = el("div", {});
  const heatPlace = el("div", {}, el("p", { class: "soft" }, "Looking where memory changed …"));
  const diffPlace = el("div", {}, el("button", { type: "button", onclick: () => compare() }, "Compare page by page"));
  const phases = Object.entries(c.pause).map(([name, ns]) => [name.replaceAll("_", " "), time(ns), `${((ns / Math.max(1, c.pause_ns)) * 100).toFixed(0)} %`]);
  const pages = [["zero", c.zero_pages], ["deduplicated", c.dedup_pages], ["unchanged", c.unchanged_pages], ["stored", c.stored_pages]];
  fill(main,
    el("h2", {}, `Checkpoint ${c.id} of ${c.vm}`),
    el("p", { class: "buttons" }, link(c.previous, "← before"), link(c.next, "after →"), el("a", { href: vmLink(store, c.vm) }, c.vm),
      c.parent_is_there ? link(c.parent, `grew from ${c.parent}`) : null, tags(c.tags, c.pinned)),
    cards([["Taken", moment(c.taken_at)], ["Why", c.reason], ["Pause", time(c.pause_ns)], ["Dirty", `${count(c.dirty_pages)} pages`], ["Stored", bytes(c.stored_bytes)],
      ["Interval", time(c.interval_ns)], ["Backlog", time(c.backlog_ns)], ["Encoded in", time(c.encode_ns)], ["Strategy", `${c.strategy}, ${c.precopy_rounds} rounds`],
      ["RAM", bytes(c.ram_bytes)], ["Machine", `${c.machine.machine_type}, ${c.machine.cpus} CPUs, QEMU ${c.machine.qemu_version}`]]),
    screenPlace,
    el("h3", {}, "What to do with it"), c.commands.map((one) => command(one, one.can_be_done ? actions[one.name] : null)), said,
    el("h3", {}, "Memory: where it changed"), heatPlace,
    el("h3", {}, "What differs from its parent"), diffPlace,
    el("h3", {}, "Pause by phase"), table("From before QEMU is asked to stop until it has confirmed that the VM runs", [["Phase"], ["Time", 1], ["Part", 1]], phases),
    el("h3", {}, "Pages"), table(`${count(c.dirty_pages)} dirty pages`, [["Became of them"], ["Pages", 1]], pages.map(([name, n]) => [name, count(n)])),
    c.disks?.length ? [el("h3", {}, "Disks"), disks(c.disks)] : [],
    el("h3", {}, "RAM blocks"), table("As QEMU has them", [["Block"], ["Used", 1], ["Reserved", 1]], c.ram.map((b) => [b.name, bytes(b.used_bytes), bytes(b.total_bytes)])),
    el("h3", {}, "Command line"), el("p", {}, el("code", {}, (c.machine.user_command ?? []).join(" "))));
  const compare = async () => {
    fill(diffPlace, el("p", { class: "soft" }, "Comparing …"));
    try { fill(diffPlace, difference(await api.diff(store, id))); } catch (error) { fill(diffPlace, problem(error)); }
  };
  screens(store, c).then((found) => fill(screenPlace, found));
  api.heat(store, id).then((found) => fill(heatPlace, memory(found, store)), (error) => fill(heatPlace, problem(error)));
  return { update() {} };
}

/** The displays of the VM, or of each member of a group that has one. */
async function screens(store, c) {
  const one = async (member) => {
    const alt = `what the display of ${member ?? c.vm} showed at checkpoint ${c.id}`;
    try { return el("img", { class: "screen", src: await api.screen(store, c.id, member), alt }); } catch (error) { return problem(error); }
  };
  return c.screens.length ? [el("h3", {}, "Screen"), ...await Promise.all(c.screens.map(one))] : [];
}

function memory(found) {
  const regions = found.regions.filter((region) => region.pages > 0);
  const row = (r) => [r.name, count(r.pages), count(r.nonzero_pages), count(r.changed_pages)];
  return [
    el("p", {}, found.parent === null ? "All pages that are not zero: it has no parent in the store, or RAM was laid out otherwise." : `Pages that differ from checkpoint ${found.parent}; a square is ${count(found.piece_pages)} pages.`),
    regions.map((region) => [el("p", { class: "soft" }, `${region.name}: ${count(region.changed_pages)} of ${count(region.pages)} pages changed`), heat(region, found.piece_pages)]).flat(),
    asTable(() => table("By RAM block", [["Block"], ["Pages", 1], ["Not zero", 1], ["Changed", 1]], regions.map(row))),
  ].flat();
}

function difference(diff) {
  const row = (r) => [r.name, count(r.pages), count(r.changed_pages), count(r.from_zero_pages), count(r.to_zero_pages), count(r.changed_sectors), bytes(r.changed_bytes)];
  const columns = [["RAM block or disk"], ["Pages", 1], ["Changed", 1], ["From zero", 1], ["To zero", 1], ["Sectors", 1], ["Bytes", 1]];
  return [table(`Checkpoint ${diff.first} against ${diff.second}`, columns, [...diff.ram, ...diff.disks].map(row)),
    el("p", {}, `Devices: ${diff.same_devices ? "the same" : "not the same"} (${diff.device_bytes.map(bytes).join(" and ")}).`)];
}

function disks(all) {
  const row = (d) => [d.name, bytes(d.disk_bytes), d.left_out ? "left out of the checkpoint" : bytes(d.written_bytes), count(d.zero_blocks), count(d.dedup_blocks + d.unchanged_blocks), bytes(d.stored_bytes), d.unreadable ? el("span", { class: "problem" }, d.unreadable) : d.base];
  return table("Written since the checkpoint before, in blocks of 4 KiB", [["Disk"], ["Size", 1], ["Written", 1], ["Zero", 1], ["Dedup", 1], ["Stored", 1], ["Over"]], all.map(row));
}

// One store.

export async function store(main, id) {
  const head = (await api.stores()).find((one) => one.id === id);
  if (!head) throw new Error(`no store ${id} is shown here`);
  const [figures, chart] = [el("div", {}), el("div", {})];
  fill(main, el("h2", {}, head.place), head.problem && problem(head.problem), figures, el("h3", {}, "Growth"), chart, el("h3", {}, "VMs"),
    el("ul", {}, head.vms.map((name) => el("li", {}, el("a", { href: vmLink(id, name) }, name)))));
  const draw = async () => {
    const { sizes, points } = await api.growth(id);
    fill(figures, cards([["On disk", bytes(sizes.total_bytes)], ["Full images would take", bytes(sizes.raw_bytes)], ["Dirty pages", bytes(sizes.dirty_bytes)],
      ["Zero", `${count(sizes.zero_pages)} pages`], ["Deduplicated", `${count(sizes.dedup_pages)} pages`], ["Unchanged", `${count(sizes.unchanged_pages)} pages`],
      ["Stored", `${count(sizes.stored_pages)} pages, ${bytes(sizes.stored_bytes)}`], ["Saved by deduplication", times(sizes.dedup_ratio)],
      ["By compression", times(sizes.compression_ratio)], ["Against full images", times(sizes.reduction_ratio)]]));
    const columns = [["Checkpoint"], ["Taken"], ["Dirty so far", 1], ["Added so far", 1]];
    fill(chart, lines("Sum over all checkpoints that are left: what was dirty and what the store grew by", points, [["added to the store", (p) => p.added_bytes], ["dirty", (p) => p.dirty_bytes]], bytes),
      asTable(() => table("What the chart shows", columns, points.map((p) => [p.id, moment(p.at), bytes(p.dirty_bytes), bytes(p.added_bytes)]))));
  };
  await draw();
  const calm = calmly(3000, () => draw().catch(() => {}));
  return { update(event, data) { if (event === "store" && data.id === id) calm(); } };
}

// Recordings and analyses.

function analysis(one) {
  if (one.problem) return problem(one.problem);
  const kind = (piece) => (piece.failed > 0 ? "failed" : piece.done === piece.last - piece.first + 1 ? "done" : "waits");
  const pieces = one.pieces.map((piece) => [kind(piece), piece.last - piece.first + 1, `intervals ${piece.first} to ${piece.last}: ${piece.done} done, ${piece.failed} failed`]);
  const words = `${one.tool}${one.arguments.length ? ` ${one.arguments.join(" ")}` : ""}: ${one.done} of ${one.intervals} intervals done, ${one.failed} failed`;
  return el("div", { "data-analysis": one.path }, el("p", {}, words, " ", el("span", { class: "soft" }, one.path), " ",
    el("progress", { max: Math.max(1, one.intervals), value: one.done, "aria-label": `progress of ${one.tool}` })), strip(words, pieces));
}

function recording(one) {
  if (one.problem) return el("section", {}, el("h3", {}, one.path), problem(one.problem));
  const pieces = one.pieces.map((piece, at) => [at % 2 ? "piece odd" : "piece", piece.end_icount - piece.from_icount,
    `intervals ${piece.first} to ${piece.last}: instructions ${count(piece.from_icount)} to ${count(piece.end_icount)}`]);
  const row = (p) => [p.first === p.last ? p.first : `${p.first}–${p.last}`, one.store ? el("a", { href: checkpointLink(one.store, p.checkpoint) }, p.checkpoint) : p.checkpoint, count(p.from_icount), count(p.end_icount - p.from_icount)];
  return el("section", { "data-recording": one.id }, el("h3", {}, `${one.vm}: ${one.path}`),
    cards([["State", one.is_being_made ? "being recorded" : one.ending], ["Began", moment(one.began_at)], ["Took", time(one.duration_ns)], ["Instructions", count(one.instructions)],
      ["Log", `${bytes(one.log_bytes)}, ${bytes(one.stored_log_bytes)} on disk`], ["Checkpoints", count(one.checkpoints)], ["Intervals", count(one.intervals)]]),
    strip(`${one.intervals} intervals, as long as their instructions`, pieces),
    asTable(() => table("Intervals", [["Interval"], ["Begins at checkpoint"], ["First instruction", 1], ["Instructions", 1]], one.pieces.map(row))),
    one.analyses.map(analysis));
}

export async function recordings(main) {
  const draw = async () => {
    const { recordings: all, analyses } = await api.recordings();
    const none = el("p", {}, "None is shown: name some, as in ", el("code", {}, "keyframe serve --recordings DIR --analysis DIR"));
    fill(main, el("h2", {}, "Recordings"), all.length || analyses.length ? all.map(recording) : none,
      analyses.length ? [el("h2", {}, "Analyses of others"), ...analyses.map(analysis)] : []);
  };
  await draw();
  return { update(event) { if (event === "recordings") draw().catch(() => {}); } };
}
