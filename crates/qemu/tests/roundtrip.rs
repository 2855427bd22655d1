//! A VM is launched, checkpointed and brought to life again, on each QEMU and machine.

mod support;

use keyframe_qemu::RunStatus;
use keyframe_qemu::restore::{self, Plan, RestoreOptions, Restored};
use keyframe_units::BlockKind;
use std::path::Path;
use support::{
    Checkpoint, Guest, checkpoint, launch, passes, payload, qemus, read_blocks, said, wait_for,
    words,
};

/// A restored VM that is killed with its test.
struct Alive(Restored);

impl Drop for Alive {
    fn drop(&mut self) {
        let _ = self.0.kill();
    }
}

fn bring_back(checkpoint: &Checkpoint) -> Alive {
    let options = RestoreOptions { paused: true, ..RestoreOptions::default() };
    let plan = Plan::new(checkpoint.source.clone(), Vec::new(), options).unwrap();
    assert_eq!(plan.notes(), [] as [&str; 0]);
    Alive(restore::start(plan, checkpoint, &checkpoint.device_state).unwrap())
}

/// Launches the self-checking guest with `line`, lets it run, pauses it and takes a checkpoint.
fn run_to_checkpoint(qemu: &str, line: &str, dir: &Path) -> (Guest, Checkpoint) {
    let firmware = payload(dir, 2000);
    let serial = dir.join("serial");
    let mut line = words(line);
    line.extend(words("-display none -nodefaults -bios"));
    line.push(firmware.to_str().unwrap().into());
    line.extend(["-serial".into(), format!("file:{}", serial.display())]);
    let mut guest = launch(qemu, &line, &dir.join("run")).unwrap();
    assert_eq!(guest.vm.audit().unwrap(), []);
    assert_eq!(guest.vm.qmp().status().unwrap(), RunStatus::Prelaunch);
    guest.vm.qmp().cont().unwrap();
    wait_for(&serial, "its third pass", |text| passes(text).len() >= 3);
    assert!(guest.vm.qmp().stop().unwrap().was_running);
    assert!(!guest.vm.qmp().stop().unwrap().was_running, "it was paused already");
    let taken = checkpoint(&mut guest.vm);
    (guest, taken)
}

fn round_trip(qemu: &str, line: &str) {
    println!("{qemu} {line}");
    let dir = tempfile::tempdir().unwrap();
    let serial = dir.path().join("serial");
    let (guest, taken) = run_to_checkpoint(qemu, line, dir.path());
    let main = &taken.source.ram.blocks()[0];
    assert_eq!(main.kind, BlockKind::Backend);
    assert!(taken.ram[0].iter().any(|b| *b != 0));
    let last = *passes(&said(&serial)).last().unwrap();
    drop(guest);
    // A restored VM would append to it.
    std::fs::remove_file(&serial).unwrap();

    let mut alive = bring_back(&taken);
    let vm = alive.0.vm();
    assert_eq!(vm.qmp().status().unwrap(), RunStatus::Paused);
    let blocks = vm.ram_blocks().unwrap();
    let restored = read_blocks(vm.pid(), &blocks);
    assert_eq!(blocks.len(), taken.ram.len());
    for (number, expected) in taken.source.ram.blocks().iter().enumerate() {
        let index = blocks.iter().position(|b| b.block.name == expected.name).unwrap();
        assert_eq!(blocks[index].block, *expected);
        assert!(restored[index] == taken.ram[number], "RAM block {} differs", expected.name);
    }

    // Each pass checks the one before, so passes that go on say that RAM and registers were the
    // checkpoint's.
    vm.qmp().cont().unwrap();
    let text = wait_for(&serial, "two passes after the restore", |text| passes(text).len() >= 2);
    let first = passes(&text)[0];
    assert!(!text.contains('X') && !text.contains('B'), "{text}");
    assert!(first > last && first <= last + 2, "pass {first} after {last}");

    // The checkpoint of a restored VM is one like any other.
    vm.qmp().stop().unwrap();
    let again = checkpoint(vm);
    assert_eq!(again.source.ram, taken.source.ram);
    let resets = said(&serial).matches('B').count();
    assert_eq!(resets, 0);
    vm.qmp().hmp("system_reset").unwrap();
    vm.qmp().cont().unwrap();
    let text = wait_for(&serial, "passes after a reset", |text| {
        text.find('B').is_some_and(|at| passes(&text[at..]).len() >= 2)
    });
    assert!(!text.contains('X'), "{text}");
}

#[test]
fn every_machine_comes_back_as_it_was() {
    for qemu in qemus() {
        for machine in ["pc", "q35", "microvm"] {
            round_trip(&qemu, &format!("-machine {machine} -m 64"));
        }
    }
}

#[test]
fn video_memory_and_several_processors_come_back() {
    for qemu in qemus() {
        round_trip(
            &qemu,
            "-machine pc -m 48 -smp 4 -device VGA,vgamem_mb=8 -device virtio-rng-pci",
        );
    }
}

#[test]
fn a_read_only_disk_does_not_stand_in_the_way() {
    for qemu in qemus() {
        let disk = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/payload.S");
        let drive = format!("-drive file={disk},format=raw,if=virtio,readonly=on");
        round_trip(&qemu, &format!("-machine pc -m 32 {drive} -device virtio-net-pci"));
        round_trip(
            &qemu,
            &format!(
                "-machine microvm -m 32 -drive file={disk},format=raw,if=none,id=d,readonly=on -device virtio-blk-device,drive=d"
            ),
        );
    }
}

#[test]
fn the_users_own_backends_come_back() {
    for qemu in qemus() {
        round_trip(
            &qemu,
            "-machine pc,memory-backend=ram -m 64 -object memory-backend-memfd,id=ram,size=64M,share=on",
        );
        round_trip(
            &qemu,
            "-machine q35 -m 64 -smp 2 -object memory-backend-ram,id=a,size=32M \
             -object {\"qom-type\":\"memory-backend-ram\",\"id\":\"b\",\"size\":33554432} \
             -numa node,memdev=a,cpus=0 -numa node,memdev=b,cpus=1",
        );
    }
}
