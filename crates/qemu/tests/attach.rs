//! Attaching to QEMUs that somebody else started.

mod support;

use keyframe_qemu::restore::{self, Plan, RestoreOptions};
use keyframe_qemu::watchdog::{self, Fired, Watchdog, Watched};
use keyframe_qemu::{AttachOptions, Error, Invocation, Monitor, RunStatus, Severity, Vm};
use keyframe_testing::{distribution_qemu, qemu_10};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::json;
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use support::foreign::{Foreign, given, out, part, until};
use support::{checkpoint, passes, qemus, read_blocks, said, wait_for, words};

const BARE: &str = "-machine pc -m 32 -display none -nodefaults";

/// A watchdog in a process of its own.
fn watchdog(vm: &Vm) -> Watchdog {
    watchdog::spawn(&mut part("watchdog_process", "x"), &vm.watched().unwrap()).unwrap()
}

#[test]
#[ignore = "a role of another test"]
fn watchdog_process() {
    let Some((_, words)) = given() else { return };
    let watched = Watched::parse(&words).unwrap();
    watchdog::run(watched, std::io::stdin(), out(), &mut keyframe_vmm::NoRescuer).unwrap();
}

/// An engine that attaches, pauses the VM, says so and does nothing ever after. `KEYFRAME_PART` is
/// `pid socket armed`.
#[test]
#[ignore = "a role of another test"]
fn engine_process() {
    let Some((value, _)) = given() else { return };
    let [pid, socket, armed] = *value.split(' ').collect::<Vec<_>>() else { panic!("{value}") };
    let options = AttachOptions { monitor: Monitor::Socket(socket.into()) };
    let mut vm = Vm::attach(pid.parse().unwrap(), &options).unwrap();
    let mut dog = watchdog(&vm);
    if armed == "armed" {
        dog.arm(Duration::from_mins(10)).unwrap();
        assert!(vm.qmp().stop().unwrap().was_running);
    }
    writeln!(out(), "ready").unwrap();
    std::thread::sleep(Duration::from_mins(2));
}

/// Another client of a VM, which passes descriptors.
struct Other(BufReader<UnixStream>);

