//! Tests drives to which a guest of Firecracker can write, on file systems that clone files: each
//! checkpoint has the drive of its instant, and each restored VM a file of its own.

use keyframe_tests::firecracker::{
    ExternalFirecracker, assert_ends_well, assert_goes_on, assert_same_sequence, attach,
    attach_words, payload_lines, refuse_attach, take_audited,
};
use keyframe_tests::firecracker_drive::{
    DISK_BYTES, config, holds_writes, make_drive, names, soak_killed_engines, start_on,
};
use keyframe_tests::mounted::{Mounted, clones};
use keyframe_tests::{TestEnv, needs_firecracker, variants, wait_until};
use std::path::Path;

#[test]
fn a_drive_is_of_the_instant_of_its_checkpoint_and_a_restored_vm_has_its_own() {
    let guest = needs_firecracker!();
    let env = TestEnv::new().with_rehearsals();
    let Some((mounted, drive, vm)) = start_on("xfs", &env, &guest) else { return };
    vm.grows(100);
    take_audited(&env, &vm, "6");
    vm.grows(100);
    let printed = vm.lines();
    drop(vm);
    assert_eq!(clones(&mounted.dir), 6, "a clone for each checkpoint");
    let (files, before) = (names(&mounted.dir), std::fs::read(&drive).unwrap());
    assert_goes_on(&env, || printed.clone(), &[]);
    assert_goes_on(&env, || printed.clone(), &["--lazy"]);
    assert_eq!(names(&mounted.dir), files, "restores leave nothing");
    let kept = env.path().join("kept").display().to_string();
    assert_goes_on(&env, || printed.clone(), &["--keep-disks", "--work-dir", &kept]);
    let own = std::fs::read(env.path().join("kept/fc.1/0-data")).unwrap();
    assert_eq!(own.len() as u64, DISK_BYTES);
    assert!(own != before, "the restored VM has another past");
    assert!(
        std::fs::read(&drive).unwrap() == before,
        "a restored VM wrote to the first one's file"
    );
    let shown = env.json(&["show", "--json", "--store", &env.store(), "latest"]);
    assert_eq!(shown["disks"][0]["name"], "data", "{shown}");
    env.ok(&["check", "--read-data", "--store", &env.store()]);
    env.ok(&["forget", "--store", &env.store(), "--keep-last", "1"]);
    env.ok(&["prune", "--store", &env.store()]);
    assert_eq!(clones(&mounted.dir), 1, "clones go with their checkpoints");
}

#[test]
fn clones_write_to_drives_of_their_own() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let Some((mounted, _, vm)) = start_on("btrfs", &env, &guest) else { return };
    vm.grows(50);
    take_audited(&env, &vm, "2");
    let (mut branch, started) = env.branch(&["latest", "-n", "3"]);
    vm.grows(100);
    for clone in &started {
        let console = Path::new(clone["directory"].as_str().unwrap()).join("console.log");
        let lines = || payload_lines(&std::fs::read_to_string(&console).unwrap_or_default());
        wait_until("the clone prints", || lines().len() > 60);
        wait_until("the first VM is where the clone was", || {
            assert_same_sequence(&vm.lines(), &lines()) > 5
        });
    }
    branch.signal(rustix::process::Signal::INT);
    assert!(branch.wait().success(), "{}", branch.report());
    assert_eq!(clones(&mounted.dir), 2, "{:?}", names(&mounted.dir));
    assert_eq!(names(&mounted.dir).len(), 3, "{:?}", names(&mounted.dir));
}

