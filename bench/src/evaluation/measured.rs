//! What is measured of a workload with an interval.

use super::Plan;
use super::processing::{self, Processing};
use super::reading::{self, Read};
use super::recording::{Recording, read_json};
use super::simulating::{self, Simulations};
use super::workload::Kind;
use crate::{Error, Options};
use jiff::Timestamp;
use serde_json::Value;
use std::path::Path;

/// Parts of a run, after the paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Until the work begins.
    Boot,
    /// Until it has gone through once.
    First,
    /// The passes behind it.
    Rest,
}

/// Sectors of all disks, by what became of them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sectors {
    pub written: f64,
    pub zero: f64,
    pub unchanged: f64,
    pub not_deduplicated: f64,
    pub against_disk: f64,
    pub against_ram: f64,
}

/// A checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct Checkpoint {
    /// Since the recording began, in seconds.
    pub at_s: f64,
    pub part: Part,
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
    /// Stop, device state, scan, copy, resume.
    pub pause_parts_ns: [f64; 5],
    pub encode_ns: f64,
    pub backlog_ns: f64,
    pub sectors: Sectors,
}

/// A workload with an interval.
pub struct Run {
    pub kind: &'static Kind,
    pub every_s: f64,
    /// How long it was recorded.
    pub recorded_s: f64,
    /// All but the first one, which is complete and comes before the VM runs.
    pub checkpoints: Vec<Checkpoint>,
    /// The first one.
    pub first: Option<Checkpoint>,
    /// Of each interval, with when it ends in seconds: by its part of all instructions.
    pub instructions: Vec<(f64, f64)>,
    /// Of the store.
    pub total_bytes: f64,
    pub reads: Vec<Read>,
    pub processing: Processing,
    pub simulations: Simulations,
}

impl Run {
    /// As in keys: `compile_2000ms`.
    pub fn key(&self) -> String {
        format!("{}_{}ms", self.kind.key, (self.every_s * 1e3).round())
    }

    /// The checkpoints of the work, or all where there are none.
    pub fn working(&self) -> Vec<&Checkpoint> {
        let of_work: Vec<&Checkpoint> =
            self.checkpoints.iter().filter(|one| one.part != Part::Boot).collect();
        if of_work.is_empty() { self.checkpoints.iter().collect() } else { of_work }
    }

    /// The mean over the checkpoints of the work.
    pub fn mean(&self, of: impl Fn(&Checkpoint) -> f64) -> f64 {
        mean(self.working().into_iter().map(of))
    }
}

/// NaN of nothing.
pub fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    sum / count
}

/// Records, reads, analyses.
pub fn all(
    options: &Options,
    plan: &Plan,
    (kind, every_ms): (&'static Kind, u64),
    dir: &Path,
) -> Result<Run, Error> {
    let name = format!("{}, checkpoints every {every_ms} ms", kind.key);
    let workload = kind.prepare(options, dir)?;
    options.say(format!("{name}: recording"));
    let recording =
        Recording::make(options, &workload, (every_ms, plan.work_ms), dir.join("recording"))?;
    let meta = recording.meta()?;
    let began: Timestamp = stamp(&meta["began_at"])?;
    let all = recording.list()?;
    let checkpoints: Vec<Checkpoint> =
        all.iter().map(|one| checkpoint(one, began, &recording)).collect::<Result<_, Error>>()?;
    let Some((first, others)) = checkpoints.split_first().filter(|(_, others)| !others.is_empty())
    else {
        return Err(Error::failed("read the recording's checkpoints", "there are fewer than two"));
    };
    let total_bytes = number(&recording.stats()?, "total_bytes")?;
    options.say(format!("{name}: processing and reading"));
    let processing = processing::measure(&recording.store(), dir)?;
    let reads = reading::measure(&recording.store(), plan.reads)?;
    options.say(format!("{name}: analysing with one job and with two"));
    let recorded_s = number(&meta, "duration_ns")? / 1e9;
    let all_instructions = number(&meta, "instructions")?;
    let from = (all_instructions * plan.left_out) as u64;
    let simulations = simulating::measure(&recording, (recorded_s, from), dir)?;
    if !simulations.is_same {
        let problem = "the intervals' results are not those of one replay through all: the recording does not replay exactly here";
        (options.warning)(&format!("{name}: {problem}; see keyframe verify"));
    }
    let analysis = read_json(&dir.join(simulating::ONE_JOB).join("analysis.json"))?;
    let instructions = instructions(&analysis, recorded_s, all_instructions)?;
    Ok(Run {
        kind,
        every_s: every_ms as f64 / 1e3,
        recorded_s,
        checkpoints: others.to_vec(),
        first: Some(*first),
        instructions,
        total_bytes,
        reads,
        processing,
        simulations,
    })
}

/// A number of a JSON object.
pub fn number(value: &Value, name: &str) -> Result<f64, Error> {
    value[name]
        .as_f64()
        .ok_or_else(|| Error::failed("read what keyframe says", format!("there is no {name}")))
}

fn stamp(value: &Value) -> Result<Timestamp, Error> {
    let text = value.as_str().unwrap_or_default();
    text.parse().map_err(|e| Error::failed(format!("read the time {text:?}"), e))
}

fn checkpoint(
    value: &Value,
    began: Timestamp,
    recording: &Recording<'_>,
) -> Result<Checkpoint, Error> {
    let taken = stamp(&value["taken_at"])?;
    let part = if taken < recording.work_began {
        Part::Boot
    } else if recording.first_pass_ended.is_none_or(|ended| taken <= ended) {
        Part::First
    } else {
        Part::Rest
    };
    let mut sectors = Sectors::default();
    let mut disk_stored_bytes = 0.0;
    for disk in value["disks"].as_array().into_iter().flatten() {
        let dedup = &disk["dedup"];
        let of = |name: &str| dedup[name]["sectors"].as_f64().unwrap_or(0.0);
        sectors.zero += of("zero");
        sectors.unchanged += of("unchanged");
        sectors.not_deduplicated += of("not_deduplicated");
        sectors.against_disk += of("against_disk");
        sectors.against_ram += of("against_ram");
        sectors.written += disk["written_bytes"].as_f64().unwrap_or(0.0) / 512.0;
        disk_stored_bytes += disk["stored_bytes"].as_f64().unwrap_or(0.0);
    }
    let of = |name: &str| number(value, name);
    let pause = &value["pause"];
    let mut pause_parts_ns = [0.0; 5];
    for (part, name) in
        pause_parts_ns.iter_mut().zip(["stop", "device_state", "scan", "copy", "resume"])
    {
        *part = number(pause, name)?;
    }
    Ok(Checkpoint {
        at_s: taken.duration_since(began).as_secs_f64(),
        part,
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
        pause_parts_ns,
        encode_ns: of("encode_ns")?,
        backlog_ns: of("backlog_ns")?,
        sectors,
    })
}

fn instructions(analysis: &Value, recorded_s: f64, all: f64) -> Result<Vec<(f64, f64)>, Error> {
    let intervals = analysis["intervals"].as_array().into_iter().flatten();
    intervals
        .map(|one| {
            let (from, end) = (number(&one["begin"], "icount")?, number(one, "end_icount")?);
            Ok((recorded_s * end / all.max(1.0), end - from))
        })
        .collect()
}
