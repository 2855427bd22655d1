//! The speed-up model against the measurements: constants are fitted to some intervals of a workload,
//! and predict the run times of all of them.
//!
//! ```text
//!   intervals of 0.5, 2, 8 s ─▶ t_start, t_i, s_sim/s_log ─┬▶ equation 3.5's busy time ─┐
//!                                                         └▶ simulated cluster ─────────┴▶ over measured
//!   intervals of 1, 4 s ───────────────────────────────────▶ not fitted: a test
//! ```
//!
//! A worker replays neighbouring intervals in one QEMU. So `t_start`, the start of QEMU and the
//! translation of the code that it finds first, is paid once for a range, here once for each job. The
//! paper's `t_i` is the cost of each further interval: the part of its replay that does not grow with
//! its length.

use super::evaluated_run::{EvaluatedRun, mean};
use super::rounds::{RunRounds, Spread};
use super::simulations::{IntervalTime, MeasuredAnalysis};
use crate::Error;
use keyframe_model::simulation::{Cluster, Dispatch, SimulatedInterval, simulate};
use keyframe_model::{Constants, Formula, SlowdownFit, TimedSimulation, fit_slowdown};
use rustc_hash::FxHashMap;

/// The intervals to which constants are fitted.
pub const FITTED_MS: [u64; 3] = [500, 2000, 8000];
/// The numbers of jobs that are measured.
pub const JOBS: [u64; 2] = [1, 2];

/// The constants of one workload with one number of jobs.
#[derive(Clone, Copy, Debug)]
pub struct FittedConstants {
    pub jobs: u64,
    /// The line through the intervals of all rounds.
    pub fit: SlowdownFit,
    /// The time to start a range.
    pub t_start_s: f64,
    /// The same over the rounds, each fitted alone.
    pub t_i_s: Spread,
    pub slowdown: Spread,
    pub t_start_spread_s: Spread,
}

/// A predicted and a measured time of an analysis.
#[derive(Clone, Copy, Debug)]
pub struct PredictedAnalysis {
    pub jobs: u64,
    /// True if the constants were not fitted to this interval.
    pub is_test: bool,
    pub measured_s: Spread,
    /// The busy time of equation 3.5, and the start.
    pub formula_s: Spread,
    /// A simulated cluster with the lengths of the run's intervals.
    pub simulated_s: Spread,
    /// Ratios within a round.
    pub formula_over_measured: Spread,
    pub simulated_over_measured: Spread,
}

/// The predicted and measured time of a recording that is analysed meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct PredictedImmediate {
    pub jobs: u64,
    pub measured_s: Spread,
    /// By equation 2.1, for enough nodes.
    pub enough_s: Spread,
    /// By equation 3.5, for too few nodes.
    pub limited_s: Spread,
    /// The number of nodes from which on equation 2.1 holds.
    pub nodes_demanded: Spread,
    pub simulated_s: Spread,
}

/// Returns the constants of `workload` for each number of jobs, fitted to its intervals of
/// [`FITTED_MS`].
pub fn fit(groups: &[RunRounds], workload: &str) -> Vec<FittedConstants> {
    let fitted: Vec<&RunRounds> = groups
        .iter()
        .filter(|group| group.workload().key == workload && is_fitted(group.every_s()))
        .collect();
    JOBS.iter().filter_map(|jobs| fit_jobs(&fitted, *jobs)).collect()
}

fn is_fitted(every_s: f64) -> bool {
    FITTED_MS.contains(&((every_s * 1e3).round() as u64))
}

fn fit_jobs(groups: &[&RunRounds], jobs: u64) -> Option<FittedConstants> {
    let mut by_round: FxHashMap<u16, Vec<IntervalTime>> = FxHashMap::default();
    for run in groups.iter().flat_map(|group| group.rounds()) {
        let intervals = run.simulations.with_jobs(jobs).map(|one| &one.intervals[..]);
        by_round.entry(run.round).or_default().extend(intervals.unwrap_or_default());
    }
    let all: Vec<IntervalTime> = by_round.values().flatten().copied().collect();
    let fit = fit_intervals(&all)?;
    let fits: Vec<(SlowdownFit, f64)> = by_round
        .values()
        .filter_map(|intervals| {
            let fit = fit_intervals(intervals)?;
            Some((fit, start_s(intervals, &fit)))
        })
        .collect();
    Some(FittedConstants {
        jobs,
        fit,
        t_start_s: start_s(&all, &fit),
        t_i_s: Spread::of(fits.iter().map(|(fit, _)| fit.t_i)),
        slowdown: Spread::of(fits.iter().map(|(fit, _)| fit.slowdown)),
        t_start_spread_s: Spread::of(fits.iter().map(|(_, start_s)| *start_s)),
    })
}

