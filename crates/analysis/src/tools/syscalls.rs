//! `syscalls`: the system calls of a Linux guest on x86-64 or aarch64, and their callers.

use super::event_run;
use super::syscall_names::syscall_name;
use super::{Tool, ToolArguments, ToolDescription, ToolRun};
use crate::btf::TaskLayout;
use crate::context::{MergeContext, RunContext, ToolSummary};
use crate::error::Result;
use crate::part_table::PartTable;
use crate::result_file::{CsvFile, Hex};
use crate::symbols;
use keyframe_plugins::{NO_DIRECT_MAP, NO_TASK, NOT_ASKED};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::Path;

pub(super) const DESCRIPTION: ToolDescription = ToolDescription {
    name: "syscalls",
    about: "System calls of a Linux guest on x86-64 or aarch64: number, name, arguments, and with \
            the kernel's types their callers",
    arguments: &[(
        "symbols",
        "file with the kernel's types (BTF), which tell the callers: vmlinux or a copy of \
         /sys/kernel/btf/vmlinux",
    )],
    results: &[(
        "syscalls.csv",
        "instruction, pc, number, name, six arguments, process, thread, its name",
    )],
};

const KIND: &str = "syscalls";
/// The part of an event's number that is the number itself.
const NUMBER_MASK: u64 = 0xffff_ffff;
/// Words of an event.
const WORDS: usize = 12;
/// Lines of the summary for each of its lists.
const SUMMARY_LINES: usize = 10;
/// The largest id of a process or thread in Linux (PID_MAX_LIMIT).
const PID_MAX: u64 = 1 << 22;

struct Syscalls {
    /// Where the kernel keeps the running task, or why it is not known.
    layout: Result<TaskLayout, String>,
}

pub(super) fn make(arguments: &ToolArguments) -> Result<Box<dyn Tool>> {
    let layout = match arguments.text("symbols") {
        None => Err("no symbols are given (--tool-arg symbols=vmlinux)".into()),
        Some(path) => {
            let bytes = symbols::read_file(Path::new(path))?;
            TaskLayout::parse(&bytes).map_err(|problem| format!("{path}: {problem}"))
        }
    };
    Ok(Box::new(Syscalls { layout }))
}

/// The thread that made a system call.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Caller {
    process: u64,
    thread: u64,
    name: String,
}

impl Caller {
    /// Decodes the caller of an event: `ids` has the process in its upper half and the thread in
    /// its lower one, or is a marker of the plugin; `name` is the task's `comm`. An error says why
    /// the caller is not known.
    fn decode(ids: u64, name: [u64; 2]) -> Result<Self, &'static str> {
        match ids {
            NOT_ASKED => return Err("the kernel's types are not known"),
            NO_DIRECT_MAP => return Err("the kernel's variables are not in its direct map"),
            NO_TASK => {
                return Err(
                    "the kernel's task pointer is invalid; the symbols may be another kernel's",
                );
            }
            _ => {}
        }
        let (process, thread) = (ids >> 32, ids & 0xffff_ffff);
        let bytes: Vec<u8> = name.into_iter().flat_map(u64::to_le_bytes).collect();
        let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
        let is_possible = (1..=PID_MAX).contains(&process) && (1..=PID_MAX).contains(&thread);
        // A task's name always ends within its 16 bytes.
        if !is_possible || text.len() == bytes.len() {
            return Err("the kernel's task is not valid; the symbols may be another kernel's");
        }
        // The guest chooses the name, and the summary shows it on a terminal.
        let name = String::from_utf8_lossy(text).replace(char::is_control, " ");
        Ok(Self { process, thread, name })
    }
}

/// The sums of all parts.
#[derive(Default)]
struct SyscallSums {
    /// Calls by number.
    calls: BTreeMap<u64, u64>,
    /// Calls by caller.
    callers: BTreeMap<Caller, u64>,
    /// Calls without a known caller, by reason.
    unknown: BTreeMap<&'static str, u64>,
}

impl Tool for Syscalls {
    fn name(&self) -> &str {
        DESCRIPTION.name
    }

    fn reads_ram(&self) -> bool {
        true
    }

