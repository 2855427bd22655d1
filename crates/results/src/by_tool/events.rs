//! `syscalls` and `watch`: single events, counted by what they are and who caused them.

use crate::csv_rows::{CsvRows, address, number, printable};
use crate::error::Result;
use crate::intervals::{band, rest, stack};
use crate::{AnalysisResults, Cell, ResultTable};
use keyframe_plot::Timeline;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The number of names that a picture tells apart.
const NAMES_DRAWN: usize = 12;
/// The most different names that are counted.
const NAMES_MAX: usize = 1 << 20;

/// The caller of a system call if the analysis did not find it.
const UNKNOWN_CALLER: &str = "(unknown caller)";

/// Describes the results of a tool that lists single events, such as system calls.
pub struct Events {
    file: &'static str,
    /// What the events are, in the plural.
    what: &'static str,
    /// The tables: title, name of the first column, columns of the file that make the name.
    counted: &'static [(&'static str, &'static str, NameParts)],
    picture: &'static str,
}

/// How the name of an event is made of three columns of its row.
#[derive(Clone, Copy)]
struct NameParts {
    columns: [&'static str; 3],
    make: fn([&str; 3]) -> Result<String, String>,
}

pub const SYSCALLS: Events = Events {
    file: "syscalls.csv",
    what: "calls",
    counted: &[
        (
            "Most frequent system calls",
            "call",
            NameParts { columns: ["name", "number", "number"], make: call_name },
        ),
        (
            "Most frequent callers",
            "thread",
            NameParts { columns: ["comm", "pid", "tid"], make: caller_name },
        ),
    ],
    picture: "System calls by interval",
};

pub const WATCH: Events = Events {
    file: "watch.csv",
    what: "writes",
    counted: &[(
        "Instructions that write most",
        "instruction",
        NameParts { columns: ["symbol", "pc", "pc"], make: instruction_name },
    )],
    picture: "Writes by interval",
};

fn call_name([name, call, _]: [&str; 3]) -> Result<String, String> {
    let call = number(call)?;
    Ok(if name.is_empty() { format!("call {call}") } else { name.to_owned() })
}

fn caller_name([name, process, thread]: [&str; 3]) -> Result<String, String> {
    if process.is_empty() {
        return Ok(UNKNOWN_CALLER.to_owned());
    }
    let (process, thread) = (number(process)?, number(thread)?);
    Ok(format!("{name} (thread {thread} of {process})"))
}

fn instruction_name([symbol, pc, _]: [&str; 3]) -> Result<String, String> {
    let pc = address(pc)?;
    Ok(if symbol.is_empty() { format!("{pc:#x}") } else { symbol.to_owned() })
}

impl Events {
    /// Returns tables that count the events by name, the most frequent first, with `top` rows at
    /// most each. Leaves out a table whose callers are all unknown. Error: the result file is
    /// missing, cannot be read or is damaged.
    pub fn tables(&self, results: &AnalysisResults, top: usize) -> Result<Vec<ResultTable>> {
        let mut tables = Vec::new();
        for (title, column, parts) in self.counted {
            let counts = self.counts(results, *parts)?;
            if counts.iter().all(|(name, _)| name == UNKNOWN_CALLER) && !counts.is_empty() {
                continue;
            }
            let all = counts.iter().fold(0_u64, |sum, (_, count)| sum.saturating_add(*count));
            let mut table = ResultTable::new(*title, &[self.what, "percent", column]);
            for (name, count) in counts {
                let share = Cell::share(count, Some(all));
                table.push(top, vec![Cell::Count(count), share, Cell::Text(name)]);
            }
            tables.push(table);
        }
        Ok(tables)
    }

    /// The number of events of each name, the most frequent first.
    fn counts(&self, results: &AnalysisResults, parts: NameParts) -> Result<Vec<(String, u64)>> {
        let mut counts: BTreeMap<String, u64> = BTreeMap::new();
        CsvRows::open(&results.file(self.file))?.each(parts.columns, |cells| {
            let name = printable(&(parts.make)(cells)?);
            if let Some(count) = counts.get_mut(&name) {
                *count = count.saturating_add(1);
            } else if counts.len() == NAMES_MAX {
                return Err(format!("more than {NAMES_MAX} different names"));
            } else {
                counts.insert(name, 1);
            }
            Ok(())
        })?;
        let mut counts: Vec<_> = counts.into_iter().collect();
        counts.sort_by_key(|(_, count)| Reverse(*count));
        Ok(counts)
    }

    /// Returns the picture of the events of each interval: those of the most frequent names, and
    /// all others. Error: the result file is missing, cannot be read or is damaged.
    pub fn timeline(&self, results: &AnalysisResults) -> Result<Timeline> {
        let Some(&(_, _, parts)) = self.counted.first() else {
            return Ok(results.timeline_of(self.picture, Vec::new()));
        };
        let mut drawn = self.counts(results, parts)?;
        let has_others = drawn.len() > NAMES_DRAWN;
        drawn.truncate(NAMES_DRAWN);
        let mut by_name: Vec<Vec<u64>> = drawn.iter().map(|_| results.zeros()).collect();
        let mut others = results.zeros();
        let [first, second, third] = parts.columns;
        let columns = ["icount", first, second, third];
        CsvRows::open(&results.file(self.file))?.each(columns, |[icount, cells @ ..]| {
            let name = printable(&(parts.make)(cells)?);
            let at = results.interval_containing(number(icount)?);
            let found = drawn.iter().position(|(known, _)| *known == name);
            let into = found.and_then(|found| by_name.get_mut(found)).unwrap_or(&mut others);
            if let Some(count) = into.get_mut(at) {
                *count += 1;
            }
            Ok(())
        })?;
        let named = drawn.iter().zip(&by_name);
        let mut bands: Vec<_> =
            named.map(|((name, _), counts)| band(name, results.summed(counts))).collect();
        if has_others {
            bands.push(rest(format!("other {}", self.what), results.summed(&others)));
        }
        let label = format!("{} in the interval", self.what);
        let panels = vec![stack(self.counted.first().map_or("", |one| one.0), &label, bands)];
        Ok(results.timeline_of(self.picture, panels))
    }
}
