//! `cache`: hits and misses of a hierarchy of data caches, by interval.
//!
//! ```text
//!   without warmup   part: certain counts, log of open accesses ─▶ join.rs: exact, as in one replay of all intervals
//!   warmup=N         part: counts, certain and open misses ──────▶ bounds.rs: least and most misses of each interval
//! ```
//!
//! The caches are empty at the begin of the first interval, and where intervals are missing. With a
//! warm-up, each interval's caches are empty at the begin of an earlier interval instead, in a run
//! of one interval as in a run of all. In an analysis of separate intervals nothing warms them
//! up.

mod bounds;
mod join;

use super::table_run::TableRun;
use super::{Tool, ToolArguments, ToolDescription, ToolRun};
use crate::context::{MergeContext, RunContext, ToolSummary};
use crate::error::{Error, Result};
use join::CacheJoin;
use keyframe_plugins::exact_cache::LruSets;
use std::fmt::Write as _;

pub(super) const DESCRIPTION: ToolDescription = ToolDescription {
    name: "cache",
    about: "Accesses and misses of set-associative data caches (LRU, physical addresses)",
    arguments: &[
        ("l1", "BYTES:WAYS of level 1 (default 32K:8)"),
        ("l2", "of level 2 (default 1M:16), or none"),
        ("l3", "of level 3 (default 16M:16), or none"),
        ("line", "bytes of a line (default 64)"),
        (
            "warmup",
            "approximate: intervals before each one that fill its caches, 0 to 16 (default: exact, \
             the caches keep their contents)",
        ),
    ],
    results: &[(
        "cache.csv",
        "interval, first instruction, level, reads, writes, read misses, write misses; with warmup \
         also least and most misses for any cache contents before the warm-up",
    )],
};

const WARM_UP_MAX: u64 = 16;

struct Cache {
    /// The levels as the plugin's argument: BYTES:WAYS/BYTES:WAYS/...
    levels: String,
    line_bytes: u64,
    /// The number of warm-up intervals; none for exact counts.
    warm_up: Option<u64>,
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
    let warm_up = arguments.number("warmup", 0, WARM_UP_MAX)?;
    Ok(Box::new(Cache { levels, line_bytes, warm_up }))
}

impl Tool for Cache {
    fn name(&self) -> &str {
        DESCRIPTION.name
    }

    fn warm_up_intervals(&self) -> usize {
        self.warm_up.unwrap_or(0) as usize
    }

    fn expect_separate_intervals(&mut self) {
        self.warm_up.get_or_insert(0);
    }

    fn begin(&self, run: &RunContext) -> Result<Box<dyn ToolRun>> {
        let mut arguments = vec![
            ("ram", run.ram.argument()),
            ("line", self.line_bytes.to_string()),
            ("levels", self.levels.clone()),
        ];
        let Some(warm_up) = self.warm_up else {
            arguments.push(("skip", u64::from(run.warm_up.is_some()).to_string()));
            return TableRun::begin(run, "cache", &[join::KIND], arguments);
        };
        arguments.push(("warmup", warm_up.to_string()));
        // More may come than this run knows: hierarchies that warm up for them are then filled.
        let intervals = if run.has_many_cuts() { u64::MAX } else { 1 };
        arguments.push(("intervals", intervals.to_string()));
        TableRun::begin(run, "cache-bounds", &[bounds::KIND], arguments)
    }

    fn merge(&self, merge: &MergeContext) -> Result<ToolSummary> {
        if self.warm_up.is_some() {
            return bounds::merge(merge);
        }
        let levels = LruSets::of_levels(&self.levels, self.line_bytes);
        let levels = levels.map_err(|problem| Error::Argument {
            tool: DESCRIPTION.name.into(),
            argument: self.levels.clone(),
            problem,
        })?;
        join::merge(merge, CacheJoin::new(levels))
    }
}