    fn processors(&self) -> Option<&'static [&'static str]> {
        Some(&["x86_64", "aarch64"])
    }

    fn begin(&self, run: &RunContext) -> Result<Box<dyn ToolRun>> {
        let task = match self.layout {
            Ok(TaskLayout { current, pid, tgid, comm }) => {
                format!("{current:#x}:{pid}:{tgid}:{comm}")
            }
            Err(_) => "none".into(),
        };
        event_run::begin(run, KIND, WORDS, vec![("task", task)])
    }

    fn merge(&self, merge: &MergeContext) -> Result<ToolSummary> {
        let header = "icount,pc,number,name,arg0,arg1,arg2,arg3,arg4,arg5,pid,tid,comm";
        let mut csv = CsvFile::create(&merge.out, "syscalls.csv", header)?;
        let mut sums = SyscallSums::default();
        for part in &merge.parts {
            for row in PartTable::read(&part.file(KIND, "part"), KIND, WORDS)?.rows() {
                let &[icount, pc, number, ref arguments @ .., ids, name0, name1] = row else {
                    continue;
                };
                *sums.calls.entry(number).or_default() += 1;
                let caller = Caller::decode(ids, [name0, name1]);
                let of_caller = caller.as_ref().ok().map(|one| (one.process, one.thread));
                let (process, thread) = of_caller.unzip();
                let comm = caller.as_ref().map_or("", |one| one.name.as_str());
                let arguments: Vec<Hex> = arguments.iter().copied().map(Hex).collect();
                let name = syscall_name(number).unwrap_or_default();
                csv.row((
                    icount,
                    Hex(pc),
                    number & NUMBER_MASK,
                    name,
                    arguments,
                    process,
                    thread,
                    comm,
                ))?;
                match caller {
                    Ok(caller) => *sums.callers.entry(caller).or_default() += 1,
                    Err(why) => *sums.unknown.entry(why).or_default() += 1,
                }
            }
        }
        let lines = self.summary_lines(sums);
        Ok(ToolSummary { lines, files: vec![csv.finish()?] })
    }
}

impl Syscalls {
    fn summary_lines(&self, sums: SyscallSums) -> Vec<String> {
        let mut most: Vec<_> = sums.calls.into_iter().collect();
        most.sort_unstable_by_key(|&(number, times)| (Reverse(times), number));
        let total: u64 = most.iter().map(|(_, times)| times).sum();
        let mut lines = vec![format!("{total} system calls")];
        lines.extend(most.iter().take(SUMMARY_LINES).map(|(number, times)| {
            format!("{times} {}", syscall_name(*number).unwrap_or("unknown"))
        }));
        let mut callers: Vec<_> = sums.callers.into_iter().collect();
        callers.sort_by_key(|(_, times)| Reverse(*times));
        lines.extend(callers.iter().take(SUMMARY_LINES).map(|(by, times)| {
            format!("{times} by {} (thread {} of {})", by.name, by.thread, by.process)
        }));
        if let Err(why) = &self.layout {
            lines.push(format!("callers are not known: {why}"));
        } else {
            let unknown = sums.unknown.iter();
            lines
                .extend(unknown.map(|(why, times)| format!("{times} by an unknown caller: {why}")));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_possible_callers_are_accepted() {
        let words = |text: &[u8; 16]| {
            let [one, other] =
                [0, 8].map(|at| u64::from_le_bytes(text[at..at + 8].try_into().unwrap()));
            [one, other]
        };
        let caller = Caller::decode(7 << 32 | 9, words(b"some,na\tme\0rest.")).unwrap();
        assert_eq!(caller, Caller { process: 7, thread: 9, name: "some,na me".into() });
        for (ids, name) in [
            (NOT_ASKED, b"name\0rest......."),
            (NO_DIRECT_MAP, b"name\0rest......."),
            (NO_TASK, b"name\0rest......."),
            (7 << 32, b"name\0rest......."),
            (7 << 32 | 0x9000_0000, b"name\0rest......."),
            (7 << 32 | 9, b"a name of sixteen"[..16].try_into().unwrap()),
        ] {
            let name = words(name[..16].try_into().unwrap());
            assert!(Caller::decode(ids, name).is_err(), "{ids:#x}");
        }
    }
}
