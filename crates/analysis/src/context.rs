//! The inputs of a tool: the intervals of a run, the guest's RAM, the directory of its parts.
//!
//! ```text
//!   recording   │ interval 0 │ interval 1 │ interval 2 │ ...    cut at the checkpoints
//!   run         [────────────┼────────────]                     in parallel: a QEMU for each range
//!               [────────────┼────────────┼────────────]        in sequence: one QEMU for all
//!   part                0            1            2             the same bytes both ways
//! ```

use crate::error::{Error, Result};
use crate::plugin::PluginInterface;
use crate::symbols::SymbolTable;
use keyframe_plugins::FILE_ARGUMENTS;
use keyframe_units::GuestPhys;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The number of instructions that the VM has executed since the recording began, as QEMU counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Icount(pub u64);

/// An interval to analyse: the instructions from `start` to before `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IcountInterval {
    /// Its number in the recording, from 0 on.
    pub index: u32,
    /// Its first instruction.
    pub start: Icount,
    /// The first instruction after it.
    pub end: Icount,
}

/// A contiguous range of RAM in the guest's physical address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RamRange {
    /// The guest-physical address of its first byte.
    pub guest: GuestPhys,
    /// The RAM address of that byte. Under plugin interface 1 it is QEMU's `ram_addr_t`; under
    /// interface 4 it is any numbering that [`RamFile::number`] shares.
    pub number: u64,
    /// Its length, in bytes.
    pub len_bytes: u64,
}

/// A file with RAM that QEMU maps shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RamFile {
    /// The RAM address of the file's first byte, in the numbering of [`RamRange::number`].
    pub number: u64,
    /// The file's path, as QEMU opens it.
    pub path: PathBuf,
}

/// The guest's RAM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplayRam {
    /// A file for each memory backend, at most [`ReplayRam::FILES_MAX`].
    pub files: Vec<RamFile>,
    /// The ranges in the guest's physical address space, beginning with the one at address 0.
    pub ranges: Vec<RamRange>,
}

impl ReplayRam {
    /// The largest number of files.
    pub const FILES_MAX: usize = FILE_ARGUMENTS.len();

    /// The ranges as the plugin's argument `ram`.
    pub(crate) fn argument(&self) -> String {
        let mut text = String::new();
        for range in &self.ranges {
            let separator = if text.is_empty() { "" } else { "/" };
            let (guest, number, len) = (range.guest.0, range.number, range.len_bytes);
            let _ = write!(text, "{separator}{guest:#x}:{number:#x}:{len:#x}");
        }
        text
    }

    /// The files as arguments of the plugin.
    pub(crate) fn file_arguments(&self) -> impl Iterator<Item = (&'static str, String)> {
        let text = |file: &RamFile| format!("{:#x}:{}", file.number, file.path.display());
        FILE_ARGUMENTS.into_iter().zip(self.files.iter().map(text))
    }
}

/// The inputs of a run: one QEMU that replays one interval or several consecutive ones. The
/// intervals after the first are given to [`ToolRun::cut`](crate::ToolRun::cut).
#[derive(Clone, Debug)]
pub struct RunContext {
    /// The plugin interface of the run's QEMU.
    pub interface: PluginInterface,
    /// The plugin file, as [`crate::plugin::install`] wrote it.
    pub plugin: PathBuf,
    /// The guest's RAM.
    pub ram: ReplayRam,
    /// The directory for the run's parts, which exists.
    pub dir: PathBuf,
    /// The instructions that the run replays before the first interval, if that does not begin at
    /// its checkpoint. The part of these instructions is dropped.
    pub warm_up: Option<IcountInterval>,
    /// The first interval.
    pub first: IcountInterval,
    /// False if the first interval is certainly the only one.
    pub may_continue: bool,
}

/// The part of a run between two cuts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunningInterval {
    pub interval: IcountInterval,
    /// False for the warm-up, whose part is dropped.
    pub is_kept: bool,
}

