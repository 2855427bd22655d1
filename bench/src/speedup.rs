//! `speedup`: an analysis with several jobs over one replay through all intervals.
//!
//! ```text
//!   tool     one replay of all   analyze --jobs 1   analyze --jobs 2   two analyses at once
//!             T_s                 T_1                T_2                T_both: gain of the machine
//!                                                                       2 T_1 / T_both
//!   live     record, and analyze --follow --jobs 2 meanwhile; the same after the recording
//!   wait     analyze --jobs 1, 2, 4, 8, 16 with the stand-in for a slow simulator
//!   nodes    analyze --on slurm with 1, 2, 4, 8, 16 nodes with the stand-in, over links
//! ```
//!
//! The peer is what a user would do without Keyframe's intervals: one replay, with the same tool.
//! The gain of two independent analyses is the most that this machine gives to two jobs, so that
//! `speedup_over_gain` shows what the distribution costs. The results of one job and of two must equal
//! those of one replay, byte for byte; otherwise the benchmark fails.

mod live;
mod node_cluster;
mod nodes;
mod waiting;

use crate::part_selection::PartSelection;
use crate::replay::recording::Recording;
use crate::replay::run_method::{self, RunMethod};
use crate::replay::workload::{self, PreparedWorkload};
use crate::sample::Sample;
use crate::{Error, Options, Report};
use jiff::Timestamp;
use keyframe_plot::Figure;
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, Instant};

/// The tools that are measured if `--only` names none.
const TOOLS: [&str; 4] = ["icount", "hot", "memtrace", "cache"];
/// Further tools that `--only` can name.
const OTHER_TOOLS: [&str; 3] = ["coverage", "working-set", "syscalls"];
/// The part that analyses during the recording.
const LIVE: &str = "live";
/// The tools of part `live`.
const LIVE_TOOLS: [&str; 2] = ["icount", "hot"];
/// The part with the stand-in.
const WAIT: &str = "wait";
/// The parts with the stand-in on the nodes of a cluster.
const NODES: [&str; 3] = ["nodes_deferred", "nodes_immediate", "nodes_delivery"];

/// Longest time until a recording has begun.
const RECORDING_TIMEOUT: Duration = Duration::from_secs(60);

/// The extent of the benchmark.
struct Plan {
    rounds: usize,
    /// The amount of work that is recorded, about one second each.
    units: u32,
    /// The interval between checkpoints.
    every: &'static str,
    /// The number of seconds that are recorded for the stand-in.
    wait_units: u32,
    /// Its interval between checkpoints.
    wait_every: &'static str,
    /// How many times its recorded time each interval takes.
    wait_factor: u64,
    nodes: nodes::Plan,
}

const FULL: Plan = Plan {
    rounds: 3,
    units: 20,
    every: "1s",
    wait_units: 40,
    wait_every: "250ms",
    wait_factor: 31,
    nodes: nodes::FULL,
};
const QUICK: Plan = Plan {
    rounds: 1,
    units: 5,
    every: "500ms",
    wait_units: 8,
    wait_every: "250ms",
    wait_factor: 8,
    nodes: nodes::QUICK,
};

/// The times of a tool, by round.
#[derive(Default)]
struct ToolTimes {
    one_replay_ns: Sample,
    one_job_ns: Sample,
    two_jobs_ns: Sample,
    both_ns: Sample,
    /// Ratios within a round.
    one_job_over_one_replay: Sample,
    speedup: Sample,
    gain: Sample,
    speedup_over_gain: Sample,
}

/// Measures.
pub fn run(options: &Options) -> Result<Report, Error> {
    let names =
        TOOLS.into_iter().chain(OTHER_TOOLS).chain([LIVE, WAIT]).chain(NODES).map(str::to_owned);
    let selection = PartSelection::new("speedup", &options.only, names)?;
    let is_named = !options.only.is_empty();
    let plan = if options.quick { &QUICK } else { &FULL };
    let dir = tempfile::tempdir().map_err(Error::io("make a temporary directory"))?;
    let mut report = Report::new("speedup");
    let tools: Vec<&str> = TOOLS
        .into_iter()
        .chain(OTHER_TOOLS.into_iter().filter(|_| is_named))
        .filter(|tool| selection.has(tool))
        .collect();
    let mut charts = Vec::new();
    if !tools.is_empty() {
        let place = dir.path().join("recording");
        record(options, ("processes", plan.units), plan.every, dir.path(), &place)?;
        let recording = Recording { options, dir: &place };
        report.figure("instructions", recording.instructions()? as f64);
        for tool in tools {
            let times = tool_times(options, plan, &recording, tool)?;
            add_tool(&mut report, tool, &times);
        }
    }
    if selection.has(LIVE) {
        let work = (("processes", plan.units), plan.every);
        for tool in LIVE_TOOLS {
            live::measure(options, tool, work, dir.path(), &mut report)?;
        }
    }
    if is_named && selection.has(WAIT) {
        charts.push(waiting::measure(options, plan, dir.path(), &mut report)?);
    }
    let of_nodes = NODES.map(|part| is_named && selection.has(part));
    if of_nodes.contains(&true) {
        let measured = nodes::measure(options, &plan.nodes, of_nodes, dir.path(), &mut report)?;
        charts.extend(measured);
    }
    report.plot = Figure { title: "Parallel analysis over one replay".into(), charts };
    Ok(report)
}