/// Returns the line through the times of the intervals to which a worker went on. If there are none,
/// it is through all, without the starts of QEMU.
fn fit_intervals(intervals: &[IntervalTime]) -> Option<SlowdownFit> {
    let timed = |one: &IntervalTime| TimedSimulation {
        recorded_s: one.recorded_s,
        simulated_s: one.replay_s - one.start_s.unwrap_or(0.0),
    };
    let later: Vec<TimedSimulation> =
        intervals.iter().filter(|one| one.start_s.is_none()).map(timed).collect();
    let all = || intervals.iter().map(timed).collect::<Vec<_>>();
    fit_slowdown(&if later.is_empty() { all() } else { later })
}

/// Returns the mean time by which the first interval of a range takes longer than the line says: the
/// start of QEMU, and code that is not translated yet. It is 0 if no range began.
fn start_s(intervals: &[IntervalTime], fit: &SlowdownFit) -> f64 {
    let firsts = intervals.iter().filter(|one| one.start_s.is_some());
    let longer_s = |one: &IntervalTime| one.replay_s - fit.t_i - fit.slowdown * one.recorded_s;
    mean(firsts.map(longer_s)).max(0.0)
}

/// Returns what `constants` predict for the analyses after the recordings of `group`; `None` if none
/// was made with their number of jobs.
pub fn analysis(
    group: &RunRounds,
    constants: &FittedConstants,
) -> Result<Option<PredictedAnalysis>, Error> {
    let mut rows = Vec::new();
    for measured in
        group.rounds().iter().filter_map(|run| run.simulations.with_jobs(constants.jobs))
    {
        rows.push((
            measured.analysis_s,
            formula_s(measured, constants),
            simulated_s(measured, constants)?,
        ));
    }
    let spread = |of: fn(&(f64, f64, f64)) -> f64| Spread::of(rows.iter().map(of));
    Ok((!rows.is_empty()).then(|| PredictedAnalysis {
        jobs: constants.jobs,
        is_test: !is_fitted(group.every_s()),
        measured_s: spread(|row| row.0),
        formula_s: spread(|row| row.1),
        simulated_s: spread(|row| row.2),
        formula_over_measured: spread(|row| row.1 / row.0),
        simulated_over_measured: spread(|row| row.2 / row.0),
    }))
}

/// Returns `n (t_i + s_sim/s_log L) / N`, the busy time of a node, and the start of its range.
fn formula_s(measured: &MeasuredAnalysis, constants: &FittedConstants) -> f64 {
    let count = measured.intervals.len() as f64;
    let recorded_s: f64 = measured.intervals.iter().map(|one| one.recorded_s).sum();
    let busy_s = count * constants.fit.t_i + constants.fit.slowdown * recorded_s;
    constants.t_start_s + busy_s / measured.jobs as f64
}

/// Simulates a cluster of as many nodes as jobs. Each node starts once, and takes the intervals in
/// their order.
fn simulated_s(measured: &MeasuredAnalysis, constants: &FittedConstants) -> Result<f64, Error> {
    let intervals: Vec<SimulatedInterval> = measured
        .intervals
        .iter()
        .map(|one| interval(0.0, one.recorded_s, &constants.fit))
        .collect();
    cluster_s(&intervals, measured.jobs, constants.t_start_s, Dispatch::Deferred)
}

fn interval(ready_s: f64, recorded_s: f64, fit: &SlowdownFit) -> SimulatedInterval {
    let work_s = fit.t_i + fit.slowdown * recorded_s;
    SimulatedInterval { ready_s, work_s, image_bytes: 0.0, new_bytes: 0.0 }
}

fn cluster_s(
    intervals: &[SimulatedInterval],
    nodes: u64,
    start_s: f64,
    dispatch: Dispatch,
) -> Result<f64, Error> {
    let mut cluster = Cluster { dispatch, ..Cluster::of(nodes as usize) };
    cluster.nodes.iter_mut().for_each(|node| node.start_s = start_s);
    let outcome =
        simulate(intervals, &cluster).map_err(|e| Error::failed("simulate a cluster", e))?;
    Ok(outcome.makespan_s)
}

