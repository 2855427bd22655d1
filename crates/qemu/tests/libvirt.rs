//! Attaching to a VM that a real libvirt runs. One test, for it starts a daemon; skipped, with the
//! reason printed, where that cannot be.

mod support;

use keyframe_qemu::restore::{self, Plan, RestoreOptions};
use keyframe_qemu::watchdog::{self, Fired, Watchdog, Watched};
use keyframe_qemu::{Error, QmpEvent, RunStatus, Vm};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};
use support::foreign::{given, out, part, until};
use support::libvirt::Libvirt;
use support::{checkpoint, passes, payload, qemus, read_blocks, said, wait_for};

#[test]
#[ignore = "a role of another test"]
fn watchdog_process() {
    let Some((_, words)) = given() else { return };
    let watched = Watched::parse(&words).unwrap();
    watchdog::run(watched, std::io::stdin(), out(), &mut keyframe_vmm::NoRescuer).unwrap();
}

/// An engine that attaches, pauses the VM, says so and does nothing ever after. `KEYFRAME_PART` is
/// `pid domain uri`.
#[test]
#[ignore = "a role of another test"]
fn engine_process() {
    let Some((value, _)) = given() else { return };
    let [pid, domain, uri] = *value.split(' ').collect::<Vec<_>>() else { panic!("{value}") };
    let monitor = keyframe_qemu::Monitor::Libvirt { domain: domain.into(), uri: Some(uri.into()) };
    let options = keyframe_qemu::AttachOptions { monitor };
    let mut vm = Vm::attach(pid.parse().unwrap(), &options).unwrap();
    let mut dog = watchdog(&vm);
    dog.arm(Duration::from_mins(10)).unwrap();
    assert!(vm.qmp().stop().unwrap().was_running);
    writeln!(out(), "ready").unwrap();
    std::thread::sleep(Duration::from_mins(2));
}

fn watchdog(vm: &Vm) -> Watchdog {
    watchdog::spawn(&mut part("watchdog_process", "x"), &vm.watched().unwrap()).unwrap()
}

/// Children of this process that have not been waited for.
fn children() -> String {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .map(|t| std::fs::read_to_string(t.unwrap().path().join("children")).unwrap_or_default())
        .collect()
}

