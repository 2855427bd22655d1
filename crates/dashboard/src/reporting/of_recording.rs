//! The parts of a report about a recording: its facts, its intervals, and analyses of it.

use super::ReportPage;
use crate::error::{Error, Result};
use keyframe_plot::{Axis, Chart, Figure, Point, Scale, Series};
use keyframe_replay::interval::{Interval, RecordedCheckpoint, intervals};
use keyframe_replay::{Recording, RecordingEnding};
use keyframe_replay_driver::previous_timings;
use keyframe_store::Sealed;
use keyframe_units::{human_bytes, human_duration, percentile};
use std::path::Path;

/// The most rows of the table of intervals. The plot shows all intervals.
const ROWS_MAX: usize = 200;

/// Returns those checkpoints of `sealed` that belong to `recording`, each with its instruction
/// count, in the order of these counts.
pub fn checkpoints(
    recording: &Recording,
    sealed: Vec<Sealed>,
) -> Vec<(RecordedCheckpoint, Sealed)> {
    let of = |one: Sealed| {
        let place = one.meta.machine.recorded.as_ref()?;
        let is_ours = place.recording == recording.meta.id;
        is_ours.then_some((RecordedCheckpoint { icount: place.icount, checkpoint: one.id }, one))
    };
    let mut all: Vec<_> = sealed.into_iter().filter_map(of).collect();
    all.sort_by_key(|(place, _)| *place);
    all
}

/// Adds to `page` the part "Recording": a table of facts about `recording` and, if it has
/// checkpoints, its intervals as a plot and a table. `places` are the recording's checkpoints.
///
/// Error: the plot cannot be drawn.
pub fn add(
    page: &mut ReportPage,
    recording: &Recording,
    places: Vec<RecordedCheckpoint>,
) -> Result<()> {
    let meta = &recording.meta;
    let newest = places.iter().map(|place| place.icount).max().unwrap_or(0);
    let instructions =
        if meta.ending == RecordingEnding::Recording { newest } else { meta.instructions };
    let all = intervals(places, instructions);
    page.part("Recording");
    add_facts(page, recording, instructions, all.len());
    if all.is_empty() {
        page.line("It has no checkpoints, and so no intervals: keyframe segment takes them from a replay.");
        return Ok(());
    }
    add_lengths(page, &all)?;
    add_intervals(page, &all);
    Ok(())
}

/// Adds the table of facts. `instructions` is the number of recorded instructions.
fn add_facts(page: &mut ReportPage, recording: &Recording, instructions: u64, intervals: usize) {
    let meta = &recording.meta;
    let ending = match meta.ending {
        RecordingEnding::Recording => "it is still being made",
        RecordingEnding::Complete => "complete",
        RecordingEnding::Cut => "cut: QEMU was killed, or could not write its log",
    };
    let seconds = meta.duration_ns as f64 / 1e9;
    let speed = if seconds > 0.0 {
        format!("{:.1} million a second", instructions as f64 / seconds / 1e6)
    } else {
        "-".into()
    };
    let log = format!(
        "{} as QEMU wrote it, {} on disk",
        human_bytes(meta.log_bytes),
        human_bytes(recording.stored_log_bytes())
    );
    page.facts(
        "What was recorded",
        &[
            ("VM", meta.vm.clone()),
            ("Began (UTC)", meta.began_at.to_string()),
            ("Took", human_duration(meta.duration_ns)),
            ("Ended", ending.into()),
            ("Instructions", format!("{instructions}, {speed}")),
            ("Log", log),
            ("Intervals", intervals.to_string()),
            ("QEMU", meta.qemu_version.clone()),
            ("Command", meta.user_command.join(" ")),
        ],
    );
}

