//! `memtrace-columns`: the column encoders of `memtrace.parquet` against those of the parquet
//! library, on the same rows.
//!
//! ```text
//!   guest ─▶ keyframe record ─▶ keyframe analyze --tool memtrace ─▶ rows of its last second
//!                                                                     │
//!          by turns, a file for each column:   own encoders ◀─────────┴────────▶ the library's
//! ```
//!
//! Both write Parquet with LZ4. The library uses the encoding of the same kind: its dictionary for
//! `pc`, `page`, `size` and `flags`, DELTA_BINARY_PACKED for `icount`, BYTE_STREAM_SPLIT for `vaddr`.
//! The own encoders get the indices of `pc` and `page` from the plugin, so building them is not
//! measured; the library has to find them in the values.

mod encoders;
mod trace;

use crate::guest_files::SmallGuest;
use crate::sample::Sample;
use crate::{Error, Options, Report};
use encoders::{ColumnEncoder, encode};
use keyframe_analysis::tools::MEMTRACE_COLUMNS;
use keyframe_plot::{Axis, Chart, Figure, Point, Scale, Series};
use trace::Trace;

/// Encoding a column of all rows: time and size.
#[derive(Clone, Default)]
struct Measured {
    ns: Sample,
    bytes: u64,
}

/// Measures both encoders.
pub fn run(options: &Options) -> Result<Report, Error> {
    if !options.only.is_empty() {
        return Err(Error::NoOption { benchmark: "memtrace-columns", option: "--only" });
    }
    let files = SmallGuest::find(options)?;
    let dir = tempfile::tempdir().map_err(Error::io("make a temporary directory"))?;
    let trace = Trace::record(options, &files, dir.path())?;
    let default_rounds = if options.quick { 3 } else { 11 };
    let rounds = options.rounds.unwrap_or(default_rounds);
    let columns = MEMTRACE_COLUMNS;
    let mut measured = vec![[Measured::default(), Measured::default()]; columns.len()];
    for round in 1..=rounds {
        options.say(format!("round {round} of {rounds}: {} rows", trace.rows()));
        for (column, both) in measured.iter_mut().enumerate() {
            for (encoder, measured) in ColumnEncoder::ALL.into_iter().zip(both) {
                let (ns, bytes) = encode(encoder, &trace, column, dir.path())?;
                measured.ns.push(ns);
                measured.bytes = bytes;
            }
        }
    }
    Ok(report(&trace, rounds, &measured))
}

fn report(trace: &Trace, rounds: u16, measured: &[[Measured; 2]]) -> Report {
    let mut report = Report::new("memtrace-columns");
    let rows = trace.rows() as f64;
    let millions = rows / 1e6;
    report.figure("rows", rows);
    report.figure("rounds", rounds.into());
    let mut totals = [(0.0, 0.0); 2];
    for (column, both) in MEMTRACE_COLUMNS.iter().zip(measured) {
        for ((encoder, measured), total) in
            ColumnEncoder::ALL.into_iter().zip(both).zip(&mut totals)
        {
            let (ns, bytes) = (measured.ns.median() / millions, measured.bytes as f64 / millions);
            *total = (total.0 + ns, total.1 + bytes);
            add(&mut report, encoder, column.name, ns, bytes);
        }
        add_ratios(&mut report, column.name);
    }
    for (encoder, (ns, bytes)) in ColumnEncoder::ALL.into_iter().zip(totals) {
        add(&mut report, encoder, "all", ns, bytes);
    }
    add_ratios(&mut report, "all");
    report.plot = chart(&report);
    report
}

/// Draws time and size of each column.
fn chart(report: &Report) -> Figure {
    let figure = |key: String| report.figures.get(&key).copied().unwrap_or(f64::NAN);
    let series = ColumnEncoder::ALL.into_iter().map(|encoder| Series {
        name: encoder.key().into(),
        points: MEMTRACE_COLUMNS
            .iter()
            .map(|column| Point {
                x: figure(format!("{}_{}_million_rows_bytes", encoder.key(), column.name)),
                y: figure(format!("{}_{}_million_rows_ns", encoder.key(), column.name)),
                deviation: None,
            })
            .collect(),
    });
    let chart = Chart {
        title: "columns of memtrace.parquet".into(),
        x: Axis::new("bytes of a million rows", Scale::Linear),
        y: Axis::new("median time for a million rows, ns", Scale::Log),
        series: series.collect(),
    };
    Figure { title: "Own column encoders and the library's".into(), charts: vec![chart] }
}

fn add(report: &mut Report, encoder: ColumnEncoder, column: &str, ns: f64, bytes: f64) {
    report.figure(format!("{}_{column}_million_rows_ns", encoder.key()), ns);
    report.figure(format!("{}_{column}_million_rows_bytes", encoder.key()), bytes);
}

/// Ratios above 1 mean that the library takes longer, or more bytes.
fn add_ratios(report: &mut Report, column: &str) {
    for (name, unit) in [("time", "million_rows_ns"), ("bytes", "million_rows_bytes")] {
        report.ratio_of(
            format!("{column}_library_over_own_{name}"),
            &format!("library_{column}_{unit}"),
            &format!("own_{column}_{unit}"),
        );
    }
}
