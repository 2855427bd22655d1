//! `keyframe rollback` of a VM with a disk: RAM and disk go back together, or neither does, whoever
//! is killed.

use keyframe_tests::disks::{copy, socket_of};
use keyframe_tests::journaling::{
    blank_image, journaling, records_of, wait_for_more_records, wait_for_records,
};
use keyframe_tests::{
    Bench, JournalImage, Orphan, PATIENCE, Process, Qemu, chosen_qemus, distribution_qemu,
    journal_counter, number, restored_pid, until, variants,
};
use std::path::{Path, PathBuf};

fn start(bench: &Bench, qemu: &Qemu, options: &[&str]) -> (Process, PathBuf) {
    let image = blank_image(bench, "disk");
    let monitor = bench.path().join("own.sock");
    let own = format!("unix:{},server=on,wait=off", monitor.display());
    let boot = journaling(qemu, &image).with(&["-qmp", &own]);
    let mut run = bench.start(&[&["--name", "guest"], options].concat(), &boot);
    run.wait_for("KF READY");
    wait_for_records(&mut run, 0, 100);
    (run, monitor)
}

fn take(bench: &Bench) -> u64 {
    bench.ok(&["take", "--name", "guest"]);
    number(bench.list().last().expect("a checkpoint"), "id")
}

/// The overlays in the store.
fn overlays(bench: &Bench) -> usize {
    let count = |dir: &Path| {
        std::fs::read_dir(dir).map_or(0, |d| d.flatten().filter(|e| e.path().is_dir()).count())
    };
    let places = std::fs::read_dir(Path::new(&bench.store()).join("disks")).expect("STORE/disks");
    places.flatten().map(|place| count(&place.path())).sum()
}

/// The disk of checkpoint `id`, and that a VM which comes to life from it finds on it what its RAM
/// says.
fn restored(bench: &Bench, id: u64) -> Vec<u8> {
    let out = bench.path().join(format!("{id}.raw"));
    let id = id.to_string();
    let mut paused = bench.restore(&id, &["--paused"]);
    paused.wait_for_error("is paused after");
    copy(&socket_of(restored_pid(&paused)), "d", &out);
    drop(paused);
    let mut vm = bench.restore(&id, &[]);
    // More than the ring: each block is compared before it is overwritten.
    wait_for_records(&mut vm, 0, 300);
    std::fs::read(out).expect("the copy")
}

/// Whether some line behind the first `skip` ones tells of fewer records than `far`. Soon the guest
/// is beyond them again.
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
        let bench = Bench::new();
        let (mut run, monitor) = start(&bench, &qemu, &["--interval", "700ms"]);
        let base = std::fs::read(bench.path().join("disk.raw")).expect("the image");
        let target = take(&bench);
        let mut befores = Vec::new();
        for round in 0..3 {
            let far = wait_for_more_records(&mut run, 400);
            let skip = run.lines().len();
            let done = bench.json(&["rollback", &target.to_string(), "--name", "guest", "--json"]);
            befores.push((number(&done, "before"), number(&done, "now")));
            let back = run.wait_until(|p| went_back(&p.lines(), skip, far).then_some(()));
            assert!(
                back.is_some(),
                "round {round}: the guest does not go back behind {far}; {}",
                run.report()
            );
            // All of the ring is read in that time.
            wait_for_more_records(&mut run, 400);
            assert_eq!(overlays(&bench), 1, "what was written before is gone");
        }
        // The next checkpoint holds the disk as it stands there.
        let mut own = keyframe_qemu::Qmp::connect(&monitor, PATIENCE).expect("its monitor");
        own.stop().expect("stop");
        let last = take(&bench);
        let (served, copied) =
            (bench.path().join("keyframe/guest/disks.sock"), bench.path().join("now.raw"));
        copy(&served, "d", &copied);
        own.cont().expect("cont");
        drop(own);
        records_of(&run.lines());
        bench.ok(&["stop", "--name", "guest"]);
        assert!(run.wait().success(), "{}", run.report());
        assert!(
            restored(&bench, last) == std::fs::read(&copied).expect("the copy"),
            "checkpoint {last}'s disk"
        );
        assert!(JournalImage::read(&copied, 1).torn.is_empty());
        // Also the one behind the rollback, which is the target, and the one before it.
        let (before, now) = befores[1];
        let targets = restored(&bench, target);
        assert!(restored(&bench, now) == targets, "checkpoint {now}, behind the rollback");
        assert!(restored(&bench, before) != targets, "checkpoint {before}, before the rollback");
        assert!(
            std::fs::read(bench.path().join("disk.raw")).expect("the image") == base,
            "the image was written"
        );
        bench.ok(&["check", "--read-data", "--quiet", "--store", &bench.store()]);
    }
}