/// The clones of its drives, and the drive that its configuration names, lie in its directory.
#[test]
fn checkpoints_of_a_clone_outlive_it_and_the_first_drive() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let Some((_mounted, drive, vm)) = start_on("xfs", &env, &guest) else { return };
    vm.grows(30);
    take_audited(&env, &vm, "1");
    vm.grows(200);
    let printed = vm.lines();
    drop(vm);
    let (mut branch, started) = env.branch(&["latest", "--name", "clone"]);
    let clone = &started[0];
    let (api, pid) = (clone["monitor"].as_str().unwrap(), clone["qemu_pid"].to_string());
    let words = ["attach", "--store", &env.store(), "--name", "of-clone", "--api", api];
    let options = ["--interval", "200ms", "--count", "2", "--audit", "of-clone"];
    env.ok(&[&words[..], &options, &[&pid]].concat());
    branch.signal(rustix::process::Signal::INT);
    assert!(branch.wait().success(), "{}", branch.report());
    assert!(branch.errors().contains(".keyframe-drives"), "{}", branch.report());
    assert_goes_on(&env, || printed.clone(), &[]);
    std::fs::remove_file(&drive).unwrap();
    env.ok(&["forget", "--store", &env.store(), "2", "3"]);
    assert_goes_on(&env, || printed.clone(), &[]);
    assert!(!drive.exists(), "the file for a moment is left");
}

#[test]
fn a_bundle_has_the_drive() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let Some((mounted, drive, vm)) = start_on("xfs", &env, &guest) else { return };
    vm.grows(30);
    take_audited(&env, &vm, "2");
    vm.grows(100);
    let printed = vm.lines();
    drop(vm);
    env.ok(&["bundle", "--store", &env.store(), "latest", "-o", "vm.bundle"]);
    env.ok(&["forget", "--store", &env.store(), "1", "2"]);
    env.ok(&["prune", "--store", &env.store()]);
    std::fs::remove_file(&drive).unwrap();
    assert_eq!(names(&mounted.dir), [""; 0], "no file of the drive is left");
    env.ok(&["import", "--store", &env.store(), "vm.bundle"]);
    assert_goes_on(&env, || printed.clone(), &[]);
}

/// It is refused after it has looked for clones that a killed engine has left.
#[test]
fn a_second_engine_leaves_the_clones_of_the_first() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let Some((mounted, _, vm)) = start_on("xfs", &env, &guest) else { return };
    let mut run = attach(&env, &vm, &["--interval", "30ms"]);
    run.wait_for_error("a checkpoint every");
    let words = attach_words(&env, &vm, &[]);
    let words: Vec<&str> =
        words.iter().map(|word| if word == "fc" { "second" } else { &**word }).collect();
    for _ in 0..10 {
        env.refused(&words, 1, &["another userfaultfd"]);
    }
    env.ok(&["stop", "--name", "fc"]);
    assert_ends_well(&mut run);
    assert!(!run.errors().contains("checkpoint failed"), "{}", run.report());
    assert_eq!(clones(&mounted.dir), env.list().len(), "{:?}", names(&mounted.dir));
}

#[test]
fn an_engine_that_dies_in_any_phase_leaves_the_drive_to_its_vm() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let Some((mounted, _, vm)) = start_on("xfs", &env, &guest) else { return };
    for phase in ["precopy", "paused", "device-state", "copied", "resumed", "encoding", "sealing"] {
        let fault = format!("kill:{phase}:2");
        let mut run = attach(&env, &vm, &["--interval", "100ms", "--fault", &fault]);
        assert!(!run.wait().success(), "{phase}: {}", run.report());
        vm.grows(10);
    }
    let mut run = attach(&env, &vm, &["--interval", "200ms", "--count", "3", "--audit", "audit"]);
    assert_ends_well(&mut run);
    assert_eq!(clones(&mounted.dir), env.list().len(), "{:?}", names(&mounted.dir));
    assert_goes_on(&env, || vm.lines(), &[]);
}

/// 200 times the engine or its watchdog is killed at a random moment. No VM is lost, and what was
/// sealed is exact.
#[test]
#[ignore = "takes minutes; scripts/soak runs it"]
fn soak_killed_engines_lose_no_page_and_no_vm() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let Some((mounted, _, vm)) = start_on("xfs", &env, &guest) else { return };
    soak_killed_engines(&env, &vm);
    assert_eq!(clones(&mounted.dir), env.list().len(), "{:?}", names(&mounted.dir));
}

