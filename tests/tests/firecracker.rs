//! Tests checkpoints of Firecracker's VMs: exact, restored at once, lazily and as clones; the VM runs
//! on whatever happens to the engine; what cannot be exact is refused.

use keyframe_tests::core_file::{core_registers, text, translate};
use keyframe_tests::firecracker::{
    ExternalFirecracker, FirecrackerGuest, assert_ends_well, assert_goes_on, assert_same_sequence,
    attach, end_clones, payload_lines, refuse_attach, take_audited, take_audited_after,
};
use keyframe_tests::helpers::{helper_of, kill};
use keyframe_tests::{Process, TestEnv, is_gone, needs_firecracker, number, wait_until};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn start(env: &TestEnv, guest: &FirecrackerGuest) -> ExternalFirecracker {
    ExternalFirecracker::start(env, guest, &guest.config(128, ""))
}

#[test]
fn a_restored_vm_goes_on_exactly_from_an_audited_checkpoint() {
    let guest = needs_firecracker!();
    let env = TestEnv::new().with_rehearsals();
    let vm = start(&env, &guest);
    take_audited(&env, &vm, "6");
    // What the restored VM is to print once more.
    vm.grows(60);
    let printed = vm.lines();
    drop(vm);
    assert_goes_on(&env, || printed.clone(), &[]);
    assert_goes_on(&env, || printed.clone(), &["--lazy"]);
    let shown = env.ok(&["show", "--store", &env.store(), "latest"]);
    assert!(shown.contains("Firecracker 1."), "{shown}");
    env.ok(&["check", "--read-data", "--store", &env.store()]);
    let store = env.store();
    let export =
        |format, file| ["export", "--store", &store, "latest", "--format", format, "-o", file];
    env.refused(&export("migration", "vm.mig"), 1, &["no migration stream", "--format elf"]);
    env.ok(&export("raw", "vm.raw"));
    let raw = std::fs::read(env.path().join("vm.raw")).unwrap();
    let copy = newest_audit(&env);
    assert!(raw == copy, "the export differs from the copy of RAM in the pause");
    env.ok(&["diff", "--store", &env.store(), "1", "2"]);
}

#[test]
fn the_core_file_has_the_registers_of_all_processors() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let config = guest.config(128, "").replace("\"vcpu_count\": 1", "\"vcpu_count\": 2");
    let vm = ExternalFirecracker::start(&env, &guest, &config);
    take_audited(&env, &vm, "2");
    let store = env.store();
    for format in ["raw", "elf"] {
        env.ok(&["export", "--store", &store, "2", "--format", format, "-o", format]);
    }
    let (ram, core) = (read(env.path().join("raw")), read(env.path().join("elf")));
    let cpus = core_registers(&core);
    assert_eq!(cpus.len(), 2, "{cpus:?}");
    let program = read(guest.payload());
    let (start, code) = text(&program);
    let is_code = |address: u64| (start..start + code.len() as u64).contains(&address);
    let running = cpus[0];
    // The processor executes the payload, on its stack, with its page tables.
    assert!(is_code(running.rip), "{running:?} is not in the payload");
    assert_eq!(translate(&ram, running.cr3, running.rip), Some(running.rip), "{running:?}");
    let stack = translate(&ram, running.cr3, running.rsp).unwrap() as usize;
    let returns =
        ram[stack..stack + 512].chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
    assert!(returns.clone().any(is_code), "no return address on the stack: {running:?}");
    // The second one has not run: it is where Firecracker has put it.
    assert_eq!((cpus[1].rip, cpus[1].cr3), (start, running.cr3));
    // The file of RAM and that of the core are the same memory.
    assert!(core.ends_with(&ram), "the core has another memory");
}

fn read(path: PathBuf) -> Vec<u8> {
    std::fs::read(path).unwrap()
}

/// The copy of RAM that the audit has made in the newest pause.
fn newest_audit(env: &TestEnv) -> Vec<u8> {
    let directory = std::fs::read_dir(env.path().join("audit")).unwrap();
    let files = directory.map(|entry| entry.unwrap().path());
    let number =
        |path: &PathBuf| path.file_stem().and_then(|stem| stem.to_str()?.parse::<u64>().ok());
    let newest = files.filter(|path| number(path).is_some()).max_by_key(number).unwrap();
    std::fs::read(newest).unwrap()
}

