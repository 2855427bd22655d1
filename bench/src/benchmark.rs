//! The benchmarks by name, and the options that each of them has.

use crate::{
    Error, Report, evaluation, fleet, memtrace_columns, overhead, pause, replay, replication,
    restore, speedup, store, vmm,
};
use keyframe_units::error_chain as chain;
use std::path::PathBuf;
use std::time::Duration;

/// How a benchmark is run.
pub struct Options {
    /// The `keyframe` program to measure.
    pub keyframe: PathBuf,
    /// Measure fewer repetitions.
    pub quick: bool,
    /// Measure only these parts, named as in the keys; all parts if it is empty.
    pub only: Vec<String>,
    /// How often each thing is measured; the benchmark's own number if `None`.
    pub rounds: Option<u16>,
    /// How many seconds each run of `replication` and `fleet` is counted; its own number if `None`.
    pub seconds: Option<u16>,
    /// The directory of the small guest; built if `None`.
    pub guest: Option<PathBuf>,
    /// The directory of the real guest; built if `None`.
    pub real_guest: Option<PathBuf>,
    /// The directory of Firecracker and its payload; built if `None`.
    pub firecracker_guest: Option<PathBuf>,
    /// The QEMU with which `replay`, `speedup` and `evaluation` record; `qemu-system-x86_64` if `None`.
    pub qemu: Option<PathBuf>,
    /// The directory to which `evaluation` writes; `out/evaluation` if `None`.
    pub out: Option<PathBuf>,
    /// The time after which `evaluation` begins no further measurement; no limit if `None`.
    pub stop_after: Option<Duration>,
    /// The store whose newest run `store` feeds; a generated stream if `None`.
    pub from: Option<keyframe_store::Store>,
    /// Called with a line about the measurement that begins.
    pub progress: fn(&str),
    /// Called with a line about each part that is left out, and the reason.
    pub warning: fn(&str),
}

impl Options {
    /// Reports the measurement that begins.
    pub fn say(&self, line: impl AsRef<str>) {
        (self.progress)(line.as_ref());
    }

    /// Warns that `subject` is left out because of `error`.
    pub fn left_out(&self, subject: &str, error: &Error) {
        (self.warning)(&format!("{subject} is left out: {}", chain(error)));
    }
}

type Run = fn(&Options) -> Result<Report, Error>;

const ALL: [(&str, Run); 11] = [
    ("pause", pause::run),
    ("overhead", overhead::run),
    ("restore", run_restore),
    ("store", store::run),
    ("replay", replay::run),
    ("speedup", speedup::run),
    ("replication", replication::run),
    ("evaluation", evaluation::run),
    ("memtrace-columns", memtrace_columns::run),
    ("fleet", fleet::run),
    ("vmm", vmm::run),
];

/// Returns the names of all benchmarks.
pub fn names() -> [&'static str; 11] {
    ALL.map(|(name, _)| name)
}

/// Runs benchmark `name`. Fails if an option is set that the benchmark does not have.
pub fn run(name: &str, options: &Options) -> Result<Report, Error> {
    let Some((benchmark, run)) = ALL.into_iter().find(|(known, _)| *known == name) else {
        return Err(Error::failed("find the benchmark", format!("no benchmark is named {name}")));
    };
    let special: [(&str, bool, &[&str]); 5] = [
        ("--qemu", options.qemu.is_some(), &["replay", "speedup", "evaluation"]),
        ("--seconds", options.seconds.is_some(), &["replication", "fleet"]),
        ("--out", options.out.is_some(), &["evaluation"]),
        ("--stop-after", options.stop_after.is_some(), &["evaluation"]),
        ("--from", options.from.is_some(), &["store"]),
    ];
    for (option, is_set, benchmarks) in special {
        if is_set && !benchmarks.contains(&benchmark) {
            return Err(Error::NoOption { benchmark, option });
        }
    }
    run(options)
}

/// Runs `restore`, which always measures all of its parts by turns.
fn run_restore(options: &Options) -> Result<Report, Error> {
    let option = match (options.only.is_empty(), options.rounds) {
        (false, _) => "--only",
        (true, Some(_)) => "--rounds",
        (true, None) => return restore::run(options),
    };
    Err(Error::NoOption { benchmark: "restore", option })
}
