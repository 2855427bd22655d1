//! The exact counts of all intervals: applies the log of each to the true contents of the caches
//! (`plugins/src/exact_cache.rs` shows why they are exact).

use crate::context::{MergeContext, Part, ToolSummary};
use crate::error::{Error, Result};
use crate::part_table::PartTable;
use crate::result_file::CsvFile;
use keyframe_plugins::exact_cache::{LevelCounts, LogEntry, LruSets, Met};

pub(super) const KIND: &str = "cachelog";

/// The caches at the end of the intervals that have been joined.
pub(super) struct CacheJoin {
    levels: Vec<LruSets>,
    /// The instruction that comes next.
    next: Option<u64>,
}

impl CacheJoin {
    /// Makes the join from `levels`, the empty caches of all levels.
    pub fn new(levels: Vec<LruSets>) -> Self {
        Self { levels, next: None }
    }

    /// Joins the next interval and returns its counts for each level. If intervals are missing
    /// before it, the caches are empty at its begin.
    ///
    /// Errors: [`Error::File`]; [`Error::Damaged`].
    fn join(&mut self, part: &Part) -> Result<Vec<LevelCounts>> {
        let (path, interval) = (part.file(KIND, "part"), part.interval);
        let table = PartTable::read(&path, KIND, 1)?;
        if self.next.is_some_and(|next| next != interval.start.0) {
            self.levels.iter_mut().for_each(LruSets::clear);
        }
        self.next = Some(interval.end.0);
        self.apply(table.words()).map_err(|(word, problem)| Error::Damaged {
            path,
            place: format!("row {word}"),
            problem: format!("{problem}; delete it and run the analysis again"),
        })
    }

    /// Applies a part and returns the counts, or the number of an impossible word.
    fn apply(&mut self, part: &[u64]) -> Result<Vec<LevelCounts>, (usize, &'static str)> {
        let begin = self.levels.len() * size_of::<LevelCounts>() / size_of::<u64>();
        let (certain, log) = part.split_at_checked(begin).ok_or((0, "counts are missing"))?;
        let mut counts = certain.as_chunks().0.to_vec();
        for (number, &word) in log.iter().enumerate() {
            let entry = LogEntry::from_word(word).filter(|one| one.level() < self.levels.len());
            match entry.ok_or((begin + number, "not an access of these caches"))? {
                LogEntry::Front { line, level } => {
                    self.levels[level].touch(line);
                }
                LogEntry::Open { line, is_write, level } => {
                    access(&mut self.levels[level..], &mut counts[level..], line, is_write);
                }
            }
        }
        let reaches = |pair: &[LevelCounts]| pair[0][2..] == pair[1][..2];
        let fits = |level: &LevelCounts| level[2] <= level[0] && level[3] <= level[1];
        if counts.iter().all(fits) && counts.windows(2).all(reaches) {
            Ok(counts)
        } else {
            Err((0, "the counts do not match the log"))
        }
    }
}

/// Performs an access that reaches the first of `levels`, where it has been counted.
fn access(levels: &mut [LruSets], counts: &mut [LevelCounts], line: u64, is_write: bool) {
    let way = usize::from(is_write);
    let mut is_counted = true;
    for (level, counts) in levels.iter_mut().zip(counts) {
        if !is_counted {
            counts[way] = counts[way].saturating_add(1);
        }
        is_counted = false;
        match level.touch(line) {
            Met::MostRecent | Met::Present => return,
            Met::Room | Met::Full => counts[2 + way] = counts[2 + way].saturating_add(1),
        }
    }
}

/// Merges all parts into `cache.csv`.
pub(super) fn merge(merge: &MergeContext, mut join: CacheJoin) -> Result<ToolSummary> {
    let header = "interval,start_icount,level,reads,writes,read_misses,write_misses";
    let mut csv = CsvFile::create(&merge.out, "cache.csv", header)?;
    let mut sums = vec![[0_u64; 2]; join.levels.len()];
    for part in &merge.parts {
        let (index, start) = (part.interval.index, part.interval.start.0);
        for (number, counts) in join.join(part)?.into_iter().enumerate() {
            let [reads, writes, read_misses, write_misses] = counts;
            csv.row((index, start, number + 1, reads, writes, read_misses, write_misses))?;
            let both = [reads.saturating_add(writes), read_misses.saturating_add(write_misses)];
            sums[number].iter_mut().zip(both).for_each(|(sum, one)| *sum = sum.saturating_add(one));
        }
    }
    let lines = sums.iter().enumerate().map(|(number, &[accesses, misses])| {
        let share = 100.0 * misses as f64 / accesses.max(1) as f64;
        format!("level {}: {accesses} accesses, {misses} misses ({share:.2} %)", number + 1)
    });
    Ok(ToolSummary { lines: lines.collect(), files: vec![csv.finish()?] })
}

#[cfg(test)]
mod tests;
