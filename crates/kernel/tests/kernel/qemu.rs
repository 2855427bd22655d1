//! Forks, first writes and our own death on QEMU itself, where there is one. Mostly no guest runs:
//! QEMU waits for its start, so that its memory stands still.

use crate::oracle::Random;
use crate::target::{PAGE, start_role_under};
use keyframe_kernel::attach::inject_userfaultfd;
use keyframe_kernel::fault_tracker::FaultTracker;
use keyframe_kernel::frozen_copy::FrozenCopy;
use keyframe_kernel::memory::GuestReader;
use keyframe_kernel::{Error, Process, write_memory};
use keyframe_units::{HostRange, HostVirt};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

const RAM_BYTES: u64 = 192 << 20;

struct Qemu {
    child: Child,
    monitor: ChildStdin,
    answers: BufReader<ChildStdout>,
    process: Process,
}

impl Qemu {
    fn start(program: &str, options: &[&str]) -> Self {
        let mut command = Command::new(program);
        command.args([
            "-M",
            "pc",
            "-m",
            "192",
            "-S",
            "-nodefaults",
            "-display",
            "none",
            "-qmp",
            "stdio",
        ]);
        let child = command.args(options).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.unwrap_or_else(|error| panic!("start {program}: {error}"));
        let (monitor, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let process = Process::open(child.id()).unwrap();
        let mut qemu = Self { child, monitor, answers: BufReader::new(stdout), process };
        qemu.line();
        qemu.ask("qmp_capabilities");
        qemu
    }

    /// The next answer. QEMU answers or ends: either ends the wait.
    fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(
            (&mut self.answers).take(1 << 20).read_line(&mut line).unwrap() > 0,
            "QEMU has ended"
        );
        line
    }

    fn ask(&mut self, command: &str) {
        writeln!(self.monitor, "{{\"execute\": \"{command}\"}}").unwrap();
        loop {
            let answer = self.line();
            assert!(!answer.contains("\"error\""), "{command}: {answer}");
            if answer.contains("\"return\"") {
                return;
            }
        }
    }

    fn ram(&self) -> HostRange {
        let maps = self.process.maps().unwrap();
        maps.iter().find(|mapping| mapping.range.len_bytes == RAM_BYTES).unwrap().range
    }

