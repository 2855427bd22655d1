//! The entry of a checkpoint that `keyframe list --json` prints, and sums over many checkpoints.

use keyframe_store::{
    DiskCounts, DiskMeta, PausePhases, ProcessingPhases, Sealed, SectorBreakdown,
};
use keyframe_units::{PAGE_BYTES, percentile};
use keyframe_vm_disks::clone_files::has_clone;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The entry of a checkpoint in `keyframe list --json`. Times are in nanoseconds, sizes in bytes,
/// pages of 4 KiB.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Entry {
    /// The number of the checkpoint in its store.
    pub id: u64,
    /// The VM's name.
    pub vm: String,
    /// The run that took it.
    pub run: String,
    /// The time of its pause, UTC (RFC 3339).
    pub taken_at: String,
    /// The reason why it was taken: `interval`, `take`, `rollback` (before one, and after it) or
    /// `import`.
    pub reason: String,
    /// Its epoch in the run; 0 is the first, which holds all pages.
    pub epoch: u64,
    /// The number of the checkpoint from which the VM was restored, branched or rolled back before
    /// this one. Absent if the VM was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restored_from: Option<u64>,
    /// The number of the checkpoint that it follows: `restored_from`, or the one before it in the
    /// run. `keyframe list` and the engine that has taken it set it. Absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<u64>,
    /// Its tags.
    pub tags: Vec<String>,
    /// True if it is pinned: no retention rule forgets it.
    #[serde(default)]
    pub pinned: bool,
    /// The name of the strategy that copied its pages, such as `precopy`.
    pub strategy: String,
    /// How its last pages were found, in the pause: `window`, `scan`, or `scan:REASON` if a window
    /// could not name them. Empty if this was not noted.
    #[serde(default)]
    pub found_by: String,
    /// The duration of the pause: from the request to stop until QEMU confirmed that the VM runs.
    pub pause_ns: u64,
    /// The durations of the steps of the pause.
    pub pause: PausePhases,
    /// The number of copy rounds before the pause.
    pub precopy_rounds: u32,
    /// The number of dirty pages that each round found.
    pub round_pages: Vec<u64>,
    /// The number of pages that it holds.
    pub dirty_pages: u64,
    /// Those of `dirty_pages` that are zero. They take no space.
    pub zero_pages: u64,
    /// Those of `dirty_pages` whose content the store held already.
    pub dedup_pages: u64,
    /// Those of `dedup_pages` whose content came from a disk.
    #[serde(default)]
    pub dedup_disk_pages: u64,
    /// Those of `dirty_pages` that the guest wrote without changing them.
    pub unchanged_pages: u64,
    /// Those of `dirty_pages` whose content was new to the store, and was stored.
    pub stored_pages: u64,
    /// The bytes that `stored_pages` take in packs.
    pub stored_bytes: u64,
    /// The bytes of its page map.
    pub map_bytes: u64,
    /// The bytes of QEMU's device state.
    pub device_bytes: u64,
    /// The time since the pause of the checkpoint before; 0 for the first of a run.
    pub interval_ns: u64,
    /// The delay with which it began, because the checkpoint before was still being encoded.
    pub backlog_ns: u64,
    /// The time to hash, compress and store its pages after the pause.
    pub encode_ns: u64,
    /// The durations of the steps after the pause. Absent if they were not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processing: Option<ProcessingPhases>,
    /// The guest instructions that the host's processor executed since the session began, if they
    /// were counted (`--count-instructions`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counted_instructions: Option<u64>,
    /// The bytes of all RAM blocks of the VM.
    pub ram_bytes: u64,
    /// The disks that the guest can write to, with the writes since the checkpoint before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskEntry>,
}

/// A disk in a checkpoint. Blocks are of 4 KiB.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DiskEntry {
    /// Its id or node name; in a group `MEMBER/NAME`.
    pub name: String,
    /// Its size in bytes.
    pub disk_bytes: u64,
    /// The path of its image; `blank` if it has none.
    pub base: String,
    /// True if the image is a clone that the checkpoint has for itself: a copy of the disk as it was,
    /// which the file system made in the pause. The checkpoint then holds no blocks of the disk.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_clone: bool,
    /// True if it is not part of the checkpoint.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub left_out: bool,
    /// The bytes of the blocks that were written.
    #[serde(default)]
    pub written_bytes: u64,
    /// Its blocks in the checkpoint.
    #[serde(flatten)]
    pub counts: DiskCounts,
    /// What deduplication found in the written blocks, in sectors of 512 bytes.
    #[serde(default)]
    pub dedup: SectorBreakdown,
    /// The reason why it cannot be read now. Only `keyframe show` sets it. Absent if it can be
    /// read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unreadable: Option<String>,
}

impl DiskEntry {
    fn of(disk: &DiskMeta) -> Self {
        let is_clone = has_clone(disk);
        let DiskMeta { name, disk_bytes, base, counts, left_out } = disk.clone();
        let base = if base.is_blank() { base.format } else { base.path };
        let written_bytes = counts.written_blocks * PAGE_BYTES as u64;
        let dedup = SectorBreakdown::of(&counts);
        Self {
            name,
            disk_bytes,
            base,
            is_clone,
            left_out,
            written_bytes,
            counts,
            dedup,
            unreadable: None,
        }
    }
}

