//! Metrics for Prometheus (text format 0.0.4): of running VMs from their engines, of stores from
//! their listings.
//!
//! Units are base units (seconds, bytes). A VM whose engine does not answer has only
//! `keyframe_vm_up` 0. An unknown number is left out, never 0.

use crate::source::{DashboardSource, VmState};
use serde_json::Value;
use std::fmt::Write;

/// A metric with its samples.
struct MetricFamily {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    samples: Vec<(String, f64)>,
}

impl MetricFamily {
    fn new(name: &'static str, kind: &'static str, help: &'static str) -> Self {
        Self { name, kind, help, samples: Vec::new() }
    }

    fn add(&mut self, labels: &[(&str, &str)], value: f64) {
        let labels: Vec<String> =
            labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
        self.samples.push((labels.join(","), value));
    }

    fn add_some(&mut self, labels: &[(&str, &str)], value: Option<f64>) {
        if let Some(value) = value {
            self.add(labels, value);
        }
    }

    fn write(&self, text: &mut String) {
        if self.samples.is_empty() {
            return;
        }
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "# HELP {} {}\n# TYPE {} {}",
            self.name, self.help, self.name, self.kind
        );
        for (labels, value) in &self.samples {
            let _ = writeln!(text, "{}{{{labels}}} {value}", self.name);
        }
    }
}

/// Escapes a label value.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Returns all metrics of `source`, in the text format of Prometheus.
pub fn text(source: &dyn DashboardSource) -> String {
    let mut text = String::new();
    for family in of_vms(&source.vms()).into_iter().chain(of_stores(source)) {
        family.write(&mut text);
    }
    text
}

fn number(value: &Value, pointer: &str) -> Option<f64> {
    value.pointer(pointer)?.as_f64()
}

fn seconds(value: &Value, pointer: &str) -> Option<f64> {
    number(value, pointer).map(|ns| ns / 1e9)
}

