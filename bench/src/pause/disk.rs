//! What a disk under write load adds to the pause.
//!
//! ```text
//!   guest                                        disk (raw, virtio, served)
//!   writes 20,000 pages a second in 512 MiB      idle    it only lies there
//!   the same                                     load    written with O_DIRECT as fast as the guest can
//! ```
//!
//! Two boots of 1 GiB, pre-copy. The loaded one writes fewer pages, for its one processor works on
//! the disk as well: so the pages of both are told beside the pauses.

use super::{INTERVAL, RATE, WRITTEN_MIB, number};
use crate::guest::Guest as Files;
use crate::sample::Sample;
use crate::vm::Protected;
use crate::{Error, Options, Report};
use std::path::Path;
use std::time::Instant;

const DISK_BYTES: u64 = 64 << 20;

/// One of the two guests.
#[derive(Default)]
struct Guest {
    pause_ns: Sample,
    dirty_pages: Sample,
    written_blocks: Sample,
}

/// Both.
#[derive(Default)]
pub struct Pauses {
    idle: Guest,
    load: Guest,
}

/// `checkpoints` of each guest.
pub fn measure(
    options: &Options,
    files: &Files,
    dir: &Path,
    checkpoints: usize,
) -> Result<Pauses, Error> {
    let dirty = format!("kf.dirty.rate={RATE} kf.dirty.mib={WRITTEN_MIB}");
    options.say("a disk that is idle: boot and first checkpoint");
    let idle =
        guest(options, files, &dir.join("idle"), &format!("kf.work=dirty {dirty}"), checkpoints)?;
    options.say("a disk that is written to: boot and first checkpoint");
    let journal = "kf.journal.rate=0 kf.journal.mib=32 kf.journal.sync=64";
    let load = format!("kf.work=dirty+journal {dirty} {journal}");
    let load = guest(options, files, &dir.join("load"), &load, checkpoints)?;
    if load.written_blocks.median() < 1.0 {
        return Err(Error::failed(
            "load the disk",
            "the guest wrote nothing to it: the machine is too busy",
        ));
    }
    Ok(Pauses { idle, load })
}

fn guest(
    options: &Options,
    files: &Files,
    dir: &Path,
    append: &str,
    checkpoints: usize,
) -> Result<Guest, Error> {
    std::fs::create_dir(dir).map_err(Error::io("make a directory for a disk"))?;
    let image = dir.join("disk.raw");
    let made = std::fs::File::create(&image).and_then(|file| file.set_len(DISK_BYTES));
    made.map_err(Error::io("make a disk"))?;
    let mut command = files.command(super::MEM, append);
    command
        .extend(["-drive".into(), format!("file={},format=raw,if=virtio,id=d", image.display())]);
    let mut vm = Protected::start(options, &dir.join("store"), ("none", "precopy"), &command)?;
    vm.guest.wait_for("KF READY", 180)?;
    // The complete one, and the one that learns what the load is.
    vm.take("precopy")?;
    vm.take("precopy")?;
    let mut guest = Guest::default();
    let mut next = Instant::now() + INTERVAL;
    for _ in 0..checkpoints {
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        next = Instant::now() + INTERVAL;
        let entry = vm.take("precopy")?;
        guest.pause_ns.push(number(&entry, "pause_ns")?);
        guest.dirty_pages.push(number(&entry, "dirty_pages")?);
        let disk = entry.pointer("/disks/0").unwrap_or_default();
        guest.written_blocks.push(number(disk, "written_blocks")?);
    }
    Ok(guest)
}

impl Pauses {
    /// Adds the figures of both, and by how much the pause grows.
    pub fn tell(&self, report: &mut Report) {
        for (name, guest) in [("idle", &self.idle), ("load", &self.load)] {
            let key = format!("precopy_20k_disk_{name}");
            report.figure(format!("{key}_pause_p50_ns"), guest.pause_ns.median());
            report.figure(format!("{key}_pause_p99_ns"), guest.pause_ns.percentile(99));
            report.figure(format!("{key}_dirty_pages_p50"), guest.dirty_pages.median());
            report.figure(format!("{key}_written_blocks_p50"), guest.written_blocks.median());
        }
        let growth = self.load.pause_ns.median() - self.idle.pause_ns.median();
        report.figure("precopy_growth_with_disk_load_ns", growth);
    }
}
