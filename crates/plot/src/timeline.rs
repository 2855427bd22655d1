//! Timelines: what happened in each of many intervals, as stacked areas or as lines in steps.

use crate::axis::Axis;
use crate::draw_timeline;
use crate::picture::{Picture, SizePx};
use crate::{CHARTS_MAX, Error, SERIES_MAX, TITLE_HEIGHT_PX};
use plotters::prelude::DrawingBackend;
use std::path::Path;

/// The width of a timeline, with its legend.
const WIDTH_PX: u32 = 1100;
/// The height of a panel.
const PANEL_HEIGHT_PX: u32 = 360;
/// The largest number of cells: there are not many more columns of pixels.
pub const CELLS_MAX: usize = 1000;

/// A timeline: panels with one horizontal axis, one below the other.
#[derive(Clone, Debug)]
pub struct Timeline {
    /// The title above all panels.
    pub title: String,
    /// The horizontal axis. Its scale is not used: it is linear, from the first cell to the last.
    pub x: Axis,
    /// The intervals, in rising order. At most [`CELLS_MAX`].
    pub cells: Vec<Cell>,
    /// The panels, from top to bottom.
    pub panels: Vec<Panel>,
}

/// A column of a timeline: the range of the horizontal axis that one value of each band covers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cell {
    /// Where it begins, as a value of the horizontal axis.
    pub from: f64,
    /// Where it ends, as a value of the horizontal axis.
    pub to: f64,
}

/// A panel of a timeline.
#[derive(Clone, Debug)]
pub struct Panel {
    /// The title above the panel.
    pub title: String,
    /// The vertical axis, which begins at 0.
    pub y: Axis,
    /// The end of the vertical axis; `None` if it fits the values.
    pub y_max: Option<f64>,
    /// How the bands are drawn.
    pub shape: PanelShape,
    /// The bands: if stacked, from the bottom to the top.
    pub bands: Vec<Band>,
}

/// How the values of a panel are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PanelShape {
    /// As areas on top of each other.
    Stacked,
    /// As lines, level in each cell.
    Steps,
}

/// A sequence of values, one for each cell.
#[derive(Clone, Debug)]
pub struct Band {
    /// Its name in the legend.
    pub name: String,
    /// Its values. Those that are not finite are left out.
    pub values: Vec<f64>,
    /// True for a remainder, which is drawn in grey.
    pub is_rest: bool,
}

impl Timeline {
    /// Draws the timeline as an SVG document.
    ///
    /// Error: [`Error::Draw`] if the timeline has no panel or no cell, too many panels, cells or
    /// bands, or a band without a value for each cell, or if the library fails.
    pub fn svg(&self) -> Result<String, Error> {
        self.to_svg()
    }

    /// Draws the timeline as a PNG image.
    ///
    /// Error: [`Error::Draw`] if the timeline has no panel or no cell, too many panels, cells or
    /// bands, or a band without a value for each cell, or if the library fails.
    pub fn png(&self) -> Result<Vec<u8>, Error> {
        self.to_png()
    }

    /// Writes the timeline to `path`, in the format that its extension names.
    ///
    /// Errors: [`Error::Name`] if the extension is neither `svg` nor `png`, [`Error::Draw`] as for
    /// [`Self::svg`], [`Error::Write`] if the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        self.write_to(path)
    }
}

impl Picture for Timeline {
    fn title(&self) -> &str {
        &self.title
    }

    fn size_px(&self) -> SizePx {
        let height = TITLE_HEIGHT_PX + PANEL_HEIGHT_PX * self.panels.len() as u32;
        SizePx { width: WIDTH_PX, height }
    }

    fn check(&self) -> Result<(), Error> {
        let (panels, cells) = (self.panels.len(), self.cells.len());
        if panels == 0 || panels > CHARTS_MAX {
            return Err(self
                .failed(format!("it has {panels} panels; the number must be 1 to {CHARTS_MAX}")));
        }
        if cells == 0 || cells > CELLS_MAX {
            return Err(self
                .failed(format!("it has {cells} intervals; the number must be 1 to {CELLS_MAX}")));
        }
        for Panel { bands, .. } in &self.panels {
            if bands.len() > SERIES_MAX {
                return Err(self.failed(format!(
                    "a panel has {} bands; the number must be at most {SERIES_MAX}",
                    bands.len()
                )));
            }
            if let Some(odd) = bands.iter().find(|band| band.values.len() != cells) {
                return Err(self.failed(format!(
                    "{:?} has {} values for {cells} intervals",
                    odd.name,
                    odd.values.len()
                )));
            }
        }
        Ok(())
    }

    fn draw<B: DrawingBackend>(&self, backend: B) -> Result<(), String> {
        draw_timeline::timeline(self, backend)
    }
}
