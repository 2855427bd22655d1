//! Benchmarks against peers: each runs the product and its peers as a user would, on the same
//! guest, in one run.
//!
//! One file a benchmark, with a directory of its parts; the others are what they share. Every
//! figure is measured in the run that prints it; a ratio is computed from two figures of the same
//! run. What cannot be measured has no key.
//!
//! ```text
//!   pause ────┬─▶ vm::Protected ─▶ keyframe run -- qemu ...      pause as `keyframe take` tells it
//!             └─▶ peer::Peer ────▶ qemu ... + monitor, events    pause as QEMU's STOP and RESUME tell it
//!   overhead ─┬─▶ vm::Protected ─┐
//!             └─▶ vm::Guest ─────┴▶ the guest's own counter of its work, against the host's clock
//!   restore ──┬─▶ keyframe restore, eager and lazy               from the command until the VM runs
//!             └─▶ qemu -loadvm, and memcpy
//!   replay ───┬─▶ qemu, plain and counting; keyframe record          the same work between two lines of the guest
//!             └─▶ keyframe verify, segment, analyze                its recordings
//!   replication ┬▶ keyframe protect, standby, witness on hosts of their own   work and answers against those of plain QEMU there
//!             └─▶ a host that loses power                        until a client's next answer
//!   evaluation ─▶ keyframe record, list, stats, analyze, plan          what the checkpoint paper's chapter 6 measures
//!   store ────┬─▶ keyframe bench store --job                     pages put and read again, one process for each store
//!             └─▶ keyframe-bench-peers, borg, restic
//! ```
//!
//! Left out: judging figures; a benchmark passes when it could measure.

mod evaluation;
mod events;
mod guest;
pub mod hosts;
mod interrupt;
pub mod ledger;
mod overhead;
mod parts;
mod pause;
mod peer;
mod replay;
mod replication;
mod restore;
mod sample;
mod store;
mod vm;

pub use store::run_job;

use keyframe_plot::Figure;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// How a benchmark is run.
pub struct Options {
    /// The keyframe binary to measure.
    pub keyframe: PathBuf,
    /// Fewer repetitions.
    pub quick: bool,
    /// Only these parts, as keys name them; all where it is empty.
    pub only: Vec<String>,
    /// How often each thing is measured, in place of the benchmark's own numbers.
    pub rounds: Option<u16>,
    /// How long each run of `replication` is counted, in place of its own number.
    pub seconds: Option<u16>,
    /// The small guest's files; built where absent.
    pub guest: Option<PathBuf>,
    /// The real guest's files; built where absent.
    pub real_guest: Option<PathBuf>,
    /// The QEMU that `replay` and `evaluation` record with; the one on the path where none is
    /// named.
    pub qemu: Option<PathBuf>,
    /// Where `evaluation` writes its files; `out/evaluation` where nothing is named.
    pub out: Option<PathBuf>,
    /// The store whose newest run `store` feeds, in place of pages that it makes.
    pub from: Option<keyframe_store::Store>,
    /// Told what is being measured.
    pub progress: fn(&str),
    /// Told what is left out, and why.
    pub warning: fn(&str),
}

impl Options {
    fn say(&self, line: impl AsRef<str>) {
        (self.progress)(line.as_ref());
    }

    fn left_out(&self, what: &str, error: &Error) {
        (self.warning)(&format!("{what} is left out: {}", parts::chain(error)));
    }
}

/// What a benchmark found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The benchmark.
    pub name: String,
    /// Measured values; the key's end is the unit.
    pub figures: BTreeMap<String, f64>,
    /// One figure over another, or a part of a whole.
    pub ratios: BTreeMap<String, f64>,
    /// What is not there, and why.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub notes: BTreeMap<String, String>,
    /// The same as a picture.
    #[serde(skip)]
    pub plot: Figure,
    /// What a person compares at a glance; empty where the values are all there is.
    #[serde(skip)]
    pub table: String,
}

impl Report {
    fn new(name: &str) -> Self {
        let plot = Figure { title: String::new(), charts: Vec::new() };
        Self {
            name: name.into(),
            figures: BTreeMap::new(),
            ratios: BTreeMap::new(),
            notes: BTreeMap::new(),
            plot,
            table: String::new(),
        }
    }

    fn figure(&mut self, key: impl Into<String>, value: f64) {
        self.figures.insert(key.into(), value);
    }

    fn ratio(&mut self, key: impl Into<String>, value: f64) {
        self.ratios.insert(key.into(), value);
    }

    /// The ratio of two figures, where both were measured.
    fn ratio_of(&mut self, key: impl Into<String>, over: &str, under: &str) {
        if let (Some(over), Some(under)) = (self.figures.get(over), self.figures.get(under)) {
            let value = over / under;
            self.ratio(key, value);
        }
    }