#[test]
fn clones_go_on_independently_and_share_what_they_do_not_write() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let vm = start(&env, &guest);
    take_audited(&env, &vm, "3");
    vm.grows(60);
    let printed = vm.lines();
    let (mut branch, clones) = env.branch(&["latest", "-n", "4"]);
    let console = |clone: &Value| {
        let path = Path::new(clone["directory"].as_str().unwrap()).join("console.log");
        payload_lines(&std::fs::read_to_string(path).unwrap_or_default())
    };
    for clone in &clones {
        wait_until("the clone prints", || console(clone).len() > 30);
        assert!(assert_same_sequence(&printed, &console(clone)) > 5);
        let pid = number(clone, "qemu_pid");
        let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
        assert!(smaps.contains("memfd:keyframe-ram"), "it does not share its RAM");
    }
    assert_eq!(clones.len(), 4);
    vm.grows(1);
    end_clones(&mut branch, &clones);
}

#[test]
fn a_clone_is_checkpointed_in_its_turn() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let vm = start(&env, &guest);
    take_audited(&env, &vm, "2");
    let store = env.store();
    let (mut branch, clones) = env.branch(&["latest", "--name", "clone"]);
    let clone = &clones[0];
    let (api, pid) = (clone["monitor"].as_str().unwrap(), number(clone, "qemu_pid").to_string());
    let audited = ["--interval", "300ms", "--count", "3", "--audit", "audit2"];
    let words = [&["attach", "--store", &store, "--name", "of-clone", "--api", api], &audited[..]];
    env.ok(&[&words.concat()[..], &[&pid]].concat());
    branch.signal(rustix::process::Signal::INT);
    branch.wait();
    // The first VM has run on meanwhile, and is ahead.
    assert_goes_on(&env, || vm.lines(), &[]);
}

#[test]
fn the_commands_name_firecracker_and_what_it_cannot_do() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let vm = start(&env, &guest);
    let mut run = attach(&env, &vm, &["--interval", "none"]);
    run.wait_for_error("checkpoints by `keyframe take`");
    env.ok(&["take", "--name", "fc"]);
    let status = env.ok(&["status"]);
    assert!(status.contains(&format!("(Firecracker {},", vm.pid())), "{status}");
    env.ok(&["stop", "--name", "fc"]);
    assert_ends_well(&mut run);
    let (mut branch, clones) = env.branch(&["latest", "-n", "2", "--name", "clone"]);
    let pid = number(&clones[0], "qemu_pid") as u32;
    let status = env.ok(&["status"]);
    assert!(status.contains(&format!("(Firecracker {pid})")), "{status}");
    env.ok(&["stop", "--name", "clone-1"]);
    wait_until("the clone is gone", || is_gone(pid));
    end_clones(&mut branch, &clones[1..]);
    let binary = guest.binary();
    let command = ["--", &*binary, "--api-sock", "a.sock"];
    let record = [&["record", "--out", "recording"], &command[..]].concat();
    env.refused(&record, 1, &["a VM of Firecracker cannot be recorded", "under QEMU"]);
    let profile = [&["profile"], &command[..]].concat();
    env.refused(&profile, 1, &["profile starts a VM of QEMU alone", "--api SOCKET PID"]);
}

#[test]
fn an_engine_that_dies_in_any_phase_leaves_the_vm_running() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let vm = start(&env, &guest);
    for phase in [
        "precopy",
        "stopping",
        "paused",
        "device-state",
        "copied",
        "resumed",
        "encoding",
        "sealing",
    ] {
        let fault = format!("kill:{phase}:2");
        let mut run = attach(&env, &vm, &["--interval", "100ms", "--fault", &fault]);
        assert!(!run.wait().success(), "{phase}: {}", run.report());
        vm.grows(10);
        assert!(!vm.is_paused(), "{phase}");
    }
    // And with its watchdog, outside of a pause.
    let mut run = attach(&env, &vm, &["--interval", "none"]);
    run.wait_for_error("checkpoints by `keyframe take`");
    let watchdog = helper_of(run.pid(), "__watchdog");
    kill(watchdog);
    kill(run.pid());
    run.wait();
    vm.grows(10);
    take_audited_after(&env, &vm);
}