/// How a metric is read from a VM's status, by JSON pointers.
#[derive(Clone, Copy)]
enum StatusReading {
    Number(&'static str),
    /// Nanoseconds, converted.
    Seconds(&'static str),
    /// 1 if the text is this one, otherwise 0.
    Is(&'static str, &'static str),
    /// 1 if true, otherwise 0.
    True(&'static str),
    /// 1 if the value is not null, otherwise 0.
    Some(&'static str),
    /// 1 if there is a value, otherwise 0.
    There(&'static str),
    /// The first number minus the second, at least 0.
    Behind(&'static str, &'static str),
}

impl StatusReading {
    fn of(self, status: &Value) -> Option<f64> {
        let flag = |is: bool| f64::from(u8::from(is));
        match self {
            Self::Number(at) => number(status, at),
            Self::Seconds(at) => seconds(status, at),
            Self::Is(at, text) => Some(flag(status.pointer(at)?.as_str()? == text)),
            Self::True(at) => Some(flag(status.pointer(at)?.as_bool()?)),
            Self::Some(at) => Some(flag(!status.pointer(at)?.is_null())),
            Self::There(at) => Some(flag(status.pointer(at).is_some())),
            Self::Behind(at, behind) => {
                Some((number(status, at)? - number(status, behind)?).max(0.0))
            }
        }
    }
}

use StatusReading::{Behind, Is, Number, Seconds, True};

/// Name, kind, help and reading of the metrics with one number for each VM.
#[rustfmt::skip]
const OF_STATUS: [(&str, &str, &str, StatusReading); 30] = [
    ("keyframe_vm_running", "gauge", "1 while the VM runs, 0 while it is paused or unknown.", Is("/state", "running")),
    ("keyframe_checkpoints_sealed_total", "counter", "Checkpoints sealed in this run.", Number("/sealed")),
    ("keyframe_checkpoints_failed_total", "counter", "Checkpoints that failed in this run.", Number("/failed")),
    ("keyframe_checkpoints_failing", "gauge", "1 while the newest checkpoint is not sealed because it failed.", StatusReading::There("/failing")),
    ("keyframe_store_free_bytes", "gauge", "Bytes that could be written to the store's medium at the newest checkpoint.", Number("/store_free_bytes")),
    ("keyframe_last_checkpoint_age_seconds", "gauge", "Age of the newest sealed checkpoint.", Seconds("/last_age_ns")),
    ("keyframe_checkpoint_interval_seconds", "gauge", "Interval between checkpoints, fixed or by a budget; absent if they are taken by command only.", Seconds("/interval_ns")),
    ("keyframe_checkpoint_backlog_seconds", "gauge", "How late the newest checkpoint began, because the previous one was still being encoded.", Seconds("/backlog_ns")),
    ("keyframe_checkpoints_queued", "gauge", "Checkpoints captured that are not sealed yet.", Number("/queued")),
    ("keyframe_last_checkpoint_pause_seconds", "gauge", "The whole pause of the newest checkpoint.", Seconds("/last/pause_ns")),
    ("keyframe_last_checkpoint_encode_seconds", "gauge", "Hashing, compressing and storing the newest checkpoint.", Seconds("/last/encode_ns")),
    ("keyframe_last_checkpoint_stored_bytes", "gauge", "Bytes that new pages of the newest checkpoint take in packs.", Number("/last/stored_bytes")),
    ("keyframe_recorder_kept_checkpoints", "gauge", "Checkpoints of the run that the flight recorder keeps.", Number("/recorder/kept")),
    ("keyframe_recorder_forgotten_total", "counter", "Checkpoints that the flight recorder has forgotten.", Number("/recorder/forgotten")),
    ("keyframe_recorder_freed_packs_total", "counter", "Packs whose space the flight recorder has given back.", Number("/recorder/freed_packs")),
    ("keyframe_recorder_failing", "gauge", "1 while the flight recorder's last pass failed.", StatusReading::Some("/recorder/last_error")),
    ("keyframe_replication_primary", "gauge", "1 on the VM's host, 0 on its standby.", Is("/replication/role", "primary")),
    ("keyframe_replication_protected", "gauge", "1 while a failure of the primary's host loses nothing.", Is("/replication/state", "protected")),
    ("keyframe_replication_connected", "gauge", "1 while the other host is connected.", True("/replication/connected")),
    ("keyframe_replication_term", "gauge", "Takeovers so far, from 1.", Number("/replication/term")),
    ("keyframe_replication_epochs_total", "counter", "Epochs of this process.", Number("/replication/epochs")),
    ("keyframe_replication_lag_epochs", "gauge", "Epochs that are not on the standby yet.", Behind("/replication/epoch", "/replication/acknowledged")),
    ("keyframe_replication_pause_seconds", "gauge", "How long the VM was paused for the newest epoch.", Seconds("/replication/pause_ns")),
    ("keyframe_replication_transfer_seconds", "gauge", "From the newest epoch's pause to its acknowledgement.", Seconds("/replication/transfer_ns")),
    ("keyframe_replication_held_packets", "gauge", "Packets that wait for an epoch to be on the standby.", Number("/replication/held_packets")),
    ("keyframe_replication_held_bytes", "gauge", "Bytes of the packets that wait.", Number("/replication/held_bytes")),
    ("keyframe_replication_passed_packets_total", "counter", "Packets that were released.", Number("/replication/passed_packets")),
    ("keyframe_replication_dropped_packets_total", "counter", "Packets that were dropped because the buffer was full.", Number("/replication/dropped_packets")),
    ("keyframe_replication_wire_bytes_total", "counter", "Bytes of all epochs on the wire.", Number("/replication/all_wire_bytes")),
    ("keyframe_replication_raw_bytes_total", "counter", "Bytes of the dirty pages of all epochs.", Number("/replication/all_raw_bytes")),
];

fn of_vms(vms: &[VmState]) -> Vec<MetricFamily> {
    let mut up = MetricFamily::new("keyframe_vm_up", "gauge", "1 if the VM's engine answers.");
    let mut phases = MetricFamily::new(
        "keyframe_last_checkpoint_pause_phase_seconds",
        "gauge",
        "The pause of the newest checkpoint, by phase.",
    );
    let mut pages = MetricFamily::new(
        "keyframe_last_checkpoint_pages",
        "gauge",
        "Pages of the newest checkpoint: dirty, and of these zero, deduplicated, unchanged and stored.",
    );
    let mut taken = MetricFamily::new(
        "keyframe_replication_taken_total",
        "counter",
        "Epochs on the standby, by the reason for which they were taken.",
    );
    let mut families: Vec<(MetricFamily, StatusReading)> = OF_STATUS
        .iter()
        .map(|(name, kind, help, value)| (MetricFamily::new(name, kind, help), *value))
        .collect();
    for vm in vms {
        let labels = [("vm", vm.name.as_str())];
        up.add(&labels, f64::from(u8::from(vm.problem.is_none())));
        for (family, value) in &mut families {
            family.add_some(&labels, value.of(&vm.status));
        }
        for phase in ["stop", "device_state", "scan", "copy", "resume"] {
            let value = seconds(&vm.status, &format!("/last/pause/{phase}"));
            phases.add_some(&[("vm", &vm.name), ("phase", phase)], value);
        }
        let kinds = [
            ("dirty", "dirty"),
            ("zero", "zero"),
            ("dedup", "deduplicated"),
            ("unchanged", "unchanged"),
            ("stored", "stored"),
        ];
        for (field, kind) in kinds {
            let value = number(&vm.status, &format!("/last/{field}_pages"));
            pages.add_some(&[("vm", &vm.name), ("kind", kind)], value);
        }
        for (reason, count) in reasons(&vm.status) {
            taken.add_some(&[("vm", &vm.name), ("reason", reason)], count.as_f64());
        }
    }
    let of_status = families.into_iter().map(|(family, _)| family);
    std::iter::once(up).chain(of_status).chain([phases, pages, taken]).collect()
}

/// The number of epochs of a protected VM, by the reason for which they were taken.
fn reasons(status: &Value) -> impl Iterator<Item = (&String, &Value)> {
    status.pointer("/replication/reasons").and_then(Value::as_object).into_iter().flatten()
}

fn of_stores(source: &dyn DashboardSource) -> Vec<MetricFamily> {
    let mut up = MetricFamily::new("keyframe_store_up", "gauge", "1 if the store can be read.");
    let mut count = MetricFamily::new(
        "keyframe_store_checkpoints",
        "gauge",
        "Sealed checkpoints in the store.",
    );
    let mut bytes = MetricFamily::new(
        "keyframe_store_bytes",
        "gauge",
        "Size of packs, maps, checkpoints and tags.",
    );
    let mut raw = MetricFamily::new(
        "keyframe_store_full_image_bytes",
        "gauge",
        "Size of full images of all checkpoints.",
    );
    let mut pages = MetricFamily::new(
        "keyframe_store_pages",
        "gauge",
        "Pages of all present checkpoints: zero, deduplicated, unchanged and stored.",
    );
    for store in source.stores() {
        let labels = [("store", store.place.as_str())];
        up.add(&labels, f64::from(u8::from(store.problem.is_none())));
        count.add(&labels, store.checkpoints as f64);
        let Ok(sizes) = source.sizes(&store.id) else { continue };
        bytes.add(&labels, sizes.total_bytes as f64);
        raw.add(&labels, sizes.raw_bytes as f64);
        let kinds = [
            ("zero", sizes.zero_pages),
            ("deduplicated", sizes.dedup_pages),
            ("unchanged", sizes.unchanged_pages),
            ("stored", sizes.stored_pages),
        ];
        for (kind, value) in kinds {
            pages.add(&[("store", &store.place), ("kind", kind)], value as f64);
        }
    }
    vec![up, count, bytes, raw, pages]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn told(status: Value) -> String {
        let vm = VmState { name: "db".into(), store: None, problem: None, status };
        let mut text = String::new();
        for family in of_vms(&[vm]) {
            family.write(&mut text);
        }
        text
    }

    #[test]
    fn a_replication_has_metrics_and_unknown_numbers_are_left_out() {
        let mut status = json!({"state": "running", "replication": {"role": "primary", "state": "syncing", "connected": true,
            "epoch": 9, "acknowledged": 7, "pause_ns": 2_500_000, "held_packets": 3}});
        let text = told(status.clone());
        for line in [
            "keyframe_vm_running{vm=\"db\"} 1",
            "keyframe_replication_primary{vm=\"db\"} 1",
            "keyframe_replication_protected{vm=\"db\"} 0",
            "keyframe_replication_connected{vm=\"db\"} 1",
            "keyframe_replication_lag_epochs{vm=\"db\"} 2",
            "keyframe_replication_pause_seconds{vm=\"db\"} 0.0025",
            "keyframe_replication_held_packets{vm=\"db\"} 3",
        ] {
            assert!(text.lines().any(|told| told == line), "{line}\n{text}");
        }
        assert!(!text.contains("passed_packets") && !text.contains("recorder"), "{text}");
        status["replication"]["acknowledged"] = Value::Null;
        assert!(!told(status).contains("lag_epochs"));
        assert!(!told(json!({"state": "running"})).contains("replication"));
    }
}
