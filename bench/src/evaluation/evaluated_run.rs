//! The measurements of one workload with one checkpoint interval.

use super::Plan;
use super::image_reading::{self, ImageReadTimes};
use super::recording::{AnalysisRequest, Recording, RecordingPlan, read_json};
use super::reprocessing::{self, PhaseTimes};
use super::simulations::{self, Simulations};
use super::workload::Workload;
use crate::{Error, Options};
use jiff::Timestamp;
use serde_json::Value;
use std::path::Path;

/// The phases of a run, as in the paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunPhase {
    /// Until the work begins.
    Boot,
    /// The first pass of the work.
    FirstPass,
    /// The passes after it.
    LaterPasses,
}

/// Sectors of 512 bytes on all disks, by the place where their content was found.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunSectorCounts {
    pub written: f64,
    pub zero: f64,
    pub unchanged: f64,
    pub not_deduplicated: f64,
    pub against_disk: f64,
    pub against_ram: f64,
}

/// The figures of one checkpoint. The fields have the meaning of `keyframe list --json`.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointFigures {
    /// Seconds since the recording began.
    pub at_s: f64,
    pub phase: RunPhase,
    pub dirty_pages: f64,
    pub zero_pages: f64,
    pub dedup_pages: f64,
    pub dedup_disk_pages: f64,
    pub unchanged_pages: f64,
    pub stored_pages: f64,
    pub stored_bytes: f64,
    pub disk_stored_bytes: f64,
    pub map_bytes: f64,
    pub device_bytes: f64,
    pub ram_bytes: f64,
    pub pause_ns: f64,
    /// The pause by phase: stop, device state, scan, copy, resume.
    pub pause_phases_ns: [f64; 5],
    pub encode_ns: f64,
    pub backlog_ns: f64,
    pub sectors: RunSectorCounts,
}

/// The instructions of one interval.
#[derive(Clone, Copy, Debug)]
pub struct IntervalInstructions {
    /// The end of the interval in seconds, estimated from its share of all instructions.
    pub end_s: f64,
    pub count: f64,
}

/// A workload that was recorded with one interval and analysed.
pub struct EvaluatedRun {
    pub workload: &'static Workload,
    /// The time between two checkpoints.
    pub every_s: f64,
    /// The duration of the recording.
    pub recorded_s: f64,
    /// All checkpoints except the first.
    pub checkpoints: Vec<CheckpointFigures>,
    /// The first checkpoint. It is complete, and taken before the VM runs.
    pub first: Option<CheckpointFigures>,
    pub instructions: Vec<IntervalInstructions>,
    /// The size of the store.
    pub total_bytes: f64,
    pub reads: Vec<ImageReadTimes>,
    pub processing: PhaseTimes,
    pub simulations: Simulations,
}

impl EvaluatedRun {
    /// Returns its name in keys, for example `compile_2000ms`.
    pub fn key(&self) -> String {
        format!("{}_{}ms", self.workload.key, (self.every_s * 1e3).round())
    }

    /// Returns its name in charts, for example `compile, 2 s`.
    pub fn label(&self) -> String {
        format!("{}, {} s", self.workload.key, self.every_s)
    }

    /// Returns the checkpoints of the work; all checkpoints if there are none.
    pub fn working(&self) -> Vec<&CheckpointFigures> {
        let of_work: Vec<&CheckpointFigures> =
            self.checkpoints.iter().filter(|one| one.phase != RunPhase::Boot).collect();
        if of_work.is_empty() { self.checkpoints.iter().collect() } else { of_work }
    }

    /// Returns the mean over the checkpoints of the work.
    pub fn mean(&self, of: impl Fn(&CheckpointFigures) -> f64) -> f64 {
        mean(self.working().into_iter().map(of))
    }
}

/// Returns the mean of `values`; NaN if there are none.
pub fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    sum / count
}

/// Records `workload` with a checkpoint every `every_ms`, reads its checkpoints, and analyses it.
pub fn measure_run(
    options: &Options,
    plan: &Plan,
    workload: &'static Workload,
    every_ms: u64,
    dir: &Path,
) -> Result<EvaluatedRun, Error> {
    let name = format!("{}, checkpoints every {every_ms} ms", workload.key);
    options.say(format!("{name}: recording"));
    let guest = workload.prepare(options, dir)?;
    let recording_plan = RecordingPlan { every_ms, work_ms: plan.work_ms };
    let recording = Recording::make(options, &guest, recording_plan, dir.join("recording"))?;
    let meta = recording.meta()?;
    let mut checkpoints = checkpoints(&recording, timestamp(&meta["began_at"])?)?;
    if checkpoints.len() < 2 {
        return Err(Error::failed("read the recording's checkpoints", "there are fewer than two"));
    }
    let first = checkpoints.remove(0);
    let total_bytes = number(&recording.stats()?, "total_bytes")?;
    options.say(format!("{name}: processing and reading"));
    let processing = reprocessing::measure(&recording.store(), dir)?;
    let reads = image_reading::measure(&recording.store(), plan.reads)?;
    options.say(format!("{name}: analysing with one job and with two"));
    let recorded_s = number(&meta, "duration_ns")? / 1e9;
    let all_instructions = number(&meta, "instructions")?;
    let from_instruction = (all_instructions * plan.left_out) as u64;
    let request = AnalysisRequest { recorded_s, from_instruction };
    let simulations = simulations::measure(&recording, request, dir)?;
    if !simulations.is_same {
        let problem = "the results of the intervals differ from those of one replay of the whole \
                       recording: it does not replay exactly on this machine";
        (options.warning)(&format!("{name}: {problem}; see keyframe verify"));
    }
    let analysis = read_json(&dir.join(simulations::ONE_JOB).join("analysis.json"))?;
    let instructions = instructions(&analysis, recorded_s, all_instructions)?;
    Ok(EvaluatedRun {
        workload,
        every_s: every_ms as f64 / 1e3,
        recorded_s,
        checkpoints,
        first: Some(first),
        instructions,
        total_bytes,
        reads,
        processing,
        simulations,
    })
}

