//! The measured values: a sample for each VMM, size of RAM and measure.

use crate::sample::Sample;
use crate::{Error, Report};
use keyframe_units::error_chain;
use std::collections::BTreeMap;
use std::fmt::Write;

/// The VMMs, as keys name them: Firecracker, and QEMU by its accelerator.
pub const VMMS: [&str; 3] = ["firecracker", "tcg", "kvm"];

/// The measures of which the worst size is a figure without a size.
const SUMMARIZED: [&str; 10] = [
    "pause_ns",
    "pre_scan_pause_ns",
    "stop_copy_pause_ns",
    "fork_pause_ns",
    "restore_ns",
    "lazy_restore_ns",
    "bare_restore_ns",
    "bare_lazy_restore_ns",
    "branch_20_ns",
    "clone_ram_bytes",
];
/// A VMM's own method over Keyframe's: the least ratio of all sizes is the ratio of the VMM.
const RATIOS: [(&str, &str, &str); 8] = [
    ("full_over_pause", "full_ns", "pause_ns"),
    ("diff_over_pause", "diff_ns", "pause_ns"),
    ("savevm_over_pause", "savevm_ns", "pause_ns"),
    ("migrate_over_pause", "migrate_ns", "pause_ns"),
    ("load_over_restore", "load_command_ns", "restore_ns"),
    ("load_over_lazy_restore", "load_command_ns", "lazy_restore_ns"),
    ("loadvm_over_restore", "loadvm_ns", "restore_ns"),
    ("loadvm_over_lazy_restore", "loadvm_ns", "lazy_restore_ns"),
];
/// The columns of the table: a title, and the measures of which a VMM has one.
const COLUMNS: [(&str, &[&str]); 15] = [
    ("pause", &["pause_ns"]),
    ("pre-scan", &["pre_scan_pause_ns"]),
    ("stop-copy", &["stop_copy_pause_ns"]),
    ("forked", &["fork_pause_ns"]),
    ("own full", &["full_ns", "savevm_ns"]),
    ("own diff", &["diff_ns"]),
    ("restore", &["restore_ns"]),
    ("lazy", &["lazy_restore_ns"]),
    ("bare", &["bare_restore_ns"]),
    ("own load", &["load_command_ns", "loadvm_ns"]),
    ("20 clones", &["branch_20_ns"]),
    ("RAM", &["raw_bytes"]),
    ("own file", &["full_bytes", "savevm_bytes"]),
    ("first", &["first_stored_bytes"]),
    ("later", &["later_stored_bytes"]),
];
const TABLE_HEAD: &str = "Medians: times in ms (pause to 20 clones); sizes in MiB (RAM to later). \
    Own: by the VMM itself.";

/// How each thing is measured, and what is not.
const METHODS: [(&str, &str); 6] = [
    (
        "pause",
        "Keyframe's pauses are those that it reports: from before the request to pause until the VMM \
         has confirmed that the VM runs. A checkpoint follows a second after the one before; the \
         first one of a VM is left out",
    ),
    (
        "firecracker_own_snapshots",
        "full and diff: from before PATCH Paused until PATCH Resumed is answered, with new files for \
         each snapshot, a second after the one before. Each has a VM of its own with the same guest; \
         that of diff has track_dirty_pages",
    ),
    ("qemu_own_snapshots", "savevm and migrate: the time between QEMU's events STOP and RESUME"),
    (
        "restore",
        "restore and lazy_restore: as keyframe restore reports it, from its beginning until the VMM \
         has confirmed that the VM runs; restore_command: from the start of the command. \
         load_command: from the start of Firecracker until it has loaded and resumed its own Full \
         snapshot; load: these two requests alone; loadvm: from the start of QEMU. All files are in \
         the page cache. bare: a VM that has written 8 MiB",
    ),
    (
        "clones",
        "branch_20: as keyframe branch -n 20 reports it, until all run; of a guest that has halted. \
         clone_ram: private, written pages of the guest's RAM, two seconds later, of the clone with \
         the most",
    ),
    (
        "not_measured",
        "forked checkpoints of Firecracker (its seccomp filter forbids the fork); the file system of \
         a guest (table 7); copy threads and huge pages by interval",
    ),
];