/// Returns what `constants`, of one job, predict for the recordings of `group` with an analysis
/// beside them; `None` if there are none.
pub fn following(
    group: &RunRounds,
    constants: &FittedConstants,
) -> Result<Option<PredictedImmediate>, Error> {
    let mut rows = Vec::new();
    let mut jobs = 0;
    for run in group.rounds() {
        let Some(followed) = &run.followed else { continue };
        jobs = followed.jobs;
        let pause_s = mean(followed.checkpoints.iter().map(|one| one.pause_ns / 1e9));
        let paused_s: f64 = followed.checkpoints.iter().map(|one| one.pause_ns / 1e9).sum();
        let model = Constants {
            // s_log is 1: the recording stands for the VM, because no faster run of this guest under TCG exists.
            t_vm: followed.recorded_s - paused_s,
            s_sim: constants.fit.slowdown,
            s_log: 1.0,
            t_c: pause_s,
            t_i: constants.fit.t_i,
            s_cp: None,
        };
        let length_s = model.t_vm / (followed.checkpoints.len() + 1) as f64;
        let start_s = constants.t_start_s;
        let time_s = |formula| start_s + model.run_time(formula, jobs, length_s);
        rows.push([
            followed.run_time_s,
            time_s(Formula::Enough),
            time_s(Formula::Limited),
            model.nodes_demanded(length_s),
            cluster_s(&followed_intervals(run, constants), jobs, start_s, Dispatch::Immediate)?,
        ]);
    }
    let spread = |at: usize| Spread::of(rows.iter().map(|row| row[at]));
    Ok((!rows.is_empty()).then(|| PredictedImmediate {
        jobs,
        measured_s: spread(0),
        enough_s: spread(1),
        limited_s: spread(2),
        nodes_demanded: spread(3),
        simulated_s: spread(4),
    }))
}

/// Returns the intervals between the checkpoints of a followed recording. Each is ready when the
/// checkpoint at its end is sealed; the last one ends with the recording.
fn followed_intervals(run: &EvaluatedRun, constants: &FittedConstants) -> Vec<SimulatedInterval> {
    let Some(followed) = &run.followed else { return Vec::new() };
    let mut before_s = 0.0;
    let ends = followed
        .checkpoints
        .iter()
        .map(|one| (one.at_s, one.at_s + (one.pause_ns + one.processing_ns()) / 1e9))
        .chain([(followed.recorded_s, followed.recorded_s)]);
    ends.map(|(end_s, ready_s)| {
        let recorded_s = (end_s - before_s).max(0.0);
        before_s = end_s;
        interval(ready_s.max(0.0), recorded_s, &constants.fit)
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(lengths: &[f64]) -> Vec<IntervalTime> {
        let time = |(at, length): (usize, &f64)| {
            let start_s = (at == 0).then_some(0.5);
            let replay_s = 0.1 + 2.0 * length + start_s.unwrap_or(0.0);
            IntervalTime { recorded_s: *length, instructions: 1.0, replay_s, start_s }
        };
        lengths.iter().enumerate().map(time).collect()
    }

    #[test]
    fn constants_of_exact_times_predict_them() {
        let intervals = times(&[1.0, 2.0, 4.0, 1.0]);
        let fit = fit_intervals(&intervals).unwrap();
        assert!((fit.t_i - 0.1).abs() < 1e-9 && (fit.slowdown - 2.0).abs() < 1e-9, "{fit:?}");
        let none = Spread::of(std::iter::empty());
        let constants = FittedConstants {
            jobs: 1,
            fit,
            t_start_s: start_s(&intervals, &fit),
            t_i_s: none,
            slowdown: none,
            t_start_spread_s: none,
        };
        let analysis_s: f64 = intervals.iter().map(|one| one.replay_s).sum();
        let measured = MeasuredAnalysis { jobs: 1, analysis_s, intervals };
        assert!((formula_s(&measured, &constants) - analysis_s).abs() < 1e-9);
        assert!((simulated_s(&measured, &constants).unwrap() - analysis_s).abs() < 1e-9);
        // Two nodes halve the busy time, and each starts once; whole intervals cannot be halved.
        let on_two = MeasuredAnalysis { jobs: 2, ..measured };
        let busy_s = analysis_s - 0.5;
        assert!((formula_s(&on_two, &constants) - (0.5 + busy_s / 2.0)).abs() < 1e-9);
        assert!(simulated_s(&on_two, &constants).unwrap() >= formula_s(&on_two, &constants));
    }
}
