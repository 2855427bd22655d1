//! Draws a figure with any backend of plotters.

use crate::axis::{Axis, Ruler};
use crate::{Chart, Deviation, Figure, TITLE_HEIGHT_PX};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Colours that colour-blind people can tell apart: Okabe and Ito's set without yellow, which is
/// faint on white.
pub(crate) const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(60, 60, 60),
];
pub(crate) const GRID: RGBColor = RGBColor(225, 225, 225);
pub(crate) const TEXT_PX: u32 = 16;
pub(crate) const FONT: &str = "sans-serif";
/// Where the legend's rows begin: under the vertical axis.
const LEGEND_LEFT_PX: u32 = 96;
const LEGEND_ROW_PX: u32 = 22;
/// The length of a line in the legend, with the gap behind it.
const LEGEND_LINE_PX: u32 = 26;
/// The gap between two entries of a row.
const LEGEND_GAP_PX: u32 = 18;

/// Draws `figure`. The error is the text of the backend's error.
pub(crate) fn figure<B: DrawingBackend>(figure: &Figure, backend: B) -> Result<(), String> {
    let root = backend.into_drawing_area();
    let failed = |e: DrawingAreaErrorKind<B::ErrorType>| e.to_string();
    let below = draw_title(&root, &figure.title).map_err(failed)?;
    let areas = below.split_evenly((figure.charts.len(), 1));
    for (chart, area) in figure.charts.iter().zip(&areas) {
        // A single chart with the figure's title needs no second one.
        let title = if chart.title == figure.title { "" } else { &chart.title };
        draw_chart(chart, title, area).map_err(failed)?;
    }
    root.present().map_err(failed)
}

/// The result of drawing with a backend.
pub(crate) type Drawn<B, T = ()> =
    Result<T, DrawingAreaErrorKind<<B as DrawingBackend>::ErrorType>>;
type Context<'a, B> = ChartContext<'a, B, Cartesian2d<Ruler, Ruler>>;

/// Clears the picture, draws its title, and returns the area below.
pub(crate) fn draw_title<B: DrawingBackend>(
    root: &DrawingArea<B, Shift>,
    title: &str,
) -> Drawn<B, DrawingArea<B, Shift>> {
    root.fill(&WHITE)?;
    let (width_px, _) = root.dim_in_pixel();
    let style =
        (FONT, TEXT_PX + 2).into_font().color(&BLACK).pos(Pos::new(HPos::Center, VPos::Top));
    root.draw_text(title, &style, ((width_px / 2) as i32, 12))?;
    Ok(root.split_vertically(TITLE_HEIGHT_PX).1)
}

fn draw_chart<B: DrawingBackend>(
    chart: &Chart,
    title: &str,
    area: &DrawingArea<B, Shift>,
) -> Drawn<B> {
    let area = draw_legend(chart, area)?;
    let points = || {
        let all = chart.series.iter().flat_map(|s| &s.points);
        all.filter(|p| chart.x.shows(p.x) && chart.y.shows(p.y))
    };
    let x = Ruler::over(&chart.x, points().map(|p| p.x));
    let y = Ruler::over(
        &chart.y,
        points().flat_map(|p| [p.y, p.y + p.deviation.map_or(0.0, |d| d.above)]),
    );
    let axes = [(&chart.x, x), (&chart.y, y.clone())];
    let mut context = draw_axes(&area, title, 28, axes)?;
    for (index, colour) in (0..chart.series.len()).zip(COLOURS.iter().cycle()) {
        draw_series(&mut context, chart, index, *colour, &y)?;
    }
    Ok(())
}

/// Draws the names of the series below the chart, where they cover no data, and returns the area that
/// is left for the chart. Draws nothing for one series.
fn draw_legend<B: DrawingBackend>(
    chart: &Chart,
    area: &DrawingArea<B, Shift>,
) -> Drawn<B, DrawingArea<B, Shift>> {
    if chart.series.len() < 2 {
        return Ok(area.clone());
    }
    let style =
        (FONT, TEXT_PX - 2).into_font().color(&BLACK).pos(Pos::new(HPos::Left, VPos::Center));
    let (width_px, height_px) = area.dim_in_pixel();
    let (mut places, mut at) = (Vec::new(), (LEGEND_LEFT_PX, 0));
    for series in &chart.series {
        let text_px = area.estimate_text_size(&series.name, &style)?.0;
        let entry_px = LEGEND_LINE_PX + text_px + LEGEND_GAP_PX;
        if at.0 > LEGEND_LEFT_PX && at.0 + entry_px > width_px {
            at = (LEGEND_LEFT_PX, at.1 + 1);
        }
        places.push(at);
        at.0 += entry_px;
    }
    let rows_px = (at.1 + 1) * LEGEND_ROW_PX;
    let (rest, legend) = area.split_vertically(height_px.saturating_sub(rows_px));
    for ((series, (x, row)), colour) in chart.series.iter().zip(places).zip(COLOURS.iter().cycle())
    {
        let (x, y) = (x as i32, (row * LEGEND_ROW_PX + LEGEND_ROW_PX / 2) as i32);
        let end = x + LEGEND_LINE_PX as i32;
        legend.draw(&PathElement::new([(x, y), (end - 6, y)], colour.stroke_width(2)))?;
        legend.draw_text(&series.name, &style, (end, y))?;
    }
    Ok(rest)
}

/// Draws a title and two axes with their grid, the horizontal one first. Leaves `margin_right_px` free
/// on the right.
pub(crate) fn draw_axes<'a, B: DrawingBackend>(
    area: &DrawingArea<B, Shift>,
    title: &str,
    margin_right_px: u32,
    [(x_axis, x), (y_axis, y)]: [(&Axis, Ruler); 2],
) -> Drawn<B, Context<'a, B>> {
    let mut context = ChartBuilder::on(area)
        .caption(title, (FONT, TEXT_PX))
        .margin(12)
        .margin_right(margin_right_px)
        .x_label_area_size(48)
        .y_label_area_size(84)
        .build_cartesian_2d(x, y)?;
    context
        .configure_mesh()
        .x_desc(&x_axis.label)
        .y_desc(&y_axis.label)
        .x_labels(10)
        .y_labels(7)
        .label_style((FONT, TEXT_PX - 2))
        .axis_desc_style((FONT, TEXT_PX - 2))
        .bold_line_style(GRID)
        .light_line_style(WHITE)
        .draw()?;
    Ok(context)
}

fn draw_series<B: DrawingBackend>(
    context: &mut Context<'_, B>,
    chart: &Chart,
    index: usize,
    colour: RGBColor,
    y: &Ruler,
) -> Drawn<B> {
    let Some(series) = chart.series.get(index) else { return Ok(()) };
    let points: Vec<_> = series
        .points
        .iter()
        .filter(|p| chart.x.shows(p.x) && chart.y.shows(p.y))
        .copied()
        .collect();
    let bars = points.iter().filter_map(|p| {
        let is_bar = |d: &Deviation| (d.below + d.above).is_finite() && d.below + d.above > 0.0;
        let Deviation { below, above } = p.deviation.filter(is_bar)?;
        let (low, high) = (y.clamp(p.y - below), y.clamp(p.y + above));
        Some(ErrorBar::new_vertical(p.x, low, p.y, high, colour.mix(0.6).filled(), 10))
    });
    context.draw_series(bars)?;
    let dots = points.iter().map(|p| Circle::new((p.x, p.y), 3, colour.filled()));
    context.draw_series(dots)?;
    let line = LineSeries::new(points.iter().map(|p| (p.x, p.y)), colour.stroke_width(2));
    context.draw_series(line)?;
    Ok(())
}
