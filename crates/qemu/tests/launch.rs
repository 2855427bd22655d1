//! Launch, audit, pause and watchdog on real QEMUs.

mod support;

use keyframe_qemu::restore::{self, Plan, RestoreOptions};
use keyframe_qemu::watchdog::{self, Watched};
use keyframe_qemu::{Error, Qmp, RunStatus, Severity};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};
use support::{checkpoint, launch, qemus, said, wait_for, words};

const BARE: &str = "-machine pc -m 32 -display none -nodefaults";

/// The first QEMU's refusals of `line`, as text.
fn refusals(line: &str, dir: &Path) -> Vec<String> {
    let found = launch("qemu-system-x86_64", &words(line), dir).unwrap().vm.audit().unwrap();
    assert!(found.iter().all(|r| !r.reason.is_empty() && !r.fix.is_empty()));
    found
        .into_iter()
        .filter(|r| r.severity == Severity::Refused)
        .map(|r| format!("{}: {}", r.subject, r.reason))
        .collect()
}

#[test]
fn disks_that_would_be_torn_are_refused_all_at_once() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let disk = dir.path().join("disk.img");
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let drive = format!("{BARE} -drive file={},format=raw,if=virtio", disk.display());
    let found = refusals(&drive, dir.path());
    assert!(found.len() == 1 && found[0].contains("disk.img"), "{found:?}");
    let found = refusals(&format!("{drive} -snapshot"), dir.path());
    assert!(found.len() == 1 && found[0].contains("disk.img"), "{found:?}");
    let direct = launch("qemu-system-x86_64", &words(&format!("{drive},cache=none")), dir.path());
    let mut found = direct.unwrap().vm.audit().unwrap();
    found.retain(|finding| finding.severity == Severity::ScansInPauses);
    assert!(found.len() == 1 && found[0].reason.contains("direct I/O"), "{found:?}");
    assert_eq!(refusals(&format!("{drive},readonly=on"), dir.path()), [] as [&str; 0]);
    let blockdev = format!(
        "{BARE} -blockdev driver=file,filename={},node-name=f -device virtio-blk-pci,drive=f",
        disk.display()
    );
    assert_eq!(refusals(&blockdev, dir.path()).len(), 1);
    let flash = format!("{BARE} -drive if=pflash,format=raw,file={}", disk.display());
    assert_eq!(refusals(&flash, dir.path()).len(), 1);
}

#[test]
fn a_balloon_over_shared_memory_is_refused_and_over_private_memory_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let balloon = format!("{BARE} -device virtio-balloon-pci");
    assert_eq!(refusals(&balloon, dir.path()), [] as [&str; 0]);
    let shared = "-object memory-backend-memfd,id=m,size=32M,share=on -machine memory-backend=m";
    let found = refusals(&format!("{balloon} {shared}"), dir.path());
    assert!(found.len() == 1 && found[0].contains("balloon"), "{found:?}");
}

#[test]
fn what_qemu_itself_refuses_is_an_exit_at_start() {
    let dir = tempfile::tempdir().unwrap();
    let line = "-machine nonsense";
    let error = launch("qemu-system-x86_64", &words(line), dir.path()).err().unwrap();
    assert!(matches!(error, Error::Exited { .. }), "{error}");
    assert!(error.fix().unwrap().contains("without keyframe"));
}