    /// For a person: one value a line.
    pub fn text(&self) -> String {
        let mut lines = vec![format!("benchmark {}", self.name)];
        for (key, value) in &self.figures {
            let shown = if key.ends_with("_ns") {
                format!("{:.3} ms", value / 1e6)
            } else {
                format!("{value:.1}")
            };
            lines.push(format!("  {key:<44} {shown}"));
        }
        lines.extend(self.ratios.iter().map(|(key, value)| format!("  {key:<44} {value:.3}")));
        lines.extend(self.notes.iter().map(|(key, note)| format!("  {key}: {note}")));
        if !self.table.is_empty() {
            lines.push(self.table.clone());
        }
        lines.join("\n")
    }
}

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Something that it needs could not be done.
    #[error("{operation}: {problem}")]
    Failed {
        /// What was to be done.
        operation: String,
        /// Why it was not.
        problem: String,
    },
    /// A file or process operation failed.
    #[error("{operation}: {source}")]
    Io {
        /// What was to be done.
        operation: String,
        /// Why it was not.
        source: std::io::Error,
    },
    /// QEMU's monitor.
    #[error("{operation}: {source}")]
    Qmp {
        /// What it was asked.
        operation: String,
        /// What it answered.
        source: keyframe_qemu::Error,
    },
    /// A part that the benchmark does not have.
    #[error("bench {benchmark} has no part {part}: its parts are {parts}")]
    NoPart {
        /// The benchmark.
        benchmark: &'static str,
        /// What was asked for.
        part: String,
        /// What there is.
        parts: String,
    },
    /// An option that the benchmark does not have.
    #[error("bench {benchmark} has no {option}")]
    NoOption {
        /// The benchmark.
        benchmark: &'static str,
        /// What was asked for.
        option: &'static str,
    },
    /// The program with the databases is missing.
    #[error("the databases to compare with are not built: {problem}")]
    NoPeers {
        /// What is missing.
        problem: String,
    },
    /// The guest's files are missing.
    #[error("the {guest} guest is not built: {problem}")]
    NoGuest {
        /// Which.
        guest: &'static str,
        /// What is missing.
        problem: String,
    },
}

impl Error {
    /// What to do about it, where we know.
    pub fn fix(&self) -> Option<&'static str> {
        match self {
            Self::NoGuest { .. } => Some(
                "build it with guests/build in the project's directory, and name its directory with --guest or KEYFRAME_GUEST",
            ),
            Self::NoPeers { .. } => {
                Some("run make bench-peers in the project's directory, and the benchmark there too")
            }
            _ => None,
        }
    }

    fn failed(operation: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        Self::Failed { operation: operation.into(), problem: problem.to_string() }
    }

    fn io(operation: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let operation = operation.into();
        move |source| Self::Io { operation, source }
    }

    fn qmp(operation: impl Into<String>) -> impl FnOnce(keyframe_qemu::Error) -> Self {
        let operation = operation.into();
        move |source| Self::Qmp { operation, source }
    }
}

type Benchmark = fn(&Options) -> Result<Report, Error>;

/// It measures everything by turns, so that nothing can be left out.
fn restore(options: &Options) -> Result<Report, Error> {
    let option = match (options.only.is_empty(), options.rounds) {
        (false, _) => "--only",
        (true, Some(_)) => "--rounds",
        (true, None) => return restore::run(options),
    };
    Err(Error::NoOption { benchmark: "restore", option })
}

const ALL: [(&str, Benchmark); 7] = [
    ("pause", pause::run),
    ("overhead", overhead::run),
    ("restore", restore),
    ("store", store::run),
    ("replay", replay::run),
    ("replication", replication::run),
    ("evaluation", evaluation::run),
];

/// The benchmarks there are.
pub fn names() -> [&'static str; 7] {
    ALL.map(|(name, _)| name)
}

/// Runs benchmark `name`.
pub fn run(name: &str, options: &Options) -> Result<Report, Error> {
    match ALL.iter().find(|(known, _)| *known == name) {
        Some((benchmark, _))
            if options.qemu.is_some() && !["replay", "evaluation"].contains(benchmark) =>
        {
            Err(Error::NoOption { benchmark, option: "--qemu" })
        }
        Some((benchmark, _)) if options.seconds.is_some() && *benchmark != "replication" => {
            Err(Error::NoOption { benchmark, option: "--seconds" })
        }
        Some((benchmark, _)) if options.out.is_some() && *benchmark != "evaluation" => {
            Err(Error::NoOption { benchmark, option: "--out" })
        }
        Some((benchmark, _)) if options.from.is_some() && *benchmark != "store" => {
            Err(Error::NoOption { benchmark, option: "--from" })
        }
        Some((_, benchmark)) => benchmark(options),
        None => Err(Error::failed("find the benchmark", format!("no benchmark is named {name}"))),
    }
}
