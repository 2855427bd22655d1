//! What the tests of rollbacks share: a guest that hashes its RAM, checkpoints of the VM `guest`,
//! and the lines and overlays of a VM that goes back.

use crate::{Boot, HashLine, Process, Qemu, TestEnv, hash_lines, number};
use std::path::{Path, PathBuf};

/// A guest that hashes its RAM, under `qemu` with a monitor of the test's own. Returns that
/// monitor's socket too.
pub fn hashing(env: &TestEnv, qemu: &Qemu) -> (Boot, PathBuf) {
    let monitor = env.path().join("own.sock");
    let mut boot = Boot::new("hash")
        .with(&["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())]);
    boot.qemu.clone_from(&qemu.path);
    boot.mem_mib = 96;
    (boot, monitor)
}

/// Waits until the guest has printed `more` lines.
pub fn grow(vm: &mut Process, more: usize) {
    let before = hash_lines(&vm.lines()).len();
    let grown = vm.wait_until(|p| (hash_lines(&p.lines()).len() >= before + more).then_some(()));
    assert!(grown.is_some(), "the guest is silent; {}", vm.report());
}

/// The lines, split where the numbers go back: one row more than rollbacks.
pub fn rows(lines: &[HashLine]) -> Vec<&[HashLine]> {
    lines.chunk_by(|one, next| one.n < next.n).collect()
}

/// Takes a checkpoint of VM `guest` and returns its number.
pub fn take(env: &TestEnv) -> u64 {
    env.ok(&["take", "--name", "guest"]);
    newest(env)
}

/// The number of the newest checkpoint.
pub fn newest(env: &TestEnv) -> u64 {
    number(env.list().last().expect("a checkpoint"), "id")
}

/// The number of disk overlays in the store.
pub fn overlays(env: &TestEnv) -> usize {
    let count = |dir: &Path| {
        std::fs::read_dir(dir).map_or(0, |d| d.flatten().filter(|e| e.path().is_dir()).count())
    };
    let places = std::fs::read_dir(Path::new(&env.store()).join("disks")).expect("STORE/disks");
    places.flatten().map(|place| count(&place.path())).sum()
}
