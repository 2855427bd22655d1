//! The figures of one checkpoint, from the output of `keyframe list --json` and its map.

use super::maps::CheckpointMap;
use super::recording::Recording;
use crate::Error;
use crate::keyframe_json::number;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The steps of a pause, in their order.
pub const PAUSE_STEPS: [&str; 5] = ["stop", "device_state", "scan", "copy", "resume"];
/// The steps after a pause, in their order. The first four are those of the pages of RAM.
pub const PROCESSING_STEPS: [&str; 7] =
    ["hash", "look_up", "compress", "append", "disks", "sync", "map"];
/// The size of a sector.
const SECTOR_BYTES: f64 = 512.0;

/// The phases of a run, as in the paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunPhase {
    /// Until the work begins.
    Boot,
    /// The first pass of the work.
    FirstPass,
    /// The passes after it.
    LaterPasses,
}

/// Sectors of 512 bytes on all disks, by the place where their content was found.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct RunSectorCounts {
    pub written: f64,
    pub zero: f64,
    pub unchanged: f64,
    pub not_deduplicated: f64,
    pub against_disk: f64,
    pub against_ram: f64,
}

/// The figures of one checkpoint. The fields have the meaning of `keyframe list --json`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct CheckpointFigures {
    /// Its number in the store.
    pub id: u64,
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
    /// The parts of its map for pages of RAM, and for blocks of disks.
    pub ram_map_bytes: f64,
    pub disk_map_bytes: f64,
    pub device_bytes: f64,
    pub ram_bytes: f64,
    /// The size of all blocks of disks that were written since the recording began.
    pub written_disk_bytes: f64,
    pub interval_ns: f64,
    pub pause_ns: f64,
    /// The pause by [`PAUSE_STEPS`].
    pub pause_steps_ns: [f64; 5],
    pub encode_ns: f64,
    /// The time after the pause by [`PROCESSING_STEPS`].
    pub processing_steps_ns: [f64; 7],
    pub backlog_ns: f64,
    pub sectors: RunSectorCounts,
}

impl CheckpointFigures {
    /// Returns the time of all steps after the pause: those of the encoder, and those of the seal.
    pub fn processing_ns(&self) -> f64 {
        self.encode_ns + self.processing_steps_ns[4..].iter().sum::<f64>()
    }

    /// Returns the size of its map and its device state: all that is not content.
    pub fn metadata_bytes(&self) -> f64 {
        self.ram_map_bytes + self.disk_map_bytes + self.device_bytes
    }

    /// Returns its size for a node that has the checkpoint before.
    pub fn missing_bytes(&self) -> f64 {
        self.stored_bytes + self.disk_stored_bytes + self.metadata_bytes()
    }

    /// Returns its size for a node that gets it whole, as in the paper: all of RAM, and all sectors
    /// written since the recording began.
    pub fn whole_bytes(&self) -> f64 {
        self.ram_bytes + self.written_disk_bytes
    }
}

/// Reads a time.
pub fn timestamp(value: &Value) -> Result<Timestamp, Error> {
    let text = value.as_str().unwrap_or_default();
    text.parse().map_err(|e| Error::failed(format!("read the time {text:?}"), e))
}

/// Returns the figures of all checkpoints of a recording that began at `began`.
pub fn of_recording(
    recording: &Recording<'_>,
    began: Timestamp,
    maps: &[CheckpointMap],
) -> Result<Vec<CheckpointFigures>, Error> {
    recording.list()?.iter().map(|entry| of_entry(entry, began, recording, maps)).collect()
}

fn of_entry(
    entry: &Value,
    began: Timestamp,
    recording: &Recording<'_>,
    maps: &[CheckpointMap],
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
    let id = of("id")? as u64;
    let map = maps.iter().find(|map| map.checkpoint.0 == id).ok_or_else(|| {
        Error::failed("read the maps of the checkpoints", format!("checkpoint {id} has none"))
    })?;
    Ok(CheckpointFigures {
        id,
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
        ram_map_bytes: map.ram_bytes,
        disk_map_bytes: map.disk_bytes,
        device_bytes: of("device_bytes")?,
        ram_bytes: of("ram_bytes")?,
        written_disk_bytes: map.written_disk_bytes,
        interval_ns: of("interval_ns")?,
        pause_ns: of("pause_ns")?,
        pause_steps_ns: steps(&entry["pause"], PAUSE_STEPS)?,
        encode_ns: of("encode_ns")?,
        processing_steps_ns: steps(&entry["processing"], PROCESSING_STEPS)?,
        backlog_ns: of("backlog_ns")?,
        sectors,
    })
}

fn steps<const N: usize>(entry: &Value, names: [&str; N]) -> Result<[f64; N], Error> {
    let mut steps_ns = [0.0; N];
    for (ns, name) in steps_ns.iter_mut().zip(names) {
        *ns = number(entry, name)?;
    }
    Ok(steps_ns)
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
        sectors.written += disk["written_bytes"].as_f64().unwrap_or(0.0) / SECTOR_BYTES;
        stored_bytes += disk["stored_bytes"].as_f64().unwrap_or(0.0);
    }
    (sectors, stored_bytes)
}
