//! Line charts with several series and error bars, linear and logarithmic axes, as SVG and as PNG.
//!
//! ```text
//!   Figure ─┬─ title
//!           ├─ Chart ─┬─ x, y: Axis (label, scale, how a value is written)      drawn one below the other
//!           │         └─ Series ── Point (x, y, deviation)
//!           └─ Chart ...
//!
//!   Figure ── draw ──┬── plotters' SVG backend ────────────────▶ svg()    text is text: the viewer has the font
//!                    └── plotters' bitmap backend, `bitmap` ───▶ png()    text from a font that is compiled in
//! ```
//!
//! Invariants:
//! 1. Drawing needs no font, library or display of the machine.
//! 2. A value that cannot be drawn (not finite; not above 0 on a logarithmic axis) is left out; it never moves another.
//! 3. The same figure gives the same bytes.
//!
//! Left out: bars, areas, interaction; anything that knows what the numbers mean.

mod axis;
mod bitmap;
mod draw;

pub use axis::{Axis, Scale, decimal};

use std::path::{Path, PathBuf};

/// Pixels from left to right.
const WIDTH_PX: u32 = 900;
/// Pixels from top to bottom of each chart.
const CHART_HEIGHT_PX: u32 = 380;
/// Pixels of the title above the charts.
const TITLE_HEIGHT_PX: u32 = 40;
/// Charts in a figure at most: a bitmap's memory is bounded by it.
const CHARTS_MAX: usize = 16;
/// Series in a chart at most; more could not be told apart.
const SERIES_MAX: usize = 32;

/// Charts that belong together, drawn one below the other.
#[derive(Clone, Debug)]
pub struct Figure {
    /// Stands above all charts.
    pub title: String,
    /// From top to bottom.
    pub charts: Vec<Chart>,
}

/// One pair of axes and the lines over it.
#[derive(Clone, Debug)]
pub struct Chart {
    /// Stands above it.
    pub title: String,
    /// From left to right.
    pub x: Axis,
    /// From bottom to top.
    pub y: Axis,
    /// The lines, in the order of the legend.
    pub series: Vec<Series>,
}

/// One line.
#[derive(Clone, Debug)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// Its points, in the order in which they are joined.
    pub points: Vec<Point>,
}

/// One measured value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Where on the x axis.
    pub x: f64,
    /// Where on the y axis.
    pub y: f64,
    /// Half of the error bar's length, where there is one.
    pub deviation: Option<f64>,
}

/// What kind of file a figure becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Scalable, text.
    Svg,
    /// Pixels.
    Png,
}

/// Why there is no picture.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file's name does not say what it is to be.
    #[error("{}: a plot's file name ends in .svg or .png", path.display())]
    Name {
        /// The file.
        path: PathBuf,
    },
    /// The figure cannot be drawn.
    #[error("draw the figure {title:?}: {problem}")]
    Draw {
        /// Its title.
        title: String,
        /// Why not.
        problem: String,
    },
    /// The file could not be written.
    #[error("write the plot {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
}

impl Format {
    /// What the end of `path` says. Error: neither `.svg` nor `.png`.
    pub fn of(path: &Path) -> Result<Self, Error> {
        match path.extension().map(std::ffi::OsStr::to_ascii_lowercase) {
            Some(end) if end == "svg" => Ok(Self::Svg),
            Some(end) if end == "png" => Ok(Self::Png),
            _ => Err(Error::Name { path: path.into() }),
        }
    }
}

impl Figure {
    /// The figure as an SVG document.
    pub fn svg(&self) -> Result<String, Error> {
        self.check()?;
        let mut text = String::new();
        draw::figure(self, plotters::backend::SVGBackend::with_string(&mut text, self.size_px()))
            .map_err(|problem| self.failed(problem))?;
        Ok(text)
    }

    /// The figure as a PNG image.
    pub fn png(&self) -> Result<Vec<u8>, Error> {
        self.check()?;
        let (width_px, height_px) = self.size_px();
        let mut pixels = vec![0; (width_px * height_px * 3) as usize];
        draw::figure(self, bitmap::Bitmap::over(&mut pixels, (width_px, height_px)))
            .map_err(|problem| self.failed(problem))?;
        bitmap::encode(&pixels, (width_px, height_px)).map_err(|problem| self.failed(problem))
    }

    /// Writes the figure to `path`, as the end of its name says.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        let bytes = match Format::of(path)? {
            Format::Svg => self.svg()?.into_bytes(),
            Format::Png => self.png()?,
        };
        std::fs::write(path, bytes).map_err(|source| Error::Write { path: path.into(), source })
    }

    fn size_px(&self) -> (u32, u32) {
        (WIDTH_PX, TITLE_HEIGHT_PX + CHART_HEIGHT_PX * self.charts.len() as u32)
    }

    fn check(&self) -> Result<(), Error> {
        let series = self.charts.iter().map(|c| c.series.len()).max().unwrap_or(0);
        if self.charts.is_empty() || self.charts.len() > CHARTS_MAX {
            return Err(
                self.failed(format!("it has {} charts; 1 to {CHARTS_MAX} fit", self.charts.len()))
            );
        }
        if series > SERIES_MAX {
            return Err(
                self.failed(format!("a chart has {series} series; {SERIES_MAX} can be told apart"))
            );
        }
        Ok(())
    }

    fn failed(&self, problem: impl Into<String>) -> Error {
        Error::Draw { title: self.title.clone(), problem: problem.into() }
    }
}

#[cfg(test)]
mod tests;