    fn flags(&self) -> Vec<String> {
        let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", self.process.pid())).unwrap();
        smaps.lines().filter(|line| line.starts_with("VmFlags")).map(str::to_owned).collect()
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The programs of the QEMUs to test with.
fn programs() -> Vec<String> {
    keyframe_testing::qemus().into_iter().map(|qemu| qemu.path).collect()
}

fn read(process: &Process, range: HostRange) -> Vec<u8> {
    let mut bytes = vec![0; range.len_bytes as usize];
    GuestReader::new(process, &[range]).unwrap().read(&[range], &mut bytes).unwrap();
    bytes
}

fn page(ram: HostRange, number: u64) -> HostVirt {
    HostVirt(ram.start.0 + number * PAGE)
}

/// Guest RAM is kept out of children by QEMU; it is in the frozen one, and out of others again.
#[test]
fn a_fork_of_qemu_freezes_its_ram() {
    for program in programs() {
        let mut qemu = Qemu::start(&program, &[]);
        let ram = qemu.ram();
        for number in 0..500 {
            write_memory(&qemu.process, page(ram, number * 97), &[(number % 255) as u8 + 1; 64])
                .unwrap();
        }
        let (before, flags) = (read(&qemu.process, ram), qemu.flags());
        let snapshot = FrozenCopy::fork(&qemu.process, &[ram]).unwrap();
        qemu.ask("query-status");
        for number in 0..500 {
            write_memory(&qemu.process, page(ram, number * 31), &[0xcc; 4096]).unwrap();
        }
        assert!(read(snapshot.process(), ram) == before, "{program}");
        assert_eq!(
            std::fs::read_dir(format!("/proc/{}/fd", snapshot.process().pid())).unwrap().count(),
            0
        );
        println!("{program}: stopped for {} us", snapshot.stopped_ns() / 1000);
        snapshot.end().unwrap();
        assert_eq!(qemu.flags(), flags, "{program}");
        qemu.ask("query-status");
    }
}

/// A clone would kill this QEMU: it is refused before, and QEMU lives.
#[test]
fn a_qemu_under_seccomp_is_not_forked() {
    for program in programs() {
        let options = ["-sandbox", "on,spawn=deny"];
        let mut qemu = Qemu::start(&program, &options);
        let error = FrozenCopy::fork(&qemu.process, &[qemu.ram()]).unwrap_err();
        assert!(matches!(error, Error::Seccomp { .. }), "{program}: {error:?}");
        qemu.ask("query-status");
    }
}

/// Each kind of RAM that QEMU has, except files on disk, which are refused.
#[test]
fn first_writes_to_the_ram_of_qemu_are_watched() {
    for program in programs() {
        for backend in ["ram", "memfd", "memfd,share=off"] {
            let backend = format!("memory-backend-{backend},id=m,size=192M");
            let options =
                ["-object", backend.as_str(), "-machine", "memory-backend=m", "-sandbox", "on"];
            let mut qemu = Qemu::start(&program, &options);
            let ram = qemu.ram();
            let attached = inject_userfaultfd(&qemu.process).unwrap();
            let mut tracker =
                FaultTracker::new(&qemu.process, attached.uffd, attached.user_mode_only).unwrap();
            tracker.register(ram).unwrap();
            let mut out = Vec::new();
            assert_eq!(tracker.drain(ram, &mut out).unwrap().written_pages, RAM_BYTES / PAGE);
            out.clear();
            // QEMU loads its ROMs into guest RAM again.
            qemu.ask("system_reset");
            write_memory(&qemu.process, page(ram, 777), &[1; 64]).unwrap();
            let found = tracker.drain(ram, &mut out).unwrap();
            assert!((1..1000).contains(&found.written_pages), "{backend}: {found:?}");
            assert!(out.iter().any(|written| written.range.start <= page(ram, 777)
                && written.range.end() > page(ram, 777)));
            assert_eq!(tracker.pages_with_lost_protection(ram).unwrap(), []);
            drop(tracker);
            qemu.ask("query-status");
        }
    }
}

/// Has processes attach to `qemu`, and fork it where it permits that, and kills them anywhere in
/// between; QEMU answers after each.
fn kill_attachers(qemu: &mut Qemu, kills: u64, forks: bool, context: &str) {
    let mut random = Random(99);
    let ram = qemu.ram();
    let range = format!("{} {}", ram.start.0, ram.len_bytes);
    for kill in 0..kills {
        let (role, arguments) = match kill % 2 {
            1 if forks => ("killed::role_that_forks", range.as_str()),
            _ => ("killed::role_that_attaches", ""),
        };
        let mut killed = start_role_under(&[], role, &qemu.process, arguments);
        // Some sessions long, as forks of this much take their time.
        std::thread::sleep(Duration::from_micros(random.below(8000)));
        killed.kill();
        assert!(qemu.process.is_alive(), "{context}, {role}, kill {kill}: QEMU died");
        qemu.ask("query-status");
    }
    if forks {
        drop(FrozenCopy::fork(&qemu.process, &[ram]).unwrap());
    }
    assert!(inject_userfaultfd(&qemu.process).unwrap().guarded);
}

#[test]
fn whoever_attaches_to_a_waiting_qemu_may_be_killed() {
    let sandbox = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
    for program in programs() {
        for options in [&[][..], &["-sandbox", sandbox]] {
            let mut qemu = Qemu::start(&program, options);
            let mask = signal_mask(&qemu.process);
            let context = format!("{program} {options:?}");
            kill_attachers(&mut qemu, 60, options.is_empty(), &context);
            assert_eq!(signal_mask(&qemu.process), mask, "{context}");
        }
    }
}

fn signal_mask(process: &Process) -> String {
    let text = std::fs::read_to_string(format!("/proc/{}/status", process.pid())).unwrap();
    text.lines().find(|line| line.starts_with("SigBlk")).unwrap().to_owned()
}

/// The guest boots, and then writes its memory and says so each second, all the while.
#[test]
fn whoever_attaches_to_a_running_qemu_may_be_killed() {
    let guest = keyframe_testing::small_guest().display().to_string();
    for program in programs() {
        let console = tempfile::NamedTempFile::new().unwrap();
        let said = || std::fs::read_to_string(console.path()).unwrap_or_default();
        let (kernel, initrd) = (format!("{guest}/vmlinux"), format!("{guest}/initramfs.cpio.gz"));
        let serial = format!("file:{}", console.path().display());
        let append =
            "console=ttyS0 quiet panic=-1 tsc=unstable kf.work=dirty kf.rate=20000 kf.mib=64";
        let options = [
            "-serial",
            &serial,
            "-kernel",
            &kernel,
            "-initrd",
            &initrd,
            "-append",
            append,
            "-no-reboot",
        ];
        let mut qemu = Qemu::start(&program, &options);
        qemu.ask("cont");
        kill_attachers(&mut qemu, 60, true, &format!("{program}, booting"));
        let reports = |at_least: usize| {
            let deadline = Instant::now() + Duration::from_mins(2);
            while said().matches("dirty t=").count() < at_least {
                assert!(Instant::now() < deadline, "{program}: the guest works: {}", said());
                std::thread::sleep(Duration::from_millis(50));
            }
            said().matches("dirty t=").count()
        };
        reports(1);
        kill_attachers(&mut qemu, 60, true, &format!("{program}, working"));
        let before = reports(1);
        reports(before + 2);
        qemu.ask("query-status");
    }
}
