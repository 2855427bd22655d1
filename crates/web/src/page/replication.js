// A protected VM and its standby: protection, held packets, the cost of epochs and their reasons.

import { api } from "./data.js";
import { asTable, bytes, cards, count, el, fill, table, time } from "./dom.js";
import { lines } from "./chart.js";

/** The number of states that the page keeps: ten minutes, one a second. */
const KEPT = 600;

/** The address of a VM's replication page. */
export const replicationLink = (name) => `#/replication/${encodeURIComponent(name)}`;

/** Epochs that are not on the standby yet. */
function behind(told) {
  return told.epoch === null || told.acknowledged === null ? null : Math.max(0, told.epoch - told.acknowledged);
}

/** The cells of the overview that replace those of checkpoints. */
export function inShort(told) {
  return {
    state: told.state,
    // In order, for a primary and for a standby.
    kind: ["protected", "ready to take over"].includes(told.state) ? "running" : "unknown",
    newest: told.epoch ?? "–",
    what: `${told.role}${told.protects ? ` of ${told.protects}` : ""}, ${count(behind(told))} behind, ${count(told.held_packets)} packets held`,
  };
}

function figures(told) {
  const { kind } = inShort(told);
  return cards([
    ["State", told.state, `state-${kind}`],
    ["Role", `${told.role}${told.protects ? ` of ${told.protects}` : ""}, term ${told.term}`],
    ["Other host", told.connected ? "connected" : "not connected", told.connected ? null : "problem"],
    told.note && ["Last news", told.note],
    ["Epochs", count(told.epochs)],
    ["Newest", told.epoch ?? "–"],
    ["On the standby", told.acknowledged ?? "–"],
    ["Lag", behind(told) === null ? "–" : `${behind(told)} epochs, ${time(told.transfer_ns)}`],
    ["Taken because", told.reason || "–"],
    ["Its pause", time(told.pause_ns)],
    ["Since the one before", time(told.epoch_ns)],
    ["Its pages", `${count(told.pages)}, ${bytes(told.wire_bytes)} on the wire`],
    ["Packets held", `${count(told.held_packets)} (${bytes(told.held_bytes)})`],
    ["Packets passed", count(told.passed_packets)],
    ["Packets dropped", count(told.dropped_packets), told.dropped_packets > 0 ? "problem" : null],
    ["On the wire so far", `${bytes(told.all_wire_bytes)} of ${bytes(told.all_raw_bytes)} dirty pages`],
    told.took_over_ns && ["Took over after", time(told.took_over_ns)],
  ]);
}

/** The page: `main` is drawn into. */
export async function replication(main, name) {
  const [state, charts, reasons, estimates] = [el("div", {}), el("div", {}), el("div", {}), el("div", {})];
  fill(main, el("h2", {}, name), state, el("h3", {}, "Epochs, since this page was opened"), charts, el("h3", {}, "Why they were taken"), reasons, estimates);
  const seen = [];
  let newest = null;

  const draw = (told) => {
    const columns = [["Epoch"], ["Pause", 1], ["Until it was on the standby", 1], ["Since the one before", 1], ["Pages", 1], ["Packets held", 1]];
    const row = (p) => [p.epoch, time(p.pause_ns), time(p.transfer_ns), time(p.epoch_ns), count(p.pages), count(p.held_packets)];
    fill(charts, seen.length > 1
      ? [lines("Pause, time until an epoch was on the standby, time between epochs", seen,
        [["pause", (p) => p.pause_ns], ["until it was on the standby", (p) => p.transfer_ns], ["between epochs", (p) => p.epoch_ns]], time),
      lines("Packets that were held", seen, [["packets held", (p) => p.held_packets]], (value) => count(value)),
      asTable(() => table("What the charts show, the newest first", columns, seen.toReversed().slice(0, 100).map(row)))]
      : el("p", { class: "soft" }, "The first one is waited for …"));
    const why = Object.entries(told.reasons ?? {}).sort((a, b) => b[1] - a[1]);
    const all = why.reduce((sum, [, n]) => sum + n, 0);
    fill(reasons, all > 0 ? table("Of all epochs that the standby has acknowledged", [["Reason"], ["Epochs", 1], ["Part", 1]],
      why.map(([reason, n]) => [reason, count(n), `${((n / all) * 100).toFixed(0)} %`])) : el("p", { class: "soft" }, "None was taken yet."));
    fill(estimates, told.estimates?.length ? [el("h3", {}, "What the policy takes the link and the VM to be"),
      table("Estimates, by names with their units", [["Estimate"], ["Value", 1]], told.estimates.map(([what, value]) => [what.replaceAll("_", " "), count(value)]))] : []);
  };
  const take = (one) => {
    const told = one?.status?.replication;
    if (!told) return fill(state, el("p", { class: "soft" }, one?.problem ?? "It does not run on this host any more."));
    fill(state, figures(told));
    if (told.epoch !== null && told.epoch !== newest) {
      newest = told.epoch;
      seen.push(told);
      if (seen.length > KEPT) seen.shift();
    }
    draw(told);
  };
  take((await api.vms()).find((one) => one.name === name));
  return {
    update(event, data) {
      if (event === "vm" && data.name === name) take(data);
      else if (event === "vm_gone" && data.name === name) take(null);
    },
  };
}
