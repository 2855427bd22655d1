//! A recorded run on simulated clusters, with its intervals as they were measured, or equal ones.

use crate::RecordingMeasurements;
use keyframe_model::Constants;
use keyframe_model::simulation::{Cluster, ClusterRun, PlannedRun, SimulationError};
use serde::Serialize;

/// A run on simulated clusters of several sizes.
#[derive(Clone, Debug, Serialize)]
pub struct SimulatedClusters {
    /// The source of the intervals' times, for users.
    pub times: &'static str,
    /// The number of intervals of a recording; `None` if all intervals are equal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub intervals: Option<u64>,
    /// The number of intervals that are not simulated yet. Their time is taken from a line through the
    /// times of the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub estimated: Option<u64>,
    /// The time of the shortest and the longest simulation, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range_s: Option<(f64, f64)>,
    /// The time of one simulation of all, in seconds.
    pub sequential_s: f64,
    /// The number of slots of each node.
    pub slots: usize,
    /// One run for each number of nodes.
    pub table: Vec<ClusterRun>,
}

/// The simulation of a cluster failed.
#[derive(Debug, thiserror::Error)]
#[error("simulate {nodes} nodes: {source}")]
pub struct FailedSimulation {
    /// The number of nodes.
    pub nodes: u64,
    /// The reason.
    pub source: SimulationError,
}

impl SimulatedClusters {
    /// Simulates the run of `constants` on a cluster of each number of `nodes`, which `cluster`
    /// makes. The intervals are those of `measured`, or equal ones without it. With `sends_all`
    /// each interval needs all RAM of its checkpoint. Error: the simulation cannot end, or a number
    /// is out of bounds.
    pub fn of(
        (cluster, sends_all): (&dyn Fn(u64) -> Cluster, bool),
        constants: &Constants,
        measured: Option<&RecordingMeasurements>,
        nodes: &[u64],
    ) -> Result<Self, FailedSimulation> {
        let run = match measured {
            Some(measured) => {
                let intervals = measured.simulated_intervals(constants, sends_all);
                PlannedRun::of_intervals(constants, intervals, measured.length_s())
            }
            None => PlannedRun::of_equal_intervals(constants),
        };
        let on = |count: &u64| {
            let failed = |source| FailedSimulation { nodes: *count, source };
            run.on(*count, &cluster(*count)).map_err(failed)
        };
        let intervals = run.intervals().map(|all| all.len() as u64);
        let estimated = measured.map(|measured| {
            measured.pieces.iter().filter(|one| one.took_s.is_none()).count() as u64
        });
        let are_measured = estimated < intervals;
        Ok(Self {
            times: if are_measured { "measured interval times" } else { "constants" },
            intervals,
            estimated,
            range_s: run.range_s(),
            sequential_s: run.sequential_s(),
            slots: cluster(1).slots(),
            table: nodes.iter().map(on).collect::<Result<_, _>>()?,
        })
    }
}