fn sets(libvirt: &Libvirt, name: &str) -> String {
    let answer = libvirt.must(&["qemu-monitor-command", name, r#"{"execute":"query-fdsets"}"#]);
    let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
    answer["return"].to_string()
}

fn state(libvirt: &Libvirt, name: &str) -> String {
    libvirt.must(&["domstate", name]).trim().to_owned()
}

/// Starts the self-checking guest.
fn create(libvirt: &Libvirt, name: &str, qemu: &str, dir: &Path) -> u32 {
    let firmware = payload(dir, 2000);
    let inside = format!(
        "<os><type arch='x86_64' machine='pc'>hvm</type><loader type='rom'>{}</loader></os>\
         <features><acpi/></features>",
        firmware.display()
    );
    let serial =
        format!("<serial type='file'><source path='{}'/></serial>", dir.join("serial").display());
    libvirt.create(name, qemu, &inside, &serial)
}

fn checkpoints_and_pauses(libvirt: &Libvirt, name: &str, pid: u32, serial: &Path) {
    let before = (children(), sets(libvirt, name));
    for _ in 0..2 {
        let mut vm = Vm::attach(pid, &libvirt.options(name)).unwrap();
        assert_eq!((vm.audit().unwrap(), vm.vm_name().as_deref()), (vec![], Some(name)));
        let error = Vm::attach(pid, &libvirt.options(name)).err().unwrap();
        assert!(error.to_string().contains("another engine"), "{error}");
        let mut pauses = Vec::new();
        for _ in 0..10 {
            let started = Instant::now();
            assert!(vm.qmp().stop().unwrap().was_running);
            assert!(vm.save_devices().unwrap().len() > 1000);
            vm.qmp().cont().unwrap();
            pauses.push(started.elapsed());
            assert!(!vm.qmp().resumed_by_other().unwrap());
        }
        pauses.sort();
        println!("ten pauses took {:?} (median), {:?} (longest)", pauses[5], pauses[9]);
        // Somebody else lets it run in our pause.
        assert!(vm.qmp().stop().unwrap().was_running);
        libvirt.must(&["resume", name]);
        assert!(vm.qmp().cont_after_stop().unwrap(), "torn");
        // Somebody else's pause.
        libvirt.must(&["suspend", name]);
        assert!(!vm.qmp().stop().unwrap().was_running);
        assert!(!vm.qmp().resumed_by_other().unwrap());
        libvirt.must(&["resume", name]);
        assert!(vm.qmp().resumed_by_other().unwrap());
        assert!(vm.qmp().drain_events().unwrap().contains(&QmpEvent::Resume));
        assert_eq!(state(libvirt, name), "running");
        let error = vm.qmp().execute("no-such-'command", None).unwrap_err();
        assert!(
            matches!(&error, Error::Refused { reason, .. } if reason.contains("no-such-'command")),
            "{error}"
        );
    }
    assert_eq!((children(), sets(libvirt, name)), before);
    assert!(!said(serial).contains('X'));
}

fn engines_that_stall_and_die(libvirt: &Libvirt, name: &str, pid: u32) {
    let before = sets(libvirt, name);
    let mut vm = Vm::attach(pid, &libvirt.options(name)).unwrap();
    let mut dog = watchdog(&vm);
    dog.arm(Duration::from_millis(1)).unwrap();
    assert!(vm.qmp().stop().unwrap().was_running);
    until("the VM runs on", || state(libvirt, name) == "running");
    assert!(vm.qmp().cont_after_stop().unwrap(), "torn");
    assert_eq!(dog.disarm().unwrap(), Fired(true));
    dog.end();
    drop(vm);

    let value = format!("{pid} {name} {}", libvirt.uri());
    let mut command = part("engine_process", &value);
    let mut engine = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(engine.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!((line.as_str(), state(libvirt, name).as_str()), ("ready\n", "paused"));
    engine.kill().unwrap();
    engine.wait().unwrap();
    until("the VM runs on", || state(libvirt, name) == "running");
    until("QEMU forgets the engine", || sets(libvirt, name) == before);
}

fn comes_back(libvirt: &Libvirt, name: &str, pid: u32, serial: &Path) {
    let mut vm = Vm::attach(pid, &libvirt.options(name)).unwrap();
    assert!(vm.qmp().stop().unwrap().was_running);
    let taken = checkpoint(&mut vm);
    let last = *passes(&said(serial)).last().unwrap();
    drop(vm);
    libvirt.must(&["destroy", name]);

    let extra = ["-chardev", &format!("file,id=charserial0,path={}", serial.display())]
        .map(Into::into)
        .into();
    let options = RestoreOptions { paused: true, ..RestoreOptions::default() };
    let plan = Plan::new(taken.source.clone(), extra, options).unwrap();
    let mut restored = restore::start(plan, &taken, &taken.device_state).unwrap();
    let vm = restored.vm();
    let blocks = vm.ram_blocks().unwrap();
    assert!(read_blocks(vm.pid(), &blocks)[0] == taken.ram[0]);
    vm.qmp().cont().unwrap();
    let text = wait_for(serial, "two passes after the restore", |text| passes(text).len() >= 2);
    assert!(!text.contains('X') && !text.contains('B'), "{text}");
    assert!((last..=last + 2).contains(&passes(&text)[0]), "{text} after {last}");
    restored.kill().unwrap();
}

#[test]
fn a_vm_of_libvirts_is_checkpointed_and_left_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let Some(libvirt) = Libvirt::start(dir.path()) else { return };
    for (number, qemu) in qemus().iter().enumerate() {
        let name = format!("web{number}");
        let place = tempfile::tempdir().unwrap();
        let serial = place.path().join("serial");
        let binary = if qemu.contains('/') { qemu.clone() } else { format!("/usr/bin/{qemu}") };
        let pid = create(&libvirt, &name, &binary, place.path());
        wait_for(&serial, "its second pass", |text| passes(text).len() >= 2);
        println!("{qemu}");
        checkpoints_and_pauses(&libvirt, &name, pid, &serial);
        engines_that_stall_and_die(&libvirt, &name, pid);
        comes_back(&libvirt, &name, pid, &serial);

        // A domain that ends is seen to end.
        let pid = create(&libvirt, &name, &binary, place.path());
        let mut vm = Vm::attach(pid, &libvirt.options(&name)).unwrap();
        assert_eq!(vm.qmp().status().unwrap(), RunStatus::Running);
        libvirt.must(&["destroy", &name]);
        assert!(vm.wait(Duration::from_mins(2)).unwrap().is_some());
        assert!(matches!(vm.qmp().status(), Err(Error::Gone { .. } | Error::Libvirt { .. })));
    }
    let error = Vm::attach(std::process::id(), &libvirt.options("web0")).err().unwrap();
    assert!(error.to_string().contains("web0"), "{error}");
}
