//! `cache`: hits and misses of a hierarchy of data caches, by interval.
//!
//! The contents of the caches at an interval's begin are approximated by warm-up: the caches are
//! empty at the beginning of an earlier interval and filled from there on, both in a run of one
//! interval and in a run of all. For each level the tool reports the least and the largest number
//! of misses that any earlier contents would give (`plugins/src/tools/cache.rs`).

use super::table_run::TableRun;
use super::{Tool, ToolArguments, ToolDescription, ToolRun};
use crate::context::{MergeContext, RunContext, ToolSummary};
use crate::error::Result;
use crate::part_table::PartTable;
use crate::result_file::CsvFile;
use std::collections::BTreeMap;
use std::fmt::Write as _;

pub(super) const DESCRIPTION: ToolDescription = ToolDescription {
    name: "cache",
    about: "Accesses and misses of set-associative data caches (LRU, physical addresses)",
    arguments: &[
        ("l1", "BYTES:WAYS of level 1 (default 32K:8)"),
        ("l2", "of level 2 (default 1M:16), or none"),
        ("l3", "of level 3 (default 16M:16), or none"),
        ("line", "bytes of a line (default 64)"),
        ("warmup", "intervals before each one that fill the caches, 0 to 16 (default 1)"),
    ],
    results: &[(
        "cache.csv",
        "interval, first instruction, level, reads, writes, read misses, write misses, least and \
         most misses for any cache contents before the warm-up",
    )],
};

const KIND: &str = "cache";
const COLUMNS: usize = 7;
const WARM_UP_DEFAULT: u64 = 1;
const WARM_UP_MAX: u64 = 16;

struct Cache {
    /// The levels as the plugin's argument: BYTES:WAYS/BYTES:WAYS/...
    levels: String,
    line_bytes: u64,
    warm_up: u64,
}

pub(super) fn make(arguments: &ToolArguments) -> Result<Box<dyn Tool>> {
    let line_bytes = arguments.number("line", 8, 4096)?.unwrap_or(64);
    if !line_bytes.is_power_of_two() {
        return Err(arguments.wrong("line", "not a power of two".into()));
    }
    let mut levels = String::new();
    for (name, default) in [("l1", "32K:8"), ("l2", "1M:16"), ("l3", "16M:16")] {
        let text = arguments.text(name).unwrap_or(default);
        if text == "none" && name != "l1" {
            break;
        }
        let wrong = || {
            arguments.wrong(
                name,
                "write BYTES:WAYS, a whole number of sets, at most 1G and 64 ways".into(),
            )
        };
        let (bytes, ways) = text.split_once(':').ok_or_else(wrong)?;
        let bytes = super::parse_number(bytes).ok_or_else(wrong)?;
        let ways = super::parse_number(ways).ok_or_else(wrong)?;
        let is_in_range = (1..=1 << 30).contains(&bytes) && (1..=64).contains(&ways);
        if !is_in_range || bytes % (ways * line_bytes) != 0 {
            return Err(wrong());
        }
        let separator = if levels.is_empty() { "" } else { "/" };
        let _ = write!(levels, "{separator}{bytes}:{ways}");
    }
    let warm_up = arguments.number("warmup", 0, WARM_UP_MAX)?.unwrap_or(WARM_UP_DEFAULT);
    Ok(Box::new(Cache { levels, line_bytes, warm_up }))
}

impl Tool for Cache {
    fn name(&self) -> &str {
        DESCRIPTION.name
    }

    fn warm_up_intervals(&self) -> usize {
        self.warm_up as usize
    }

    fn begin(&self, run: &RunContext) -> Result<Box<dyn ToolRun>> {
        let arguments = vec![
            ("ram", run.ram.argument()),
            ("line", self.line_bytes.to_string()),
            ("levels", self.levels.clone()),
            ("warmup", self.warm_up.to_string()),
            ("intervals", if run.has_many_cuts() { u64::MAX } else { 1 }.to_string()),
        ];
        TableRun::begin(run, "cache", &[KIND], arguments)
    }

    fn merge(&self, merge: &MergeContext) -> Result<ToolSummary> {
        let header = "interval,start_icount,level,reads,writes,read_misses,write_misses,\
                      misses_least,misses_most";
        let mut csv = CsvFile::create(&merge.out, "cache.csv", header)?;
        let mut sums: BTreeMap<u64, [u64; 4]> = BTreeMap::new();
        for part in &merge.parts {
            let (index, start) = (part.interval.index, part.interval.start.0);
            for row in PartTable::read(&part.file(KIND, "part"), KIND, COLUMNS)?.rows() {
                let &[level, reads, writes, read_misses, write_misses, least, open] = row else {
                    continue;
                };
                let most = least.saturating_add(open);
                csv.row((
                    index,
                    start,
                    level,
                    reads,
                    writes,
                    read_misses,
                    write_misses,
                    least,
                    most,
                ))?;
                let (accesses, misses) =
                    (reads.saturating_add(writes), read_misses.saturating_add(write_misses));
                let sum = sums.entry(level).or_default().iter_mut();
                sum.zip([accesses, misses, least, most])
                    .for_each(|(sum, one)| *sum = sum.saturating_add(one));
            }
        }
        let lines = sums.iter().map(|(level, &[accesses, misses, least, most])| {
            let percent = |misses: u64| 100.0 * misses as f64 / accesses.max(1) as f64;
            let [share, low, high] = [misses, least, most].map(percent);
            format!(
                "level {level}: {accesses} accesses, {misses} misses ({share:.2} %); for any cache \
                 contents before the warm-up {least} to {most} misses ({low:.2} to {high:.2} %)"
            )
        });
        Ok(ToolSummary { lines: lines.collect(), files: vec![csv.finish()?] })
    }
}
