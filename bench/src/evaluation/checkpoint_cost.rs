//! The slowdown of an interval by its checkpoint, `s_cp`: an interval with its checkpoint over the
//! same work without one.
//!
//! | bound | counts as lost | |
//! |---|---|---|
//! | least | the pause | the guest runs at full speed during the processing |
//! | most | the pause and the processing | the guest stands still during the processing |
//! | fitted | what more checkpoints add to the time of an instruction | needs several intervals |
//!
//! The loss of speed during the processing cannot be measured within an interval: QEMU tells the
//! guest's instructions at checkpoints alone. It is fitted over the runs of a workload instead, with
//! the line `seconds / instructions = a + c (checkpoints / instructions)`: `c` is the time that a
//! checkpoint costs, with the pause, the processing and the faults of write protection.

use super::evaluated_run::{EvaluatedRun, mean};
use super::rounds::{RunRounds, Spread};

/// The smallest number of intervals over which the cost is fitted.
const INTERVALS_MIN: usize = 3;

/// The bounds of `s_cp` from the phases of the intervals of the work.
#[derive(Clone, Copy, Debug)]
pub struct SlowdownBounds {
    pub least: Spread,
    pub most: Spread,
}

/// Returns the bounds for the rounds of one workload with one interval.
pub fn bounds(group: &RunRounds) -> SlowdownBounds {
    let slowdown = |lost_ns: fn(&EvaluatedRun) -> f64| {
        group.spread(|run| {
            let interval_ns = run.mean(|one| one.interval_ns);
            let left_ns = interval_ns - lost_ns(run);
            if left_ns > 0.0 { interval_ns / left_ns } else { f64::NAN }
        })
    };
    SlowdownBounds {
        least: slowdown(|run| run.mean(|one| one.pause_ns)),
        most: slowdown(|run| {
            run.mean(|one| (one.pause_ns + one.processing_ns()).min(one.interval_ns))
        }),
    }
}

/// Returns the time that a checkpoint of `workload` costs its guest, in seconds, fitted in each round
/// over its intervals. It has no value if fewer than three intervals were measured. A negative value
/// says that the cost is smaller than the differences between runs.
pub fn fitted_cost_s(groups: &[RunRounds], workload: &str) -> Spread {
    let of_workload: Vec<&RunRounds> =
        groups.iter().filter(|group| group.workload().key == workload).collect();
    let last_round =
        of_workload.iter().flat_map(|group| group.rounds()).map(|run| run.round).max().unwrap_or(0);
    Spread::of((1..=last_round).filter_map(|round| {
        let runs = of_workload.iter().flat_map(|group| group.rounds());
        let points: Vec<(f64, f64)> =
            runs.filter(|run| run.round == round).filter_map(work_of).collect();
        (points.len() >= INTERVALS_MIN).then(|| slope(&points)).flatten()
    }))
}

/// Returns checkpoints and seconds for each instruction of the work.
fn work_of(run: &EvaluatedRun) -> Option<(f64, f64)> {
    let (mut checkpoints, mut seconds, mut instructions) = (0.0, 0.0, 0.0);
    for checkpoint in run.working() {
        let ended = |one: &&super::evaluated_run::IntervalInstructions| {
            one.end_checkpoint == Some(checkpoint.id)
        };
        let Some(interval) = run.instructions.iter().find(ended) else { continue };
        checkpoints += 1.0;
        seconds += checkpoint.interval_ns / 1e9;
        instructions += interval.count;
    }
    (instructions > 0.0).then(|| (checkpoints / instructions, seconds / instructions))
}

fn slope(points: &[(f64, f64)]) -> Option<f64> {
    let (mean_x, mean_y) =
        (mean(points.iter().map(|point| point.0)), mean(points.iter().map(|point| point.1)));
    let across: f64 = points.iter().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum();
    let along: f64 = points.iter().map(|(x, _)| (x - mean_x).powi(2)).sum();
    let slope = across / along;
    slope.is_finite().then_some(slope)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_its_slope_and_one_point_has_none() {
        let found = slope(&[(1.0, 5.0), (2.0, 8.0), (4.0, 14.0)]).unwrap();
        assert!((found - 3.0).abs() < 1e-9, "{found}");
        assert_eq!(slope(&[(1.0, 5.0), (1.0, 6.0)]), None);
    }
}
