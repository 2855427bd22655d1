//! Tests `keyframe rollback` of a VM with a disk: RAM and disk go back together, or neither does.

use keyframe_tests::disks::{copy_disk, disk_socket_of};
use keyframe_tests::journaling::{
    blank_image, journaling, records_of, wait_for_more_records, wait_for_records,
};
use keyframe_tests::rollbacks::{overlays, take};
use keyframe_tests::{
    JournalImage, PATIENCE, Process, Qemu, TestEnv, chosen_qemus, journal_counter, number,
    restored_pid,
};
use std::path::PathBuf;

fn start(env: &TestEnv, qemu: &Qemu, options: &[&str]) -> (Process, PathBuf) {
    let image = blank_image(env, "disk");
    let monitor = env.path().join("own.sock");
    let own = format!("unix:{},server=on,wait=off", monitor.display());
    let boot = journaling(qemu, &image).with(&["-qmp", &own]);
    let mut run = env.start(&[&["--name", "guest"], options].concat(), &boot);
    run.wait_for("KF READY");
    wait_for_records(&mut run, 0, 100);
    (run, monitor)
}

/// The disk of checkpoint `id`. Asserts that a VM restored from it finds its disk equal to its RAM.
fn restored(env: &TestEnv, id: u64) -> Vec<u8> {
    let out = env.path().join(format!("{id}.raw"));
    let id = id.to_string();
    let mut paused = env.restore(&id, &["--paused"]);
    paused.wait_for_error("is paused after");
    copy_disk(&disk_socket_of(restored_pid(&paused)), "d", &out);
    drop(paused);
    let mut vm = env.restore(&id, &[]);
    // More records than the ring holds: the guest compares each block before it overwrites it.
    wait_for_records(&mut vm, 0, 300);
    std::fs::read(out).expect("the copy")
}

/// True if a line after the first `skip` ones reports fewer records than `far`. The guest soon
/// reports more again.
fn went_back(lines: &[String], skip: usize, far: u64) -> bool {
    lines.iter().skip(skip).any(|line| {
        let told = journal_counter(std::slice::from_ref(line), "written=");
        told > 0 && told < far
    })
}

#[test]
fn a_disk_goes_back_with_its_vm_again_and_again() {
    for qemu in chosen_qemus(0) {
        println!("-- QEMU {}", qemu.label);
        let env = TestEnv::new();
        let (mut run, monitor) = start(&env, &qemu, &["--interval", "700ms"]);
        let base = std::fs::read(env.path().join("disk.raw")).expect("the image");
        let target = take(&env);
        let mut befores = Vec::new();
        for round in 0..4 {
            let far = wait_for_more_records(&mut run, 400);
            let skip = run.lines().len();
            let rollback = ["rollback", &target.to_string(), "--name", "guest", "--json", "--fast"];
            if round < 3 {
                let done = env.json(&rollback[..5]);
                befores.push((number(&done, "before"), number(&done, "now")));
            } else {
                // The next checkpoint is the first one after it.
                env.json(&rollback);
            }
            let back = run.wait_until(|p| went_back(&p.lines(), skip, far).then_some(()));
            assert!(
                back.is_some(),
                "round {round}: the guest does not go back behind {far}; {}",
                run.report()
            );
            // The guest reads the whole ring in that time.
            wait_for_more_records(&mut run, 400);
            assert_eq!(overlays(&env), 1, "what was written before is gone");
        }
        // The next checkpoint has this disk.
        let mut own = keyframe_qemu::Qmp::connect(&monitor, PATIENCE).expect("its monitor");
        own.stop().expect("stop");
        let last = take(&env);
        let (served, copied) =
            (env.path().join("keyframe/guest/disks.sock"), env.path().join("now.raw"));
        copy_disk(&served, "d", &copied);
        own.cont().expect("cont");
        drop(own);
        records_of(&run.lines());
        env.ok(&["stop", "--name", "guest"]);
        assert!(run.wait().success(), "{}", run.report());
        assert!(
            restored(&env, last) == std::fs::read(&copied).expect("the copy"),
            "checkpoint {last}'s disk"
        );
        assert!(JournalImage::read(&copied, 1).torn.is_empty());
        // Also the checkpoint of the rollback, which equals the target, and the one before it.
        let (before, now) = befores[1];
        let targets = restored(&env, target);
        assert!(restored(&env, now) == targets, "checkpoint {now}, behind the rollback");
        assert!(restored(&env, before) != targets, "checkpoint {before}, before the rollback");
        assert!(
            std::fs::read(env.path().join("disk.raw")).expect("the image") == base,
            "the image was written"
        );
        env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
    }
}

/// QEMU fails to load the devices: disk and RAM are unchanged.
#[test]
fn a_rollback_that_fails_half_way_leaves_the_disk_as_it_was() {
    for qemu in chosen_qemus(1) {
        let env = TestEnv::new();
        let image = blank_image(&env, "disk");
        let other = journaling(&qemu, &image).with(&["-device", "virtio-rng-pci"]);
        let mut run = env.start(&["--interval", "none", "--name", "other"], &other);
        run.wait_for("KF READY");
        env.ok(&["take", "--name", "other", "--tag", "other"]);
        env.ok(&["stop", "--name", "other"]);
        assert!(run.wait().success(), "{}", run.report());
        let boot = journaling(&qemu, &image);
        let mut run = env.start(&["--interval", "500ms", "--name", "guest"], &boot);
        run.wait_for("KF READY");
        let far = wait_for_records(&mut run, 0, 300);
        let before = overlays(&env);
        env.refused(&["rollback", "other", "--name", "guest"], 1, &["the VM is as it was"]);
        assert!(wait_for_more_records(&mut run, 400) > far, "the guest goes on");
        assert_eq!(overlays(&env), before, "nothing is left of it");
        let last = take(&env);
        env.ok(&["stop", "--name", "guest"]);
        assert!(run.wait().success(), "{}", run.report());
        restored(&env, last);
    }
}
