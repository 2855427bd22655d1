//! The measurements of one workload with one checkpoint interval, in one round.

use super::checkpoint_figures::{self, CheckpointFigures, RunPhase, timestamp};
use super::image_reading::{self, ImageReadTimes};
use super::recording::{Recording, RecordingPlan, read_json};
use super::simulations::{self, CheckpointTimes, Simulations};
use super::workload::Workload;
use super::{Plan, maps};
use crate::Error;
use crate::keyframe_json::KeyframeJson;
use crate::keyframe_json::number;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use std::path::Path;

/// The number of jobs that analyse a recording while it is made.
const FOLLOWING_JOBS: u64 = 1;

/// The instructions of one interval.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct IntervalInstructions {
    /// The checkpoint at its end; `None` if the recording ends there.
    pub end_checkpoint: Option<u64>,
    /// The end of the interval, in seconds since the recording began.
    pub end_s: f64,
    pub count: f64,
}

/// The same workload once more, with an analysis beside the recording.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ImmediateRun {
    pub jobs: u64,
    pub recorded_s: f64,
    /// The time from the begin of the recording to the end of the analysis.
    pub run_time_s: f64,
    /// All checkpoints except the first.
    pub checkpoints: Vec<CheckpointFigures>,
}

/// A workload that was recorded with one interval and analysed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EvaluatedRun {
    #[serde(serialize_with = "write_workload", deserialize_with = "read_workload")]
    pub workload: &'static Workload,
    /// The round, from 1.
    pub round: u16,
    /// The time between two checkpoints.
    pub every_s: f64,
    /// The duration of the recording.
    pub recorded_s: f64,
    /// All checkpoints except the first.
    pub checkpoints: Vec<CheckpointFigures>,
    /// The first checkpoint. It is complete, and taken before the VM runs.
    pub first: CheckpointFigures,
    pub instructions: Vec<IntervalInstructions>,
    /// The size of the store.
    pub total_bytes: f64,
    pub reads: Vec<ImageReadTimes>,
    pub simulations: Simulations,
    /// Of one run in each round.
    pub followed: Option<ImmediateRun>,
}

impl EvaluatedRun {
    /// Returns its name in keys, for example `compile_2000ms`.
    pub fn key(&self) -> String {
        format!("{}_{}ms", self.workload.key, (self.every_s * 1e3).round())
    }

    /// Returns the checkpoints of the work; all checkpoints if there are none.
    pub fn working(&self) -> Vec<&CheckpointFigures> {
        working(&self.checkpoints)
    }

    /// Returns the mean over the checkpoints of the work.
    pub fn mean(&self, of: impl Fn(&CheckpointFigures) -> f64) -> f64 {
        mean(self.working().into_iter().map(of))
    }

    /// Returns the time of the recording and the analyses after it.
    pub fn total_s(&self) -> f64 {
        self.recorded_s + self.simulations.deferred.iter().map(|one| one.analysis_s).sum::<f64>()
    }
}

impl ImmediateRun {
    /// Returns the mean over the checkpoints of the work.
    pub fn mean(&self, of: impl Fn(&CheckpointFigures) -> f64) -> f64 {
        mean(working(&self.checkpoints).into_iter().map(of))
    }
}

fn working(checkpoints: &[CheckpointFigures]) -> Vec<&CheckpointFigures> {
    let of_work: Vec<&CheckpointFigures> =
        checkpoints.iter().filter(|one| one.phase != RunPhase::Boot).collect();
    if of_work.is_empty() { checkpoints.iter().collect() } else { of_work }
}

/// Returns the mean of `values`; NaN if there are none.
pub fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    sum / count
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn write_workload<S: Serializer>(workload: &&'static Workload, to: S) -> Result<S::Ok, S::Error> {
    workload.key.serialize(to)
}

fn read_workload<'de, D: Deserializer<'de>>(from: D) -> Result<&'static Workload, D::Error> {
    let key = String::deserialize(from)?;
    Workload::named(&key)
        .ok_or_else(|| serde::de::Error::custom(format!("no workload is named {key}")))
}

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub struct RunRequest {
    pub workload: &'static Workload,
    pub every_ms: u64,
    pub round: u16,
    /// Record once more, with an analysis beside the recording.
    pub is_immediate: bool,
}

