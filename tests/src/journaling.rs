//! A VM whose guest writes journal records to a disk and keeps the same in RAM. If disk and RAM are
//! not of one instant, the guest reports it.

use crate::{Boot, Process, Qemu, TestEnv, journal_counter};
use std::path::{Path, PathBuf};

/// The size of the ring of records, and of the disk, in MiB.
pub const RING_MIB: u64 = 1;

/// Makes `NAME.raw`, a raw image of zeros.
pub fn blank_image(env: &TestEnv, name: &str) -> PathBuf {
    let path = env.path().join(format!("{name}.raw"));
    let file = std::fs::File::create(&path).expect("make the image");
    file.set_len(RING_MIB << 20).expect("its length");
    path
}

/// A guest that writes its journal to `image`.
pub fn journaling(qemu: &Qemu, image: &Path) -> Boot {
    let drive = format!("file={},format=raw,if=virtio,id=d", image.display());
    let mut boot = Boot::new(&format!("journal kf.mib={RING_MIB} kf.rate=400 kf.sync=8"));
    boot.qemu.clone_from(&qemu.path);
    boot.mem_mib = 96;
    boot.with(&["-drive", &drive])
}

/// The number of records in the guest's last report. Asserts that the guest has never found its disk
/// different from its RAM.
pub fn records_of(console: &[String]) -> u64 {
    let wrong: Vec<_> = console.iter().filter(|l| l.contains("KF ERROR")).collect();
    assert!(wrong.is_empty(), "the guest's disk is not what its RAM says: {wrong:?}");
    assert_eq!(journal_counter(console, "bad="), 0, "{console:?}");
    journal_counter(console, "written=")
}

/// Waits until the guest reports, after the first `skip` lines of its console, `more` records beyond
/// the first report there. Returns the last count.
pub fn wait_for_records(vm: &mut Process, skip: usize, more: u64) -> u64 {
    let counts_after = |p: &Process| -> Vec<u64> {
        let lines = p.lines();
        let lines = lines.get(skip..).unwrap_or_default();
        lines
            .iter()
            .map(|line| journal_counter(std::slice::from_ref(line), "written="))
            .filter(|n| *n > 0)
            .collect()
    };
    let grown = vm.wait_until(|p| {
        let counts = counts_after(p);
        counts.last().copied().filter(|last| *last >= counts[0] + more)
    });
    records_of(&vm.lines());
    grown.unwrap_or_else(|| panic!("the guest writes no more; {}", vm.report()))
}

/// Waits until the guest reports `more` records beyond its next report.
pub fn wait_for_more_records(vm: &mut Process, more: u64) -> u64 {
    let skip = vm.lines().len();
    wait_for_records(vm, skip, more)
}
