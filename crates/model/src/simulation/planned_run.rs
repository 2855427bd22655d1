//! A run whose simulation is planned, on clusters of several sizes, beside the formulas.

use super::{Cluster, SimulatedInterval, SimulationError, SimulationOutcome};
use super::{equal_intervals, simulate};
use crate::{Constants, Prediction, recommend};
use serde::Serialize;
use std::borrow::Cow;

/// A run that clusters simulate: its measured intervals, or equal intervals of the best length for
/// each cluster.
#[derive(Clone, Debug)]
pub struct PlannedRun {
    /// The constants of the part of the run that is simulated.
    constants: Constants,
    intervals: Option<Vec<SimulatedInterval>>,
    sequential_s: f64,
}

/// The simulated run on a cluster, beside the prediction of the formulas.
#[derive(Clone, Debug, Serialize)]
pub struct ClusterRun {
    /// The number of nodes.
    pub nodes: u64,
    /// The time from the beginning of the recording to the end of the last interval, in seconds.
    pub makespan_s: f64,
    /// The speed-up over one simulation of the whole run.
    pub speed_up: f64,
    /// The speed-up divided by the number of slots.
    pub efficiency: f64,
    /// The prediction of the formulas for equal intervals of the mean length, on a cluster without
    /// a network and failures.
    pub closed_form: Prediction,
    /// The outcome of the simulation.
    pub outcome: SimulationOutcome,
}

impl PlannedRun {
    /// Plans a run of equal intervals.
    pub fn of_equal_intervals(constants: &Constants) -> Self {
        let sequential_s = constants.s_sim * constants.t_vm;
        Self { constants: *constants, intervals: None, sequential_s }
    }

    /// Plans a run of measured `intervals`, which cover `recorded_s` seconds of the recording. If
    /// `recorded_s` is 0, they cover the whole recording.
    pub fn of_intervals(
        constants: &Constants,
        intervals: Vec<SimulatedInterval>,
        recorded_s: f64,
    ) -> Self {
        // Each interval has the time to initialise its simulation; one simulation of all has it
        // once.
        let all_s: f64 = intervals.iter().map(|interval| interval.work_s).sum();
        let sequential_s =
            (all_s - (intervals.len() as f64 - 1.0) * constants.t_i).max(f64::MIN_POSITIVE);
        // The formulas predict the part of the run that is simulated.
        let t_vm = if recorded_s > 0.0 { recorded_s / constants.s_log } else { constants.t_vm };
        let constants = Constants { t_vm, ..*constants };
        Self { constants, intervals: Some(intervals), sequential_s }
    }

    /// Returns the measured intervals; `None` for a run of equal intervals.
    pub fn intervals(&self) -> Option<&[SimulatedInterval]> {
        self.intervals.as_deref()
    }

    /// Returns the time of one simulation of the whole run, in seconds.
    pub fn sequential_s(&self) -> f64 {
        self.sequential_s
    }

    /// Returns the times of the shortest and the longest simulation of a measured interval, in
    /// seconds. Returns `None` for a run of equal intervals.
    pub fn range_s(&self) -> Option<(f64, f64)> {
        let works = || self.intervals.iter().flatten().map(|interval| interval.work_s);
        let range = (works().fold(f64::INFINITY, f64::min), works().fold(0.0, f64::max));
        self.intervals.as_ref().map(|_| range)
    }

    /// Simulates the run on `cluster`. `nodes` is the number of nodes that the result names; a run
    /// of equal intervals gets the best length for this number. Returns the outcome beside the
    /// prediction of the formulas.
    ///
    /// Errors: those of [`simulate`].
    pub fn on(&self, nodes: u64, cluster: &Cluster) -> Result<ClusterRun, SimulationError> {
        let (slots, constants) = (cluster.slots(), &self.constants);
        let (intervals, length_s): (Cow<'_, [SimulatedInterval]>, f64) =
            if let Some(intervals) = &self.intervals {
                let recorded_s = constants.s_log * constants.t_vm;
                (intervals.into(), recorded_s / intervals.len() as f64)
            } else {
                let length_s = recommend(constants, slots as u64).best.length_s;
                (equal_intervals(constants, length_s).into(), length_s)
            };
        let outcome = simulate(&intervals, cluster)?;
        Ok(ClusterRun {
            nodes,
            makespan_s: outcome.makespan_s,
            speed_up: outcome.speed_up(self.sequential_s),
            efficiency: outcome.efficiency(self.sequential_s, slots),
            closed_form: Prediction::at(constants, slots as u64, length_s),
            outcome,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONSTANTS: Constants =
        Constants { t_vm: 100.0, s_sim: 10.0, s_log: 1.25, t_c: 0.1, t_i: 2.0, s_cp: None };

    fn interval(ready_s: f64, work_s: f64) -> SimulatedInterval {
        SimulatedInterval { ready_s, work_s, image_bytes: 0.0, new_bytes: 0.0 }
    }

    fn near(found: f64, expected: f64) {
        assert!((found / expected - 1.0).abs() < 1e-9, "{found}, expected {expected}");
    }

    #[test]
    fn a_simulation_of_all_measured_intervals_begins_once() {
        let run = PlannedRun::of_intervals(
            &CONSTANTS,
            vec![interval(5.0, 12.0), interval(9.0, 7.0)],
            10.0,
        );
        near(run.sequential_s(), 17.0);
        assert_eq!(run.range_s(), Some((7.0, 12.0)));
        let on_two = run.on(2, &Cluster::of(2)).unwrap();
        near(on_two.makespan_s, 17.0);
        near(on_two.speed_up, 1.0);
        // The two intervals are 10 seconds of the recording.
        near(on_two.closed_form.length_s, 5.0);
    }

    #[test]
    fn equal_intervals_are_the_best_for_each_cluster() {
        let run = PlannedRun::of_equal_intervals(&CONSTANTS);
        near(run.sequential_s(), 1000.0);
        assert_eq!(run.range_s(), None);
        let one = run.on(1, &Cluster::of(1)).unwrap();
        let best = recommend(&CONSTANTS, 1).best;
        near(one.closed_form.length_s, best.length_s);
    }
}
