//! What runs have in common whose plugin sends records through a ring: they end alike, and place an
//! event alike.

use super::{Running, check_cuts, option};
use crate::context::{Interval, Part, RunContext};
use crate::error::Result;
use crate::ring::Reader;

/// Such a run.
pub(super) struct Ringed {
    context: RunContext,
    reader: Reader,
    /// The plugin's.
    arguments: Vec<(&'static str, String)>,
    cuts: usize,
}

impl Ringed {
    pub fn new(run: &RunContext, reader: Reader, arguments: Vec<(&'static str, String)>) -> Self {
        Self { context: run.clone(), reader, arguments, cuts: 0 }
    }
}

impl Running for Ringed {
    fn option(&self) -> String {
        let arguments: Vec<_> =
            self.arguments.iter().map(|(name, value)| (*name, value.as_str())).collect();
        option(&self.context.plugin, &arguments)
    }

    fn cut(&mut self) -> Result<()> {
        self.cuts += 1;
        self.reader.cut()
    }

    fn finish(self: Box<Self>) -> Result<Vec<Part>> {
        self.reader.finish()?;
        check_cuts(&self.context, self.cuts)?;
        Ok(self.context.parts())
    }
}

/// The intervals of a run one after the other, and the recording's own count in the one that runs.
pub(super) struct Counts {
    pending: std::vec::IntoIter<(Interval, bool)>,
    /// To be added to what the plugin has counted.
    base: u64,
    /// The interval's last instruction.
    last: u64,
}

impl Counts {
    /// Those of `run`, the warm-up first.
    pub fn of(run: &RunContext) -> Self {
        let mut all: Vec<_> = run.warm_up.into_iter().map(|interval| (interval, false)).collect();
        all.extend(run.intervals.iter().map(|&interval| (interval, true)));
        Self { pending: all.into_iter(), base: 0, last: 0 }
    }

    /// The next interval, and whether it is kept; the plugin has counted so many instructions that
    /// had begun before it.
    pub fn next_interval(&mut self, begun: u64) -> Option<(Interval, bool)> {
        let (interval, kept) = self.pending.next()?;
        self.base = interval.start.0.wrapping_sub(begun).wrapping_sub(1);
        self.last = interval.end.0.saturating_sub(1).max(interval.start.0);
        Some((interval, kept))
    }

    /// The recording's count of an instruction that is the plugin's `count`-th to begin.
    #[inline]
    pub fn icount(&self, count: u64) -> u64 {
        self.base.wrapping_add(count).min(self.last)
    }
}