/// Returns the number `name` of a JSON object.
pub fn number(value: &Value, name: &str) -> Result<f64, Error> {
    value[name]
        .as_f64()
        .ok_or_else(|| Error::failed("read the output of keyframe", format!("no number {name}")))
}

fn timestamp(value: &Value) -> Result<Timestamp, Error> {
    let text = value.as_str().unwrap_or_default();
    text.parse().map_err(|e| Error::failed(format!("read the time {text:?}"), e))
}

/// Returns the figures of all checkpoints of a recording that began at `began`.
fn checkpoints(
    recording: &Recording<'_>,
    began: Timestamp,
) -> Result<Vec<CheckpointFigures>, Error> {
    recording.list()?.iter().map(|entry| checkpoint(entry, began, recording)).collect()
}

fn checkpoint(
    entry: &Value,
    began: Timestamp,
    recording: &Recording<'_>,
) -> Result<CheckpointFigures, Error> {
    let taken = timestamp(&entry["taken_at"])?;
    let phase = if taken < recording.work_began {
        RunPhase::Boot
    } else if recording.first_pass_ended.is_none_or(|ended| taken <= ended) {
        RunPhase::FirstPass
    } else {
        RunPhase::LaterPasses
    };
    let (sectors, disk_stored_bytes) = disks(entry);
    let of = |name: &str| number(entry, name);
    let pause = &entry["pause"];
    let mut pause_phases_ns = [0.0; 5];
    for (ns, name) in
        pause_phases_ns.iter_mut().zip(["stop", "device_state", "scan", "copy", "resume"])
    {
        *ns = number(pause, name)?;
    }
    Ok(CheckpointFigures {
        at_s: taken.duration_since(began).as_secs_f64(),
        phase,
        dirty_pages: of("dirty_pages")?,
        zero_pages: of("zero_pages")?,
        dedup_pages: of("dedup_pages")?,
        dedup_disk_pages: of("dedup_disk_pages")?,
        unchanged_pages: of("unchanged_pages")?,
        stored_pages: of("stored_pages")?,
        stored_bytes: of("stored_bytes")?,
        disk_stored_bytes,
        map_bytes: of("map_bytes")?,
        device_bytes: of("device_bytes")?,
        ram_bytes: of("ram_bytes")?,
        pause_ns: of("pause_ns")?,
        pause_phases_ns,
        encode_ns: of("encode_ns")?,
        backlog_ns: of("backlog_ns")?,
        sectors,
    })
}

/// Returns the sectors, and the stored bytes, of all disks of a checkpoint.
fn disks(entry: &Value) -> (RunSectorCounts, f64) {
    let mut sectors = RunSectorCounts::default();
    let mut stored_bytes = 0.0;
    for disk in entry["disks"].as_array().into_iter().flatten() {
        let dedup = &disk["dedup"];
        let of = |name: &str| dedup[name]["sectors"].as_f64().unwrap_or(0.0);
        sectors.zero += of("zero");
        sectors.unchanged += of("unchanged");
        sectors.not_deduplicated += of("not_deduplicated");
        sectors.against_disk += of("against_disk");
        sectors.against_ram += of("against_ram");
        sectors.written += disk["written_bytes"].as_f64().unwrap_or(0.0) / 512.0;
        stored_bytes += disk["stored_bytes"].as_f64().unwrap_or(0.0);
    }
    (sectors, stored_bytes)
}

fn instructions(
    analysis: &Value,
    recorded_s: f64,
    all: f64,
) -> Result<Vec<IntervalInstructions>, Error> {
    let intervals = analysis["intervals"].as_array().into_iter().flatten();
    intervals
        .map(|interval| {
            let begin = number(&interval["begin"], "icount")?;
            let end = number(interval, "end_icount")?;
            let end_s = recorded_s * end / all.max(1.0);
            Ok(IntervalInstructions { end_s, count: end - begin })
        })
        .collect()
}
