//! A VM whose guest writes journal records to a disk and holds the same in RAM, so that a disk and
//! a RAM which are not of one instant are noticed by the guest itself.

use crate::{Bench, Boot, Process, Qemu, journal_counter};
use std::path::{Path, PathBuf};

/// MiB of the ring of records, and of the disk.
pub const RING_MIB: u64 = 1;

/// A raw image of zeros, `NAME.raw`.
pub fn blank_image(bench: &Bench, name: &str) -> PathBuf {
    let path = bench.path().join(format!("{name}.raw"));
    let file = std::fs::File::create(&path).expect("make the image");
    file.set_len(RING_MIB << 20).expect("its length");
    path
}

/// A guest with its journal on `image`.
pub fn journaling(qemu: &Qemu, image: &Path) -> Boot {
    let drive = format!("file={},format=raw,if=virtio,id=d", image.display());
    let mut boot = Boot::new(&format!("journal kf.mib={RING_MIB} kf.rate=400 kf.sync=8"));
    boot.qemu.clone_from(&qemu.path);
    boot.mem_mib = 96;
    boot.with(&["-drive", &drive])
}

/// The records that the guest has written, as it said last. Its disk has always been what its RAM
/// says.
pub fn records_of(console: &[String]) -> u64 {
    let wrong: Vec<_> = console.iter().filter(|l| l.contains("KF ERROR")).collect();
    assert!(wrong.is_empty(), "the guest's disk is not what its RAM says: {wrong:?}");
    assert_eq!(journal_counter(console, "bad="), 0, "{console:?}");
    journal_counter(console, "written=")
}

/// Waits until the guest says, behind the first `skip` lines, that it has written `more` records
/// than it said first there. Returns the last count.
pub fn wait_for_records(vm: &mut Process, skip: usize, more: u64) -> u64 {
    let told = |p: &Process| -> Vec<u64> {
        let lines = p.lines();
        let behind = lines.get(skip..).unwrap_or_default();
        behind
            .iter()
            .map(|line| journal_counter(std::slice::from_ref(line), "written="))
            .filter(|n| *n > 0)
            .collect()
    };
    let grown = vm.wait_until(|p| {
        let counts = told(p);
        counts.last().copied().filter(|last| *last >= counts[0] + more)
    });
    records_of(&vm.lines());
    grown.unwrap_or_else(|| panic!("the guest writes no more; {}", vm.report()))
}

/// The same, behind what it has said so far.
pub fn wait_for_more_records(vm: &mut Process, more: u64) -> u64 {
    let skip = vm.lines().len();
    wait_for_records(vm, skip, more)
}
