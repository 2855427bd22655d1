//! Runs whose plugin sends records through the ring, and the mapping of the plugin's instruction
//! count to the recording's.

use super::{ToolRun, plugin_option};
use crate::context::{IcountInterval, Part, RunContext, RunIntervals};
use crate::error::Result;
use crate::ring_reader::RingReader;
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
/// The plugin counts the instructions begun since QEMU started. An instruction that a page fault
/// restarts counts twice there, and once in QEMU's own count. The count therefore starts anew at
/// each interval, and is limited to the interval's last instruction.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct IcountMapper {
    /// The difference between the recording's count and the plugin's, wrapping.
    base: u64,
    /// The interval's last instruction.
    last: u64,
}

impl IcountMapper {
    /// Moves to `interval`. `begun` is the number of instructions that the plugin has counted
    /// before it.
    pub fn begin(&mut self, interval: IcountInterval, begun: u64) {
        let IcountInterval { start, end, .. } = interval;
        self.base = start.0.wrapping_sub(begun).wrapping_sub(1);
        self.last = end.0.saturating_sub(1).max(start.0);
    }

    /// Converts an instruction count of the plugin into one of the recording. `count` includes the
    /// instruction itself. The result is at most the last instruction of the present interval.
    #[inline]
    pub fn icount(&self, count: u64) -> u64 {
        self.base.wrapping_add(count).min(self.last)
    }
}
