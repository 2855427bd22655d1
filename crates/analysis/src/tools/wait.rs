//! `wait`: a stand-in for a simulator that is slower than QEMU.
//!
//! It exists for measurements of the speed-up only. The nodes of the SimuBoost paper did the same:
//! each replayed its interval and then waited until 31 times the interval's time had passed. The
//! tool counts instructions as `icount` does; the program that runs it waits.

use super::icount::InstructionCount;
use super::{Tool, ToolArguments, ToolDescription, ToolRun};
use crate::context::{MergeContext, RunContext, ToolSummary};
use crate::error::Result;

pub(super) const DESCRIPTION: ToolDescription = ToolDescription {
    name: "wait",
    about: "A stand-in for a slow simulator, for measurements: counts instructions and waits",
    arguments: &[(
        "factor",
        "each interval takes at least so many times its recorded time (1 to 1000, default 31)",
    )],
    results: &[(
        "icount.csv",
        "interval, first instruction, instructions, those of user programs and of the kernel",
    )],
};

const FACTOR_DEFAULT: u64 = 31;
const FACTOR_MAX: u64 = 1000;

struct Wait {
    factor: u64,
}

pub(super) fn make(arguments: &ToolArguments) -> Result<Box<dyn Tool>> {
    let factor = arguments.number("factor", 1, FACTOR_MAX)?.unwrap_or(FACTOR_DEFAULT);
    Ok(Box::new(Wait { factor }))
}

impl Tool for Wait {
    fn name(&self) -> &str {
        DESCRIPTION.name
    }

    fn waits(&self) -> Option<u64> {
        Some(self.factor)
    }

    fn begin(&self, run: &RunContext) -> Result<Box<dyn ToolRun>> {
        InstructionCount.begin(run)
    }

    fn merge(&self, merge: &MergeContext) -> Result<ToolSummary> {
        let mut summary = InstructionCount.merge(merge)?;
        let said = format!(
            "the times are of no simulator: each interval waited until {} times its recorded time \
             had passed",
            self.factor
        );
        summary.lines.insert(0, said);
        Ok(summary)
    }
}
