//! Draws a timeline with any backend of plotters.

use crate::axis::Ruler;
use crate::draw::{COLOURS, Drawn, FONT, TEXT_PX, draw_axes, draw_title};
use crate::timeline::{Band, Panel, PanelShape, Timeline};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Colours of neighbouring areas: Paul Tol's muted set, and three that differ from it.
const AREAS: [RGBColor; 12] = [
    RGBColor(51, 34, 136),
    RGBColor(136, 204, 238),
    RGBColor(17, 119, 51),
    RGBColor(221, 204, 119),
    RGBColor(204, 102, 119),
    RGBColor(68, 170, 153),
    RGBColor(170, 68, 153),
    RGBColor(153, 153, 51),
    RGBColor(136, 34, 85),
    RGBColor(238, 119, 51),
    RGBColor(0, 119, 187),
    RGBColor(102, 60, 20),
];
/// Colours of remainders.
const RESTS: [RGBColor; 2] = [RGBColor(190, 190, 190), RGBColor(225, 225, 225)];
const LEGEND_WIDTH_PX: u32 = 262;
/// The height of the panel's title, above its axes.
const CAPTION_PX: i32 = 44;
const LEGEND_LINE_PX: i32 = 22;
/// The longest name that fits the legend.
const NAME_CHARS_MAX: usize = 29;

/// Draws `timeline`. The error is the text of the backend's error.
pub(crate) fn timeline<B: DrawingBackend>(timeline: &Timeline, backend: B) -> Result<(), String> {
    let root = backend.into_drawing_area();
    let failed = |e: DrawingAreaErrorKind<B::ErrorType>| e.to_string();
    let below = draw_title(&root, &timeline.title).map_err(failed)?;
    let areas = below.split_evenly((timeline.panels.len(), 1));
    for (panel, area) in timeline.panels.iter().zip(&areas) {
        let (width_px, _) = area.dim_in_pixel();
        let (left, right) = area.split_horizontally(width_px.saturating_sub(LEGEND_WIDTH_PX));
        let colours = colours(panel);
        draw_panel(timeline, panel, &colours, &left).map_err(failed)?;
        draw_legend(panel, &colours, &right).map_err(failed)?;
    }
    root.present().map_err(failed)
}

/// The colour of each band.
fn colours(panel: &Panel) -> Vec<RGBColor> {
    let set = if panel.shape == PanelShape::Stacked { &AREAS[..] } else { &COLOURS[..] };
    let (mut next, mut rests) = (set.iter().cycle(), RESTS.iter().cycle());
    let mut colour = |band: &Band| if band.is_rest { rests.next() } else { next.next() };
    panel.bands.iter().map(|band| colour(band).copied().unwrap_or(BLACK)).collect()
}

fn draw_panel<B: DrawingBackend>(
    timeline: &Timeline,
    panel: &Panel,
    colours: &[RGBColor],
    area: &DrawingArea<B, Shift>,
) -> Drawn<B> {
    let (mut from, mut to) = (f64::INFINITY, f64::NEG_INFINITY);
    for cell in timeline.cells.iter().filter(|c| c.from.is_finite() && c.to.is_finite()) {
        (from, to) = (from.min(cell.from), to.max(cell.to));
    }
    let x = Ruler::between(&timeline.x, from, to);
    let tops: Vec<f64> = match panel.shape {
        PanelShape::Stacked => stacked(panel).last().cloned().unwrap_or_default(),
        PanelShape::Steps => panel.bands.iter().flat_map(|band| band.values.clone()).collect(),
    };
    let y = match panel.y_max {
        Some(end) => Ruler::between(&panel.y, 0.0, end),
        None => Ruler::over(&panel.y, tops.into_iter()),
    };
    let axes = [(&timeline.x, x), (&panel.y, y)];
    let mut context = draw_axes(area, &panel.title, 20, axes)?;
    if panel.shape == PanelShape::Stacked {
        let mut lower = vec![0.0; timeline.cells.len()];
        for (upper, colour) in stacked(panel).into_iter().zip(colours) {
            let bars = timeline.cells.iter().zip(lower.iter().zip(&upper));
            let bars = bars.filter(|(_, (low, high))| high > low).map(|(cell, (low, high))| {
                Rectangle::new([(cell.from, *low), (cell.to, *high)], colour.filled())
            });
            context.draw_series(bars)?;
            lower = upper;
        }
        return Ok(());
    }
    for (band, colour) in panel.bands.iter().zip(colours) {
        for line in steps(timeline, band) {
            context.draw_series(LineSeries::new(line, colour.stroke_width(2)))?;
        }
    }
    Ok(())
}

/// The upper edge of each band of a stack.
fn stacked(panel: &Panel) -> Vec<Vec<f64>> {
    let mut edges: Vec<Vec<f64>> = Vec::new();
    for band in &panel.bands {
        let below = edges.last();
        let edge = band.values.iter().enumerate().map(|(number, value)| {
            let value = if value.is_finite() { value.max(0.0) } else { 0.0 };
            below.and_then(|below| below.get(number)).unwrap_or(&0.0) + value
        });
        let edge = edge.collect();
        edges.push(edge);
    }
    edges
}

/// The lines of a band: a new one begins where an interval or a value is missing.
fn steps(timeline: &Timeline, band: &Band) -> Vec<Vec<(f64, f64)>> {
    let mut lines: Vec<Vec<(f64, f64)>> = Vec::new();
    let mut goes_on = None;
    for (cell, value) in timeline.cells.iter().zip(&band.values) {
        if !value.is_finite() {
            goes_on = None;
            continue;
        }
        let points = [(cell.from, *value), (cell.to, *value)];
        match lines.last_mut().filter(|_| goes_on == Some(cell.from)) {
            Some(line) => line.extend(points),
            None => lines.push(points.to_vec()),
        }
        goes_on = Some(cell.to);
    }
    lines
}

/// The names of the bands beside the panel, in the order in which a stack shows them.
fn draw_legend<B: DrawingBackend>(
    panel: &Panel,
    colours: &[RGBColor],
    area: &DrawingArea<B, Shift>,
) -> Drawn<B> {
    let mut entries: Vec<_> = panel.bands.iter().zip(colours).collect();
    if panel.shape == PanelShape::Stacked {
        entries.reverse();
    }
    let style =
        (FONT, TEXT_PX - 2).into_font().color(&BLACK).pos(Pos::new(HPos::Left, VPos::Center));
    for ((band, colour), line) in entries.into_iter().zip(0..) {
        let y = CAPTION_PX + line * LEGEND_LINE_PX;
        area.draw(&Rectangle::new([(0, y - 6), (14, y + 6)], colour.filled()))?;
        area.draw_text(&shortened(&band.name), &style, (22, y))?;
    }
    Ok(())
}

/// A name that fits the legend.
fn shortened(name: &str) -> String {
    if name.chars().count() <= NAME_CHARS_MAX {
        return name.to_owned();
    }
    name.chars().take(NAME_CHARS_MAX - 2).chain("..".chars()).collect()
}