impl RunningInterval {
    /// Makes the running interval of `interval`, whose part is kept.
    pub fn kept(interval: IcountInterval) -> Self {
        Self { interval, is_kept: true }
    }
}

/// The intervals of a run: the running one, and those whose parts have not been returned yet.
#[derive(Debug)]
pub(crate) struct RunIntervals {
    dir: PathBuf,
    running: Option<RunningInterval>,
    /// The intervals that have ended, in order.
    ended: VecDeque<IcountInterval>,
    /// The number of intervals that have begun, and of the cuts so far.
    begun: usize,
    cuts: usize,
}

impl RunIntervals {
    /// Begins with the warm-up of `run`, or with its first interval if it has none.
    pub fn new(run: &RunContext) -> Self {
        let (dir, running) = (run.dir.clone(), Some(run.first_running()));
        Self { dir, running, ended: VecDeque::new(), begun: 1, cuts: 0 }
    }

    /// Ends the running interval and begins `next`. Returns the part of the ended one; `None` if
    /// that was the warm-up. With `None` for `next`, no interval follows. Error: [`Error::Cuts`] if
    /// all intervals had ended.
    pub fn cut(&mut self, next: Option<IcountInterval>) -> Result<Option<Part>> {
        self.cuts += 1;
        let running = self.running.take();
        let Some(RunningInterval { interval, is_kept }) = running else {
            return Err(Error::Cuts { intervals: self.begun, cuts: self.cuts });
        };
        if is_kept {
            self.ended.push_back(interval);
        }
        self.begun += usize::from(next.is_some());
        self.running = next.map(RunningInterval::kept);
        Ok(is_kept.then(|| Part { interval, dir: self.dir.clone() }))
    }

    /// Returns the parts of the intervals that have ended since the last call.
    pub fn take_ended(&mut self) -> Vec<Part> {
        let dir = &self.dir;
        self.ended.drain(..).map(|interval| Part { interval, dir: dir.clone() }).collect()
    }

    /// Returns [`Error::Cuts`] if the last interval has not ended.
    pub fn check_ended(&self) -> Result<()> {
        match self.running {
            None => Ok(()),
            Some(_) => Err(Error::Cuts { intervals: self.begun, cuts: self.cuts }),
        }
    }
}

impl RunContext {
    /// The warm-up, or the first interval if there is no warm-up.
    pub(crate) fn first_running(&self) -> RunningInterval {
        let warm_up = self.warm_up.map(|interval| RunningInterval { interval, is_kept: false });
        warm_up.unwrap_or(RunningInterval::kept(self.first))
    }

    /// Whether the run may have more than one cut.
    pub(crate) fn has_many_cuts(&self) -> bool {
        self.may_continue || self.warm_up.is_some()
    }
}

/// The output of a tool for one interval.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The interval.
    pub interval: IcountInterval,
    /// The directory with the part's files.
    pub dir: PathBuf,
}

impl Part {
    /// Returns the path of the part's file with the table `kind`, such as `DIR/KIND.EXTENSION`;
    /// `extension` has no dot.
    pub fn file(&self, kind: &str, extension: &str) -> PathBuf {
        part_file(&self.dir, self.interval.index, kind, extension)
    }
}

pub(crate) fn part_file(dir: &Path, index: u32, kind: &str, extension: &str) -> PathBuf {
    dir.join(format!("{index:06}.{kind}.{extension}"))
}

/// The inputs of a merge.
#[derive(Clone, Debug)]
pub struct MergeContext {
    /// The parts in the order of the recording.
    pub parts: Vec<Part>,
    /// The directory for result files, which exists.
    pub out: PathBuf,
    /// The symbols in the guest's RAM; empty unless [`Tool::needs_guest_symbols`].
    ///
    /// [`Tool::needs_guest_symbols`]: crate::Tool::needs_guest_symbols
    pub guest_symbols: Arc<SymbolTable>,
}

/// The summary of a result for the terminal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolSummary {
    /// Lines of text.
    pub lines: Vec<String>,
    /// The result files that were written.
    pub files: Vec<PathBuf>,
}
