//! Values of intervals, and the cells of a picture that they are drawn in.

use crate::AnalysisResults;
use crate::csv_rows::number;
use keyframe_plot::{Axis, Band, Cell, Panel, PanelShape, Scale, Timeline, decimal};

/// The largest number of cells of a picture: more would be narrower than a pixel or two.
const INTERVALS_DRAWN_MAX: usize = 360;

/// An interval of an analysis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnalysedInterval {
    /// Its number in the recording.
    pub index: u32,
    /// Its first instruction, or when it begins.
    pub start: u64,
    /// The first instruction after it, or when it ends.
    pub end: u64,
}

impl AnalysisResults {
    /// Returns the position of the interval whose number a cell has.
    pub(crate) fn interval_by_number(&self, cell: &str) -> Result<usize, String> {
        let index = number(cell)?;
        let found = self.intervals.binary_search_by_key(&index, |one| one.index.into());
        found.map_err(|_| format!("interval {index} is not one of this analysis"))
    }

    /// Returns the position of the interval with instruction `icount`. The first and the last one
    /// also stand for what lies before and after all.
    pub(crate) fn interval_containing(&self, icount: u64) -> usize {
        let next = self.intervals.partition_point(|one| one.start <= icount);
        next.saturating_sub(1)
    }

    /// Returns one value of 0 for each interval.
    pub(crate) fn zeros(&self) -> Vec<u64> {
        vec![0; self.intervals.len()]
    }

    /// Returns how many neighbouring intervals a cell of a picture has.
    fn per_cell(&self) -> usize {
        self.intervals.len().div_ceil(INTERVALS_DRAWN_MAX).max(1)
    }

    /// Returns the sum of the values in each cell.
    pub(crate) fn summed(&self, values: &[u64]) -> Vec<f64> {
        let sum = |some: &[u64]| some.iter().map(|value| *value as f64).sum();
        values.chunks(self.per_cell()).map(sum).collect()
    }

    /// Returns the largest value in each cell.
    pub(crate) fn largest(&self, values: &[u64]) -> Vec<f64> {
        let largest = |some: &[u64]| some.iter().copied().max().unwrap_or(0) as f64;
        values.chunks(self.per_cell()).map(largest).collect()
    }

    /// Returns the instructions in each cell; `None` if only the time is known.
    pub(crate) fn instructions_by_cell(&self) -> Option<Vec<f64>> {
        let lengths: Vec<u64> =
            self.intervals.iter().map(|one| one.end.saturating_sub(one.start)).collect();
        (!self.is_approximate).then(|| self.summed(&lengths))
    }

    /// Returns the picture `what` with these panels.
    pub(crate) fn timeline_of(&self, what: &str, panels: Vec<Panel>) -> Timeline {
        let cell = |some: &[AnalysedInterval]| {
            let [from, to] = [some.first().map(|one| one.start), some.last().map(|one| one.end)]
                .map(|at| at.unwrap_or(0) as f64);
            Cell { from, to }
        };
        let x = if self.is_approximate {
            let label = "time of the guest in seconds".into();
            Axis { label, scale: Scale::Linear, write: |ns| decimal(ns / 1e9) }
        } else {
            Axis::new("instructions since the recording began", Scale::Linear)
        };
        Timeline {
            title: self.picture_title(what),
            x,
            cells: self.intervals.chunks(self.per_cell()).map(cell).collect(),
            panels,
        }
    }
}

/// Returns `part` of `whole` in percent, value by value; not a number where `whole` is 0.
pub fn percent_of(part: &[f64], whole: &[f64]) -> Vec<f64> {
    scaled(part, whole, 100.0)
}

/// Returns `part` for each `unit` of `whole`, value by value; not a number where `whole` is 0.
pub fn scaled(part: &[f64], whole: &[f64], unit: f64) -> Vec<f64> {
    let ratio = |(part, whole): (&f64, &f64)| {
        if *whole > 0.0 { unit * part / whole } else { f64::NAN }
    };
    part.iter().zip(whole).map(ratio).collect()
}

/// Makes a band with this name, of one value for each cell of a picture.
pub fn band(name: impl Into<String>, values: Vec<f64>) -> Band {
    Band { name: name.into(), values, is_rest: false }
}

/// Makes a band for what other bands leave, which is drawn in grey.
pub fn rest(name: impl Into<String>, values: Vec<f64>) -> Band {
    Band { name: name.into(), values, is_rest: true }
}

/// Makes a panel of shares in percent, which make 100 together. `label` is that of its axis.
pub fn shares(title: &str, label: &str, bands: Vec<Band>) -> Panel {
    let y = Axis::new(label, Scale::Linear);
    Panel { title: title.into(), y, y_max: Some(100.0), shape: PanelShape::Stacked, bands }
}

/// Makes a panel of lines in steps. `label` is that of its axis.
pub fn lines(title: &str, label: &str, bands: Vec<Band>) -> Panel {
    let y = Axis::new(label, Scale::Linear);
    Panel { title: title.into(), y, y_max: None, shape: PanelShape::Steps, bands }
}

/// Makes a panel of areas on top of each other. `label` is that of its axis.
pub fn stack(title: &str, label: &str, bands: Vec<Band>) -> Panel {
    Panel { shape: PanelShape::Stacked, ..lines(title, label, bands) }
}