/// Records the workload, reads its checkpoints, and analyses it. All files go into `dir`.
pub fn measure_run(
    keyframe: KeyframeJson<'_>,
    plan: &Plan,
    request: RunRequest,
    dir: &Path,
) -> Result<EvaluatedRun, Error> {
    let RunRequest { workload, every_ms, round, is_immediate } = request;
    let KeyframeJson { options, interrupt } = keyframe;
    let name = format!("round {round}, {}, checkpoints every {every_ms} ms", workload.key);
    options.say(format!("{name}: recording"));
    let guest = workload.prepare(options, dir)?;
    let recording_plan = RecordingPlan { every_ms, work_ms: plan.work_ms };
    let recording = Recording::make(keyframe, &guest, recording_plan, dir.join("recording"))?;
    let meta = recording.meta()?;
    let maps = maps::read(&recording.store())?;
    let began = timestamp(&meta["began_at"])?;
    let mut checkpoints = checkpoint_figures::of_recording(&recording, began, &maps)?;
    if checkpoints.len() < 2 {
        return Err(Error::failed("read the recording's checkpoints", "there are fewer than two"));
    }
    let first = checkpoints.remove(0);
    let total_bytes = number(&recording.stats()?, "total_bytes")?;
    options.say(format!("{name}: reading images"));
    let reads = image_reading::measure(&recording.store(), plan.reads)?;
    interrupt.check()?;
    options.say(format!("{name}: analysing with one job and with two"));
    let recorded_s = number(&meta, "duration_ns")? / 1e9;
    let all_instructions = number(&meta, "instructions")?;
    let from_instruction = (all_instructions * plan.left_out) as u64;
    let taken = [&first].into_iter().chain(&checkpoints).map(|one| (one.id, one.at_s));
    let times = CheckpointTimes { at_s: taken.collect(), recorded_s };
    let simulations = simulations::measure(&recording, from_instruction, &times, dir)?;
    if !simulations.is_same {
        let problem = "the results of the intervals differ from those of one replay of the whole \
                       recording: it does not replay exactly on this machine";
        (options.warning)(&format!("{name}: {problem}; see keyframe verify"));
    }
    let analysis = read_json(&dir.join(simulations::ONE_JOB).join("analysis.json"))?;
    let instructions = instructions(&analysis, &times)?;
    let followed = if is_immediate {
        options.say(format!("{name}: recording once more, and analysing meanwhile"));
        let again = dir.join("again");
        std::fs::create_dir(&again).map_err(Error::io(format!("make {}", again.display())))?;
        Some(measure_followed(keyframe, workload, recording_plan, &again)?)
    } else {
        None
    };
    Ok(EvaluatedRun {
        workload,
        round,
        every_s: every_ms as f64 / 1e3,
        recorded_s,
        checkpoints,
        first,
        instructions,
        total_bytes,
        reads,
        simulations,
        followed,
    })
}

fn measure_followed(
    keyframe: KeyframeJson<'_>,
    workload: &Workload,
    plan: RecordingPlan,
    dir: &Path,
) -> Result<ImmediateRun, Error> {
    let guest = workload.prepare(keyframe.options, dir)?;
    let recorded = dir.join("recording");
    let (recording, followed) =
        Recording::make_followed(keyframe, &guest, plan, recorded, FOLLOWING_JOBS)?;
    let meta = recording.meta()?;
    let maps = maps::read(&recording.store())?;
    let began = timestamp(&meta["began_at"])?;
    let checkpoints = checkpoint_figures::of_recording(&recording, began, &maps)?;
    let (analysed, all) =
        (number(&followed.report, "instructions")?, number(&meta, "instructions")?);
    // The last interval ends where the guest was switched off, just before the end of the log.
    if analysed < all * 0.99 {
        let problem = format!("it ended at instruction {analysed} of {all}");
        return Err(Error::failed("analyse a recording while it is made", problem));
    }
    Ok(ImmediateRun {
        jobs: FOLLOWING_JOBS,
        recorded_s: number(&meta, "duration_ns")? / 1e9,
        run_time_s: followed.run_time_s,
        checkpoints: checkpoints.into_iter().skip(1).collect(),
    })
}

fn instructions(
    analysis: &Value,
    times: &CheckpointTimes,
) -> Result<Vec<IntervalInstructions>, Error> {
    let intervals = analysis["intervals"].as_array().into_iter().flatten();
    intervals
        .map(|interval| {
            let end_checkpoint = interval["end"].as_u64();
            let count = number(interval, "end_icount")? - number(interval, "from_icount")?;
            Ok(IntervalInstructions { end_checkpoint, end_s: times.of(end_checkpoint), count })
        })
        .collect()
}

