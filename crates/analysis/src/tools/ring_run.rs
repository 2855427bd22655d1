//! Runs whose plugin sends records through the ring, and the mapping of the plugin's instruction
//! count to the recording's.

use super::{ToolRun, plugin_option};
use crate::context::{IcountInterval, Part, RunContext, RunIntervals};
use crate::error::Result;
use crate::ring_reader::RingReader;
use keyframe_plugins::board::Board;
use std::path::PathBuf;

/// A run whose plugin sends records through the ring. A [`RingReader`] takes them.
pub(super) struct RingRun {
    plugin: PathBuf,
    intervals: RunIntervals,
    reader: RingReader,
    /// The plugin's arguments.
    arguments: Vec<(&'static str, String)>,
}

impl RingRun {
    /// Creates the run. `reader` reads the ring, and `arguments` are the names and values of the
    /// plugin's options.
    pub fn new(
        run: &RunContext,
        reader: RingReader,
        arguments: Vec<(&'static str, String)>,
    ) -> Self {
        Self { plugin: run.plugin.clone(), intervals: RunIntervals::new(run), reader, arguments }
    }
}

impl ToolRun for RingRun {
    fn option(&self) -> String {
        let arguments: Vec<_> =
            self.arguments.iter().map(|(name, value)| (*name, value.as_str())).collect();
        plugin_option(&self.plugin, &arguments)
    }

    fn cut(&mut self, next: Option<IcountInterval>) -> Result<()> {
        self.reader.cut(next)?;
        self.intervals.cut(next).map(drop)
    }

    /// The reader has written a part when its cut returns.
    fn completed(&mut self) -> Result<Vec<Part>> {
        Ok(self.intervals.take_ended())
    }

    fn finish(mut self: Box<Self>) -> Result<Vec<Part>> {
        self.reader.finish()?;
        self.intervals.check_ended()?;
        Ok(self.intervals.take_ended())
    }
}

/// Maps the plugin's instruction count to the recording's.
///
/// The reader starts the plugin's count at the recording's number of the first instruction. From
/// then on the plugin takes QEMU's own count, if QEMU tells it: both are the same then. Otherwise an
/// instruction that an exception interrupts counts twice in the plugin and once in the recording.
/// The count then starts anew at each interval, and is limited to the interval's last instruction.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct IcountMapper {
    /// The difference between the recording's count and the plugin's, wrapping.
    base: u64,
    /// The interval's last instruction.
    last: u64,
}

impl IcountMapper {
    /// Moves to `interval`, before which the VM is stopped, and returns the plugin's number of its
    /// first instruction.
    pub fn begin(&mut self, interval: IcountInterval, board: &Board) -> u64 {
        let IcountInterval { start, end, .. } = interval;
        // If an exception interrupted the instruction before the stop, the board corrects its count
        // at the next instruction. So it does not say where the interval begins.
        let first = if board.is_exact() { start.0 } else { board.counted(0) };
        self.base = start.0.wrapping_sub(first).wrapping_sub(1);
        self.last = end.0.saturating_sub(1).max(start.0);
        first
    }

    /// Converts an instruction count of the plugin into one of the recording. `count` includes the
    /// instruction itself. The result is at most the last instruction of the present interval.
    #[inline]
    pub fn icount(&self, count: u64) -> u64 {
        self.base.wrapping_add(count).min(self.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::Icount;
    use crate::ring_reader::SharedBoard;

    fn interval(index: u32, start: u64, end: u64) -> IcountInterval {
        IcountInterval { index, start: Icount(start), end: Icount(end) }
    }

    #[test]
    fn exact_counts_are_the_recordings() {
        let board = SharedBoard::create(0).unwrap().board;
        board.start_count(1000);
        let mut icounts = IcountMapper::default();
        assert_eq!(icounts.begin(interval(0, 1000, 2000), &board), 1000);
        assert_eq!((icounts.icount(1001), icounts.icount(2000)), (1000, 1999));
        board.set_exact();
        board.start_count(2001);
        assert_eq!(icounts.begin(interval(1, 2000, 3000), &board), 2000, "one was interrupted");
        assert_eq!(icounts.icount(2001), 2000);
    }

    #[test]
    fn other_counts_start_anew_at_each_interval() {
        let board = SharedBoard::create(0).unwrap().board;
        board.start_count(1000);
        let mut icounts = IcountMapper::default();
        icounts.begin(interval(0, 1000, 2000), &board);
        assert_eq!(icounts.icount(2007), 1999, "not beyond the interval");
        board.start_count(2007);
        assert_eq!(icounts.begin(interval(1, 2000, 3000), &board), 2007);
        assert_eq!(icounts.icount(2008), 2000);
    }
}
