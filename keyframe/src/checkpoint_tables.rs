//! Tables over checkpoints, for people.

use crate::output;
use keyframe_inspect::entry::{DiskEntry, DiskSums, Entry, PHASES, PauseQuantiles};
use std::collections::BTreeMap;

const DISK_HEADER: [&str; 8] =
    ["disk", "checkpoints", "written", "p50 each", "most", "zero", "dedup", "stored"];

/// Returns the table of the bytes written to each disk, in all and per checkpoint.
pub fn disk_table(disks: &[DiskSums]) -> String {
    let rows: Vec<Vec<String>> = disks
        .iter()
        .map(|disk| {
            let mut sample: Vec<u64> =
                disk.checkpoints.iter().map(|one| one.written_bytes).collect();
            sample.sort_unstable();
            let each = |percent| output::bytes(output::percentile(&sample, percent));
            let name = format!("{} {}", disk.vm, disk.name);
            if disk.clones == sample.len() {
                let mut cells = vec![name, sample.len().to_string(), "in clones".into()];
                cells.resize(DISK_HEADER.len(), String::new());
                return cells;
            }
            vec![
                name,
                sample.len().to_string(),
                output::bytes(disk.written_bytes),
                each(50),
                each(100),
                disk.counts.zero_blocks.to_string(),
                (disk.counts.dedup_blocks + disk.counts.unchanged_blocks).to_string(),
                output::bytes(disk.counts.stored_bytes),
            ]
        })
        .collect();
    output::table(&DISK_HEADER, &rows)
}

/// The table of `list`. Where VMs have disks, `disk` is what was written to them, or
/// that the checkpoint has clones of them.
pub fn table(entries: &[Entry]) -> String {
    let with_disks = entries.iter().any(|e| !e.disks.is_empty());
    let rows: Vec<Vec<String>> = entries
        .iter()
        .map(|e| {
            let mut cells = vec![
                e.id.to_string(),
                e.vm.clone(),
                e.epoch.to_string(),
                e.taken_at.get(..19).unwrap_or(&e.taken_at).replace('T', " "),
                output::duration(e.pause_ns),
                e.dirty_pages.to_string(),
                e.zero_pages.to_string(),
                (e.dedup_pages + e.unchanged_pages).to_string(),
                output::bytes(e.stored_bytes),
                output::bytes(e.map_bytes),
            ];
            if with_disks {
                cells.push(disk_cell(&e.disks));
            }
            let pinned = e.pinned.then(|| "(pinned)".to_owned());
            cells.push(e.tags.iter().cloned().chain(pinned).collect::<Vec<_>>().join(","));
            cells
        })
        .collect();
    let mut header = vec![
        "id",
        "vm",
        "epoch",
        "taken (UTC)",
        "pause",
        "dirty",
        "zero",
        "dedup",
        "stored",
        "map",
    ];
    header.extend(with_disks.then_some("disk"));
    header.push("tags");
    output::table(&header, &rows)
}

/// What was written to the disks of a checkpoint, or `clone` if it has clones of all of them.
fn disk_cell(disks: &[DiskEntry]) -> String {
    if !disks.is_empty() && disks.iter().all(|disk| disk.is_clone) {
        return "clone".into();
    }
    output::bytes(disks.iter().map(|disk| disk.written_bytes).sum())
}

/// The pauses of many checkpoints by phase: median and 99th percentile.
pub fn pause_table(entries: &[Entry]) -> String {
    let quantiles = PauseQuantiles::of(entries);
    let rows: Vec<Vec<String>> = PHASES
        .iter()
        .map(|(name, _)| {
            let cell = |of: &BTreeMap<&str, u64>| {
                of.get(name).map_or_else(String::new, |ns| output::duration(*ns))
            };
            vec![name.replace('_', " "), cell(&quantiles.p50_ns), cell(&quantiles.p99_ns)]
        })
        .collect();
    output::table(&["pause by phase", "p50", "p99"], &rows)
}