#[test]
fn an_engine_that_is_killed_in_a_rehearsal_leaves_no_second_firecracker() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let vm = start(&env, &guest);
    let mut is_rehearsed = false;
    // A rehearsal can end before the test sees it.
    for _ in 0..10 {
        let mut run = attach(&env, &vm, &["--interval", "100ms", "--count", "1"]);
        while !is_rehearsed && !is_gone(run.pid()) {
            is_rehearsed = !vm.others_below(env.path()).is_empty();
        }
        kill(run.pid());
        run.wait();
        if is_rehearsed {
            break;
        }
    }
    assert!(is_rehearsed, "no rehearsal was seen");
    wait_until("the second Firecracker ends", || vm.others_below(env.path()).is_empty());
    vm.grows(10);
}

#[test]
fn faults_cost_at_most_one_checkpoint_and_never_the_vm() {
    let guest = needs_firecracker!();
    for fault in ["disk-full", "scan-error", "short-read", "qmp-lost:paused:2"] {
        let env = TestEnv::new();
        let vm = start(&env, &guest);
        let options = ["--interval", "100ms", "--count", "4", "--audit", "audit", "--fault", fault];
        let mut run = attach(&env, &vm, &options);
        let exit = run.wait();
        assert!(matches!(exit.code(), Some(0 | 3)), "{fault}: {}", run.report());
        assert_eq!(env.list().len(), 4, "{fault}: {}", run.report());
        vm.grows(5);
    }
}

#[test]
fn a_vm_that_ends_in_a_pause_leaves_its_checkpoints() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let vm = start(&env, &guest);
    let mut run =
        attach(&env, &vm, &["--interval", "100ms", "--fault", "qemu-killed:device-state:3"]);
    run.wait();
    assert!(env.list().len() >= 2, "{}", run.report());
    env.ok(&["check", "--read-data", "--store", &env.store()]);
}

#[test]
fn a_socket_that_is_gone_ends_neither_the_run_nor_the_vm() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let vm = start(&env, &guest);
    let mut run = attach(&env, &vm, &["--interval", "none"]);
    run.wait_for_error("checkpoints by `keyframe take`");
    std::fs::rename(vm.socket(), env.path().join("elsewhere")).unwrap();
    env.ok(&["take", "--name", "fc"]);
    vm.grows(5);
    let status = env.ok(&["status"]);
    assert!(status.contains("Firecracker"), "{status}");
    env.ok(&["stop", "--name", "fc"]);
    assert_ends_well(&mut run);
    refuse_attach(&env, &vm, &[], &["is gone", "--api-sock"]);
    vm.grows(5);
    std::fs::rename(env.path().join("elsewhere"), vm.socket()).unwrap();
}

#[test]
fn a_vm_that_its_user_paused_stays_paused() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let vm = start(&env, &guest);
    let mut run = attach(&env, &vm, &["--interval", "none", "--audit", "audit"]);
    run.wait_for_error("checkpoints by `keyframe take`");
    vm.api().pause().unwrap();
    env.ok(&["take", "--name", "fc"]);
    assert!(vm.is_paused());
    wait_until("the pause is seen", || env.ok(&["status"]).contains("paused"));
    vm.api().resume().unwrap();
    vm.grows(5);
    wait_until("the end of the pause is seen", || env.ok(&["status"]).contains("running"));
    env.ok(&["stop", "--name", "fc"]);
    assert_ends_well(&mut run);
}

#[test]
fn what_firecracker_cannot_do_is_refused_and_the_vm_runs_on() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let vm = start(&env, &guest);
    let refused = |options: &[&str], words: &[&str]| refuse_attach(&env, &vm, options, words);
    refused(&["--disk", "served"], &["Firecracker opens the files"]);
    refused(&["--strategy", "fork"], &["seccomp"]);
    refused(&["--count-instructions"], &["Firecracker", "counted"]);
    refused(&["1"], &["as part of a group"]);
    let mut run = attach(&env, &vm, &["--interval", "none"]);
    run.wait_for_error("checkpoints by `keyframe take`");
    env.ok(&["take", "--name", "fc", "--tag", "good"]);
    vm.grows(5);
    env.ok(&["take", "--name", "fc"]);
    env.ok(&["stop", "--name", "fc"]);
    assert_ends_well(&mut run);
    let store = env.store();
    env.refused(
        &["restore", "--store", &store, "good", "--accel", "tcg"],
        1,
        &["KVM alone", "--accel"],
    );
    vm.grows(5);
}

