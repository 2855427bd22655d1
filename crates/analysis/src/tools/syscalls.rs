//! `syscalls`: system calls of an x86-64 Linux guest.

use super::events;
use super::syscall_names::name;
use super::{Arguments, Description, Running, Tool};
use crate::context::{MergeContext, RunContext, Summary};
use crate::csv::Csv;
use crate::error::Result;
use crate::part::Rows;
use std::collections::BTreeMap;

pub(super) const DESCRIPTION: Description = Description {
    name: "syscalls",
    about: "System calls of an x86-64 Linux guest: number, name, arguments",
    arguments: &[],
    results: &[("syscalls.csv", "instruction, pc, number, name, six arguments")],
};

const KIND: &str = "syscalls";
const RECORDS: usize = 3;

struct Syscalls;

#[expect(clippy::unnecessary_wraps, reason = "one shape for all tools")]
pub(super) fn make(_arguments: &Arguments) -> Result<Box<dyn Tool>> {
    Ok(Box::new(Syscalls))
}

impl Tool for Syscalls {
    fn name(&self) -> &str {
        DESCRIPTION.name
    }

    fn reads_ram(&self) -> bool {
        true
    }

    fn begin(&self, run: &RunContext) -> Result<Box<dyn Running>> {
        events::begin(run, KIND, RECORDS, Vec::new())
    }

    fn merge(&self, merge: &MergeContext) -> Result<Summary> {
        let header = "icount,pc,number,name,arg0,arg1,arg2,arg3,arg4,arg5";
        let mut csv = Csv::create(&merge.out, "syscalls.csv", header)?;
        let mut calls: BTreeMap<u64, u64> = BTreeMap::new();
        for part in &merge.parts {
            for row in Rows::read(&part.file(KIND, "part"), KIND, 3 * RECORDS)?.iter() {
                let &[icount, pc, number, ref arguments @ ..] = row else { continue };
                *calls.entry(number).or_default() += 1;
                let called = name(number).unwrap_or_default();
                let arguments: Vec<_> = arguments.iter().map(|argument| format!("{argument:#x}")).collect();
                csv.line(format_args!("{icount},{pc:#x},{number},{called},{}", arguments.join(",")))?;
            }
        }
        let mut most: Vec<_> = calls.into_iter().collect();
        most.sort_unstable_by_key(|&(number, times)| (std::cmp::Reverse(times), number));
        let all: u64 = most.iter().map(|(_, times)| times).sum();
        let mut lines = vec![format!("{all} system calls")];
        let shown = most.iter().take(10);
        lines.extend(shown.map(|(number, times)| format!("{times} {}", name(*number).unwrap_or("unknown"))));
        Ok(Summary { lines, files: vec![csv.finish()?] })
    }
}
