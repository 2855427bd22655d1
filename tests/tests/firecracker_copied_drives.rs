//! Tests drives to which a guest of Firecracker can write, on a file system that does not clone
//! files: what was written is read after each pause, as it was in it.

use keyframe_tests::firecracker::{
    ExternalFirecracker, assert_ends_well, assert_goes_on, assert_same_sequence, attach,
    payload_lines, refuse_attach, take_audited,
};
use keyframe_tests::firecracker_drive::{
    DISK_BYTES, config, make_drive, names, soak_killed_engines, start_on,
};
use keyframe_tests::mounted::Mounted;
use keyframe_tests::{Process, TestEnv, needs_firecracker, wait_until};
use std::path::Path;

/// The drive of the newest checkpoint, as `export` writes it.
fn exported(env: &TestEnv) -> Vec<u8> {
    let file = env.path().join("exported").display().to_string();
    let words = ["export", "--store", &env.store(), "latest", "--disk", "data", "-f", "-o", &file];
    env.ok(&words);
    std::fs::read(file).unwrap()
}

/// Returns the number of blocks that checkpoint `id` has of its drive.
fn written_blocks(env: &TestEnv, id: &str) -> u64 {
    let shown = env.json(&["show", "--json", "--store", &env.store(), id]);
    shown["disks"][0]["written_blocks"].as_u64().unwrap_or_else(|| panic!("{shown}"))
}

#[test]
fn a_copied_drive_is_of_the_instant_of_its_checkpoint() {
    let guest = needs_firecracker!();
    let env = TestEnv::new().with_rehearsals();
    let Some((mounted, drive, vm)) = start_on("ext4", &env, &guest) else { return };
    vm.grows(100);
    take_audited(&env, &vm, "6");
    vm.grows(100);
    let printed = vm.lines();
    drop(vm);
    assert_eq!(names(&mounted.dir), ["disk.img", "lost+found"], "nothing lies beside the drive");
    assert!(written_blocks(&env, "2") < DISK_BYTES / 4096 / 2, "what was written since, alone");
    std::fs::remove_file(&drive).unwrap();
    assert_goes_on(&env, || printed.clone(), &[]);
    assert_goes_on(&env, || printed.clone(), &["--lazy"]);
    assert!(!drive.exists(), "the file for a moment is left");
    env.ok(&["check", "--read-data", "--store", &env.store()]);
    // An earlier one does not need the later ones, nor they it.
    env.ok(&["forget", "--store", &env.store(), "1", "3", "5", "6"]);
    env.ok(&["prune", "--store", &env.store()]);
    assert_goes_on(&env, || printed.clone(), &[]);
    env.ok(&["bundle", "--store", &env.store(), "latest", "-o", "vm.bundle"]);
    env.ok(&["forget", "--store", &env.store(), "2", "4"]);
    env.ok(&["import", "--store", &env.store(), "vm.bundle"]);
    assert_goes_on(&env, || printed.clone(), &[]);
}

/// Nothing is written while the user has paused the VM, so the file itself is the oracle.
#[test]
fn each_checkpoint_of_a_paused_vm_has_its_file() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let Some((_mounted, drive, vm)) = start_on("ext4", &env, &guest) else { return };
    let mut run = attach(&env, &vm, &["--interval", "20ms"]);
    run.wait_for_error("a checkpoint every");
    for _ in 0..5 {
        vm.grows(20);
        vm.api().pause().unwrap();
        env.ok(&["take", "--name", "fc"]);
        assert!(exported(&env) == std::fs::read(&drive).unwrap(), "another drive");
        vm.api().resume().unwrap();
    }
    env.ok(&["stop", "--name", "fc"]);
    assert_ends_well(&mut run);
    let errors = run.errors();
    assert!(!errors.contains("changed, and the kernel"), "{errors}");
}

#[test]
fn a_vm_that_keyframe_starts_is_restored_and_branched_with_its_drive() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let Some((_mounted, drive, vm)) = start_on("ext4", &env, &guest) else { return };
    drop(vm);
    let file = env.path().join("fc.json").display().to_string();
    let socket = env.path().join("run.sock").display().to_string();
    let (store, binary) = (env.store(), guest.binary());
    let options = ["run", "--store", &store, "--name", "fc", "--interval", "200ms"];
    let line = ["--audit", "audit", "--", &binary, "--api-sock", &socket, "--config-file", &file];
    let mut run = Process::start(env.command(&[&options[..], &line].concat()));
    wait_until("the fifth checkpoint", || env.list().len() >= 5);
    let has_printed = |run: &Process| payload_lines(&run.lines().join("\n")).len();
    let enough = has_printed(&run) + 20;
    assert!(run.wait_until(|run| (has_printed(run) > enough).then_some(())).is_some());
    env.ok(&["stop", "--name", "fc"]);
    assert!(run.wait().success(), "{}", run.report());
    let printed = payload_lines(&run.lines().join("\n"));
    // The first VM has printed more than a later one would tell.
    for id in 6..=env.list().len() {
        env.ok(&["forget", "--store", &store, &id.to_string()]);
    }
    let before = std::fs::read(&drive).unwrap();
    assert_goes_on(&env, || printed.clone(), &[]);
    let (mut branch, started) = env.branch(&["latest", "-n", "3"]);
    for clone in &started {
        let console = Path::new(clone["directory"].as_str().unwrap()).join("console.log");
        let lines = || payload_lines(&std::fs::read_to_string(&console).unwrap_or_default());
        wait_until("the clone prints", || lines().len() > 60);
    }
    branch.signal(rustix::process::Signal::INT);
    assert!(branch.wait().success(), "{}", branch.report());
    assert!(std::fs::read(&drive).unwrap() == before, "a clone wrote to the first VM's file");
}

