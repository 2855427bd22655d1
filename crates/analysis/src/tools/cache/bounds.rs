//! Approximate counts of each interval, with bounds: the caches are filled by the intervals before
//! it, as many as the warm-up has (`plugins/src/tools/cache_bounds.rs`).

use crate::context::{MergeContext, ToolSummary};
use crate::error::Result;
use crate::part_table::PartTable;
use crate::result_file::CsvFile;
use std::collections::BTreeMap;

pub(super) const KIND: &str = "cachebnd";
const COLUMNS: usize = 7;

/// Merges all parts into `cache.csv`.
pub(super) fn merge(merge: &MergeContext) -> Result<ToolSummary> {
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
            csv.row((index, start, level, reads, writes, read_misses, write_misses, least, most))?;
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
