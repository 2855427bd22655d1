//! `keyframe attach`: exact checkpoints of a VM that somebody else started, which is none the worse
//! for it, whatever becomes of the engine.

use keyframe_qemu::Qmp;
use keyframe_tests::libvirt::Libvirt;
use keyframe_tests::{
    Bench, Boot, Foreign, PATIENCE, Process, Sequence, assert_restores_exactly, hash_lines, number,
    qemus, small_guest, until,
};
use rustix::process::Signal;
use std::path::Path;

fn hashing() -> Boot {
    let mut boot = Boot::new("hash");
    boot.mem_mib = 96;
    boot
}

/// Starts the guest by hand and waits until it works.
fn start(bench: &Bench, boot: &Boot) -> Foreign {
    let mut vm = Foreign::start(bench, boot);
    vm.console.wait_for("KF READY");
    vm
}

/// `keyframe attach` to `vm` through monitor `name`, in words.
fn words(bench: &Bench, vm: &Foreign, name: &str, options: &[&str]) -> Vec<String> {
    bench.attach_args(&["--qmp", &vm.socket(name)], vm.console.pid(), options)
}

fn as_str(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

/// Starts it in the background, as VM `guest`.
fn attach(bench: &Bench, vm: &Foreign, options: &[&str]) -> Process {
    let args = words(bench, vm, "a", &[&["--name", "guest"], options].concat());
    Process::start(bench.command(&as_str(&args)))
}

/// Runs it to its end, which must come with a sealed checkpoint each time it was asked for one.
fn attach_for(bench: &Bench, vm: &Foreign, count: usize) {
    let before = bench.list().len();
    let count_text = count.to_string();
    let options =
        ["--count", &count_text, "--interval", "300ms", "--audit", "audit", "--name", "guest"];
    let args = words(bench, vm, "a", &options);
    let output = bench.run(&as_str(&args));
    let said = String::from_utf8_lossy(&output.stderr);
    // The watchdog of an engine that was killed may still be about: a checkpoint that it tears is
    // dropped.
    assert!(matches!(output.status.code(), Some(0 | 3)) && !said.contains("audit"), "{said}");
    assert!(said.contains("detached") && !said.contains("AUDIT"), "{said}");
    assert_eq!(bench.list().len(), before + count);
}

/// The guest prints on, and has printed nothing but its sequence.
fn assert_runs_on(vm: &Foreign, sequence: &mut Sequence) {
    let before = hash_lines(&vm.console.lines()).len();
    until("the guest runs on", || hash_lines(&vm.console.lines()).len() >= before + 3);
    sequence.check(&hash_lines(&vm.console.lines()), 3);
}

fn assert_goes_on(bench: &Bench, sequence: &mut Sequence) {
    let mut restored = bench.restore("latest", &[]);
    let grown = restored.wait_until(|p| (hash_lines(&p.lines()).len() >= 4).then_some(()));
    assert!(grown.is_some(), "the newest checkpoint does not go on; {}", restored.report());
    sequence.check(&hash_lines(&restored.lines()), 4);
}

#[test]
fn a_vm_that_runs_is_checkpointed_exactly_and_left_without_a_trace() {
    let mut sequence = Sequence::new(16);
    let bench = Bench::new();
    let vm = start(&bench, &hashing());
    let before = vm.traces();
    for _ in 0..2 {
        attach_for(&bench, &vm, 4);
        vm.assert_left_as(&before);
        // The socket is free again.
        let mut monitor = Qmp::connect(Path::new(&vm.socket("a")), PATIENCE).unwrap();
        assert!(monitor.status().unwrap().is_running());
        assert_runs_on(&vm, &mut sequence);
    }
    // Ended by a signal while checkpoints are taken back to back.
    let mut engine = attach(&bench, &vm, &["--interval", "50ms"]);
    engine.wait_for_error("a checkpoint every");
    until("some checkpoints", || bench.list().len() >= 11);
    engine.signal(Signal::INT);
    assert!(engine.wait().success(), "{}", engine.report());
    vm.assert_left_as(&before);
    assert_runs_on(&vm, &mut sequence);

    drop(vm);
    assert_restores_exactly(&bench, "7");
    assert_goes_on(&bench, &mut sequence);
}

#[test]
fn an_attached_engine_is_asked_and_stopped_by_name() {
    let mut sequence = Sequence::new(16);
    let bench = Bench::new();
    let vm = start(&bench, &hashing());
    let mut engine = attach(&bench, &vm, &["--interval", "none"]);
    engine.wait_for_error("by `keyframe take`");
    let status = bench.json(&["status", "--json"]);
    assert_eq!((&status[0]["vm"], &status[0]["state"]), (&"guest".into(), &"running".into()));
    assert_eq!(number(&status[0], "qemu_pid"), u64::from(vm.console.pid()));
    let taken = bench.json(&["take", "--json", "--tag", "first"]);
    assert_eq!((number(&taken, "id"), &taken["tags"][0]), (1, &"first".into()));

    // Nobody else gets in between: not by this monitor, not by another.
    let busy = words(&bench, &vm, "a", &["--name", "second"]);
    bench.refused(&as_str(&busy), 1, &[&vm.socket("a"), "fix:"]);
    let other = words(&bench, &vm, "b", &["--name", "second"]);
    bench.refused(&as_str(&other), 1, &["another engine", "keyframe stop"]);
    bench.ok(&["take"]);

    bench.ok(&["stop", "--name", "guest"]);
    assert!(engine.wait().success(), "{}", engine.report());
    assert!(
        engine.errors().contains("detached") && engine.errors().contains("2 checkpoints sealed")
    );
    assert_runs_on(&vm, &mut sequence);
    drop(vm);
    assert_goes_on(&bench, &mut sequence);
}

#[test]
fn a_vm_under_run_is_not_attached_to() {
    let bench = Bench::new();
    let socket = bench.path().join("own.sock").display().to_string();
    let boot = hashing().with(&["-qmp", &format!("unix:{socket},server=on,wait=off")]);
    let mut run = bench.start(&["--interval", "300ms", "--name", "guest"], &boot);
    run.wait_for("KF READY");
    let status = bench.json(&["status", "--json"]);
    let pid = number(&status[0], "qemu_pid") as u32;
    let args = bench.attach_args(&["--qmp", &socket], pid, &["--name", "second"]);
    bench.refused(&as_str(&args), 1, &["another engine", "keyframe stop"]);
    let engine = status[0]["qmp"].as_str().unwrap();
    let args = bench.attach_args(&["--qmp", engine], pid, &["--name", "second"]);
    bench.refused(&as_str(&args), 1, &[engine, "fix:"]);
    let sealed = bench.list().len();
    until("checkpoints go on", || bench.list().len() >= sealed + 3);
    bench.ok(&["stop"]);
    assert!(run.wait().success(), "{}", run.report());
}

#[test]
fn what_is_not_that_vm_is_refused_and_no_vm_is_harmed() {
    let mut sequence = Sequence::new(16);
    let (bench, other) = (Bench::new(), Bench::new());
    let vm = start(&bench, &hashing());
    let before = vm.traces();
    // A disk that nothing of ours could serve at a restore.
    let files = other.path().join("files");
    std::fs::create_dir(&files).unwrap();
    std::fs::write(files.join("a"), [7; 5000]).unwrap();
    let drive = format!("file=fat:rw:{},if=virtio,format=raw", files.display());
    let with_disk = Foreign::start(&other, &hashing().with(&["-drive", &drive]));
    let refused = |pid: u32, socket: &str, words: &[&str]| {
        bench.refused(
            &as_str(&bench.attach_args(&["--qmp", socket], pid, &["--count", "1"])),
            1,
            words,
        );
    };
    let pid = vm.console.pid();
    refused(
        with_disk.console.pid(),
        &vm.socket("a"),
        &[&format!("belongs to process {pid}"), "fix:"],
    );
    refused(std::process::id(), &vm.socket("a"), &["belongs to process", "fix:"]);
    refused(4_194_305, &vm.socket("a"), &["no such process", "fix:"]);
    refused(pid, "/no-such/socket", &["/no-such/socket"]);
    let busy = Qmp::connect(Path::new(&vm.socket("a")), PATIENCE).unwrap();
    refused(pid, &vm.socket("a"), &[&vm.socket("a"), "fix:"]);
    drop(busy);
    refused(
        with_disk.console.pid(),
        &with_disk.socket("a"),
        &["reached by fat", "read-only", "fix:"],
    );
    bench.refused(
        &["attach", "--store", &bench.store(), &pid.to_string()],
        2,
        &["--qmp", "--libvirt"],
    );
    assert!(bench.list().is_empty());
    vm.assert_left_as(&before);
    assert!(with_disk.runs());
    assert_eq!(std::fs::read(files.join("a")).unwrap(), [7; 5000], "the disk was written to");
    assert_runs_on(&vm, &mut sequence);
}

#[test]
fn a_vm_that_its_user_paused_stays_paused() {
    let mut sequence = Sequence::new(16);
    let bench = Bench::new();
    let vm = start(&bench, &hashing());
    assert!(vm.other().stop().unwrap().was_running);
    let mut engine = attach(&bench, &vm, &["--interval", "none", "--audit", "audit"]);
    engine.wait_for_error("by `keyframe take`");
    assert_eq!(bench.json(&["status", "--json"])[0]["state"], "paused");
    for _ in 0..2 {
        bench.ok(&["take"]);
        assert!(!vm.runs(), "its user's pause was ended");
    }
    bench.ok(&["stop"]);
    assert!(engine.wait().success(), "{}", engine.report());
    assert!(!vm.runs(), "its user's pause was ended");
    // An engine that dies leaves that pause alone, too.
    let mut engine = attach(&bench, &vm, &["--interval", "none", "--fault", "kill:copied"]);
    engine.wait_for_error("by `keyframe take`");
    assert!(!bench.run(&["take"]).status.success());
    assert!(!engine.wait().success(), "{}", engine.report());
    assert!(!vm.runs(), "its user's pause was ended");
    vm.other().cont().unwrap();
    assert_runs_on(&vm, &mut sequence);
    drop(vm);
    assert_restores_exactly(&bench, "2");
}

#[test]
fn an_engine_killed_in_a_pause_leaves_a_vm_that_runs_and_can_be_attached_to() {
    let mut sequence = Sequence::new(16);
    let bench = Bench::new();
    let vm = start(&bench, &hashing());
    let before = vm.traces();
    for phase in ["paused", "copied"] {
        println!("-- killed at {phase}");
        let fault = format!("kill:{phase}:3");
        let mut engine = attach(&bench, &vm, &["--interval", "200ms", "--fault", &fault]);
        assert!(!engine.wait().success(), "it was not killed; {}", engine.report());
        assert_runs_on(&vm, &mut sequence);
        vm.assert_left_as(&before);
        attach_for(&bench, &vm, 2);
        vm.assert_left_as(&before);
    }
    drop(vm);
    bench.ok(&["check", "--read-data", "--quiet", "--store", &bench.store()]);
    assert_goes_on(&bench, &mut sequence);
}

#[test]
fn a_vm_that_ends_ends_the_engine_in_good_order() {
    let bench = Bench::new();
    for how in ["poweroff", "quit", "killed"] {
        println!("-- {how}");
        let mut vm = start(&bench, &hashing());
        let mark = bench.list().len();
        let mut engine = attach(&bench, &vm, &["--interval", "50ms"]);
        until("some checkpoints", || bench.list().len() >= mark + 3);
        match how {
            "poweroff" => vm.console.say("poweroff"),
            "quit" => vm.other().quit().unwrap(),
            _ => vm.console.signal(Signal::KILL),
        }
        let exit = engine.wait();
        assert!(exit.success(), "{exit}: {}", engine.report());
        assert!(engine.errors().contains("VM guest has ended"), "{}", engine.report());
        vm.console.wait();
        bench.ok(&["check", "--read-data", "--quiet", "--store", &bench.store()]);
    }
}

/// The console of a domain, which libvirt writes to a file.
fn said(serial: &Path) -> Vec<String> {
    let text = String::from_utf8_lossy(&std::fs::read(serial).unwrap_or_default()).into_owned();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn a_domain_of_libvirts_is_checkpointed_and_left_as_it_was() {
    for qemu in qemus() {
        println!("-- QEMU {}", qemu.label);
        let emulator =
            if qemu.path.contains('/') { qemu.path } else { format!("/usr/bin/{}", qemu.path) };
        domain_is_left_as_it_was(&emulator);
    }
}

fn domain_is_left_as_it_was(emulator: &str) {
    let mut sequence = Sequence::new(16);
    let bench = Bench::new();
    let home = tempfile::tempdir().unwrap();
    let Some(libvirt) = Libvirt::start(home.path()) else { return };
    let (dir, serial) = (small_guest(), bench.path().join("serial"));
    let inside = format!(
        "<os><type arch='x86_64' machine='pc'>hvm</type><kernel>{0}/vmlinux</kernel>\
         <initrd>{0}/initramfs.cpio.gz</initrd>\
         <cmdline>console=ttyS0 quiet panic=-1 tsc=unstable kf.work=hash</cmdline></os><features><acpi/></features>",
        dir.display()
    );
    let devices = format!("<serial type='file'><source path='{}'/></serial>", serial.display());
    let pid = libvirt.create("web", emulator, &inside, &devices);
    until("the guest works", || hash_lines(&said(&serial)).len() >= 3);
    let uri = libvirt.uri();
    let monitor = ["--libvirt", "web", "--connect", &uri];
    let sets = r#"{"execute":"query-fdsets"}"#;
    let query =
        || libvirt.must(&["qemu-monitor-command", "web", sets]).replace(char::is_numeric, "");
    let before = query();
    for _ in 0..2 {
        let options = ["--count", "3", "--interval", "500ms", "--audit", "audit"];
        bench.ok(&as_str(&bench.attach_args(&monitor, pid, &options)));
        assert_eq!(libvirt.must(&["domstate", "web"]).trim(), "running");
        assert_eq!(query(), before);
    }
    let list = bench.list();
    assert!(list.len() == 6 && list.iter().all(|entry| entry["vm"] == "web"), "{list:?}");
    let printed = hash_lines(&said(&serial)).len();
    until("the guest runs on", || hash_lines(&said(&serial)).len() >= printed + 3);
    sequence.check(&hash_lines(&said(&serial)), 6);
    // Killed in a pause: libvirt's VM runs on.
    let options = ["--interval", "500ms", "--fault", "kill:copied:2"];
    let args = bench.attach_args(&monitor, pid, &options);
    let mut engine = Process::start(bench.command(&as_str(&args)));
    assert!(!engine.wait().success(), "it was not killed; {}", engine.report());
    let printed = hash_lines(&said(&serial)).len();
    until("the guest runs on", || hash_lines(&said(&serial)).len() >= printed + 3);
    libvirt.must(&["destroy", "web"]);
    assert_restores_exactly(&bench, "5");
}
