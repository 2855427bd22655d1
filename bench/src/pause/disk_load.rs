//! The pause of a guest whose disk is idle, and of one whose disk is under write load.
//!
//! ```text
//!   guest                                        disk (raw, virtio, served)
//!   writes 20,000 pages a second in 512 MiB      idle    attached
//!   the same                                     load    written with O_DIRECT at full speed
//! ```
//!
//! Two boots of 1 GiB with pre-copy. The guest under load writes fewer pages, because its one vCPU
//! also writes to the disk. The report therefore has the pages of both.

use super::{INTERVAL, RATE, WRITTEN_MIB, no_interval, number};
use crate::guest_files::SmallGuest;
use crate::running_guest::CheckpointedGuest;
use crate::sample::Sample;
use crate::{Error, Options, Report};
use std::path::Path;
use std::time::Instant;

const DISK_BYTES: u64 = 64 << 20;

/// The checkpoints of one of the two guests.
#[derive(Default)]
struct DiskGuest {
    pause_ns: Sample,
    dirty_pages: Sample,
    written_blocks: Sample,
}

/// The checkpoints of both guests.
#[derive(Default)]
pub struct DiskPauses {
    idle: DiskGuest,
    load: DiskGuest,
}

/// Takes `checkpoints` checkpoints of each guest.
pub fn measure(
    options: &Options,
    files: &SmallGuest,
    dir: &Path,
    checkpoints: usize,
) -> Result<DiskPauses, Error> {
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
    Ok(DiskPauses { idle, load })
}

fn guest(
    options: &Options,
    files: &SmallGuest,
    dir: &Path,
    append: &str,
    checkpoints: usize,
) -> Result<DiskGuest, Error> {
    std::fs::create_dir(dir).map_err(Error::io("make a directory for a disk"))?;
    let image = dir.join("disk.raw");
    let made = std::fs::File::create(&image).and_then(|file| file.set_len(DISK_BYTES));
    made.map_err(Error::io("make a disk"))?;
    let mut command = files.command(super::MEM, append);
    command
        .extend(["-drive".into(), format!("file={},format=raw,if=virtio,id=d", image.display())]);
    let mut vm =
        CheckpointedGuest::start(options, &dir.join("store"), no_interval("precopy"), &command)?;
    vm.guest.wait_for("KF READY", 180)?;
    // The first checkpoint is complete, and the second one adapts to the load.
    vm.take("precopy")?;
    vm.take("precopy")?;
    let mut guest = DiskGuest::default();
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

impl DiskPauses {
    /// Adds the figures of both guests, and the growth of the pause.
    pub fn add_to(&self, report: &mut Report) {
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
