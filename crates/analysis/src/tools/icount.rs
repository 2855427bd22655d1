//! `icount`: instructions of each interval, by half of the address space.

use super::{Arguments, Description, Running, Tool, check_cuts, option};
use crate::context::{MergeContext, Part, RunContext, Summary};
use crate::csv::Csv;
use crate::error::{Error, Result, file};
use crate::part::Rows;
use crate::ring::SharedBoard;

pub(super) const DESCRIPTION: Description = Description {
    name: "icount",
    about: "Instructions of each interval, of user programs and of the kernel",
    arguments: &[],
    results: &[(
        "icount.csv",
        "interval, first instruction, instructions, those of user programs and of the kernel",
    )],
};

const KIND: &str = "icount";

/// In the order of the board's counters.
const HALVES: usize = 2;

struct Icount;

#[expect(clippy::unnecessary_wraps, reason = "one shape for all tools")]
pub(super) fn make(_arguments: &Arguments) -> Result<Box<dyn Tool>> {
    Ok(Box::new(Icount))
}

struct Run {
    context: RunContext,
    shared: SharedBoard,
    seen: [u64; HALVES],
    /// What was counted until each cut since the one before.
    cuts: Vec<[u64; HALVES]>,
}

impl Tool for Icount {
    fn name(&self) -> &str {
        DESCRIPTION.name
    }

    fn begin(&self, run: &RunContext) -> Result<Box<dyn Running>> {
        let shared = SharedBoard::create(0)?;
        Ok(Box::new(Run { context: run.clone(), shared, seen: [0; HALVES], cuts: Vec::new() }))
    }

    fn merge(&self, merge: &MergeContext) -> Result<Summary> {
        let header = "interval,start_icount,instructions,user,kernel";
        let mut csv = Csv::create(&merge.out, "icount.csv", header)?;
        let mut total = [0_u64; HALVES];
        for part in &merge.parts {
            let path = part.file(KIND, "part");
            let rows = Rows::read(&path, KIND, HALVES)?;
            let [user, kernel] =
                rows.iter().next().and_then(|row| row.try_into().ok()).ok_or_else(|| {
                    Error::Damaged {
                        path: path.clone(),
                        place: "rows".into(),
                        problem: "there is none".into(),
                    }
                })?;
            let (index, start, sum) =
                (part.interval.index, part.interval.start.0, user.saturating_add(kernel));
            csv.line(format_args!("{index},{start},{sum},{user},{kernel}"))?;
            total = [total[0].saturating_add(user), total[1].saturating_add(kernel)];
        }
        let [user, kernel] = total;
        let line =
            format!("{} instructions: {user} user, {kernel} kernel", user.saturating_add(kernel));
        Ok(Summary { lines: vec![line], files: vec![csv.finish()?] })
    }
}

impl Running for Run {
    fn option(&self) -> String {
        option(&self.context.plugin, &[("tool", "icount"), ("board", &self.shared.path())])
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
