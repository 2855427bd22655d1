//! Tests against broken files, lost series and values in the wrong place.

use super::*;

/// x, y, deviation.
type Xyd = (f64, f64, Option<f64>);

fn figure(scale: Scale, series: &[(&str, &[Xyd])]) -> Figure {
    let series = series
        .iter()
        .map(|(name, points)| Series {
            name: (*name).into(),
            points: points
                .iter()
                .map(|(x, y, deviation)| Point {
                    x: *x,
                    y: *y,
                    deviation: deviation.map(Into::into),
                })
                .collect(),
        })
        .collect();
    let chart = Chart {
        title: "pages < 5 & \"more\"".into(),
        x: Axis::new("epoch", Scale::Log),
        y: Axis::new("pages", scale),
        series,
    };
    Figure { title: "a figure".into(), charts: vec![chart.clone(), chart] }
}

const A: &[Xyd] = &[(10.0, 200.0, Some(20.0)), (100.0, 1900.0, Some(90.0)), (1000.0, 2100.0, None)];
const B: &[Xyd] = &[(10.0, 20.0, Some(200.0)), (1000.0, 40.0, Some(0.0))];

#[test]
fn an_svg_names_all_series_and_escapes_text() {
    let svg = figure(Scale::Linear, &[("1 vCPU", A), ("2 <vCPUs>", B)]).svg().unwrap();
    assert!(svg.trim_start().starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    for text in ["a figure", "pages &lt; 5 &amp; ", "1 vCPU", "2 &lt;vCPUs&gt;", "epoch", "2,000"] {
        assert!(svg.contains(text), "no {text:?}");
    }
    assert!(!svg.contains("<vCPUs>"));
    assert_eq!(svg, figure(Scale::Linear, &[("1 vCPU", A), ("2 <vCPUs>", B)]).svg().unwrap());
}

#[test]
fn a_png_can_be_decoded_and_is_not_empty() {
    for scale in [Scale::Linear, Scale::Log] {
        let bytes = figure(scale, &[("a", A), ("b", B)]).png().unwrap();
        let mut reader = png::Decoder::new(std::io::Cursor::new(bytes)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((info.width, info.height), (WIDTH_PX, TITLE_HEIGHT_PX + 2 * CHART_HEIGHT_PX));
        let dark = pixels.chunks(3).filter(|p| p.iter().all(|c| *c < 100)).count();
        assert!((1000..100_000).contains(&dark), "{dark} dark pixels: no text, or nothing else");
    }
}

#[test]
fn values_that_cannot_be_drawn_are_left_out_without_harm() {
    let odd: &[Xyd] = &[
        (0.0, 1.0, None),
        (-1.0, 2.0, None),
        (10.0, f64::NAN, Some(f64::NAN)),
        (f64::INFINITY, 3.0, None),
        (20.0, -4.0, Some(f64::INFINITY)),
    ];
    for scale in [Scale::Linear, Scale::Log] {
        for series in [&[("odd", odd), ("a", A)][..], &[("odd", odd)], &[("none", &[])], &[]] {
            let figure = figure(scale, series);
            assert!(!figure.svg().unwrap().contains("NaN"));
            figure.png().unwrap();
        }
    }
}

#[test]
fn an_invalid_figure_is_refused_with_its_title() {
    let mut none = figure(Scale::Linear, &[]);
    none.charts.clear();
    assert!(none.svg().unwrap_err().to_string().contains("a figure"));
    let many: Vec<(&str, &[_])> = vec![("a", A); SERIES_MAX + 1];
    assert!(figure(Scale::Linear, &many).png().is_err());
    for name in ["a.jpg", "svg", "", "a.svg.gz"] {
        assert!(matches!(FigureFormat::of(Path::new(name)), Err(Error::Name { .. })), "{name}");
    }
    assert_eq!(FigureFormat::of(Path::new("a/b.PNG")).unwrap(), FigureFormat::Png);
    let error = figure(Scale::Linear, &[]).write(Path::new("/nonexistent/a.svg")).unwrap_err();
    assert!(error.to_string().contains("/nonexistent/a.svg"));
}

fn timeline(shape: PanelShape) -> Timeline {
    let band = |name: &str, values: [f64; 3], is_rest| Band {
        name: name.into(),
        values: values.into(),
        is_rest,
    };
    let bands = vec![
        band("do_page_fault", [1.0, 2.0, 3.0], false),
        band("a_name_that_is_too_long_for_the_legend <b>", [2.0, f64::NAN, 1.0], false),
        band("other", [5.0, 1.0, -1.0], true),
    ];
    let y = Axis::new("instructions", Scale::Linear);
    let panel = Panel { title: "by function".into(), y, y_max: None, shape, bands };
    let cells = [(500.0, 600.0), (600.0, 650.0), (800.0, 900.0)];
    Timeline {
        title: "a timeline".into(),
        x: Axis::new("instruction", Scale::Linear),
        cells: cells.into_iter().map(|(from, to)| Cell { from, to }).collect(),
        panels: vec![panel],
    }
}

/// The pixels of a picture, three bytes each.
fn pixels(png: Vec<u8>) -> Vec<u8> {
    let mut reader = png::Decoder::new(std::io::Cursor::new(png)).read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    reader.next_frame(&mut pixels).unwrap();
    pixels
}

#[test]
fn a_timeline_shows_each_band_and_begins_with_the_first_interval() {
    for shape in [PanelShape::Stacked, PanelShape::Steps] {
        let timeline = timeline(shape);
        let svg = timeline.svg().unwrap();
        for text in ["a timeline", "do_page_fault", "a_name_that_is_too_long", "other"] {
            assert!(svg.contains(text), "no {text:?}");
        }
        assert!(!svg.contains("NaN"));
        let has_mark = |mark: &str| svg.lines().any(|line| line.trim() == mark);
        assert!(has_mark("600") && !has_mark("200"), "the axis begins at 500: {svg}");
        let pixels = pixels(timeline.png().unwrap());
        let coloured = |p: &[u8]| p.iter().max().unwrap() - p.iter().min().unwrap() > 60;
        let count = pixels.chunks(3).filter(|p| coloured(p)).count();
        let least = if shape == PanelShape::Stacked { 20_000 } else { 500 };
        assert!(count > least, "{shape:?}: {count} coloured pixels");
    }
}

#[test]
fn a_stack_fills_the_heights_of_its_values() {
    let mut full = timeline(PanelShape::Stacked);
    full.cells.truncate(1);
    full.panels[0].y_max = Some(8.0);
    for band in &mut full.panels[0].bands {
        band.values.truncate(1);
    }
    // 1, 2 and 5 of 8: no white is left, and the shares of the colours are those of the values.
    let pixels = pixels(full.png().unwrap());
    let count = |rgb: [u8; 3]| pixels.chunks(3).filter(|p| **p == rgb).count() as f64;
    let (first, second, rest) =
        (count([51, 34, 136]), count([136, 204, 238]), count([190, 190, 190]));
    assert!((second / first - 2.0).abs() < 0.1, "{first} {second}");
    assert!((rest / first - 5.0).abs() < 0.2, "{first} {rest}");
}

#[test]
fn an_invalid_timeline_is_refused_with_its_title() {
    let whole = timeline(PanelShape::Steps);
    let mut odd = whole.clone();
    odd.cells.pop();
    let refused = odd.svg().unwrap_err().to_string();
    assert!(refused.contains("a timeline") && refused.contains("do_page_fault"), "{refused}");
    let without = [
        Timeline { cells: Vec::new(), ..whole.clone() },
        Timeline { panels: Vec::new(), ..whole.clone() },
        Timeline { cells: vec![whole.cells[0]; CELLS_MAX + 1], ..whole.clone() },
    ];
    assert!(without.iter().all(|one| one.png().is_err()));
    // Intervals that are no range are drawn as nothing.
    let cells = vec![Cell { from: f64::NAN, to: 7.0 }; 3];
    assert!(!Timeline { cells, ..whole }.svg().unwrap().contains("NaN"));
}