/// Adds the distribution of the intervals' lengths in instructions, as a table and as a plot.
fn add_lengths(page: &mut ReportPage, all: &[Interval]) -> Result<()> {
    let mut lengths: Vec<u64> = all.iter().map(Interval::len).collect();
    lengths.sort_unstable();
    let at = |percent| percentile(&lengths, percent).to_string();
    page.table(
        "Instructions of an interval",
        &["Shortest", "Median", "90 %", "Longest"],
        &[vec![at(0), at(50), at(90), at(100)]],
    );
    let points = all.iter().map(|one| Point {
        x: f64::from(one.index),
        y: one.len() as f64 / 1e6,
        deviation: None,
    });
    let chart = Chart {
        title: "Instructions of each interval".into(),
        x: Axis::new("interval", Scale::Linear),
        y: Axis::new("million instructions", Scale::Linear),
        series: vec![Series { name: "instructions".into(), points: points.collect() }],
    };
    page.figure(
        &Figure { title: String::new(), charts: vec![chart] },
        "How much there is to replay in each interval.",
    )
}

/// Adds the table of the first [`ROWS_MAX`] intervals.
fn add_intervals(page: &mut ReportPage, all: &[Interval]) {
    let row = |one: &Interval| {
        let end = one.end.map_or_else(|| "the log's".into(), |id| id.to_string());
        vec![
            one.index.to_string(),
            one.begin.checkpoint.to_string(),
            end,
            one.from_icount.to_string(),
            one.len().to_string(),
        ]
    };
    let rows: Vec<_> = all.iter().take(ROWS_MAX).map(row).collect();
    let caption = if all.len() > ROWS_MAX { "The first intervals" } else { "Intervals" };
    page.table(
        caption,
        &["Interval", "From checkpoint", "To", "First instruction", "Instructions"],
        &rows,
    );
}

/// Adds to `page` a part about the analysis in the directory `out`. Error: its files cannot be
/// read.
pub fn add_analysis(page: &mut ReportPage, out: &Path) -> Result<()> {
    let (head, took) = previous_timings(out)?;
    page.part(&format!("Analysis {}", head.tool));
    let mut each: Vec<u64> = took.iter().map(|one| one.wall_ns).collect();
    each.sort_unstable();
    let at = |percent| human_duration(percentile(&each, percent));
    let begin = took.iter().map(|one| one.began_at_ns).min().unwrap_or(0);
    let end = took.iter().map(|one| one.began_at_ns.saturating_add(one.wall_ns)).max().unwrap_or(0);
    let (sum, span) = (each.iter().sum::<u64>(), end.saturating_sub(begin));
    let at_once = if span > 0 {
        format!("{:.1} at a time, on average", sum as f64 / span as f64)
    } else {
        "-".into()
    };
    page.facts(
        "How it went",
        &[
            ("Directory", out.display().to_string()),
            ("Arguments", head.arguments.join(" ")),
            ("Intervals", format!("{} of {} done", took.len(), head.intervals.len())),
            ("Tried again", took.iter().filter(|one| one.tries > 1).count().to_string()),
            ("An interval took", format!("{} in the median, {} at most", at(50), at(100))),
            ("All together", human_duration(sum)),
            ("From the first's start to the last's end", human_duration(span)),
            ("Side by side", at_once),
        ],
    );
    if head.is_approximate {
        page.line(
            "It is of a run that was not recorded, so what it shows need not be what happened.",
        );
    }
    page.table("Results", &["File", "Size"], &result_files(out)?);
    Ok(())
}

/// The name and size of each result in the analysis's directory, in the order of the names.
fn result_files(out: &Path) -> Result<Vec<Vec<String>>> {
    let results = std::fs::read_dir(out)
        .map_err(|source| Error::Io { operation: format!("read {}", out.display()), source })?;
    let mut files: Vec<Vec<String>> = results
        .flatten()
        .filter_map(|file| {
            Some((file.file_name().to_string_lossy().into_owned(), file.metadata().ok()?))
        })
        .filter(|(name, found)| {
            found.is_file() && !["lock", "analysis.json", "intervals.json"].contains(&name.as_str())
        })
        .map(|(name, found)| vec![name, human_bytes(found.len())])
        .collect();
    files.sort();
    Ok(files)
}
