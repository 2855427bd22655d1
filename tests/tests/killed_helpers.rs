//! Tests the death of helper processes, of the terminal, and of the engine: the user's VM goes on,
//! checkpoints go on or end with a reason, and `status` tells which.

use keyframe_tests::attach_soak::{Draws, Shape, soak};
use keyframe_tests::helpers::{helper_of, kill};
use keyframe_tests::journaling::{blank_image, journaling, wait_for_more_records};
use keyframe_tests::{
    Boot, ExternalVm, Process, Qemu, TestEnv, chosen_qemus, distribution_qemu, number, qemus, seed,
    variants, wait_until,
};
use rustix::process::Signal;
use serde_json::Value;
use std::fs::File;
use std::process::Stdio;

fn status(env: &TestEnv) -> Value {
    env.json(&["status", "--json", "--name", "guest"])[0].clone()
}

/// Waits until `more` further checkpoints are sealed.
fn wait_for_checkpoints(env: &TestEnv, more: u64) {
    let before = number(&status(env), "sealed");
    wait_until("checkpoints go on", || number(&status(env), "sealed") >= before + more);
}

fn start(env: &TestEnv, boot: &Boot) -> Process {
    let mut run = env.start(&["--interval", "300ms", "--name", "guest"], boot);
    run.wait_for("KF READY");
    run
}

/// Asserts that `run` has ended well, or with a warning: a checkpoint may have failed.
fn assert_ended(run: &mut Process) {
    let end = run.wait();
    assert!(matches!(end.code(), Some(0 | 3)), "{end}; {}", run.report());
}

#[test]
fn a_killed_watchdog_is_started_again() {
    let env = TestEnv::new();
    let mut boot = Boot::new("hash");
    boot.mem_mib = 96;
    let mut run = start(&env, &boot);
    for _ in 0..2 {
        wait_for_checkpoints(&env, 2);
        kill(helper_of(run.pid(), "__watchdog"));
        wait_for_checkpoints(&env, 2);
    }
    env.ok(&["take", "--name", "guest"]);
    assert_eq!(run.errors().matches("the watchdog process had ended").count(), 2);
    env.ok(&["stop", "--name", "guest"]);
    assert!(run.wait().success(), "{}", run.report());
}

#[test]
fn a_killed_disk_server_is_started_again_and_its_guest_notices_nothing() {
    for qemu in chosen_qemus(0) {
        let env = TestEnv::new();
        let mut run = start(&env, &journaling(&qemu, &blank_image(&env, "d")));
        for _ in 0..3 {
            wait_for_more_records(&mut run, 200);
            kill(helper_of(run.pid(), "__disks"));
            wait_for_more_records(&mut run, 200);
            wait_for_checkpoints(&env, 2);
        }
        env.ok(&["take", "--name", "guest"]);
        assert_eq!(status(&env)["state"], "running");
        assert_eq!(run.errors().matches("serves the disks had ended").count(), 3);
        env.ok(&["stop", "--name", "guest"]);
        assert_ended(&mut run);
        env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
        // The disk of the newest checkpoint is of the instant of its RAM.
        let mut restored = env.restore("latest", &[]);
        restored.wait_for_error("is running after");
        wait_for_more_records(&mut restored, 200);
    }
}

#[test]
fn a_vm_whose_disks_cannot_be_served_is_paused_until_they_are() {
    let env = TestEnv::new();
    let (image, away) = (blank_image(&env, "d"), env.path().join("away.raw"));
    let mut run = start(&env, &journaling(&distribution_qemu(), &image));
    wait_for_more_records(&mut run, 200);
    std::fs::rename(&image, &away).expect("move the image away");
    kill(helper_of(run.pid(), "__disks"));
    wait_until("the VM is paused", || status(&env)["state"] == "paused");
    let shown = status(&env);
    let why = shown["last_error"].as_str().unwrap_or_default().to_owned();
    assert!(why.contains("d.raw") && why.contains("paused until its disks are served"), "{shown}");
    std::fs::rename(&away, &image).expect("move the image back");
    wait_until("the VM runs on", || status(&env)["state"] == "running");
    wait_for_more_records(&mut run, 200);
    wait_for_checkpoints(&env, 2);
    assert!(run.errors().contains("the VM's disks are served again"), "{}", run.report());
    env.ok(&["stop", "--name", "guest"]);
    assert_ended(&mut run);
}