/// Records `units` of workload `key` into `place`, with a checkpoint every `every`.
fn record(
    options: &Options,
    (key, units): (&str, u32),
    every: &'static str,
    dir: &Path,
    place: &Path,
) -> Result<(), Error> {
    let workload = workload::ALL
        .iter()
        .find(|workload| workload.key == key)
        .ok_or_else(|| Error::failed("find the workload", key))?;
    let work = PreparedWorkload::prepare(workload, units, options, dir)?;
    run_method::run(options, &work, RunMethod::Every(every), place).map(drop)
}

/// Analyses with `tool` and checks the result against one replay. Returns the report.
fn checked(recording: &Recording<'_>, arguments: &[&str]) -> Result<Value, Error> {
    let all = [arguments, &["--check-sequential"]].concat();
    let (_, mut reports) = recording.reports(&all, 1)?;
    let report = reports.pop().unwrap_or_default();
    match report["equals_sequential"].as_bool() {
        Some(true) => Ok(report),
        _ => Err(Error::failed(
            format!("analyze {}", arguments.join(" ")),
            "the result is not that of one replay",
        )),
    }
}

fn ns(report: &Value, key: &str) -> f64 {
    report[key].as_f64().unwrap_or(f64::NAN)
}

fn tool_times(
    options: &Options,
    plan: &Plan,
    recording: &Recording<'_>,
    tool: &str,
) -> Result<ToolTimes, Error> {
    let mut times = ToolTimes::default();
    for round in 1..=options.rounds.map_or(plan.rounds, usize::from) {
        options.say(format!("{tool}, round {round}: one job, and one replay"));
        let one = checked(recording, &["--tool", tool, "--jobs", "1"])?;
        options.say(format!("{tool}, round {round}: two jobs, and one replay"));
        let two = checked(recording, &["--tool", tool, "--jobs", "2"])?;
        options.say(format!("{tool}, round {round}: two analyses at once"));
        let (both_ns, _) = recording.reports(&["--tool", tool, "--jobs", "1"], 2)?;
        let [one_job_ns, two_jobs_ns] = [&one, &two].map(|report| ns(report, "wall_ns"));
        let sequential = [&one, &two].map(|report| ns(report, "sequential_wall_ns"));
        let one_replay_ns = f64::midpoint(sequential[0], sequential[1]);
        let (speedup, gain) = (one_replay_ns / two_jobs_ns, 2.0 * one_job_ns / both_ns);
        times.one_replay_ns.push(one_replay_ns);
        times.one_job_ns.push(one_job_ns);
        times.two_jobs_ns.push(two_jobs_ns);
        times.both_ns.push(both_ns);
        // One job and its replay ran in the same command.
        times.one_job_over_one_replay.push(one_job_ns / sequential[0]);
        times.speedup.push(speedup);
        times.gain.push(gain);
        times.speedup_over_gain.push(speedup / gain);
    }
    Ok(times)
}

fn add_tool(report: &mut Report, tool: &str, times: &ToolTimes) {
    let figures = [
        ("one_replay_ns", &times.one_replay_ns),
        ("one_job_ns", &times.one_job_ns),
        ("two_jobs_ns", &times.two_jobs_ns),
        ("two_analyses_at_once_ns", &times.both_ns),
    ];
    for (name, sample) in figures {
        report.figure(format!("{tool}_{name}"), sample.median());
    }
    let ratios = [
        ("speedup_over_gain", &times.speedup_over_gain),
        ("speedup", &times.speedup),
        ("gain", &times.gain),
        ("one_job_over_one_replay", &times.one_job_over_one_replay),
    ];
    for (name, sample) in ratios {
        report.ratio(format!("{name}_{tool}"), sample.median());
        report.ratio(format!("{name}_{tool}_least"), sample.percentile(1));
        report.ratio(format!("{name}_{tool}_most"), sample.percentile(100));
    }
}

/// Records `work` with a checkpoint every `every` into `place`, and calls `analyse` as soon as the
/// first checkpoint is sealed. Returns the value of `analyse`, and the time from the beginning of the
/// recording to the end of `analyse`, in nanoseconds.
fn analyse_meanwhile<T>(
    options: &Options,
    (work, every): ((&str, u32), &'static str),
    dir: &Path,
    place: &Path,
    analyse: impl FnOnce() -> Result<T, Error>,
) -> Result<(T, f64), Error> {
    let (analysed, ended) = std::thread::scope(|scope| {
        let recorder = scope.spawn(|| record(options, work, every, dir, place));
        let begun = wait_for(&place.join("store/checkpoints"));
        let analysed = begun.and_then(|()| analyse());
        let ended = Timestamp::now();
        let recorded = recorder
            .join()
            .map_err(|_| Error::failed("record", "the thread of the recording panicked"))?;
        recorded.and(analysed).map(|analysed| (analysed, ended))
    })?;
    let began = Recording { options, dir: place }.began_at()?;
    Ok((analysed, ended.duration_since(began).as_nanos() as f64))
}

/// Waits until a directory has an entry.
fn wait_for(dir: &Path) -> Result<(), Error> {
    let began = Instant::now();
    while std::fs::read_dir(dir).map_or(0, Iterator::count) == 0 {
        if began.elapsed() > RECORDING_TIMEOUT {
            return Err(Error::failed("record", format!("{} stayed empty", dir.display())));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
