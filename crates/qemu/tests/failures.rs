//! Restores that must fail: each names its reason and leaves no process behind. One test, for it
//! looks at all children of its process.

mod support;

use keyframe_qemu::cmdline::CommandLineError;
use keyframe_qemu::restore::{self, Plan, RamSource, RestoreOptions};
use keyframe_qemu::stream::StreamError;
use keyframe_qemu::{Error, Result};
use keyframe_units::{BlockKind, Page, PageIndex, PageRange, RamBlock, RamLayout};
use std::ffi::OsString;
use std::path::Path;
use support::{Checkpoint, checkpoint, launch, qemus, words};

fn try_restore(taken: &Checkpoint, extra: &[&str]) -> Result<()> {
    let extra = extra.iter().map(OsString::from).collect();
    let plan = Plan::new(taken.source.clone(), extra, RestoreOptions::default())?;
    let mut restored = restore::start(plan, taken, &taken.device_state)?;
    restored.kill()
}

/// Children of this process that have not been waited for.
fn children() -> String {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .map(|t| std::fs::read_to_string(t.unwrap().path().join("children")).unwrap_or_default())
        .collect()
}

fn take(qemu: &str, dir: &Path) -> Checkpoint {
    let line = words("-machine pc -m 32 -display none -nodefaults -device virtio-rng-pci");
    let mut guest = launch(qemu, &line, dir).unwrap();
    guest.vm.qmp().cont().unwrap();
    guest.vm.qmp().stop().unwrap();
    checkpoint(&mut guest.vm)
}

fn fresh(taken: &Checkpoint) -> Checkpoint {
    Checkpoint {
        source: taken.source.clone(),
        device_state: taken.device_state.clone(),
        ram: taken.ram.clone(),
    }
}

struct Broken;

impl RamSource for Broken {
    fn read(
        &self,
        _: PageRange,
        _: &mut dyn FnMut(PageIndex, &Page) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        Err(std::io::Error::other("the pack is damaged"))
    }
}

fn refuses_what_does_not_fit(taken: &Checkpoint) {
    let mut other = fresh(taken);
    other.source.machine.machine_type = "pc-i440fx-1.0".into();
    let error = try_restore(&other, &[]).unwrap_err();
    assert!(
        matches!(&error, Error::DifferentMachine { expected, .. } if expected == "pc-i440fx-1.0"),
        "{error}"
    );

    let mut other = fresh(taken);
    let mut blocks: Vec<RamBlock> = other.source.ram.clone().into();
    blocks.push(RamBlock {
        name: "more".into(),
        kind: BlockKind::Stream,
        used_bytes: 4096,
        total_bytes: 4096,
    });
    other.source.ram = RamLayout::new(blocks).unwrap();
    other.ram.push(vec![0; 4096]);
    let error = try_restore(&other, &[]).unwrap_err();
    assert!(
        matches!(&error, Error::DifferentMachine { what, .. } if what.contains("more")),
        "{error}"
    );

    let mut other = fresh(taken);
    other.source.machine.vmm_version = "6.6.6 (Elsewhere)".into();
    // The very binary that is known is not asked for its version.
    other.source.machine.binary_blake3 = "0".repeat(64);
    let error = try_restore(&other, &[]).unwrap_err();
    assert!(
        error.to_string().contains("6.6.6") && error.fix().unwrap().contains("--qemu"),
        "{error}"
    );

    let mut other = fresh(taken);
    other.source.machine.binary_path = "/no/such/qemu".into();
    let error = try_restore(&other, &[]).unwrap_err();
    assert!(error.to_string().contains("/no/such/qemu") && error.fix().is_some(), "{error}");

    let error = try_restore(taken, &["-m", "64"]).unwrap_err();
    assert!(
        matches!(&error, Error::CommandLine(CommandLineError::Argument { argument, .. }) if argument == "-m 64"),
        "{error}"
    );
    let error = try_restore(taken, &["-nonsense", "1"]).unwrap_err();
    assert!(matches!(error, Error::Exited { .. }), "{error}");
}

fn refuses_damage(taken: &Checkpoint) {
    let mut other = fresh(taken);
    let at = other.device_state.windows(10).position(|w| w == b"virtio-rng").unwrap();
    other.device_state[at] = b'?';
    let error = try_restore(&other, &[]).unwrap_err();
    assert!(matches!(error, Error::Exited { .. }), "{error}");

    let mut other = fresh(taken);
    other.device_state.truncate(at);
    let error = try_restore(&other, &[]).unwrap_err();
    assert!(matches!(error, Error::Stream(StreamError::DeviceState { .. })), "{error}");

    // Cut in the middle, with an end that looks right.
    let mut other = fresh(taken);
    other.device_state.truncate(at);
    other.device_state.extend(b"\x7e\0\0\0\x01\0");
    let error = try_restore(&other, &[]).unwrap_err();
    assert!(matches!(error, Error::Exited { .. }), "{error}");

    let plan = Plan::new(taken.source.clone(), Vec::new(), RestoreOptions::default()).unwrap();
    let error = restore::start(plan, &Broken, &taken.device_state).err().unwrap();
    assert!(error.to_string().contains("RAM block"), "{error}");
}

#[test]
fn a_restore_that_fails_says_why_and_leaves_no_process() {
    for qemu in qemus() {
        let dir = tempfile::tempdir().unwrap();
        let taken = take(&qemu, dir.path());
        try_restore(&taken, &[]).unwrap();
        refuses_what_does_not_fit(&taken);
        refuses_damage(&taken);
        assert_eq!(children(), "");
    }
}
