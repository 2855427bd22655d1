//! Tests `keyframe attach`: it takes exact checkpoints of a VM that Keyframe did not start. The VM
//! runs on unharmed, even if the engine dies.

use keyframe_qemu::Qmp;
use keyframe_tests::libvirt::Libvirt;
use keyframe_tests::{
    Boot, ExternalVm, PATIENCE, Process, Sequence, TestEnv, assert_restores_exactly, children,
    hash_lines, number, qemus, small_guest, wait_until,
};
use rustix::process::Signal;
use std::path::Path;

fn hashing() -> Boot {
    let mut boot = Boot::new("hash");
    boot.mem_mib = 96;
    boot
}

/// Starts the guest without Keyframe and waits until it works.
fn start(env: &TestEnv, boot: &Boot) -> ExternalVm {
    let mut vm = ExternalVm::start(env, boot);
    vm.console.wait_for("KF READY");
    vm
}

/// The arguments of `keyframe attach` to `vm` through monitor `name`.
fn words(env: &TestEnv, vm: &ExternalVm, name: &str, options: &[&str]) -> Vec<String> {
    env.attach_args(&["--qmp", &vm.socket(name)], vm.console.pid(), options)
}

fn as_str(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

/// Runs `keyframe attach` until it ends. It must succeed and seal each requested checkpoint.
fn attach_for(env: &TestEnv, vm: &ExternalVm, count: usize) {
    let before = env.list().len();
    let count_text = count.to_string();
    let options =
        ["--count", &count_text, "--interval", "300ms", "--audit", "audit", "--name", "guest"];
    let args = words(env, vm, "a", &options);
    let output = env.run(&as_str(&args));
    let said = String::from_utf8_lossy(&output.stderr);
    // The watchdog of a killed engine may still run. A checkpoint that it interrupts is discarded.
    assert!(matches!(output.status.code(), Some(0 | 3)) && !said.contains("audit"), "{said}");
    assert!(said.contains("detached") && !said.contains("AUDIT"), "{said}");
    assert_eq!(env.list().len(), before + count);
}

/// Asserts that the guest continues its sequence without an error.
fn assert_runs_on(vm: &ExternalVm, sequence: &mut Sequence) {
    let before = hash_lines(&vm.console.lines()).len();
    wait_until("the guest runs on", || hash_lines(&vm.console.lines()).len() >= before + 3);
    sequence.check(&hash_lines(&vm.console.lines()), 3);
}

fn assert_goes_on(env: &TestEnv, sequence: &mut Sequence) {
    let mut restored = env.restore("latest", &[]);
    let grown = restored.wait_until(|p| (hash_lines(&p.lines()).len() >= 4).then_some(()));
    assert!(grown.is_some(), "the newest checkpoint does not go on; {}", restored.report());
    sequence.check(&hash_lines(&restored.lines()), 4);
}

#[test]
fn a_vm_that_runs_is_checkpointed_exactly_and_left_without_a_trace() {
    let mut sequence = Sequence::new(16);
    let env = TestEnv::new();
    let vm = start(&env, &hashing());
    let before = vm.traces();
    for _ in 0..2 {
        attach_for(&env, &vm, 4);
        vm.assert_unchanged_since(&before);
        // The socket is free again.
        let mut monitor = Qmp::connect(Path::new(&vm.socket("a")), PATIENCE).unwrap();
        assert!(monitor.status().unwrap().is_running());
        assert_runs_on(&vm, &mut sequence);
    }
    // A signal ends the engine while it takes checkpoints without a break.
    let mut engine = env.attach(&vm, &["--interval", "50ms"]);
    engine.wait_for_error("a checkpoint every");
    wait_until("some checkpoints", || env.list().len() >= 11);
    engine.signal(Signal::INT);
    assert!(engine.wait().success(), "{}", engine.report());
    vm.assert_unchanged_since(&before);
    assert_runs_on(&vm, &mut sequence);

    drop(vm);
    assert_restores_exactly(&env, "7");
    assert_goes_on(&env, &mut sequence);
}

#[test]
fn an_attached_engine_is_asked_and_stopped_by_name() {
    let mut sequence = Sequence::new(16);
    let env = TestEnv::new();
    let vm = start(&env, &hashing());
    let mut engine = env.attach(&vm, &["--interval", "none"]);
    engine.wait_for_error("by `keyframe take`");
    let status = env.json(&["status", "--json"]);
    assert_eq!((&status[0]["vm"], &status[0]["state"]), (&"guest".into(), &"running".into()));
    assert_eq!(number(&status[0], "qemu_pid"), u64::from(vm.console.pid()));
    let taken = env.json(&["take", "--json", "--tag", "first"]);
    assert_eq!((number(&taken, "id"), &taken["tags"][0]), (1, &"first".into()));

    // Other engines are refused, on this monitor and on another.
    let busy = words(&env, &vm, "a", &["--name", "second"]);
    env.refused(&as_str(&busy), 1, &[&vm.socket("a"), "fix:"]);
    let other = words(&env, &vm, "b", &["--name", "second"]);
    env.refused(&as_str(&other), 1, &["another engine", "keyframe stop"]);
    env.ok(&["take"]);

    env.ok(&["stop", "--name", "guest"]);
    assert!(engine.wait().success(), "{}", engine.report());
    assert!(
        engine.errors().contains("detached") && engine.errors().contains("2 checkpoints sealed")
    );
    assert_runs_on(&vm, &mut sequence);
    drop(vm);
    assert_goes_on(&env, &mut sequence);
}

#[test]
fn a_vm_under_run_is_not_attached_to() {
    let env = TestEnv::new();
    let socket = env.path().join("own.sock").display().to_string();
    let boot = hashing().with(&["-qmp", &format!("unix:{socket},server=on,wait=off")]);
    let mut run = env.start(&["--interval", "300ms", "--name", "guest"], &boot);
    run.wait_for("KF READY");
    let status = env.json(&["status", "--json"]);
    let pid = number(&status[0], "qemu_pid") as u32;
    let args = env.attach_args(&["--qmp", &socket], pid, &["--name", "second"]);
    env.refused(&as_str(&args), 1, &["another engine", "keyframe stop"]);
    let engine = status[0]["qmp"].as_str().unwrap();
    let args = env.attach_args(&["--qmp", engine], pid, &["--name", "second"]);
    env.refused(&as_str(&args), 1, &[engine, "fix:"]);
    let sealed = env.list().len();
    wait_until("checkpoints go on", || env.list().len() >= sealed + 3);
    env.ok(&["stop"]);
    assert!(run.wait().success(), "{}", run.report());
}

#[test]
fn what_is_not_that_vm_is_refused_and_no_vm_is_harmed() {
    let mut sequence = Sequence::new(16);
    let (env, other) = (TestEnv::new(), TestEnv::new());
    let vm = start(&env, &hashing());
    let before = vm.traces();
    // A disk that Keyframe could not serve at a restore.
    let files = other.path().join("files");
    std::fs::create_dir(&files).unwrap();
    std::fs::write(files.join("a"), [7; 5000]).unwrap();
    let drive = format!("file=fat:rw:{},if=virtio,format=raw", files.display());
    let with_disk = ExternalVm::start(&other, &hashing().with(&["-drive", &drive]));
    let refused = |pid: u32, socket: &str, words: &[&str]| {
        env.refused(
            &as_str(&env.attach_args(&["--qmp", socket], pid, &["--count", "1"])),
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
        &["reaches by fat", "read-only", "fix:"],
    );
    env.refused(&["attach", "--store", &env.store(), &pid.to_string()], 2, &["--qmp", "--libvirt"]);
    env.refused(
        &["attach", "--store", &env.store(), "nobody"],
        1,
        &["no VM named nobody", "--qmp"],
    );
    assert!(env.list().is_empty());
    vm.assert_unchanged_since(&before);
    assert!(with_disk.is_running());
    assert_eq!(std::fs::read(files.join("a")).unwrap(), [7; 5000], "the disk was written to");
    assert_runs_on(&vm, &mut sequence);
}

#[test]
fn a_vm_that_its_user_paused_stays_paused() {
    let mut sequence = Sequence::new(16);
    let env = TestEnv::new();
    let vm = start(&env, &hashing());
    assert!(vm.monitor().stop().unwrap().was_running);
    let mut engine = env.attach(&vm, &["--interval", "none", "--audit", "audit"]);
    engine.wait_for_error("by `keyframe take`");
    assert_eq!(env.json(&["status", "--json"])[0]["state"], "paused");
    for _ in 0..2 {
        env.ok(&["take"]);
        assert!(!vm.is_running(), "its user's pause was ended");
    }
    env.ok(&["stop"]);
    assert!(engine.wait().success(), "{}", engine.report());
    assert!(!vm.is_running(), "its user's pause was ended");
    // A pause of another tool outlives a killed engine, too.
    let mut engine = env.attach(&vm, &["--interval", "none", "--fault", "kill:copied"]);
    engine.wait_for_error("by `keyframe take`");
    assert!(!env.run(&["take"]).status.success());
    assert!(!engine.wait().success(), "{}", engine.report());
    assert!(!vm.is_running(), "its user's pause was ended");
    vm.monitor().cont().unwrap();
    assert_runs_on(&vm, &mut sequence);
    drop(vm);
    assert_restores_exactly(&env, "2");
}

#[test]
fn an_engine_killed_in_a_pause_leaves_a_vm_that_runs_and_can_be_attached_to() {
    let mut sequence = Sequence::new(16);
    let env = TestEnv::new();
    let vm = start(&env, &hashing());
    let before = vm.traces();
    for phase in ["paused", "copied"] {
        println!("-- killed at {phase}");
        let fault = format!("kill:{phase}:3");
        let mut engine = env.attach(&vm, &["--interval", "200ms", "--fault", &fault]);
        assert!(!engine.wait().success(), "it was not killed; {}", engine.report());
        assert_runs_on(&vm, &mut sequence);
        vm.assert_unchanged_since(&before);
        attach_for(&env, &vm, 2);
        vm.assert_unchanged_since(&before);
    }
    drop(vm);
    env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
    assert_goes_on(&env, &mut sequence);
}

#[test]
fn a_vm_that_ends_ends_the_engine_in_good_order() {
    let env = TestEnv::new();
    for how in ["poweroff", "quit", "killed"] {
        println!("-- {how}");
        let mut vm = start(&env, &hashing());
        let mark = env.list().len();
        let mut engine = env.attach(&vm, &["--interval", "50ms"]);
        wait_until("some checkpoints", || env.list().len() >= mark + 3);
        match how {
            "poweroff" => vm.console.type_line("poweroff"),
            "quit" => vm.monitor().quit().unwrap(),
            _ => vm.console.signal(Signal::KILL),
        }
        let exit = engine.wait();
        assert!(exit.success(), "{exit}: {}", engine.report());
        assert!(engine.errors().contains("VM guest has ended"), "{}", engine.report());
        vm.console.wait();
        env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
    }
}

/// The console of a domain; libvirt writes it to a file.
/// The kernel reports discards of private RAM only.
#[test]
fn a_restored_vm_with_a_balloon_can_be_checkpointed_again() {
    let env = TestEnv::new();
    let boot = hashing().with(&["-device", "virtio-balloon-pci,id=balloon"]);
    let mut run = env.start(&["--interval", "300ms", "--count", "2"], &boot);
    assert!(run.wait().success(), "{}", run.report());
    for lazy in [&[][..], &["--lazy"]] {
        is_attached_to_again(&env, lazy);
    }
}

fn is_attached_to_again(env: &TestEnv, options: &[&str]) {
    let mut sequence = Sequence::new(16);
    let monitor = env.path().join("restored").display().to_string();
    let _ = std::fs::remove_file(&monitor);
    let qmp = format!("unix:{monitor},server=on,wait=off");
    let mut restored = env.restore("latest", &[options, &["--", "-qmp", &qmp]].concat());
    let grown = restored.wait_until(|p| (hash_lines(&p.lines()).len() >= 3).then_some(()));
    assert!(grown.is_some(), "{}", restored.report());
    let [qemu] = children(restored.pid())[..] else { panic!("one QEMU: {}", restored.report()) };
    let options = ["--count", "2", "--interval", "300ms", "--audit", "audit", "--name", "again"];
    let output = env.run(&as_str(&env.attach_args(&["--qmp", &monitor], qemu, &options)));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !said.contains("AUDIT"), "{said}");
    sequence.check(&hash_lines(&restored.lines()), 3);
    drop(restored);
    assert_goes_on(env, &mut sequence);
}

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
    let env = TestEnv::new();
    let home = tempfile::tempdir().unwrap();
    let Some(libvirt) = Libvirt::start(home.path()) else { return };
    let (dir, serial) = (small_guest(), env.path().join("serial"));
    let inside = format!(
        "<os><type arch='x86_64' machine='pc'>hvm</type><kernel>{0}/vmlinux</kernel>\
         <initrd>{0}/initramfs.cpio.gz</initrd>\
         <cmdline>console=ttyS0 quiet panic=-1 tsc=unstable kf.work=hash</cmdline></os><features><acpi/></features>",
        dir.display()
    );
    let devices = format!("<serial type='file'><source path='{}'/></serial>", serial.display());
    let pid = libvirt.create("web", emulator, &inside, &devices);
    wait_until("the guest works", || hash_lines(&said(&serial)).len() >= 3);
    let uri = libvirt.uri();
    let monitor = ["--libvirt", "web", "--connect", &uri];
    let sets = r#"{"execute":"query-fdsets"}"#;
    let query =
        || libvirt.must(&["qemu-monitor-command", "web", sets]).replace(char::is_numeric, "");
    let before = query();
    for _ in 0..2 {
        let options = ["--count", "3", "--interval", "500ms", "--audit", "audit"];
        env.ok(&as_str(&env.attach_args(&monitor, pid, &options)));
        assert_eq!(libvirt.must(&["domstate", "web"]).trim(), "running");
        assert_eq!(query(), before);
    }
    let list = env.list();
    assert!(list.len() == 6 && list.iter().all(|entry| entry["vm"] == "web"), "{list:?}");
    let printed = hash_lines(&said(&serial)).len();
    wait_until("the guest runs on", || hash_lines(&said(&serial)).len() >= printed + 3);
    sequence.check(&hash_lines(&said(&serial)), 6);
    // The engine is killed in a pause: libvirt's VM runs on.
    let options = ["--interval", "500ms", "--fault", "kill:copied:2"];
    let args = env.attach_args(&monitor, pid, &options);
    let mut engine = Process::start(env.command(&as_str(&args)));
    assert!(!engine.wait().success(), "it was not killed; {}", engine.report());
    let printed = hash_lines(&said(&serial)).len();
    wait_until("the guest runs on", || hash_lines(&said(&serial)).len() >= printed + 3);
    libvirt.must(&["destroy", "web"]);
    assert_restores_exactly(&env, "5");
}
