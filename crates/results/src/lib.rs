//! The results of an analysis as tables and as pictures.
//!
//! ```text
//!   OUT/*.csv, *.parquet ── AnalysisResults ─┬─ tables ───▶ ResultTable ─┬─ text, as wide as a terminal
//!                                            │                           └─ JSON
//!                                            └─ timeline ─▶ keyframe-plot: SVG, PNG
//! ```
//!
//! One file for each tool in `by_tool/`. A tool of a third party has the first rows of its CSV
//! files as tables.
//!
//! Invariants: the files may come from anywhere. A row is bounded before it is read, as is the
//! number of different names that are counted; no contents make this crate panic. No control
//! character of a file gets into a text.
//!
//! Not here: the analysis itself, and the choice between its directories.

mod by_tool;
mod csv_rows;
mod error;
mod intervals;
mod table;

#[cfg(test)]
mod tests;

pub use error::{Error, Result};
pub use intervals::AnalysedInterval;
pub use table::{Cell, ResultTable};

use keyframe_plot::Timeline;
use std::path::{Path, PathBuf};

/// An analysis whose results are in a directory.
#[derive(Clone, Debug)]
pub struct AnalysisResults {
    /// The directory.
    pub dir: PathBuf,
    /// The tool's name, or the path of its manifest.
    pub tool: String,
    /// True if the intervals were simulated: their bounds are nanoseconds of the guest's time.
    pub is_approximate: bool,
    /// The analysed intervals, in rising order.
    pub intervals: Vec<AnalysedInterval>,
}

impl AnalysisResults {
    /// Returns the tables of the results, each with `top` rows at most.
    ///
    /// Errors: [`Error::NoResult`] if the analysis has no results yet; [`Error::File`] if a file
    /// cannot be read; [`Error::Damaged`] for a file that no tool has written; [`Error::Parquet`]
    /// for an invalid Parquet file.
    pub fn tables(&self, top: usize) -> Result<Vec<ResultTable>> {
        by_tool::tables(self, top)
    }

    /// Returns the picture of the results over the course of the recording. Errors: those of
    /// [`Self::tables`]; [`Error::NoPicture`] if there is none for the tool.
    pub fn timeline(&self) -> Result<Timeline> {
        by_tool::timeline(self)
    }

    /// Returns the path of a file.
    fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Returns the number of analysed instructions, or `None` if only the time is known.
    fn instructions(&self) -> Option<u64> {
        let all = self.intervals.iter().map(|one| one.end.saturating_sub(one.start));
        (!self.is_approximate).then(|| all.fold(0, u64::saturating_add))
    }

    /// Returns the title of the picture that shows `what`.
    fn picture_title(&self, what: &str) -> String {
        if self.is_approximate { format!("{what} (approximate)") } else { what.to_owned() }
    }
}

/// Returns the file name of a path, as text.
fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().replace(char::is_control, " ")
}