impl Other {
    fn connect(socket: &Path) -> Self {
        let mut other = Self(BufReader::new(UnixStream::connect(socket).unwrap()));
        other.until("QMP");
        writeln!(other.0.get_ref(), r#"{{"execute": "qmp_capabilities"}}"#).unwrap();
        other.until("return");
        other
    }

    fn add_fd(&mut self, set: u32, mark: &str, file: &File) {
        let arguments = json!({ "fdset-id": set, "opaque": mark });
        let command = json!({ "execute": "add-fd", "arguments": arguments }).to_string();
        let fds = [file.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
        let text = [IoSlice::new(command.as_bytes())];
        rustix::net::sendmsg(self.0.get_ref(), &text, &mut ancillary, SendFlags::empty()).unwrap();
        self.until("return");
    }

    fn until(&mut self, word: &str) {
        let mut line = String::new();
        while !line.contains(word) {
            line.clear();
            assert!(self.0.read_line(&mut line).unwrap() > 0, "no {word}");
        }
    }
}

/// Runs [`engine_process`] until it is ready, and kills it.
fn engine_that_dies(guest: &Foreign, armed: &str, between: impl FnOnce()) {
    let value = format!("{} {} {armed}", guest.pid(), guest.socket("a").display());
    let mut command = part("engine_process", &value);
    let mut engine = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(engine.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    between();
    engine.kill().unwrap();
    engine.wait().unwrap();
}

#[test]
fn a_running_vm_is_checkpointed_and_left_as_it_was() {
    for qemu in qemus() {
        let dir = tempfile::tempdir().unwrap();
        let serial = dir.path().join("serial");
        let guest = Foreign::with_payload(&qemu, "-machine pc -m 64 -name web", dir.path());
        wait_for(&serial, "its second pass", |text| passes(text).len() >= 2);
        // Attach, detach, attach again.
        for _ in 0..3 {
            let mut vm = guest.attach().unwrap();
            assert!(vm.is_attached() && vm.pid() == guest.pid());
            assert_eq!(vm.audit().unwrap(), []);
            assert_eq!(vm.vm_name().as_deref(), Some("web"));
            assert!(vm.qmp().stop().unwrap().was_running);
            assert!(vm.save_devices().unwrap().len() > 1000);
            assert!(!vm.qmp().cont_after_stop().unwrap());
            assert!(!guest.traces().is_empty(), "{qemu}");
            assert_eq!(vm.keep(), guest.pid());
            assert_eq!(guest.traces(), "", "{qemu}");
        }
        let mut vm = guest.attach().unwrap();
        let line: Vec<OsString> = vm.user_command().iter().map(OsString::from).collect();
        let invocation = Invocation::parse(line).unwrap();
        assert_eq!(vm.identity().unwrap(), invocation.identity().unwrap(), "{qemu}");
        assert_eq!(vm.working_directory().unwrap(), std::env::current_dir().unwrap());
        assert!(vm.qmp().stop().unwrap().was_running);
        let taken = checkpoint(&mut vm);
        let last = *passes(&said(&serial)).last().unwrap();
        drop(vm);
        drop(guest);

        let options = RestoreOptions { paused: true, ..RestoreOptions::default() };
        // A restored VM would append to it.
        std::fs::remove_file(&serial).unwrap();
        let plan = Plan::new(taken.source.clone(), Vec::new(), options).unwrap();
        let mut restored = restore::start(plan, &taken, &taken.device_state).unwrap();
        let vm = restored.vm();
        let blocks = vm.ram_blocks().unwrap();
        assert!(read_blocks(vm.pid(), &blocks)[0] == taken.ram[0]);
        vm.qmp().cont().unwrap();
        let text =
            wait_for(&serial, "two passes after the restore", |text| passes(text).len() >= 2);
        assert!(!text.contains('X') && !text.contains('B'), "{text}");
        assert!((last..=last + 2).contains(&passes(&text)[0]), "{text} after {last}");
        restored.kill().unwrap();
    }
}

#[test]
fn a_second_engine_is_refused_on_either_monitor() {
    for qemu in qemus() {
        let dir = tempfile::tempdir().unwrap();
        let guest = Foreign::start(&qemu, &words(BARE), dir.path());
        let mut vm = guest.attach().unwrap();
        let error = guest.attach().err().unwrap();
        assert!(
            matches!(&error, Error::MonitorBusy { monitor } if monitor.ends_with("/a")),
            "{error}"
        );
        assert!(error.fix().unwrap().contains("-qmp"), "{error}");
        let error = Vm::attach(guest.pid(), &guest.options("b")).err().unwrap();
        assert!(error.to_string().contains("another engine"), "{error}");
        // The first is none the worse for it.
        vm.save_devices().unwrap();
        drop(vm);
        assert_eq!(guest.traces(), "", "{qemu}");
        drop(Vm::attach(guest.pid(), &guest.options("b")).unwrap());
    }
}

#[test]
fn what_is_not_that_qemu_is_refused() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [one, two] =
        [0, 1].map(|n| Foreign::start("qemu-system-x86_64", &words(BARE), dirs[n].path()));
    let refused = |pid: u32, options: &AttachOptions, word: &str| {
        let error = Vm::attach(pid, options).err().unwrap();
        assert!(error.to_string().contains(word), "{error} has no {word:?}");
        assert!(error.fix().is_some() || word == "no-such", "{error}");
    };
    refused(one.pid(), &two.options("a"), &format!("belongs to process {}", two.pid()));
    refused(std::process::id(), &one.options("a"), "belongs to process");
    refused(4_194_305, &one.options("a"), "no such process");
    refused(one.pid(), &AttachOptions { monitor: Monitor::Socket("/no-such".into()) }, "no-such");
    let libvirt = Monitor::Libvirt { domain: "web".into(), uri: None };
    refused(one.pid(), &AttachOptions { monitor: libvirt }, "not the QEMU of libvirt's domain web");
    for guest in [&one, &two] {
        assert_eq!(guest.traces(), "");
        assert_eq!(guest.other().status().unwrap(), RunStatus::Running);
    }

    let dir = tempfile::tempdir().unwrap();
    let line = format!("{BARE} -incoming tcp:127.0.0.1:0");
    let waiting = Foreign::start("qemu-system-x86_64", &words(&line), dir.path());
    refused(waiting.pid(), &waiting.options("a"), "-incoming");
}

#[test]
fn a_device_that_qemu_cannot_save_is_refused() {
    // QEMU 11 can save an NVMe disk.
    for qemu in [distribution_qemu()].into_iter().chain(qemu_10()).map(|qemu| qemu.path) {
        let dir = tempfile::tempdir().unwrap();
        let guest =
            Foreign::start(&qemu, &words(&format!("{BARE} -device nvme,serial=x")), dir.path());
        let found = guest.attach().unwrap().audit().unwrap();
        assert!(found.len() == 1 && found[0].subject.contains("nvme"), "{found:?}");
    }
}

#[test]
fn the_end_of_the_vm_is_seen_and_asked_for() {
    for qemu in qemus() {
        let dir = tempfile::tempdir().unwrap();
        let mut guest = Foreign::start(&qemu, &words(BARE), dir.path());
        let mut vm = guest.attach().unwrap();
        assert!(
            vm.ended().unwrap().is_none() && vm.wait(Duration::from_millis(10)).unwrap().is_none()
        );
        guest.other().quit().unwrap();
        assert!(vm.wait(Duration::from_mins(2)).unwrap().is_some(), "{qemu}");
        assert!(vm.ended().unwrap().is_some_and(|ended| ended.success()));
        drop(vm);
        assert!(guest.child.wait().unwrap().success());

        let dir = tempfile::tempdir().unwrap();
        let mut guest = Foreign::start(&qemu, &words(BARE), dir.path());
        guest.attach().unwrap().kill().unwrap();
        assert!(guest.child.wait().unwrap().success(), "asked to quit, not killed");
    }
}

#[test]
fn an_engine_killed_in_a_pause_leaves_a_vm_that_runs_and_no_trace() {
    for qemu in qemus() {
        let dir = tempfile::tempdir().unwrap();
        let guest = Foreign::start(&qemu, &words(BARE), dir.path());
        engine_that_dies(&guest, "armed", || {
            assert_eq!(guest.other().status().unwrap(), RunStatus::Paused);
        });
        until("the VM runs on", || guest.other().status().unwrap().is_running());
        until("QEMU forgets the engine", || guest.traces().is_empty());
        until("the monitor is free", || guest.attach().is_ok());
    }
}

#[test]
fn an_engine_killed_outside_a_pause_leaves_the_users_pause_alone() {
    for qemu in qemus() {
        let dir = tempfile::tempdir().unwrap();
        let guest = Foreign::start(&qemu, &words(BARE), dir.path());
        engine_that_dies(&guest, "disarmed", || {
            assert!(guest.other().stop().unwrap().was_running);
        });
        until("the monitor is free", || guest.attach().is_ok());
        let mut vm = guest.attach().unwrap();
        assert_eq!(vm.qmp().status().unwrap(), RunStatus::Paused);
        assert!(!vm.qmp().stop().unwrap().was_running, "somebody else's pause");
        vm.save_devices().unwrap();
        drop(vm);
        // QEMU 7.2 forgets nothing while the VM is paused.
        guest.other().cont().unwrap();
        until("QEMU forgets the engine", || guest.traces().is_empty());
    }
}

#[test]
fn what_an_engine_and_its_watchdog_left_behind_is_taken_back_by_the_next() {
    for qemu in qemus() {
        let dir = tempfile::tempdir().unwrap();
        let guest = Foreign::start(&qemu, &words(BARE), dir.path());
        // Somebody's own set stays, and one of an engine that is gone goes. While another client is
        // connected, no QEMU drops a set by itself.
        let file = std::fs::OpenOptions::new().write(true).open("/dev/null").unwrap();
        let mut other = Other::connect(&guest.socket("b"));
        other.add_fd(19300, "keyframe-engine:4194303:5:1", &file);
        other.add_fd(7, "the user's own", &file);
        let mut vm = guest.attach().unwrap();
        let sets = vm.qmp().execute("query-fdsets", None).unwrap().to_string();
        assert!(sets.contains("the user's own") && !sets.contains("4194303"), "{qemu}: {sets}");
    }
}

#[test]
fn an_engine_that_stalls_finds_its_checkpoint_torn() {
    for qemu in qemus() {
        let dir = tempfile::tempdir().unwrap();
        let guest = Foreign::start(&qemu, &words(BARE), dir.path());
        let mut vm = guest.attach().unwrap();
        let mut dog = watchdog(&vm);
        for stalls in [false, true, false] {
            dog.arm(Duration::from_millis(if stalls { 1 } else { 600_000 })).unwrap();
            assert!(vm.qmp().stop().unwrap().was_running);
            if stalls {
                until("the VM runs on", || guest.other().status().unwrap().is_running());
            }
            vm.save_devices().unwrap();
            assert_eq!(vm.qmp().cont_after_stop().unwrap(), stalls, "{qemu}");
            assert_eq!(dog.disarm().unwrap(), Fired(stalls), "{qemu}");
            assert!(vm.qmp().status().unwrap().is_running());
        }
        // A user's pause: the engine disarms at once, and the watchdog leaves it alone.
        assert!(guest.other().stop().unwrap().was_running);
        dog.arm(Duration::from_mins(10)).unwrap();
        assert!(!vm.qmp().stop().unwrap().was_running);
        assert_eq!(dog.disarm().unwrap(), Fired(false));
        dog.end();
        assert_eq!(vm.qmp().status().unwrap(), RunStatus::Paused);
    }
}

/// A command line that boots the small guest.
fn small_guest(line: &str) -> Vec<String> {
    let dir = keyframe_testing::small_guest();
    let mut line = words(line);
    for (option, file) in [("-kernel", "vmlinux"), ("-initrd", "initramfs.cpio.gz")] {
        line.extend([option.to_owned(), dir.join(file).display().to_string()]);
    }
    let append = "console=ttyS0 quiet panic=-1 tsc=unstable kf.work=dirty kf.rate=2000 kf.mib=16";
    line.extend(["-append".to_owned(), append.to_owned()]);
    line
}

#[test]
fn memory_that_was_plugged_in_comes_back() {
    let mut line = small_guest("-machine pc -m 256M,slots=2,maxmem=1G -display none -nodefaults");
    let dir = tempfile::tempdir().unwrap();
    let serial = dir.path().join("serial");
    line.extend(["-serial".to_owned(), format!("file:{}", serial.display())]);
    for qemu in qemus() {
        let guest = Foreign::start(&qemu, &line, dir.path());
        wait_for(&serial, "its workload", |text| text.contains("KF READY"));
        let plug = |command: &str, arguments: serde_json::Value| {
            guest.other().execute(command, Some(arguments)).unwrap();
        };
        plug(
            "object-add",
            json!({ "qom-type": "memory-backend-ram", "id": "mem1", "size": 128 << 20 }),
        );
        plug("device_add", json!({ "driver": "pc-dimm", "id": "dimm1", "memdev": "mem1" }));
        wait_for(&serial, "some work", |text| text.matches("dirty t=").count() >= 2);
        let mut vm = guest.attach().unwrap();
        assert_eq!(vm.audit().unwrap(), []);
        let plugged = vm.plugged_memory().unwrap();
        assert_eq!(plugged[..2], ["-object", "memory-backend-ram,id=mem1,size=134217728"]);
        assert!(
            plugged.len() == 4
                && plugged[3].contains("memdev=mem1")
                && plugged[3].contains("slot=0")
        );
        let address = plugged[3].split_once("addr=").unwrap().1.split(',').next().unwrap();
        let look = format!("xp /4gx {address}");
        assert!(vm.qmp().stop().unwrap().was_running);
        // In place of the guest, which leaves such memory alone until it is told to use it.
        let block =
            vm.ram_blocks().unwrap().into_iter().find(|b| b.block.name.contains("mem1")).unwrap();
        let memory = std::fs::OpenOptions::new()
            .write(true)
            .open(format!("/proc/{}/mem", vm.pid()))
            .unwrap();
        for page in (0..block.block.total_bytes).step_by(0x10_3000) {
            memory
                .write_all_at(&[page.to_le_bytes(), [0xa5; 8]].concat(), block.host.0 + page)
                .unwrap();
        }
        let seen = vm.qmp().hmp(&look).unwrap();
        assert!(seen.contains("0xa5a5a5a5a5a5a5a5"), "{seen}");
        let mut taken = checkpoint(&mut vm);
        taken.source.machine.user_command.extend(plugged);
        drop(vm);
        drop(guest);

        let options = RestoreOptions { paused: true, ..RestoreOptions::default() };
        // A restored VM would append to it.
        std::fs::remove_file(&serial).unwrap();
        let plan = Plan::new(taken.source.clone(), Vec::new(), options).unwrap();
        let mut restored = restore::start(plan, &taken, &taken.device_state).unwrap();
        let vm = restored.vm();
        let blocks = vm.ram_blocks().unwrap();
        let ram = read_blocks(vm.pid(), &blocks);
        assert_eq!(blocks.len(), taken.ram.len());
        for (number, expected) in taken.source.ram.blocks().iter().enumerate() {
            let index = blocks.iter().position(|b| b.block == *expected).unwrap();
            assert!(ram[index] == taken.ram[number], "RAM block {} differs; {qemu}", expected.name);
        }
        assert_eq!(vm.qmp().hmp(&look).unwrap(), seen, "the guest sees it where it was");
        vm.qmp().cont().unwrap();
        wait_for(&serial, "work after the restore", |text| text.matches("dirty t=").count() >= 2);
        assert!(!said(&serial).contains("KF ERROR"));
        restored.kill().unwrap();
    }
}

#[test]
fn a_plugged_device_is_followed_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let line = words(&format!("{BARE} -device virtio-rng-pci,id=rng0"));
    let guest = Foreign::start("qemu-system-x86_64", &line, dir.path());
    let mut vm = guest.attach().unwrap();
    assert_eq!(vm.audit().unwrap(), []);
    // The line of the next checkpoint has it.
    let followed = json!({ "driver": "virtio-rng-pci", "id": "rng1" });
    vm.qmp().execute("device_add", Some(followed)).unwrap();
    assert_eq!(vm.audit().unwrap(), []);
    let plugged = json!({ "driver": "edu", "id": "edu1" });
    vm.qmp().execute("device_add", Some(plugged)).unwrap();
    let mut found = vm.audit().unwrap();
    // A warning says that QEMU saves nothing of it.
    found.retain(|finding| finding.severity == Severity::Refused);
    assert!(
        found.len() == 1 && found[0].subject.contains("edu1") && !found[0].fix.is_empty(),
        "{found:?}"
    );
}
