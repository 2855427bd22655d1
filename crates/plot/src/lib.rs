//! Line charts with several series and error bars, linear and logarithmic axes, and timelines with
//! stacked areas, as SVG and as PNG.
//!
//! ```text
//!   Figure ─┬─ title
//!           ├─ Chart ─┬─ x, y: Axis (label, scale, format of values)     one below the other
//!           │         └─ Series ── Point (x, y, deviation)
//!           └─ Chart ...
//!
//!   Timeline ─┬─ title, x: Axis
//!             ├─ Cell (from, to) ...                                     the intervals
//!             └─ Panel ─┬─ title, y: Axis                                one below the other
//!                       └─ Band (name, a value for each cell)            stacked, or lines in steps
//!
//!   both ──── draw ──┬── plotters' SVG backend ──────────────▶ svg()    text for the viewer's font
//!                    └── plotters' bitmap backend, bitmap ───▶ png()    text in a built-in font
//! ```
//!
//! Invariants:
//! 1. Drawing needs no font, library or display of the machine.
//! 2. A value that cannot be drawn is left out and moves no other value. Such values are not
//!    finite, or not above 0 on a logarithmic axis.
//! 3. The same figure gives the same bytes.
//!
//! There is no interaction, and the crate does not interpret the values.

mod axis;
mod bitmap;
mod draw;
mod draw_timeline;
mod picture;
mod timeline;

pub use axis::{Axis, Scale, decimal};
pub use timeline::{Band, CELLS_MAX, Cell, Panel, PanelShape, Timeline};

use picture::{Picture, SizePx};
use plotters::prelude::DrawingBackend;
use std::path::{Path, PathBuf};

/// The width of a figure.
const WIDTH_PX: u32 = 900;
/// The height of a chart.
const CHART_HEIGHT_PX: u32 = 380;
/// The height of the title above the charts.
const TITLE_HEIGHT_PX: u32 = 40;
/// The largest number of charts in a figure, which bounds the memory of a bitmap.
const CHARTS_MAX: usize = 16;
/// The largest number of series in a chart: more cannot be told apart.
const SERIES_MAX: usize = 32;

/// A figure: charts that are drawn one below the other.
#[derive(Clone, Debug)]
pub struct Figure {
    /// The title above all charts.
    pub title: String,
    /// The charts, from top to bottom.
    pub charts: Vec<Chart>,
}

/// A chart: two axes and the lines between them.
#[derive(Clone, Debug)]
pub struct Chart {
    /// The title above the chart.
    pub title: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// The lines, in the order of the legend.
    pub series: Vec<Series>,
}

/// One line of a chart.
#[derive(Clone, Debug)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// Its points, in the order in which they are joined.
    pub points: Vec<Point>,
}

/// A point of a line: one measured value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// The value on the horizontal axis.
    pub x: f64,
    /// The value on the vertical axis.
    pub y: f64,
    /// The error bar; `None` if there is none.
    pub deviation: Option<Deviation>,
}

/// The error bar of a point: how far it reaches from the point, in units of the vertical axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Deviation {
    /// Down from the point.
    pub below: f64,
    /// Up from the point.
    pub above: f64,
}

impl From<f64> for Deviation {
    /// A bar that reaches equally far in both directions.
    fn from(deviation: f64) -> Self {
        Self { below: deviation, above: deviation }
    }
}

/// The format of a figure's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FigureFormat {
    /// Scalable vector graphics, `.svg`.
    Svg,
    /// A bitmap, `.png`.
    Png,
}

/// The reason why a figure was not drawn or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file's name ends with neither `.svg` nor `.png`.
    #[error("{}: a plot's file name ends in .svg or .png", path.display())]
    Name {
        /// The file.
        path: PathBuf,
    },
    /// The figure cannot be drawn.
    #[error("draw the figure {title:?}: {problem}")]
    Draw {
        /// The title of the figure.
        title: String,
        /// What is wrong.
        problem: String,
    },
    /// The file could not be written.
    #[error("write the plot {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
}

impl FigureFormat {
    /// Returns the format that the extension of `path` names.
    ///
    /// Error: [`Error::Name`] if the extension is neither `svg` nor `png`.
    pub fn of(path: &Path) -> Result<Self, Error> {
        match path.extension().map(std::ffi::OsStr::to_ascii_lowercase) {
            Some(end) if end == "svg" => Ok(Self::Svg),
            Some(end) if end == "png" => Ok(Self::Png),
            _ => Err(Error::Name { path: path.into() }),
        }
    }
}

impl Figure {
    /// Draws the figure as an SVG document.
    ///
    /// Error: [`Error::Draw`] if the figure has no chart, too many charts or too many series, or
    /// the library fails.
    pub fn svg(&self) -> Result<String, Error> {
        self.to_svg()
    }

    /// Draws the figure as a PNG image.
    ///
    /// Error: [`Error::Draw`] if the figure has no chart, too many charts or too many series, or
    /// the library fails.
    pub fn png(&self) -> Result<Vec<u8>, Error> {
        self.to_png()
    }

    /// Writes the figure to `path`, in the format that its extension names.
    ///
    /// Errors: [`Error::Name`] if the extension is neither `svg` nor `png`, [`Error::Draw`] as for
    /// [`Self::svg`], [`Error::Write`] if the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        self.write_to(path)
    }
}

impl Picture for Figure {
    fn title(&self) -> &str {
        &self.title
    }

    fn size_px(&self) -> SizePx {
        let height = TITLE_HEIGHT_PX + CHART_HEIGHT_PX * self.charts.len() as u32;
        SizePx { width: WIDTH_PX, height }
    }

    fn check(&self) -> Result<(), Error> {
        let series = self.charts.iter().map(|c| c.series.len()).max().unwrap_or(0);
        if self.charts.is_empty() || self.charts.len() > CHARTS_MAX {
            return Err(self.failed(format!(
                "it has {} charts; the number must be 1 to {CHARTS_MAX}",
                self.charts.len()
            )));
        }
        if series > SERIES_MAX {
            return Err(self.failed(format!(
                "a chart has {series} series; the number must be at most {SERIES_MAX}"
            )));
        }
        Ok(())
    }

    fn draw<B: DrawingBackend>(&self, backend: B) -> Result<(), String> {
        draw::figure(self, backend)
    }
}

#[cfg(test)]
mod tests;
