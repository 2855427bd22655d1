//! The result of a benchmark, as JSON, text and chart.

use keyframe_plot::Figure;
use serde::Serialize;
use std::collections::BTreeMap;

/// The result of a benchmark.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The name of the benchmark.
    pub name: String,
    /// Measured values by key. A key ends with its unit, for example `_ns`.
    pub figures: BTreeMap<String, f64>,
    /// Ratios by key: one figure over another, or a part of a whole.
    pub ratios: BTreeMap<String, f64>,
    /// Remarks by topic: the input, and the parts that are left out.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub notes: BTreeMap<String, String>,
    /// The figures as a chart.
    #[serde(skip)]
    pub plot: Figure,
    /// A table for a person; empty if the benchmark has none.
    #[serde(skip)]
    pub table: String,
    /// Why the benchmark stopped before all was measured, and how it goes on; `None` if it is
    /// complete.
    #[serde(skip)]
    pub incomplete: Option<String>,
}

impl Report {
    /// Makes an empty report of benchmark `name`.
    pub fn new(name: &str) -> Self {
        let plot = Figure { title: String::new(), charts: Vec::new() };
        Self {
            name: name.into(),
            figures: BTreeMap::new(),
            ratios: BTreeMap::new(),
            notes: BTreeMap::new(),
            plot,
            table: String::new(),
            incomplete: None,
        }
    }

    /// Adds a figure.
    pub fn figure(&mut self, key: impl Into<String>, value: f64) {
        self.figures.insert(key.into(), value);
    }

    /// Adds a ratio.
    pub fn ratio(&mut self, key: impl Into<String>, value: f64) {
        self.ratios.insert(key.into(), value);
    }

    /// Adds the ratio of two figures if both were measured.
    pub fn ratio_of(&mut self, key: impl Into<String>, over: &str, under: &str) {
        if let (Some(over), Some(under)) = (self.figures.get(over), self.figures.get(under)) {
            let value = over / under;
            self.ratio(key, value);
        }
    }

    /// Returns the text for a person: one value a line, then the table.
    pub fn text(&self) -> String {
        let mut lines = vec![format!("benchmark {}", self.name)];
        for (key, value) in &self.figures {
            let shown = if key.ends_with("_ns") {
                format!("{:.3} ms", value / 1e6)
            } else {
                format!("{value:.1}")
            };
            lines.push(format!("  {key:<44} {shown}"));
        }
        lines.extend(self.ratios.iter().map(|(key, value)| format!("  {key:<44} {value:.3}")));
        lines.extend(self.notes.iter().map(|(key, note)| format!("  {key}: {note}")));
        if !self.table.is_empty() {
            lines.push(self.table.clone());
        }
        lines.join("\n")
    }
}