#[test]
fn what_a_vm_writes_is_measured_and_it_runs_on() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let vm = start(&env, &guest);
    let (socket, pid) = (vm.socket().display().to_string(), vm.pid().to_string());
    let words = ["profile", "--epochs", "20ms,200ms", "--samples", "5", "--json"];
    let profile = env.json(&[&words[..], &["--api", &socket, &pid]].concat());
    assert_eq!(number(&profile, "ram_bytes"), 128 << 20, "{profile}");
    let rows = profile["curves"][0]["rows"].as_array().unwrap();
    let pages = |at: usize| rows[at]["pages"]["mean"].as_f64().unwrap();
    assert!(rows.len() == 2 && pages(0) > 0.0 && pages(1) > pages(0), "{profile}");
    assert!(profile["notes"].to_string().contains("Firecracker does not tell them"), "{profile}");
    vm.grows(5);
    env.refused(&["profile", &pid], 1, &["is no QEMU", "--api SOCKET"]);
    // A userfaultfd that was left would end this.
    take_audited(&env, &vm, "2");
}

#[test]
fn a_read_only_drive_that_has_changed_is_not_restored() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    std::fs::write(env.path().join("disk"), vec![0; 1 << 20]).unwrap();
    let drive = r#", "drives": [{ "drive_id": "data", "path_on_host": "disk",
        "is_root_device": false, "is_read_only": true }]"#;
    let vm = ExternalFirecracker::start(&env, &guest, &guest.config(128, drive));
    take_audited(&env, &vm, "2");
    drop(vm);
    // The guest may have read it.
    std::fs::write(env.path().join("disk"), vec![1; 1 << 20]).unwrap();
    let store = env.store();
    env.refused(&["restore", "--store", &store, "latest"], 1, &["disk (data) has changed"]);
}

#[test]
fn a_run_starts_firecracker_and_ends_it() {
    let guest = needs_firecracker!();
    let env = TestEnv::new();
    let (config, socket) = (env.path().join("vm.json"), env.path().join("run.sock"));
    let (config, socket) = (config.display().to_string(), socket.display().to_string());
    let (store, binary) = (env.store(), guest.binary());
    let line = ["--", &binary, "--api-sock", &socket, "--config-file", &config];
    let run_words = |options: &[&str]| -> Vec<String> {
        let own = ["run", "--store", &store, "--name", "fc", "--no-rehearsal"];
        own.iter().chain(options).chain(&line).map(|word| (*word).to_owned()).collect()
    };
    // Refused before Firecracker is started.
    let vsock = r#", "vsock": { "guest_cid": 3, "uds_path": "vsock" }"#;
    std::fs::write(&config, guest.config(128, vsock)).unwrap();
    let refused = run_words(&[]);
    let refused: Vec<&str> = refused.iter().map(|word| &**word).collect();
    env.refused(&refused, 1, &["the vsock device"]);
    assert!(!Path::new(&socket).exists());
    std::fs::write(&config, guest.config(128, "")).unwrap();
    let options = run_words(&["--interval", "200ms", "--audit", "audit"]);
    let options: Vec<&str> = options.iter().map(|word| &**word).collect();
    let mut run = Process::start(env.command(&options));
    wait_until("checkpoints are taken", || env.list().len() > 3);
    let status = env.json(&["status", "--json"]);
    assert!(status.to_string().contains("\"vmm\":\"firecracker\""), "{status}");
    env.ok(&["take", "--name", "fc", "--tag", "last"]);
    env.ok(&["stop", "--name", "fc"]);
    assert_ends_well(&mut run);
    assert!(!payload_lines(&(run.lines().join("\n") + "\n")).is_empty(), "{}", run.report());
    assert!(!Path::new(&socket).exists(), "its socket is left");
    env.ok(&["check", "--read-data", "--store", &env.store()]);
    // A VM whose engine has died is shown, its name is taken, and it can be ended.
    let mut run = Process::start(env.command(&options));
    run.wait_for_error("a checkpoint every 200ms");
    let pid = number(&env.json(&["status", "--json"])[0], "qemu_pid") as u32;
    kill(run.pid());
    run.wait();
    let status = env.ok(&["status"]);
    let line = format!("fc: runs on without an engine (Firecracker {pid})");
    let again = format!("keyframe attach --store STORE --api {socket} {pid}");
    assert!(status.contains(&line) && status.contains(&again), "{status}");
    let second: Vec<&str> =
        options.iter().map(|word| if *word == socket { "other.sock" } else { *word }).collect();
    env.refused(&second, 1, &["a VM named fc still runs"]);
    env.ok(&["stop", "--name", "fc"]);
    wait_until("the VM is gone", || is_gone(pid));
    assert!(env.ok(&["status"]).contains("nothing runs"));
}