impl Entry {
    /// Makes the entry of a sealed checkpoint, without `parent`.
    pub fn of(sealed: &Sealed) -> Self {
        let (meta, timing, counts) = (&sealed.meta, &sealed.meta.timing, &sealed.meta.counts);
        Self {
            id: sealed.id.0,
            vm: meta.vm.clone(),
            run: meta.run.clone(),
            taken_at: meta.taken_at.to_string(),
            reason: meta.reason.clone(),
            epoch: meta.epoch.0,
            restored_from: meta.parent.map(|id| id.0),
            parent: None,
            tags: sealed.names().cloned().collect(),
            pinned: sealed.is_pinned(),
            strategy: timing.strategy.clone(),
            found_by: timing.found_by.clone(),
            pause_ns: timing.pause_ns,
            pause: timing.pause,
            precopy_rounds: timing.precopy_rounds,
            round_pages: timing.round_pages.clone(),
            dirty_pages: counts.dirty_pages,
            zero_pages: counts.zero_pages,
            dedup_pages: counts.dedup_pages,
            dedup_disk_pages: counts.dedup_disk_pages,
            unchanged_pages: counts.unchanged_pages,
            stored_pages: counts.stored_pages,
            stored_bytes: counts.stored_bytes,
            map_bytes: counts.map_bytes,
            device_bytes: counts.device_bytes,
            interval_ns: timing.interval_ns,
            backlog_ns: timing.backlog_ns,
            encode_ns: timing.encode_ns,
            processing: timing.processing,
            counted_instructions: meta.machine.counted_instructions,
            ram_bytes: meta.ram.len_bytes(),
            disks: meta.disks.iter().map(DiskEntry::of).collect(),
        }
    }
}

/// The writes of a VM to one disk, over many checkpoints.
#[derive(Clone, Debug, Serialize)]
pub struct DiskSums {
    /// The VM's name.
    pub vm: String,
    /// The disk's name; in a group `MEMBER/NAME`.
    pub name: String,
    /// The sum of the counts of all checkpoints.
    #[serde(flatten)]
    pub counts: DiskCounts,
    /// The bytes of the blocks that were written.
    pub written_bytes: u64,
    /// The number of checkpoints that have a clone of the disk, and hold no blocks of it.
    #[serde(skip_serializing_if = "is_zero")]
    pub clones: usize,
    /// The writes in each checkpoint with the disk.
    pub checkpoints: Vec<DiskWritten>,
}

/// The blocks of a disk in one checkpoint.
#[derive(Clone, Debug, Serialize)]
pub struct DiskWritten {
    /// The number of the checkpoint.
    pub id: u64,
    /// The bytes of the blocks written since the checkpoint before.
    pub written_bytes: u64,
    /// The bytes that were appended to packs for them.
    pub stored_bytes: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &usize) -> bool {
    *number == 0
}

impl DiskSums {
    /// Adds up the writes to disks in `entries`. Returns one sum for each disk of each VM, sorted
    /// by VM and disk.
    pub fn of(entries: &[Entry]) -> Vec<Self> {
        let mut sums: BTreeMap<(&str, &str), Self> = BTreeMap::new();
        for (entry, disk) in entries.iter().flat_map(|e| e.disks.iter().map(move |disk| (e, disk)))
        {
            let sum = sums.entry((&entry.vm, &disk.name)).or_insert_with(|| Self {
                vm: entry.vm.clone(),
                name: disk.name.clone(),
                counts: DiskCounts::default(),
                written_bytes: 0,
                clones: 0,
                checkpoints: Vec::new(),
            });
            sum.counts += disk.counts;
            sum.written_bytes += disk.written_bytes;
            sum.clones += usize::from(disk.is_clone);
            let (written_bytes, stored_bytes) = (disk.written_bytes, disk.counts.stored_bytes);
            sum.checkpoints.push(DiskWritten { id: entry.id, written_bytes, stored_bytes });
        }
        sums.into_values().collect()
    }
}

/// A function that reads one phase of an entry's pause, in nanoseconds.
pub type PhaseOf = fn(&Entry) -> u64;
/// The name of each step of a pause, in their order, and `pause` for the whole pause, each with a
/// function that reads it from an entry.
pub const PHASES: [(&str, PhaseOf); 6] = [
    ("stop", |e| e.pause.stop),
    ("scan", |e| e.pause.scan),
    ("copy", |e| e.pause.copy),
    ("device_state", |e| e.pause.device_state),
    ("resume", |e| e.pause.resume),
    ("pause", |e| e.pause_ns),
];

/// Median and 99th percentile (nearest rank) of each phase over many checkpoints, in nanoseconds.
#[derive(Clone, Debug, Serialize)]
pub struct PauseQuantiles {
    /// The median, by the name of the phase; `pause` is the whole pause.
    pub p50_ns: BTreeMap<&'static str, u64>,
    /// The 99th percentile, by the name of the phase; `pause` is the whole pause.
    pub p99_ns: BTreeMap<&'static str, u64>,
}

impl PauseQuantiles {
    /// Computes the quantiles over `entries`; all are 0 if there are none.
    pub fn of(entries: &[Entry]) -> Self {
        let quantile = |percent| {
            let at = |value: PhaseOf| {
                let mut sample: Vec<u64> = entries.iter().map(value).collect();
                sample.sort_unstable();
                percentile(&sample, percent)
            };
            PHASES.iter().map(|(name, value)| (*name, at(*value))).collect()
        };
        Self { p50_ns: quantile(50), p99_ns: quantile(99) }
    }
}