/// Messages that cannot be written end nothing.
#[test]
fn a_terminal_that_cannot_be_written_ends_no_engine() {
    let env = TestEnv::new();
    let mut boot = Boot::new("hash");
    boot.mem_mib = 96;
    let mut vm = ExternalVm::start(&env, &boot);
    vm.console.wait_for("KF READY");
    let full = || Stdio::from(File::options().write(true).open("/dev/full").expect("/dev/full"));
    let closed = || {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        Stdio::from(writer)
    };
    let streams: [(&str, &dyn Fn() -> Stdio); 2] = [("full", &full), ("closed", &closed)];
    for (name, stream) in streams {
        let options = ["--name", "guest", "--interval", "100ms", "-v"];
        let args = env.attach_args(&["--qmp", &vm.socket("a")], vm.console.pid(), &options);
        let mut command = env.command(&args.iter().map(String::as_str).collect::<Vec<_>>());
        command.stdin(Stdio::null()).stdout(stream()).stderr(stream());
        let sealed = env.list().len();
        let mut engine = command.spawn().expect("attach");
        wait_until("checkpoints", || {
            env.list().len() >= sealed + 3 || engine.try_wait().expect("its end").is_some()
        });
        let pid = rustix::process::Pid::from_raw(engine.id().cast_signed()).expect("a pid");
        rustix::process::kill_process(pid, Signal::HUP).expect("the engine runs");
        let exit = engine.wait().expect("its end");
        assert_eq!(exit.code(), Some(0), "{name}");
        assert!(env.list().len() >= sealed + 3, "{name}");
    }
    assert!(vm.is_running());
}

fn shape(name: &str, machine: &str, work: &str, words: &[&str], options: &[&str]) -> Shape {
    let mut boot = Boot::new(work).with(words);
    boot.machine = machine.into();
    boot.mem_mib = 96;
    let options = options.iter().map(|word| (*word).to_owned()).collect();
    Shape { name: name.into(), boot, options }
}

/// Shapes of VMs as people have them. A generator of command lines can add to them.
fn shapes(directory: &std::path::Path) -> Vec<Shape> {
    let image = |name: &str| {
        let path = directory.join(name);
        File::create(&path).and_then(|file| file.set_len(8 << 20)).expect("an image");
        format!("file={},format=raw,if=none,id=d", path.display())
    };
    let (virtio, ide, scsi) = (image("virtio.raw"), image("ide.raw"), image("scsi.raw"));
    let bitmap = ["--disk", "bitmap"];
    let journal = "journal kf.mib=4 kf.rate=200";
    vec![
        shape(
            "pc with a virtio disk and two cards",
            "pc",
            &format!("{journal} kf.dev=/dev/vda"),
            &[
                "-drive",
                &virtio,
                "-device",
                "virtio-blk-pci,drive=d",
                "-netdev",
                "user,id=n0",
                "-device",
                "virtio-net-pci,netdev=n0",
                "-netdev",
                "user,id=n1",
                "-device",
                "e1000,netdev=n1",
            ],
            &bitmap,
        ),
        shape(
            "pc with an IDE disk",
            "pc",
            &format!("{journal} kf.dev=/dev/sda kf.bus=ide"),
            &["-drive", &ide, "-device", "ide-hd,drive=d"],
            &bitmap,
        ),
        shape(
            "q35 with a SCSI disk",
            "q35",
            &format!("{journal} kf.dev=/dev/sda kf.bus=scsi"),
            &["-drive", &scsi, "-device", "virtio-scsi-pci", "-device", "scsi-hd,drive=d"],
            &bitmap,
        ),
        shape("microvm", "microvm", "hash", &[], &[]),
    ]
}