/// A measured VM: its VMM, and the size of its RAM in MiB.
pub type Vm = (&'static str, u64);

/// All samples.
#[derive(Default)]
pub struct Rows {
    samples: BTreeMap<(&'static str, u64, &'static str), Sample>,
    notes: BTreeMap<&'static str, String>,
}

impl Rows {
    /// Adds a value of `measure`, whose name ends with its unit.
    pub fn push(&mut self, (vmm, mib): Vm, measure: &'static str, value: f64) {
        self.samples.entry((vmm, mib, measure)).or_default().push(value);
    }

    /// Notes why `vmm` was not measured, or not completely.
    pub fn note(&mut self, vmm: &'static str, error: &Error) {
        self.notes.insert(vmm, format!("not measured completely: {}", error_chain(error)));
    }

    /// Returns whether nothing was measured.
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// Returns the median of `measure`.
    pub fn median(&self, (vmm, mib): Vm, measure: &str) -> Option<f64> {
        let is_it = |key: &(&str, u64, &str)| *key == (vmm, mib, measure);
        self.samples.iter().find(|(key, _)| is_it(key)).map(|(_, sample)| sample.median())
    }

    /// Returns the sizes of RAM with which `vmm` was measured.
    pub fn sizes(&self, vmm: &str) -> Vec<u64> {
        let mut sizes: Vec<u64> =
            self.samples.keys().filter(|key| key.0 == vmm).map(|key| key.1).collect();
        sizes.dedup();
        sizes
    }

    /// Adds each median to `report`, and the largest value of the pauses.
    pub fn add_figures(&self, report: &mut Report) {
        for ((vmm, mib, measure), sample) in &self.samples {
            let (name, unit) = measure.rsplit_once('_').unwrap_or((measure, ""));
            report.figure(format!("{vmm}_{mib}mib_{name}_p50_{unit}"), sample.median());
            if name.ends_with("pause") {
                report.figure(format!("{vmm}_{mib}mib_{name}_max_{unit}"), sample.percentile(100));
                report.figure(format!("{vmm}_{mib}mib_{name}_samples"), sample.len() as f64);
            }
        }
        for (vmm, note) in &self.notes {
            report.notes.insert((*vmm).into(), note.clone());
        }
        for (topic, note) in METHODS {
            report.notes.insert(topic.into(), note.into());
        }
    }

    /// Adds the figures and ratios without a size: those of the size that is worst for Keyframe.
    pub fn add_summary(&self, report: &mut Report) {
        for vmm in VMMS {
            let sizes = self.sizes(vmm);
            for measure in SUMMARIZED {
                let medians = sizes.iter().filter_map(|mib| self.median((vmm, *mib), measure));
                if let Some(worst) = medians.reduce(f64::max) {
                    report.figure(summary_key(vmm, measure), worst);
                }
            }
            for (name, own, ours) in RATIOS {
                let ratio = |mib: &u64| {
                    let vm = (vmm, *mib);
                    Some(self.median(vm, own)? / self.median(vm, ours)?)
                };
                if let Some(least) = sizes.iter().filter_map(ratio).reduce(f64::min) {
                    report.ratio(format!("{vmm}_{name}"), least);
                }
            }
        }
    }

    /// Returns the table for a person: a line for each VM.
    pub fn table(&self) -> String {
        let mut table = format!("{TABLE_HEAD}\n  {:<12}{:>5}", "VMM", "MiB");
        for (title, _) in COLUMNS {
            let _ = write!(table, "{title:>10}");
        }
        for vmm in VMMS {
            for mib in self.sizes(vmm) {
                let _ = write!(table, "\n  {vmm:<12}{mib:>5}");
                for (_, measures) in COLUMNS {
                    let cell = measures.iter().find_map(|measure| {
                        let unit = if measure.ends_with("_ns") { 1e6 } else { f64::from(1 << 20) };
                        self.median((vmm, mib), measure).map(|value| value / unit)
                    });
                    let cell = cell.map_or("-".into(), |value| format!("{value:.2}"));
                    let _ = write!(table, "{cell:>10}");
                }
            }
        }
        table
    }
}

/// Returns the key of a measure's worst size. The clones' keys have no `p50`, because their values
/// are of twenty clones at once.
fn summary_key(vmm: &str, measure: &str) -> String {
    let (name, unit) = measure.rsplit_once('_').unwrap_or((measure, ""));
    if name.starts_with("branch") || name.starts_with("clone") {
        format!("{vmm}_{name}_{unit}")
    } else {
        format!("{vmm}_{name}_p50_{unit}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured() -> Rows {
        let mut rows = Rows::default();
        for (mib, pause, full) in [(128, 2e6, 200e6), (1024, 3e6, 240e6)] {
            let vm = ("firecracker", mib);
            for (measure, value) in [
                ("pause_ns", pause),
                ("full_ns", full),
                ("diff_ns", full / 10.0),
                ("restore_ns", 20e6),
                ("branch_20_ns", 600e6),
                ("raw_bytes", (mib << 20) as f64),
            ] {
                rows.push(vm, measure, value);
            }
        }
        rows
    }

    /// Other programs read these keys.
    #[test]
    fn the_keys_are_those_promised_and_of_the_worst_size() {
        let mut report = Report::new("vmm");
        measured().add_figures(&mut report);
        measured().add_summary(&mut report);
        for (key, value) in [
            ("firecracker_pause_p50_ns", 3e6),
            ("firecracker_restore_p50_ns", 20e6),
            ("firecracker_branch_20_ns", 600e6),
            ("firecracker_128mib_pause_p50_ns", 2e6),
        ] {
            assert!((report.figures[key] - value).abs() < 1.0, "{key}");
        }
        assert!((report.ratios["firecracker_full_over_pause"] - 80.0).abs() < 1e-9);
        assert!((report.ratios["firecracker_diff_over_pause"] - 8.0).abs() < 1e-9);
        let keys: Vec<_> = report.figures.keys().filter(|key| key.contains("tcg")).collect();
        assert!(keys.is_empty(), "{keys:?}");
    }

    #[test]
    fn the_table_has_a_line_for_each_vm() {
        let table = measured().table();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 4, "{table}");
        assert!(
            lines[3].contains("1024      3.00         -         -         -    240.00     24.00"),
            "{table}"
        );
    }
}
