//! `icount`: instructions of each interval, by half of the address space.

use super::{Tool, ToolArguments, ToolDescription, ToolRun, check_cuts, plugin_option};
use crate::context::{MergeContext, Part, RunContext, ToolSummary};
use crate::error::{Error, Result, file};
use crate::part_table::PartTable;
use crate::result_file::CsvFile;
use crate::ring_reader::SharedBoard;

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

struct InstructionCount;

#[expect(clippy::unnecessary_wraps, reason = "all tools have the same signature")]
pub(super) fn make(_arguments: &ToolArguments) -> Result<Box<dyn Tool>> {
    Ok(Box::new(InstructionCount))
}

struct InstructionCountRun {
    context: RunContext,
    shared: SharedBoard,
    /// The counters at the last cut.
    seen: [u64; HALVES],
    /// The instructions between each cut and the one before.
    cuts: Vec<[u64; HALVES]>,
}

impl Tool for InstructionCount {
    fn name(&self) -> &str {
        DESCRIPTION.name
    }

    fn begin(&self, run: &RunContext) -> Result<Box<dyn ToolRun>> {
        let shared = SharedBoard::create(0)?;
        let context = run.clone();
        Ok(Box::new(InstructionCountRun { context, shared, seen: [0; HALVES], cuts: Vec::new() }))
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
        plugin_option(&self.context.plugin, &[("tool", "icount"), ("board", &self.shared.path())])
    }

    fn cut(&mut self) -> Result<()> {
        self.shared.check()?;
        let now: [u64; HALVES] = std::array::from_fn(|half| self.shared.board.counted(half));
        self.cuts.push(std::array::from_fn(|half| now[half].wrapping_sub(self.seen[half])));
        self.seen = now;
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<Vec<Part>> {
        check_cuts(&self.context, self.cuts.len())?;
        let warm_ups = usize::from(self.context.warm_up.is_some());
        let dir = &self.context.dir;
        let parts =
            self.context.intervals.iter().zip(&self.cuts[warm_ups..]).map(|(&interval, counts)| {
                let part = Part { interval, dir: dir.clone() };
                let path = part.file(KIND, "part");
                keyframe_plugins::write_part(&path, KIND, HALVES, counts)
                    .map_err(file("writing", &path))?;
                Ok(part)
            });
        parts.collect()
    }
}