/// QEMU finds devices that it does not have: disk and RAM are again what they were.
#[test]
fn a_rollback_that_fails_half_way_leaves_the_disk_as_it_was() {
    for qemu in chosen_qemus(1) {
        let bench = Bench::new();
        let image = blank_image(&bench, "disk");
        let other = journaling(&qemu, &image).with(&["-device", "virtio-rng-pci"]);
        let mut run = bench.start(&["--interval", "none", "--name", "other"], &other);
        run.wait_for("KF READY");
        bench.ok(&["take", "--name", "other", "--tag", "other"]);
        bench.ok(&["stop", "--name", "other"]);
        assert!(run.wait().success(), "{}", run.report());
        let boot = journaling(&qemu, &image);
        let mut run = bench.start(&["--interval", "500ms", "--name", "guest"], &boot);
        run.wait_for("KF READY");
        let far = wait_for_records(&mut run, 0, 300);
        let before = overlays(&bench);
        bench.refused(&["rollback", "other", "--name", "guest"], 1, &["the VM is as it was"]);
        assert!(wait_for_more_records(&mut run, 400) > far, "the guest goes on");
        assert_eq!(overlays(&bench), before, "nothing is left of it");
        let last = take(&bench);
        bench.ok(&["stop", "--name", "guest"]);
        assert!(run.wait().success(), "{}", run.report());
        restored(&bench, last);
    }
}

/// The steps are those of the fault: the VM stands; its disk is another; all is loaded; it is
/// whole.
#[test]
fn an_engine_killed_in_a_rollback_leaves_no_vm_standing() {
    for (step, ends) in variants([(1, false), (2, true), (3, true), (4, false)], 2) {
        println!("-- killed at step {step}");
        let bench = Bench::new();
        let fault = format!("kill-rollback:{step}");
        let (mut run, _) =
            start(&bench, &distribution_qemu(), &["--interval", "none", "--fault", &fault]);
        let target = take(&bench);
        let far = wait_for_more_records(&mut run, 300);
        let qemu = Orphan::of(&bench, &mut run, "guest");
        let skip = run.lines().len();
        let killed = bench.run(&["rollback", &target.to_string(), "--name", "guest"]);
        assert!(!killed.status.success(), "the fault did not strike");
        run.wait();
        if ends {
            until("QEMU is ended", || !qemu.is_running());
            until("it is said", || run.errors().contains("middle of a rollback"));
        } else {
            let told = || journal_counter(run.lines().get(skip..).unwrap_or_default(), "written=");
            if step == 4 {
                until("the VM has gone back", || went_back(&run.lines(), skip, far));
            }
            until("the guest goes on without its engine", || told() > far + 300);
            records_of(&run.lines());
            qemu.kill();
        }
        // As it was before the rollback, at the instant at which it stood.
        let newest = number(bench.list().last().expect("a checkpoint"), "id");
        assert_eq!(newest > target, step > 1, "the checkpoint before");
        restored(&bench, newest);
        bench.ok(&["check", "--read-data", "--quiet", "--store", &bench.store()]);
    }
}
