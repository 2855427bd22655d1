//! What a tool is told: the intervals of a run, where RAM is, where its parts go.
//!
//! ```text
//!   recording   │ interval 0 │ interval 1 │ interval 2 │ ...          cut where the checkpoints are
//!   run         [────────────]                                      side by side: one QEMU and one run for each
//!               [────────────┼────────────┼────────────]            in sequence: one run with all of them
//!   part                0            1            2                 the same in both ways, to the byte
//! ```

use crate::plugin::Interface;
use keyframe_plugins::FILE_ARGUMENTS;
use keyframe_units::GuestPhys;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Instructions that the VM has executed since the recording began, as QEMU counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Icount(pub u64);

/// From one checkpoint to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interval {
    /// Its number in the recording, from 0.
    pub index: u32,
    /// The instruction that it begins before.
    pub start: Icount,
    /// The instruction that it ends before.
    pub end: Icount,
}

/// A part of RAM that the guest sees at one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RamRange {
    /// Where the guest sees its first byte.
    pub guest: GuestPhys,
    /// QEMU's number of that byte, as plugins of its interface 1 are told; under interface 4 any
    /// that [`RamFile`]s agree with.
    pub number: u64,
    /// Length.
    pub len_bytes: u64,
}

/// A file with RAM, which QEMU maps shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RamFile {
    /// The number of its first byte.
    pub number: u64,
    /// Where QEMU finds it.
    pub path: PathBuf,
}

/// The guest's RAM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestRam {
    /// One for each memory backend, [`GuestRam::FILES_MAX`] at most.
    pub files: Vec<RamFile>,
    /// Where it is in the guest's physical address space; the range at 0 first.
    pub ranges: Vec<RamRange>,
}

impl GuestRam {
    /// Most files.
    pub const FILES_MAX: usize = FILE_ARGUMENTS.len();

    /// As the plugin takes them.
    pub(crate) fn argument(&self) -> String {
        let mut text = String::new();
        for range in &self.ranges {
            let separator = if text.is_empty() { "" } else { "/" };
            let (guest, number, len) = (range.guest.0, range.number, range.len_bytes);
            let _ = write!(text, "{separator}{guest:#x}:{number:#x}:{len:#x}");
        }
        text
    }

    /// The files, as the plugin takes them.
    pub(crate) fn file_arguments(&self) -> impl Iterator<Item = (&'static str, String)> {
        let text = |file: &RamFile| format!("{:#x}:{}", file.number, file.path.display());
        FILE_ARGUMENTS.into_iter().zip(self.files.iter().map(text))
    }
}

/// One QEMU, and the intervals that it goes through.
#[derive(Clone, Debug)]
pub struct RunContext {
    /// Which interface its QEMU has.
    pub interface: Interface,
    /// The plugin, as [`crate::plugin::place`] put it.
    pub plugin: PathBuf,
    /// Its RAM.
    pub ram: GuestRam,
    /// Where its parts go; there already.
    pub dir: PathBuf,
    /// What it goes through before the first interval, as that begins behind its checkpoint; its
    /// part is dropped.
    pub warm_up: Option<Interval>,
    /// In order, each beginning where the one before ends.
    pub intervals: Vec<Interval>,
}

impl RunContext {
    /// The parts of its intervals, each in its directory.
    pub(crate) fn parts(&self) -> Vec<Part> {
        self.intervals.iter().map(|&interval| Part { interval, dir: self.dir.clone() }).collect()
    }

    /// All that is cut, warm-up first.
    pub(crate) fn cuts(&self) -> usize {
        self.intervals.len() + usize::from(self.warm_up.is_some())
    }
}

/// What a tool made of one interval.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Which.
    pub interval: Interval,
    /// Where its files are.
    pub dir: PathBuf,
}

impl Part {
    /// The file of one table.
    pub fn file(&self, kind: &str, extension: &str) -> PathBuf {
        part_file(&self.dir, self.interval.index, kind, extension)
    }
}

pub(crate) fn part_file(dir: &Path, index: u32, kind: &str, extension: &str) -> PathBuf {
    dir.join(format!("{index:06}.{kind}.{extension}"))
}

/// All parts, and where the results go.
#[derive(Clone, Debug)]
pub struct MergeContext {
    /// In the order of the recording.
    pub parts: Vec<Part>,
    /// The directory for result files; there already.
    pub out: PathBuf,
}

/// What a terminal shows of a result.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Lines.
    pub lines: Vec<String>,
    /// Result files that were written.
    pub files: Vec<PathBuf>,
}
