//! The results of an analysis: its parts, merged.

use super::Analysis;
use super::files::{FAILED, FinishedPart, IntervalTiming, TIMES, empty_dir, finished_part, write};
use crate::error::{AnalysisError, Error, Result};
use crate::event::{EventSink, ReplayEvent};
use keyframe_analysis::{MergeContext, ToolSummary};
use keyframe_replay::interval::Interval;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

impl Analysis<'_> {
    /// Returns the parts of all intervals in order. The queue must be empty.
    ///
    /// # Errors
    ///
    /// [`AnalysisError::IntervalsFailed`] with the first interval that has no part. The others are
    /// told to `events`.
    pub fn collect(&self, events: &dyn EventSink<ReplayEvent>) -> Result<Vec<FinishedPart>> {
        let (mut made, mut failures) = (Vec::new(), Vec::new());
        let intervals = self.intervals();
        for interval in &intervals {
            match finished_part(&self.out, interval) {
                Some(done) => {
                    made.push(FinishedPart { is_old: self.is_old(done.index), ..done });
                }
                None => failures.push((interval.index, self.failure_of(interval))),
            }
        }
        let (failed, count) = (failures.len(), intervals.len());
        let mut failures = failures.into_iter();
        let Some((index, reason)) = failures.next() else { return Ok(made) };
        for (index, reason) in failures {
            events.event(&ReplayEvent::IntervalWithoutPart { index, reason });
        }
        Err(AnalysisError::IntervalsFailed { failed, count, index, reason }.into())
    }

    fn failure_of(&self, interval: &Interval) -> String {
        let text = std::fs::read_to_string(self.part_dir(interval).join(FAILED));
        text.unwrap_or_else(|_| "its part is not there".into())
    }

    /// Merges all parts into the tool's results, and writes how long the intervals took. Errors:
    /// those of the tool; the file of the times cannot be written.
    pub fn merge(&self, done: Vec<FinishedPart>) -> Result<ToolSummary> {
        let timings: Vec<IntervalTiming> = done.iter().map(IntervalTiming::from).collect();
        let text = serde_json::to_string_pretty(&timings).unwrap_or_default();
        write(&self.out.join(TIMES), text.as_bytes())?;
        let parts = done.into_iter().flat_map(|done| done.parts).collect();
        let guest_symbols = self.guest_symbols()?;
        let merge = MergeContext { parts, out: self.out.clone(), guest_symbols };
        Ok(self.tool.merge(&merge)?)
    }

    /// Makes the results of one replay through all intervals, in `OUT/sequential`. `on_progress` is
    /// called now and then with the instruction that QEMU has reached. Errors: the replay fails;
    /// those of the tool.
    pub fn in_sequence(
        &self,
        interrupted: &AtomicBool,
        on_progress: &mut dyn FnMut(u64),
    ) -> Result<ToolSummary> {
        let out = self.out.join("sequential");
        let parts = out.join("parts");
        empty_dir(&out)?;
        empty_dir(&parts)?;
        let all = self.intervals();
        let [Some(first), Some(last)] = [all.first(), all.last()] else {
            return Err(AnalysisError::NoIntervals.into());
        };
        let intervals = if self.tool.can_cut() {
            all.clone()
        } else {
            vec![Interval { end: last.end, end_icount: last.end_icount, ..*first }]
        };
        let (parts, _) = self.run(&parts, &intervals, interrupted, on_progress)?;
        let guest_symbols = self.guest_symbols()?;
        Ok(self.tool.merge(&MergeContext { parts, out, guest_symbols })?)
    }

    /// Removes the parts and the queue, which are not needed after the merge. Error: a file cannot
    /// be removed.
    pub fn clear(&self) -> Result<()> {
        let parts = self.out.join("parts");
        std::fs::remove_dir_all(&parts)
            .and_then(|()| std::fs::remove_dir_all(self.out.join("queue")))
            .map_err(|e| Error::io(format!("remove {} and what is beside it", parts.display()), e))
    }
}

/// Compares the result files of two runs of one tool, byte by byte. Returns the files of `one` that
/// differ, and those that `other` lacks. Error: a file cannot be read.
pub fn differing_files(one: &ToolSummary, other: &ToolSummary) -> Result<Vec<PathBuf>> {
    let mut differing = Vec::new();
    for (number, file) in one.files.iter().enumerate() {
        let is_same = match other.files.get(number) {
            Some(same) => are_equal(file, same)?,
            None => false,
        };
        if !is_same {
            differing.push(file.clone());
        }
    }
    Ok(differing)
}

fn are_equal(one: &Path, other: &Path) -> Result<bool> {
    let open = |path: &Path| std::fs::File::open(path).map_err(|e| Error::file("open", path, e));
    let (mut one_file, mut other_file) = (open(one)?, open(other)?);
    let (mut a, mut b) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    loop {
        let len = one_file.read(&mut a).map_err(|e| Error::file("read", one, e))?;
        if len == 0 {
            let more = other_file.read(&mut b[..1]).map_err(|e| Error::file("read", other, e))?;
            return Ok(more == 0);
        }
        if other_file.read_exact(&mut b[..len]).is_err() || a[..len] != b[..len] {
            return Ok(false);
        }
    }
}