#[cfg(test)]
pub mod samples {
    //! Invented measurements.

    use super::super::simulations::{IntervalTime, MeasuredAnalysis, ModelFit, SimulatedRun};
    use super::*;

    fn checkpoint(id: u64, at_s: f64, every_s: f64) -> CheckpointFigures {
        let phase = if id < 3 { RunPhase::Boot } else { RunPhase::LaterPasses };
        CheckpointFigures {
            id,
            at_s,
            phase,
            dirty_pages: 100.0 + id as f64,
            zero_pages: 10.0,
            dedup_pages: 20.0,
            dedup_disk_pages: 5.0,
            unchanged_pages: 10.0,
            stored_pages: 60.0,
            stored_bytes: 90_000.0,
            disk_stored_bytes: 1000.0,
            ram_map_bytes: 2000.0,
            disk_map_bytes: 100.0,
            device_bytes: 3000.0,
            ram_bytes: f64::from(128 << 20),
            written_disk_bytes: 4096.0 * id as f64,
            interval_ns: every_s * 1e9,
            pause_ns: 5e6,
            pause_steps_ns: [1e6; 5],
            encode_ns: 9e6,
            processing_steps_ns: [2e6; 7],
            backlog_ns: 0.0,
            sectors: checkpoint_figures::RunSectorCounts {
                written: 8.0,
                against_ram: 8.0,
                ..Default::default()
            },
        }
    }

    /// Returns a run of 8 s. One job replays it twice as slowly as it was recorded, and needs 0.1 s
    /// for each interval, and 0.5 s to start.
    pub fn run(every_ms: u64, round: u16) -> EvaluatedRun {
        let (every_s, recorded_s) = (every_ms as f64 / 1e3, 8.0);
        let count = (recorded_s / every_s) as u64;
        let checkpoints: Vec<CheckpointFigures> =
            (1..count).map(|id| checkpoint(id, id as f64 * every_s, every_s)).collect();
        let times = |jobs: u64| {
            let start_s = |at: u64| at.is_multiple_of(count / jobs).then_some(0.5);
            let time = |at: u64| IntervalTime {
                recorded_s: every_s,
                instructions: every_s * 1e8,
                replay_s: 0.1 + 2.0 * every_s + start_s(at).unwrap_or(0.0),
                start_s: start_s(at),
            };
            let intervals: Vec<IntervalTime> = (0..count).map(time).collect();
            let all_s: f64 = intervals.iter().map(|one| one.replay_s).sum();
            MeasuredAnalysis { jobs, analysis_s: all_s / jobs as f64, intervals }
        };
        let rows: Vec<SimulatedRun> = [1, 2, 4, 8, 16]
            .map(|nodes| SimulatedRun {
                nodes,
                makespan_s: recorded_s + 16.0 / nodes as f64,
                speed_up: 1.0,
                formula_makespan_s: recorded_s + 16.0 / nodes as f64,
                formula_speed_up: 1.0,
            })
            .into();
        EvaluatedRun {
            workload: Workload::named("small").expect("the workload"),
            round,
            every_s,
            recorded_s: recorded_s + f64::from(round) / 10.0,
            first: checkpoint(0, 0.0, every_s),
            instructions: (1..=count)
                .map(|id| IntervalInstructions {
                    end_checkpoint: Some(id),
                    end_s: id as f64 * every_s,
                    count: every_s * 1e8,
                })
                .collect(),
            total_bytes: 1e7,
            reads: vec![ImageReadTimes {
                checkpoint: 1,
                warm_s: 0.1,
                cold_s: 0.2,
                image_bytes: 1e8,
            }],
            simulations: Simulations {
                sequential_s: 16.5,
                is_same: true,
                deferred: vec![times(1), times(2)],
                deferred_simulated: rows.clone(),
                immediate: rows.clone(),
                over_network: rows.clone(),
                en_bloc: rows,
                fit: ModelFit { t_i_s: 0.1, slowdown: 2.0, r_squared: 1.0 },
            },
            followed: (every_ms == 2000).then(|| ImmediateRun {
                jobs: 1,
                recorded_s,
                run_time_s: 17.0,
                checkpoints: checkpoints.clone(),
            }),
            checkpoints,
        }
    }
}
