//! Measures QEMU under one accelerator: checkpoints against `savevm` and `migrate`, restores against
//! `-loadvm`.

use super::Bench;
use super::costs::{allocated_bytes, push_pause_parts, stored_bytes};
use super::restores::RESTORED;
use super::rows::{Rows, Vm};
use crate::Error;
use crate::guest_files::{PayloadGuest, SmallGuest};
use crate::keyframe_json::number;
use crate::qemu_peer::{QemuPeer, SaveMethod};
use crate::restore::restore_times::loadvm;
use crate::running_guest::{CheckpointedGuest, Schedule};
use std::path::Path;
use std::time::Duration;

/// The time between two checkpoints, and between two of QEMU's own saves.
const INTERVAL: Duration = Duration::from_secs(1);
/// The pages that the guest writes in a second under TCG, and in a pass under KVM.
const RATE: u64 = 1000;
/// The strategies, which take turns, and the names of their pauses.
const STRATEGIES: [(&str, &str); 4] = [
    ("precopy", "pause_ns"),
    ("pre-scan", "pre_scan_pause_ns"),
    ("stop-copy", "stop_copy_pause_ns"),
    ("fork", "fork_pause_ns"),
];
/// The RAM that the guest's kernel needs.
const KERNEL_MIB: u64 = 112;
/// The largest part of RAM that the guest writes.
const WRITTEN_MIB_MAX: u64 = 256;

/// A guest of QEMU.
pub struct QemuGuest {
    vm: Vm,
    command: Vec<String>,
    /// What it prints when it is ready.
    ready: &'static str,
}

impl QemuGuest {
    /// Linux with `mib` of RAM. It has written a part of it, and writes pages of that part.
    pub fn under_tcg(files: &SmallGuest, mib: u64) -> Self {
        let written_mib = (mib - KERNEL_MIB).min(WRITTEN_MIB_MAX);
        let append = format!("kf.work=dirty kf.rate={RATE} kf.mib={written_mib}");
        let command = files.command(&format!("{mib}M"), &append);
        Self { vm: ("tcg", mib), command, ready: "KF READY dirty" }
    }

    /// The firmware payload with `mib` of RAM, of which it writes 16 MiB again and again.
    pub fn under_kvm(files: &PayloadGuest, mib: u64) -> Self {
        let command = files.command(&format!("{mib}M"), RATE);
        Self { vm: ("kvm", mib), command, ready: "KF READY payload" }
    }

    fn say(&self, bench: &Bench<'_>, what: &str) {
        bench.options.say(format!("{}, {} MiB: {what}", super::part_title(self.vm.0), self.vm.1));
    }
}

/// Measures `guest`.
pub fn measure(bench: &Bench<'_>, guest: &QemuGuest, rows: &mut Rows) -> Result<(), Error> {
    let (vmm, mib) = guest.vm;
    let dir = bench.dir.join(format!("{vmm}-{mib}"));
    std::fs::create_dir_all(&dir).map_err(Error::io("make a directory"))?;
    rows.push(guest.vm, "raw_bytes", (mib << 20) as f64);
    let store = dir.join(format!("store-{vmm}-{mib}"));
    checkpoints(bench, guest, &store, rows)?;
    guest.say(bench, "restores");
    for _ in 0..bench.plan.restores {
        bench.restore(guest.vm, (&store, &dir), RESTORED, rows)?;
    }
    own_snapshots(bench, guest, &dir, rows)?;
    std::fs::remove_dir_all(&dir).map_err(Error::io("remove the stores"))
}

fn checkpoints(
    bench: &Bench<'_>,
    guest: &QemuGuest,
    store: &Path,
    rows: &mut Rows,
) -> Result<(), Error> {
    guest.say(bench, "boot and checkpoints");
    let schedule = Schedule { interval: "none", strategy: "precopy" };
    let mut vm = CheckpointedGuest::start(bench.options, store, schedule, &guest.command)?;
    vm.guest.wait_for(guest.ready, 180)?;
    let first = vm.take("precopy")?;
    rows.push(guest.vm, "first_stored_bytes", stored_bytes(&first)?);
    for _ in 0..bench.plan.checkpoints.div_ceil(2) {
        for (strategy, measure) in STRATEGIES {
            bench.interrupt.sleep(INTERVAL)?;
            let taken = vm.take(strategy)?;
            rows.push(guest.vm, measure, number(&taken, "pause_ns")?);
            if strategy == "precopy" {
                push_pause_parts(guest.vm, &taken, rows)?;
            }
            rows.push(guest.vm, "dirty_pages", number(&taken, "dirty_pages")?);
            rows.push(guest.vm, "later_stored_bytes", stored_bytes(&taken)?);
        }
    }
    Ok(())
}

/// Has QEMU save and load the same guest by itself.
fn own_snapshots(
    bench: &Bench<'_>,
    guest: &QemuGuest,
    dir: &Path,
    rows: &mut Rows,
) -> Result<(), Error> {
    guest.say(bench, "boot, and QEMU's own savevm, migrate and -loadvm");
    let mut peer = QemuPeer::start_command(guest.command.clone(), &dir.join("peer"), guest.ready)?;
    for _ in 0..bench.plan.saves {
        for (method, measure) in
            [(SaveMethod::Savevm, "savevm_ns"), (SaveMethod::Migrate, "migrate_ns")]
        {
            bench.interrupt.sleep(INTERVAL)?;
            if let Some(saved) = peer.save(method, bench.options)? {
                rows.push(guest.vm, measure, saved.pause_ns);
            }
        }
    }
    rows.push(guest.vm, "migrate_bytes", allocated_bytes(peer.migrated())?);
    peer.save_for_loadvm()?;
    let image = peer.image();
    rows.push(guest.vm, "savevm_bytes", allocated_bytes(&image)?);
    drop(peer);
    let mut line = guest.command.clone();
    let drive = format!("if=none,id=vmstate,format=qcow2,file={}", image.display());
    line.extend(["-drive".into(), drive, "-loadvm".into(), SaveMethod::Savevm.key().into()]);
    for _ in 0..bench.plan.restores {
        bench.interrupt.check()?;
        rows.push(guest.vm, "loadvm_ns", loadvm(&line, dir)?);
    }
    Ok(())
}
