//! `vmm`: checkpoints, restores and sizes of VMs with 128 to 1024 MiB, by VMM: tables 1 to 4 and 6
//! of the paper on generic checkpoint-restart of VMs, with each VMM's own snapshots as peers.
//!
//! ```text
//!   firecracker   keyframe attach, a checkpoint a second │ pause, sizes
//!                 PATCH Paused, Full or Diff, Resumed    │ the time that the VM stands still
//!                 keyframe restore, eager and lazy       │ /snapshot/load in a new Firecracker
//!                 keyframe branch -n 20                  │ time, and each clone's own RAM
//!   tcg, kvm      keyframe run and take, pre-copy, fork  │ savevm, migrate into a file
//!                 keyframe restore, eager and lazy       │ -loadvm
//! ```
//!
//! The guests have written as much of their RAM as the paper's idle guests, 320 MiB at most, and
//! write about 1,000 pages a second. Only one VM runs at a time, except for clones.

mod chart;
mod costs;
mod firecracker;
mod firecracker_vm;
mod qemu;
mod restores;
mod rows;

use crate::guest_files::{FirecrackerFiles, PayloadGuest, SmallGuest};
use crate::interrupt::Interrupt;
use crate::part_selection::PartSelection;
use crate::{Error, Options, Report};
use rows::{Rows, VMMS};
use std::path::Path;

/// The measured sizes of RAM, in MiB.
const SIZES: [u64; 4] = [128, 256, 512, 1024];
const SIZES_QUICK: [u64; 2] = [128, 1024];

/// How often each thing is measured.
#[derive(Clone, Copy)]
struct Plan {
    /// Checkpoints after the first one.
    checkpoints: usize,
    /// Snapshots of all of RAM by the VMM itself.
    saves: usize,
    /// Diff snapshots by Firecracker itself.
    diffs: usize,
    /// Restores of each kind.
    restores: usize,
    /// Times that clones are started.
    branches: usize,
}

const FULL: Plan = Plan { checkpoints: 20, saves: 4, diffs: 10, restores: 7, branches: 3 };
const QUICK: Plan = Plan { checkpoints: 4, saves: 1, diffs: 2, restores: 2, branches: 1 };

impl Plan {
    /// Makes the plan for `--quick` and `--rounds`.
    fn new(options: &Options) -> Self {
        match options.rounds.map(usize::from) {
            Some(rounds) => Self {
                checkpoints: 2 * rounds,
                saves: rounds,
                diffs: rounds,
                restores: rounds,
                branches: rounds,
            },
            None if options.quick => QUICK,
            None => FULL,
        }
    }
}

/// The benchmark with its options and the directory of its files.
struct Bench<'a> {
    options: &'a Options,
    interrupt: &'a Interrupt,
    dir: &'a Path,
    plan: Plan,
}

pub fn run(options: &Options) -> Result<Report, Error> {
    let part = |vmm: &str, mib: u64| format!("{vmm}_{mib}mib");
    let all = VMMS.into_iter().flat_map(|vmm| SIZES.map(|mib| part(vmm, mib)));
    let parts = PartSelection::new("vmm", &options.only, all)?;
    let sizes: &[u64] =
        if options.quick && options.only.is_empty() { &SIZES_QUICK } else { &SIZES };
    let dir = tempfile::tempdir().map_err(Error::io("make a temporary directory"))?;
    let interrupt = Interrupt::listen()?;
    let plan = Plan::new(options);
    let bench = Bench { options, interrupt: &interrupt, dir: dir.path(), plan };
    let mut rows = Rows::default();
    let load_before = load_average();
    let mut last_error = None;
    for vmm in VMMS {
        let chosen = sizes.iter().copied().filter(|mib| parts.has(&part(vmm, *mib)));
        let chosen: Vec<u64> = chosen.collect();
        if chosen.is_empty() {
            continue;
        }
        if let Err(error) = bench.measure_vmm(vmm, &chosen, &mut rows) {
            interrupt.check()?;
            options.left_out(&part_title(vmm), &error);
            rows.note(vmm, &error);
            last_error = Some(error);
        }
    }
    match last_error {
        Some(error) if rows.is_empty() => Err(error),
        _ => {
            let mut report = report(&rows);
            let machine = format!(
                "load average {load_before} at the beginning and {} at the end, of which the VMs and \
                 Keyframe are a part",
                load_average()
            );
            report.notes.insert("machine".into(), machine);
            Ok(report)
        }
    }
}

/// Returns the processes that ran or waited for a processor in the last minute, on average.
fn load_average() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().unwrap_or("unknown").to_owned()
}

/// Returns the name of a VMM for a person.
fn part_title(vmm: &str) -> String {
    match vmm {
        "firecracker" => "Firecracker".into(),
        accelerator => format!("QEMU under {}", accelerator.to_uppercase()),
    }
}

impl Bench<'_> {
    /// Measures VMs of one VMM, from the smallest to the largest.
    fn measure_vmm(&self, vmm: &'static str, sizes: &[u64], rows: &mut Rows) -> Result<(), Error> {
        match vmm {
            "firecracker" => {
                check_kvm()?;
                let files = FirecrackerFiles::find(self.options)?;
                sizes.iter().try_for_each(|mib| firecracker::measure(self, &files, *mib, rows))
            }
            "tcg" => {
                let files = SmallGuest::find(self.options)?;
                let guest = |mib| qemu::QemuGuest::under_tcg(&files, mib);
                sizes.iter().try_for_each(|mib| qemu::measure(self, &guest(*mib), rows))
            }
            _ => {
                check_kvm()?;
                let files = PayloadGuest::find()?;
                let guest = |mib| qemu::QemuGuest::under_kvm(&files, mib);
                sizes.iter().try_for_each(|mib| qemu::measure(self, &guest(*mib), rows))
            }
        }
    }
}

/// Fails if `/dev/kvm` cannot be opened.
fn check_kvm() -> Result<(), Error> {
    let device = std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm");
    device.map(drop).map_err(Error::io("open /dev/kvm"))
}

fn report(rows: &Rows) -> Report {
    let mut report = Report::new("vmm");
    rows.add_figures(&mut report);
    rows.add_summary(&mut report);
    report.table = rows.table();
    report.plot = chart::figure(rows);
    report
}