#[test]
fn a_wrapper_that_does_not_exec_is_refused_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let wrapper = dir.path().join("qemu-wrapper");
    std::fs::write(&wrapper, "#!/bin/sh\nqemu-system-x86_64 \"$@\"\nexit $?\n").unwrap();
    rustix::fs::chmod(&wrapper, rustix::fs::Mode::from_raw_mode(0o755)).unwrap();
    let error = launch(wrapper.to_str().unwrap(), &words(BARE), dir.path()).err().unwrap();
    assert!(matches!(&error, Error::Binary { fix, .. } if fix.contains("exec")), "{error}");
    let deadline = Instant::now() + Duration::from_mins(2);
    while Qmp::connect(&dir.path().join("qmp.sock"), Duration::ZERO).is_ok() {
        assert!(Instant::now() < deadline, "QEMU is still there");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn what_is_added_leaves_the_users_own_monitor_alone() {
    for qemu in qemus() {
        let dir = tempfile::tempdir().unwrap();
        let mut guest =
            launch(&qemu, &words("-machine pc -m 32 -display none -serial null"), dir.path())
                .unwrap();
        let chardevs = guest.vm.qmp().execute("query-chardev", None).unwrap().to_string();
        assert!(chardevs.contains("compat_monitor0"), "{qemu}: {chardevs}");
        assert!(guest.vm.full_command().starts_with(guest.vm.user_command()));
        assert_eq!(guest.vm.cpus().unwrap(), 1);
        assert!(guest.vm.machine_type().unwrap().starts_with("pc-i440fx-"));
    }
}

#[test]
fn ctrl_c_does_not_end_the_guest() {
    for qemu in qemus() {
        let dir = tempfile::tempdir().unwrap();
        let mut guest = launch(&qemu, &words(BARE), dir.path()).unwrap();
        let pid = rustix::process::Pid::from_raw(guest.vm.pid().cast_signed()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        for _ in 0..10 {
            assert_eq!(guest.vm.qmp().status().unwrap(), RunStatus::Prelaunch);
        }
        assert_eq!(guest.vm.try_wait().unwrap(), None);
    }
}

#[test]
fn a_resume_by_another_monitor_is_seen_on_a_real_qemu() {
    for qemu in qemus() {
        let dir = tempfile::tempdir().unwrap();
        let mut guest = launch(&qemu, &words(BARE), dir.path()).unwrap();
        let mut other =
            Qmp::connect(&dir.path().join("watchdog.sock"), Duration::from_mins(2)).unwrap();
        let qmp = guest.vm.qmp();
        qmp.cont().unwrap();
        for meddle in [false, true, false] {
            assert!(qmp.stop().unwrap().was_running);
            if meddle {
                other.cont().unwrap();
            }
            assert_eq!(qmp.cont_after_stop().unwrap(), meddle, "{qemu}");
            assert!(qmp.status().unwrap().is_running());
        }
        // Paused by somebody else: ours to look at, not ours to resume.
        assert!(other.stop().unwrap().was_running);
        assert!(!qmp.stop().unwrap().was_running);
        assert!(!qmp.resumed_by_other().unwrap());
        other.cont().unwrap();
        assert!(qmp.resumed_by_other().unwrap());
    }
}

#[test]
fn the_watchdog_resumes_a_real_vm_whose_engine_is_gone() {
    for qemu in qemus() {
        let dir = tempfile::tempdir().unwrap();
        let mut guest = launch(&qemu, &words(BARE), dir.path()).unwrap();
        guest.vm.qmp().cont().unwrap();
        let (commands, mut orders) = std::io::pipe().unwrap();
        let socket = dir.path().join("watchdog.sock");
        let dog = std::thread::spawn(move || {
            let rescuer = &mut keyframe_vmm::NoRescuer;
            watchdog::run(Watched::by_monitor(socket), commands, std::io::sink(), rescuer)
        });
        orders.write_all(b"A600000\n").unwrap();
        assert!(guest.vm.qmp().stop().unwrap().was_running);
        drop(orders);
        let deadline = Instant::now() + Duration::from_mins(2);
        while !guest.vm.qmp().status().unwrap().is_running() {
            assert!(Instant::now() < deadline, "the VM stays paused");
            std::thread::sleep(Duration::from_millis(10));
        }
        dog.join().unwrap().unwrap();
        assert!(guest.vm.qmp().resumed_by_other().unwrap());
    }
}

#[test]
fn a_vm_that_was_shut_down_ends_stays_or_is_ended_where_it_hangs() {
    for qemu in qemus() {
        let dir = tempfile::tempdir().unwrap();
        let shut_down = |more: &str| {
            let mut guest = launch(&qemu, &words(&format!("{BARE} {more}")), dir.path()).unwrap();
            guest.vm.qmp().cont().unwrap();
            guest
        };
        let mut guest = shut_down("");
        guest.vm.qmp().quit().unwrap();
        assert!(guest.vm.finish_shutdown().unwrap().is_some_and(|exit| exit.success()), "{qemu}");

        let mut guest = shut_down("-no-shutdown");
        assert!(guest.vm.finish_shutdown().unwrap().is_none(), "it answers, so it stays; {qemu}");

        // As a QEMU that hangs in its own end: it is there and does not answer.
        let mut guest = shut_down("");
        let pid = rustix::process::Pid::from_raw(guest.vm.pid().cast_signed()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
        assert!(guest.vm.finish_shutdown().unwrap().is_some_and(|exit| exit.success()), "{qemu}");
        assert!(rustix::process::test_kill_process(pid).is_err(), "it is still there; {qemu}");
    }
}

/// SeaBIOS reads QEMU's ACPI tables, which QEMU resizes then: blocks whose used size has changed.
#[test]
fn a_firmware_that_has_run_comes_back_and_reboots() {
    for qemu in qemus() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let mut line = words("-machine pc -m 64 -display none -net none -vga std");
        line.extend(["-chardev".into(), format!("file,id=log,path={}", log.display())]);
        line.extend(words("-device isa-debugcon,iobase=0x402,chardev=log -serial null"));
        let mut guest = launch(&qemu, &line, &dir.path().join("run")).unwrap();
        guest.vm.qmp().cont().unwrap();
        wait_for(&log, "the end of SeaBIOS", |text| text.contains("No bootable device"));
        assert!(guest.vm.qmp().stop().unwrap().was_running);
        let taken = checkpoint(&mut guest.vm);
        drop(guest);
        // A restored VM would append to it.
        std::fs::remove_file(&log).unwrap();
        let plan = Plan::new(taken.source.clone(), Vec::new(), RestoreOptions::default()).unwrap();
        let mut restored = restore::start(plan, &taken, &taken.device_state).unwrap();
        assert!(restored.ready_ns() > 0);
        assert!(restored.vm().qmp().status().unwrap().is_running());
        assert!(!said(&log).contains("SeaBIOS"), "it did not begin anew");
        restored.vm().qmp().hmp("system_reset").unwrap();
        wait_for(&log, "a boot after the restore", |text| text.contains("No bootable device"));
        restored.kill().unwrap();
        assert!(restored.try_wait().unwrap().is_some());
    }
}
