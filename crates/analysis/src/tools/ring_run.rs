//! Runs whose plugin sends records through the ring, and the mapping of the plugin's instruction
//! count to the recording's.

use super::{ToolRun, check_cuts, plugin_option};
use crate::context::{IcountInterval, Part, RunContext};
use crate::error::Result;
use crate::ring_reader::RingReader;

/// A run whose plugin sends records through the ring. A [`RingReader`] takes them.
pub(super) struct RingRun {
    context: RunContext,
    reader: RingReader,
    /// The plugin's arguments.
    arguments: Vec<(&'static str, String)>,
    cuts: usize,
}

impl RingRun {
    /// Creates the run. `reader` reads the ring, and `arguments` are the names and values of the
    /// plugin's options.
    pub fn new(
        run: &RunContext,
        reader: RingReader,
        arguments: Vec<(&'static str, String)>,
    ) -> Self {
        Self { context: run.clone(), reader, arguments, cuts: 0 }
    }
}

impl ToolRun for RingRun {
    fn option(&self) -> String {
        let arguments: Vec<_> =
            self.arguments.iter().map(|(name, value)| (*name, value.as_str())).collect();
        plugin_option(&self.context.plugin, &arguments)
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

/// An interval of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunningInterval {
    pub interval: IcountInterval,
    /// False for the warm-up, whose part is dropped.
    pub is_kept: bool,
}

/// Goes through the intervals of a run and maps the plugin's instruction count to the recording's.
///
/// The plugin counts the instructions begun since QEMU started. An instruction that a page fault
/// restarts counts twice there, and once in QEMU's own count. The count therefore starts anew at
/// each interval, and is limited to the interval's last instruction.
pub(super) struct IcountMapper {
    pending: std::vec::IntoIter<RunningInterval>,
    /// The difference between the recording's count and the plugin's, wrapping.
    base: u64,
    /// The interval's last instruction.
    last: u64,
}

impl IcountMapper {
    /// Starts before the first interval of `run`; the warm-up, if any, is the first one.
    pub fn new(run: &RunContext) -> Self {
        let warm_up =
            run.warm_up.into_iter().map(|interval| RunningInterval { interval, is_kept: false });
        let kept =
            run.intervals.iter().map(|&interval| RunningInterval { interval, is_kept: true });
        let all: Vec<_> = warm_up.chain(kept).collect();
        Self { pending: all.into_iter(), base: 0, last: 0 }
    }

    /// Moves to the next interval and returns it; `None` after the last one. `begun` is the number
    /// of instructions that the plugin has counted before the interval.
    pub fn next_interval(&mut self, begun: u64) -> Option<RunningInterval> {
        let running = self.pending.next()?;
        let IcountInterval { start, end, .. } = running.interval;
        self.base = start.0.wrapping_sub(begun).wrapping_sub(1);
        self.last = end.0.saturating_sub(1).max(start.0);
        Some(running)
    }

    /// Converts an instruction count of the plugin into one of the recording. `count` includes the
    /// instruction itself. The result is at most the last instruction of the present interval.
    #[inline]
    pub fn icount(&self, count: u64) -> u64 {
        self.base.wrapping_add(count).min(self.last)
    }
}