/// Only the next engine can end a pause in which both died.
#[test]
fn a_pause_in_which_engine_and_watchdog_died_is_ended_by_the_next_engine() {
    let directory = tempfile::tempdir().expect("a directory");
    for qemu in chosen_qemus(0) {
        let (env, mut vm) = started(&qemu, &shapes(directory.path())[0]);
        let bitmap = ["--disk", "bitmap", "--interval", "200ms"];
        let stalling = [&bitmap[..], &["--fault", "stall:paused:2"]].concat();
        let mut engine = env.attach(&vm, &stalling);
        wait_until("the first checkpoint", || !env.list().is_empty());
        let watchdog = helper_of(engine.pid(), "__watchdog");
        wait_until("the pause of the second", || !vm.is_running());
        kill(watchdog);
        engine.signal(Signal::KILL);
        engine.wait();
        assert!(!vm.is_running(), "something else ended the pause: this test shows nothing");

        let mut next = env.attach(&vm, &bitmap);
        next.wait_for_error(RUNS_AGAIN);
        wait_for_more_records(&mut vm.console, 200);
        wait_for_checkpoints(&env, 2);
        env.ok(&["stop", "--name", "guest"]);
        assert_ended(&mut next);
        env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
    }
}

/// A VM that its user paused stays paused, whatever an engine left in QEMU that was killed with its
/// watchdog between two pauses.
#[test]
fn a_vm_that_its_user_paused_is_resumed_by_no_later_engine() {
    let directory = tempfile::tempdir().expect("a directory");
    let shapes = shapes(directory.path());
    // The last shape is paused by one command, the first by separate ones.
    for (shape, qemu) in [&shapes[0], &shapes[3]].into_iter().zip(qemus().iter().cycle()) {
        let (env, vm) = started(qemu, shape);
        let options: Vec<&str> = shape.options.iter().map(String::as_str).collect();
        let by_command = [&options[..], &["--interval", "none"]].concat();
        let mut engine = env.attach(&vm, &by_command);
        engine.wait_for_error("by `keyframe take`");
        for _ in 0..2 {
            env.ok(&["take", "--name", "guest"]);
        }
        let watchdog = helper_of(engine.pid(), "__watchdog");
        assert!(vm.monitor().stop().expect("stop").was_running);
        wait_until("the engine sees it", || status(&env)["state"] == "paused");
        kill(watchdog);
        engine.signal(Signal::KILL);
        engine.wait();

        let mut next = env.attach(&vm, &by_command);
        next.wait_for_error("by `keyframe take`");
        assert!(!next.errors().contains(RUNS_AGAIN) && !vm.is_running(), "{}", next.report());
        env.ok(&["stop", "--name", "guest"]);
        assert_ended(&mut next);
        assert!(!vm.is_running());
        vm.monitor().cont().expect("cont");
        let before = vm.console.lines().len();
        wait_until("the guest goes on", || vm.console.lines().len() > before + 2);
        env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
    }
}

/// What an engine says that ended the pause of a dead one.
const RUNS_AGAIN: &str = "it runs again";

/// Starts a VM of `shape` under `qemu`, without Keyframe, and waits until its guest works.
fn started(qemu: &Qemu, shape: &Shape) -> (TestEnv, ExternalVm) {
    let env = TestEnv::new();
    let mut boot = shape.boot.clone();
    boot.qemu.clone_from(&qemu.path);
    let mut vm = ExternalVm::start(&env, &boot);
    vm.console.wait_for("KF READY");
    (env, vm)
}

/// A few rounds over one shape that the seed chooses; all of them with `KEYFRAME_TEST_ALL=1`.
#[test]
fn a_vm_survives_each_death_of_what_is_attached_to_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut draws = Draws::new(seed());
    for shape in variants(shapes(directory.path()), 1) {
        soak(&shape, 4, &mut draws);
    }
}