#[test]
fn a_drive_that_is_given_another_file_is_followed() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let Some((mounted, drive, vm)) = start_on("xfs", &env, &guest) else { return };
    let other = mounted.dir.join("other.img");
    let mut run = attach(&env, &vm, &["--interval", "none", "--audit", "audit"]);
    run.wait_for_error("checkpoints by `keyframe take`");
    env.ok(&["take", "--name", "fc"]);
    vm.api().pause().unwrap();
    std::fs::copy(&drive, &other).unwrap();
    vm.api().set_drive("data", &other).unwrap();
    vm.api().resume().unwrap();
    std::fs::write(&drive, "no drive any more").unwrap();
    vm.grows(50);
    env.ok(&["take", "--name", "fc"]);
    vm.grows(50);
    env.ok(&["stop", "--name", "fc"]);
    assert_ends_well(&mut run);
    let shown = env.json(&["show", "--json", "--store", &env.store(), "latest"]);
    assert!(shown.to_string().contains(".other.img.keyframe-"), "{shown}");
    assert_goes_on(&env, || vm.lines(), &[]);
}

/// A clone of the file under the path would not be the guest's drive.
#[test]
fn a_drive_whose_file_was_replaced_is_refused_and_its_vm_runs_on() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let Some((mounted, drive, vm)) = start_on("xfs", &env, &guest) else { return };
    let moved = mounted.dir.join("moved.img");
    let mut run = attach(&env, &vm, &["--interval", "none"]);
    run.wait_for_error("checkpoints by `keyframe take`");
    env.ok(&["take", "--name", "fc"]);
    std::fs::rename(&drive, &moved).unwrap();
    std::fs::copy(&moved, &drive).unwrap();
    env.refused(&["take", "--name", "fc"], 1, &["drive data", "replaced"]);
    vm.grows(5);
    std::fs::rename(&moved, &drive).unwrap();
    env.ok(&["take", "--name", "fc"]);
    env.ok(&["stop", "--name", "fc"]);
    assert_ends_well(&mut run);
    std::fs::rename(&drive, &moved).unwrap();
    refuse_attach(&env, &vm, &[], &["drive data", "replaced or removed", "PATCH"]);
    vm.grows(5);
}

/// A VM in a jail is checkpointed, and restored outside of it when the jail is gone. Its drives are
/// copied on any file system, because clones would go with the jail.
fn a_jailed_vm_goes_on_outside(kind: &str) {
    let guest = needs_firecracker!();
    let env = TestEnv::new().with_rehearsals();
    let Some(mounted) = Mounted::new(&env, kind) else { return };
    if !holds_writes() {
        return;
    }
    let drive = make_drive(env.path());
    let kernel = guest.payload().display().to_string();
    let jailed = config(&guest, Path::new("/disk.img")).replace(&kernel, "/payload.elf");
    let base = mounted.dir.join("jails");
    let (vm, root) = ExternalFirecracker::start_jailed(&env, &base, &guest, &jailed, &[&drive]);
    refuse_attach(&env, &vm, &["--disk", "reflink"], &["drive data", "jail", "--disk reflink"]);
    let before = names(&root);
    vm.grows(60);
    take_audited(&env, &vm, "4");
    vm.grows(100);
    let printed = vm.lines();
    drop(vm);
    assert_eq!(names(&root), before, "nothing is left in the jail");
    std::fs::remove_dir_all(&base).unwrap();
    let binary = guest.binary();
    for options in [&["--vmm", &*binary][..], &["--vmm", &*binary, "--lazy"]] {
        assert_goes_on(&env, || printed.clone(), options);
    }
    assert!(!Path::new("/disk.img").exists(), "a file in the root directory of the host");
    env.ok(&["check", "--read-data", "--store", &env.store()]);
}

#[test]
fn a_vm_in_a_jail_is_checkpointed_with_its_drive() {
    for kind in variants(["ext4", "btrfs"], 1) {
        a_jailed_vm_goes_on_outside(kind);
    }
}