#[test]
fn an_engine_that_dies_in_any_phase_leaves_a_copied_drive_to_its_vm() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let Some((_mounted, _, vm)) = start_on("ext4", &env, &guest) else { return };
    for phase in ["precopy", "paused", "device-state", "copied", "resumed", "encoding", "sealing"] {
        let fault = format!("kill:{phase}:2");
        let mut run = attach(&env, &vm, &["--interval", "100ms", "--fault", &fault]);
        assert!(!run.wait().success(), "{phase}: {}", run.report());
        vm.grows(10);
    }
    let mut run = attach(&env, &vm, &["--interval", "200ms", "--count", "3", "--audit", "audit"]);
    assert_ends_well(&mut run);
    assert_goes_on(&env, || vm.lines(), &[]);
}

#[test]
#[ignore = "takes minutes; scripts/soak runs it"]
fn soak_killed_engines_lose_no_page_of_a_copied_drive_and_no_vm() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let Some((_mounted, _, vm)) = start_on("ext4", &env, &guest) else { return };
    soak_killed_engines(&env, &vm);
}

/// A checkpoint that fails after the pause is lost, and the next one has its blocks.
#[test]
fn the_blocks_of_a_lost_checkpoint_are_in_the_next_one() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let Some((_mounted, drive, vm)) = start_on("ext4", &env, &guest) else { return };
    for fault in ["disk-full:200", "scan-error:3", "short-read:3"] {
        let mut run = attach(&env, &vm, &["--interval", "none", "--fault", fault]);
        run.wait_for_error("checkpoints by `keyframe take`");
        for _ in 0..4 {
            vm.grows(5);
            let _ = env.run(&["take", "--name", "fc"]);
        }
        vm.api().pause().unwrap();
        env.ok(&["take", "--name", "fc"]);
        assert!(exported(&env) == std::fs::read(&drive).unwrap(), "{fault}: another drive");
        vm.api().resume().unwrap();
        env.ok(&["stop", "--name", "fc"]);
        run.wait();
        assert!(run.errors().contains("failed"), "{fault}: {}", run.report());
    }
}

#[test]
fn a_copied_drive_that_is_given_another_file_is_followed() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let Some((mounted, drive, vm)) = start_on("ext4", &env, &guest) else { return };
    let other = mounted.dir.join("other.img");
    let mut run = attach(&env, &vm, &["--interval", "none"]);
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
    vm.api().pause().unwrap();
    env.ok(&["take", "--name", "fc"]);
    assert!(exported(&env) == std::fs::read(&other).unwrap(), "another drive");
    vm.api().resume().unwrap();
    env.ok(&["stop", "--name", "fc"]);
    assert_ends_well(&mut run);
    assert_goes_on(&env, || vm.lines(), &[]);
}

/// A request that is held back by the limit is in the guest's RAM alone.
#[test]
fn a_drive_with_a_rate_limit_is_exact() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let Some(mounted) = Mounted::new(&env, "ext4") else { return };
    let limit = r#""rate_limiter": { "ops": { "size": 8, "refill_time": 100 } }, "is_read_only""#;
    let limited = config(&guest, &make_drive(&mounted.dir)).replace(r#""is_read_only""#, limit);
    let vm = ExternalFirecracker::start(&env, &guest, &limited);
    take_audited(&env, &vm, "5");
    vm.grows(5);
    let printed = vm.lines();
    drop(vm);
    let (mut branch, started) = env.branch(&["latest", "-n", "2"]);
    for clone in &started {
        let console = Path::new(clone["directory"].as_str().unwrap()).join("console.log");
        let lines = || payload_lines(&std::fs::read_to_string(&console).unwrap_or_default());
        wait_until("the clone is where the first VM was", || {
            assert_same_sequence(&printed, &lines()) > 2
        });
    }
    branch.signal(rustix::process::Signal::INT);
    assert!(branch.wait().success(), "{}", branch.report());
}

#[test]
fn a_drive_that_can_be_captured_in_no_way_is_refused_and_its_vm_runs_on() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let folder = tempfile::Builder::new().prefix("keyframe-test-").tempdir_in("/dev/shm").unwrap();
    let drive = make_drive(folder.path());
    let vm = ExternalFirecracker::start(&env, &guest, &config(&guest, &drive));
    let said = ["drive data", "cannot be captured", "btrfs or XFS", "ext4", "is_read_only"];
    refuse_attach(&env, &vm, &[], &said);
    vm.grows(5);
    // Refused before Firecracker is started.
    let file = env.path().join("fc.json").display().to_string();
    let (store, binary) = (env.store(), guest.binary());
    let socket = env.path().join("run.sock").display().to_string();
    let line = ["--", &binary, "--api-sock", &socket, "--config-file", &file];
    env.refused(&[&["run", "--store", &store, "--name", "fc"], &line[..]].concat(), 1, &said);
    assert!(!Path::new(&socket).exists());
}

#[test]
fn a_drive_that_is_to_be_cloned_and_cannot_be_is_refused() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let Some((_mounted, _, vm)) = start_on("ext4", &env, &guest) else { return };
    let said = ["drive data", "does not clone", "btrfs or XFS"];
    refuse_attach(&env, &vm, &["--disk", "reflink"], &said);
    vm.grows(5);
}
