//! `icount`: instructions of each interval, by half of the address space.
//!
//! It counts how often instructions began: one that an exception interrupts begins again later. So
//! an interval can have a few more than its length.

use super::{Tool, ToolArguments, ToolDescription, ToolRun, plugin_option};
use crate::context::{IcountInterval, MergeContext, Part, RunContext, RunIntervals, ToolSummary};
use crate::error::{Error, Result, file};
use crate::part_table::PartTable;
use crate::result_file::CsvFile;
use crate::ring_reader::SharedBoard;
use std::path::PathBuf;

pub(super) const DESCRIPTION: ToolDescription = ToolDescription {
    name: "icount",
    about: "Instructions of each interval, of user programs and of the kernel",
    arguments: &[],
    results: &[(
        "icount.csv",
        "interval, first instruction, instructions, those of user programs and of the kernel",
    )],
};

const KIND: &str = "icount";

/// The halves of the address space, user and kernel, in the order of the board's counters.
const HALVES: usize = 2;

pub(super) struct InstructionCount;

#[expect(clippy::unnecessary_wraps, reason = "all tools have the same signature")]
pub(super) fn make(_arguments: &ToolArguments) -> Result<Box<dyn Tool>> {
    Ok(Box::new(InstructionCount))
}

struct InstructionCountRun {
    plugin: PathBuf,
    intervals: RunIntervals,
    shared: SharedBoard,
    /// The counters at the last cut.
    seen: [u64; HALVES],
}

impl Tool for InstructionCount {
    fn name(&self) -> &str {
        DESCRIPTION.name
    }

    fn begin(&self, run: &RunContext) -> Result<Box<dyn ToolRun>> {
        let shared = SharedBoard::create(0)?;
        let (plugin, intervals) = (run.plugin.clone(), RunIntervals::new(run));
        Ok(Box::new(InstructionCountRun { plugin, intervals, shared, seen: [0; HALVES] }))
    }

    fn merge(&self, merge: &MergeContext) -> Result<ToolSummary> {
        let header = "interval,start_icount,instructions,user,kernel";
        let mut csv = CsvFile::create(&merge.out, "icount.csv", header)?;
        let mut total = [0_u64; HALVES];
        for part in &merge.parts {
            let path = part.file(KIND, "part");
            let table = PartTable::read(&path, KIND, HALVES)?;
            let row: Option<[u64; HALVES]> =
                table.rows().next().and_then(|row| row.try_into().ok());
            let [user, kernel] = row.ok_or_else(|| Error::Damaged {
                path,
                place: "rows".into(),
                problem: "the table is empty".into(),
            })?;
            let (index, start) = (part.interval.index, part.interval.start.0);
            csv.row((index, start, user.saturating_add(kernel), user, kernel))?;
            total = [total[0].saturating_add(user), total[1].saturating_add(kernel)];
        }
        let [user, kernel] = total;
        let line =
            format!("{} instructions: {user} user, {kernel} kernel", user.saturating_add(kernel));
        Ok(ToolSummary { lines: vec![line], files: vec![csv.finish()?] })
    }
}

impl ToolRun for InstructionCountRun {
    fn option(&self) -> String {
        plugin_option(&self.plugin, &[("tool", "icount"), ("board", &self.shared.path())])
    }

    fn cut(&mut self, next: Option<IcountInterval>) -> Result<()> {
        self.shared.check()?;
        let now: [u64; HALVES] = std::array::from_fn(|half| self.shared.board.counted(half));
        let counts: [u64; HALVES] =
            std::array::from_fn(|half| now[half].wrapping_sub(self.seen[half]));
        self.seen = now;
        if let Some(part) = self.intervals.cut(next)? {
            let path = part.file(KIND, "part");
            keyframe_plugins::write_part(&path, KIND, HALVES, &counts)
                .map_err(file("writing", &path))?;
        }
        Ok(())
    }

    fn completed(&mut self) -> Result<Vec<Part>> {
        Ok(self.intervals.take_ended())
    }

    fn finish(mut self: Box<Self>) -> Result<Vec<Part>> {
        self.intervals.check_ended()?;
        Ok(self.intervals.take_ended())
    }
}
