//! `keyframe show`: everything that is known of one checkpoint.

use super::StoreArg;
use crate::failure::{DONE, Outcome};
use crate::output;
use keyframe_inspect::entry::{DiskEntry, Entry};
use keyframe_inspect::show::{entry, shown};
use keyframe_store::{MachineMeta, Sealed};
use keyframe_units::{BlockKind, RamBlock, RamLayout};

/// Show one checkpoint: its VM, RAM, pause by phase, pages
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  keyframe show --store S latest
  keyframe show --store S 12 --json

The pause runs from before the VMM (QEMU or Firecracker) is asked to stop until it has confirmed that the VM runs. Its phases:
  stop          until the VMM confirmed the stop
  device_state  saving the state of all devices
  scan          looking for the last dirty pages
  copy          copying them
  resume        until the VMM confirmed that the VM runs")]
pub struct Show {
    #[command(flatten)]
    store: StoreArg,
    /// A number, a tag or `latest`
    checkpoint: String,
    /// Print JSON: times in ns, sizes in bytes
    #[arg(long)]
    json: bool,
}

impl Show {
    /// Prints it.
    pub fn run(&self) -> Outcome {
        let store = self.store.open()?;
        let id = store.resolve(&self.checkpoint).map_err(|e| self.store.failure(&e))?;
        let sealed = store.sealed(id).map_err(|e| self.store.failure(&e))?;
        if self.json {
            output::json(&shown(&sealed))?;
        } else {
            output::print_line(&text(&sealed))?;
        }
        Ok(DONE)
    }
}

fn text(sealed: &Sealed) -> String {
    let (e, members) = (entry(sealed), &sealed.meta.members);
    let mut lines = vec![
        format!(
            "checkpoint {} of {} {}, epoch {}",
            e.id,
            if members.is_empty() { "VM" } else { "group" },
            e.vm,
            e.epoch
        ),
        format!("taken      {} ({})", e.taken_at, e.reason),
    ];
    if e.pinned {
        lines.push("pinned     until keyframe pin --remove".into());
    }
    if !e.tags.is_empty() {
        lines.push(format!("tags       {}", e.tags.join(", ")));
    }
    lines.extend(of_capture(&e));
    lines.extend(e.disks.iter().flat_map(of_disk));
    if members.is_empty() {
        lines.extend(of_machine(&sealed.meta.machine));
    }
    for member in members {
        lines.push(format!("member     {}", member.name));
        lines.extend(of_machine(&member.machine));
    }
    lines.extend(of_ram(e.ram_bytes, &sealed.meta.ram));
    lines.join("\n")
}

/// The lines about the pause, the copying and the pages.
fn of_capture(e: &Entry) -> [String; 5] {
    let ms = output::duration;
    [
        format!(
            "pause      {}: stop {}, scan {}, copy {}, device state {}, resume {}",
            ms(e.pause_ns),
            ms(e.pause.stop),
            ms(e.pause.scan),
            ms(e.pause.copy),
            ms(e.pause.device_state),
            ms(e.pause.resume)
        ),
        format!(
            "copied     {}, {} rounds before the pause, pages {:?}, the last found by {}",
            e.strategy, e.precopy_rounds, e.round_pages, e.found_by
        ),
        format!(
            "interval   {} since the one before, backlog {}",
            ms(e.interval_ns),
            ms(e.backlog_ns)
        ),
        format!(
            "pages      {} dirty: {} zero, {} deduplicated, {} unchanged, {} stored in {}",
            e.dirty_pages,
            e.zero_pages,
            e.dedup_pages,
            e.unchanged_pages,
            e.stored_pages,
            output::bytes(e.stored_bytes)
        ),
        format!(
            "metadata   map {}, device state {}",
            output::bytes(e.map_bytes),
            output::bytes(e.device_bytes)
        ),
    ]
}

fn of_disk(disk: &DiskEntry) -> Vec<String> {
    let (size, c, b) = (output::bytes(disk.disk_bytes), &disk.counts, output::bytes);
    if disk.left_out {
        return vec![format!(
            "disk       {}, {size}: LEFT OUT of the checkpoint; its image is {}",
            disk.name, disk.base
        )];
    }
    if disk.is_clone {
        let mut lines = vec![
            format!("disk       {}, {size}: as it was, in a clone of its image:", disk.name),
            format!("           {}", disk.base),
        ];
        lines.extend(unreadable(disk));
        return lines;
    }
    let mut lines = vec![
        format!(
            "disk       {}, {size}: {} written in {} blocks: {} zero, {} deduplicated, {} unchanged, {} stored in {}; over {}",
            disk.name,
            b(disk.written_bytes),
            c.written_blocks,
            c.zero_blocks,
            c.dedup_blocks,
            c.unchanged_blocks,
            c.stored_blocks,
            b(c.stored_bytes),
            disk.base
        ),
        format!(
            "           in sectors: {} found in RAM, {} on disks, {} are new",
            b(disk.dedup.against_ram.bytes),
            b(disk.dedup.against_disk.bytes),
            b(disk.dedup.not_deduplicated.bytes)
        ),
    ];
    lines.extend(unreadable(disk));
    lines
}

fn unreadable(disk: &DiskEntry) -> Option<String> {
    disk.unreadable.as_ref().map(|why| format!("           it cannot be read now: {why}"))
}

fn of_ram(ram_bytes: u64, layout: &RamLayout) -> [String; 2] {
    let row = |block: &RamBlock| {
        let kind = match block.kind {
            BlockKind::Backend => "backend",
            BlockKind::Stream => "stream",
        };
        vec![
            format!("  {}", block.name),
            kind.into(),
            output::bytes(block.used_bytes),
            output::bytes(block.total_bytes),
        ]
    };
    let rows: Vec<_> = layout.blocks().iter().map(row).collect();
    [
        format!(
            "RAM        {} in {}:",
            output::bytes(ram_bytes),
            output::counted(rows.len() as u64, "block")
        ),
        output::table(&["  block", "given back by", "used", "reserved"], &rows),
    ]
}

fn of_machine(machine: &MachineMeta) -> [String; 2] {
    [
        format!(
            "machine    {}, {}, {} {}",
            machine.machine_type,
            output::counted(machine.vcpus.into(), "CPU"),
            machine.vmm,
            machine.vmm_version
        ),
        format!("command    {}", machine.user_command.join(" ")),
    ]
}
