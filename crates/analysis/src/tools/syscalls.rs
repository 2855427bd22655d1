//! `syscalls`: system calls of an x86-64 Linux guest, and who called.

use super::events;
use super::syscall_names::name;
use super::{Arguments, Description, Running, Tool};
use crate::btf::Tasks;
use crate::context::{MergeContext, RunContext, Summary};
use crate::csv::{Csv, cell};
use crate::error::Result;
use crate::part::Rows;
use crate::symbols;
use keyframe_plugins::{NO_DIRECT_MAP, NO_TASK, NOT_ASKED};
use std::collections::BTreeMap;
use std::path::Path;

pub(super) const DESCRIPTION: Description = Description {
    name: "syscalls",
    about: "System calls of an x86-64 Linux guest: number, name, arguments, and with the kernel's types who called",
    arguments: &[(
        "symbols",
        "file that has the kernel's types (BTF): vmlinux or a copy of /sys/kernel/btf/vmlinux; else nobody knows who called",
    )],
    results: &[(
        "syscalls.csv",
        "instruction, pc, number, name, six arguments, process, thread, its name",
    )],
};

const KIND: &str = "syscalls";
/// Of an event.
const WORDS: usize = 12;
/// Lines of a summary for each of what it counts.
const SHOWN: usize = 10;
/// Most processes and threads that Linux has (PID_MAX_LIMIT).
const PID_MAX: u64 = 1 << 22;

struct Syscalls {
    tasks: Result<Tasks, String>,
}

pub(super) fn make(arguments: &Arguments) -> Result<Box<dyn Tool>> {
    let tasks = match arguments.text("symbols") {
        None => Err("no symbols are given (--tool-arg symbols=vmlinux)".into()),
        Some(path) => {
            let bytes = symbols::contents(Path::new(path))?;
            Tasks::parse(&bytes).map_err(|problem| format!("{path}: {problem}"))
        }
    };
    Ok(Box::new(Syscalls { tasks }))
}

/// Who called.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Caller {
    process: u64,
    thread: u64,
    name: String,
}

impl Caller {
    /// Of an event's last record; or why it is not known.
    fn of(who: u64, names: [u64; 2]) -> Result<Self, &'static str> {
        match who {
            NOT_ASKED => return Err("the kernel's types are not known"),
            NO_DIRECT_MAP => return Err("the kernel's variables are not in its direct map"),
            NO_TASK => {
                return Err(
                    "what should be its task is no memory; the symbols may be another kernel's",
                );
            }
            _ => {}
        }
        let odd = "what should be its task is none; the symbols may be another kernel's";
        let (process, thread) = (who >> 32, who & 0xffff_ffff);
        let bytes: Vec<u8> = names.into_iter().flat_map(u64::to_le_bytes).collect();
        let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
        let is_possible = (1..=PID_MAX).contains(&process) && (1..=PID_MAX).contains(&thread);
        // A name always ends within its 16 bytes.
        if !is_possible || text.len() == bytes.len() {
            return Err(odd);
        }
        Ok(Self { process, thread, name: cell(&String::from_utf8_lossy(text)) })
    }
}

impl Tool for Syscalls {
    fn name(&self) -> &str {
        DESCRIPTION.name
    }

    fn reads_ram(&self) -> bool {
        true
    }

    fn begin(&self, run: &RunContext) -> Result<Box<dyn Running>> {
        let task = match self.tasks {
            Ok(Tasks { current, pid, tgid, comm }) => format!("{current:#x}:{pid}:{tgid}:{comm}"),
            Err(_) => "none".into(),
        };
        events::begin(run, KIND, WORDS, vec![("task", task)])
    }

    fn merge(&self, merge: &MergeContext) -> Result<Summary> {
        let header = "icount,pc,number,name,arg0,arg1,arg2,arg3,arg4,arg5,pid,tid,comm";
        let mut csv = Csv::create(&merge.out, "syscalls.csv", header)?;
        let mut calls: BTreeMap<u64, u64> = BTreeMap::new();
        let mut callers: BTreeMap<Caller, u64> = BTreeMap::new();
        let mut unknown: BTreeMap<&str, u64> = BTreeMap::new();
        for part in &merge.parts {
            for row in Rows::read(&part.file(KIND, "part"), KIND, WORDS)?.iter() {
                let &[icount, pc, number, ref arguments @ .., who, name0, name1] = row else {
                    continue;
                };
                *calls.entry(number).or_default() += 1;
                let called = name(number).unwrap_or_default();
                let arguments: Vec<_> =
                    arguments.iter().map(|argument| format!("{argument:#x}")).collect();
                let by = match Caller::of(who, [name0, name1]) {
                    Ok(caller) => {
                        let text = format!("{},{},{}", caller.process, caller.thread, caller.name);
                        *callers.entry(caller).or_default() += 1;
                        text
                    }
                    Err(why) => {
                        *unknown.entry(why).or_default() += 1;
                        ",,".into()
                    }
                };
                csv.line(format_args!(
                    "{icount},{pc:#x},{number},{called},{},{by}",
                    arguments.join(",")
                ))?;
            }
        }
        let mut most: Vec<_> = calls.into_iter().collect();
        most.sort_unstable_by_key(|&(number, times)| (std::cmp::Reverse(times), number));
        let all: u64 = most.iter().map(|(_, times)| times).sum();
        let mut lines = vec![format!("{all} system calls")];
        let shown = most.iter().take(SHOWN);
        lines.extend(
            shown.map(|(number, times)| format!("{times} {}", name(*number).unwrap_or("unknown"))),
        );
        self.tell_callers(callers, &unknown, &mut lines);
        Ok(Summary { lines, files: vec![csv.finish()?] })
    }
}

impl Syscalls {
    fn tell_callers(
        &self,
        callers: BTreeMap<Caller, u64>,
        unknown: &BTreeMap<&str, u64>,
        lines: &mut Vec<String>,
    ) {
        let mut most: Vec<_> = callers.into_iter().collect();
        most.sort_by_key(|(_, times)| std::cmp::Reverse(*times));
        let shown = most.iter().take(SHOWN);
        lines.extend(shown.map(|(by, times)| {
            format!("{times} by {} (thread {} of {})", by.name, by.thread, by.process)
        }));
        match &self.tasks {
            Err(why) => lines.push(format!("who called is not known: {why}")),
            Ok(_) => {
                lines.extend(
                    unknown
                        .iter()
                        .map(|(why, times)| format!("{times} by nobody knows whom: {why}")),
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_is_believed_where_it_can_be_one() {
        let words = |text: &[u8; 16]| {
            let [one, other] =
                [0, 8].map(|at| u64::from_le_bytes(text[at..at + 8].try_into().unwrap()));
            [one, other]
        };
        let caller = Caller::of(7 << 32 | 9, words(b"some,name\0rest..")).unwrap();
        assert_eq!(caller, Caller { process: 7, thread: 9, name: "some;name".into() });
        for (who, name) in [
            (NOT_ASKED, b"name\0rest......."),
            (NO_DIRECT_MAP, b"name\0rest......."),
            (NO_TASK, b"name\0rest......."),
            (7 << 32, b"name\0rest......."),
            (7 << 32 | 0x9000_0000, b"name\0rest......."),
            (7 << 32 | 9, b"a name of sixteen"[..16].try_into().unwrap()),
        ] {
            assert!(Caller::of(who, words(name[..16].try_into().unwrap())).is_err(), "{who:#x}");
        }
    }
}
