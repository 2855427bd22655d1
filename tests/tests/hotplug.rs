//! Memory that is plugged into a running VM: the next checkpoint begins a run of its own, complete
//! and exact, and restores with that memory in place.

use keyframe_qemu::{Qmp, RunStatus, find_ram_blocks};
use keyframe_tests::{
    Bench, Boot, PATIENCE, Process, Scope, Sequence, assert_restores_exactly, hash_lines, number,
    record_skip,
};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};
use serde_json::{Value, json};
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const DIMM_BYTES: u64 = 128 << 20;
/// Every so many bytes of the DIMM something is written; no multiple of a page's neighbours.
const STEP_BYTES: usize = 0x10_3000;
/// A monitor that can answer does so at once.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// A run whose VM has a monitor of the test's own, and room for memory.
struct Plugged {
    bench: Bench,
    run: Process,
    socket: PathBuf,
    pid: u32,
}

impl Plugged {
    fn start(options: &[&str]) -> Self {
        let bench = Bench::new();
        let socket = bench.path().join("own.sock");
        let monitor = format!("unix:{},server=on,wait=off", socket.display());
        let boot = Boot::new("hash").with(&["-m", "160M,slots=2,maxmem=1G", "-qmp", &monitor]);
        let common = ["--interval", "400ms", "--name", "guest", "--audit", "audit"];
        let mut run = bench.start(&[&common, options].concat(), &boot);
        run.wait_for("KF READY");
        let status = bench.json(&["status", "--json", "--name", "guest"]);
        let pid = number(&status[0], "qemu_pid") as u32;
        Self { bench, run, socket, pid }
    }

    fn qmp(&self) -> Qmp {
        Qmp::connect(&self.socket, PATIENCE).expect("connect to the monitor")
    }

    fn must(&self, command: &str, arguments: Value) {
        self.qmp().execute(command, Some(arguments)).unwrap();
    }

    fn plug(&self, number: u32) {
        let (backend, id) = (format!("mem{number}"), format!("dimm{number}"));
        self.must(
            "object-add",
            json!({ "qom-type": "memory-backend-ram", "id": backend, "size": DIMM_BYTES }),
        );
        self.must("device_add", json!({ "driver": "pc-dimm", "id": id, "memdev": backend }));
    }

    /// In place of the guest, which leaves such memory alone until it is told to use it. As the
    /// guest it writes outside the pauses: what comes in one behind its copy would be in the
    /// audit's, and in this checkpoint rightly not.
    fn write_to_dimm(&self, number: u32, value: u8) {
        let name = format!("mem{number}");
        let blocks = find_ram_blocks(&mut self.qmp(), self.pid).expect("find RAM blocks");
        let block =
            blocks.into_iter().find(|b| b.block.name.contains(&name)).expect("the DIMM's block");
        let memory =
            OpenOptions::new().write(true).open(format!("/proc/{}/mem", self.pid)).unwrap();
        let _stopped = self.stop_between_pauses();
        for at in (0..block.block.total_bytes).step_by(STEP_BYTES) {
            memory
                .write_all_at(&[at.to_le_bytes(), [value; 8]].concat(), block.host.0 + at)
                .unwrap();
        }
    }

    /// The engine stands still while its VM runs, until this is dropped.
    fn stop_between_pauses(&self) -> Stopped<'_> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut qmp = self.qmp();
            qmp.set_timeout(ANSWER_TIMEOUT);
            let stopped = Stopped::new(&self.run);
            // Without an answer it holds one of QEMU's threads.
            if matches!(qmp.status(), Ok(RunStatus::Running)) {
                return stopped;
            }
            drop(stopped);
            assert!(
                Instant::now() < deadline,
                "the VM is always in a pause; {}",
                self.run.report()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits for `count` further checkpoints; the entries of all.
    fn more(&mut self, count: usize) -> Vec<Value> {
        let mark = self.bench.list().len();
        let taken = self.run.wait_until(|_| {
            let list = self.bench.list();
            (list.len() >= mark + count).then_some(list)
        });
        taken.unwrap_or_else(|| panic!("no more checkpoints; {}", self.run.report()))
    }

    /// The size of all RAM blocks in checkpoint `id`, and whether one of them belongs to backend
    /// `name`.
    fn ram(&self, id: &str, name: &str) -> (u64, bool) {
        let shown = self.bench.json(&["show", "--json", "--store", &self.bench.store(), id]);
        let has = shown["ram"]
            .as_array()
            .unwrap()
            .iter()
            .any(|b| b["name"].as_str().unwrap().contains(name));
        (number(&shown, "ram_bytes"), has)
    }
}

/// A process that stands still, with all its threads.
struct Stopped<'a>(&'a Process);

impl<'a> Stopped<'a> {
    fn new(process: &'a Process) -> Self {
        process.signal(Signal::STOP);
        let pid = Pid::from_raw(process.pid() as i32).expect("a pid");
        // One that has ended is left to those who ask for its exit code.
        let either = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(pid), either).expect("wait until it stands still");
        Self(process)
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.0.signal(Signal::CONT);
    }
}

fn runs(list: &[Value]) -> Vec<String> {
    let mut runs: Vec<String> =
        list.iter().map(|e| e["run"].as_str().expect("a run").to_owned()).collect();
    runs.dedup();
    runs
}

fn newest(list: &[Value]) -> String {
    number(list.last().expect("a checkpoint"), "id").to_string()
}

/// Plugs, writes where that can be done, checkpoints, restores.
fn a_dimm_is_in_the_next_checkpoint(options: &[&str], writes: bool) {
    println!("-- {}", options.join(" "));
    let mut vm = Plugged::start(options);
    let before = newest(&vm.more(2));
    vm.plug(1);
    if writes {
        vm.write_to_dimm(1, 0xa5);
    }
    vm.run.wait_for_error("a new run begins");
    vm.more(2);
    // Tracked from then on: what is written behind the first checkpoint is in a later one.
    if writes {
        vm.write_to_dimm(1, 0x5a);
    }
    let list = vm.more(2);
    assert_eq!(runs(&list).len(), 2, "{list:?}");
    let (small, large) = (vm.ram(&before, "mem1"), vm.ram(&newest(&list), "mem1"));
    assert_eq!((small.1, large), (false, (small.0 + DIMM_BYTES, true)));
    vm.bench.ok(&["stop"]);
    let code = vm.run.wait().code();
    // A checkpoint that was under way as the DIMM came is lost, and that is a warning.
    assert!(matches!(code, Some(0 | 3)), "{code:?}: {}", vm.run.report());
    assert!(
        !vm.run.errors().contains("AUDIT") && !vm.run.errors().contains("audit of"),
        "{}",
        vm.run.report()
    );
    let mut sequence = Sequence::new(16);
    sequence.check(&hash_lines(&vm.run.lines()), 3);
    vm.bench.ok(&["check", "--read-data", "--quiet", "--store", &vm.bench.store()]);

    let id = newest(&vm.bench.list());
    assert_restores_exactly(&vm.bench, &id);
    let mut restored = vm.bench.restore(&id, &[]);
    let grown = restored.wait_until(|p| (hash_lines(&p.lines()).len() >= 4).then_some(()));
    assert!(grown.is_some(), "the restored guest is silent; {}", restored.report());
    sequence.check(&hash_lines(&restored.lines()), 4);
}

#[test]
fn a_dimm_that_is_plugged_in_is_in_the_next_checkpoint() {
    a_dimm_is_in_the_next_checkpoint(&[], true);
}

#[test]
fn so_it_is_with_copy_on_write() {
    // The kernel refuses writes from outside that would have to wait for a handler.
    a_dimm_is_in_the_next_checkpoint(&["--strategy", "cow"], false);
}

#[test]
fn so_it_is_with_fork() {
    a_dimm_is_in_the_next_checkpoint(&["--strategy", "fork"], true);
}

#[test]
fn a_dimm_that_is_unplugged_is_in_no_further_checkpoint() {
    let mut vm = Plugged::start(&[]);
    let before = newest(&vm.more(1));
    vm.plug(1);
    vm.run.wait_for_error("a new run begins");
    vm.more(1);
    vm.must("device_del", json!({ "id": "dimm1" }));
    let gone = || {
        let devices = vm.qmp().execute("query-memory-devices", None).unwrap();
        devices.as_array().unwrap().is_empty()
    };
    let deadline = Instant::now() + Duration::from_secs(10);
    while !gone() {
        if Instant::now() > deadline {
            record_skip(Scope::Part, "this guest does not release the DIMM");
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    vm.must("object-del", json!({ "id": "mem1" }));
    let begun = |p: &Process| p.errors().matches("a new run begins").count();
    let third = vm.run.wait_until(|run| (begun(run) == 2).then_some(()));
    assert!(third.is_some(), "no third run; {}", vm.run.report());
    let list = vm.more(2);
    assert_eq!(runs(&list).len(), 3, "{list:?}");
    assert_eq!(vm.ram(&newest(&list), "mem1"), vm.ram(&before, "mem1"));
    vm.bench.ok(&["stop"]);
    assert!(matches!(vm.run.wait().code(), Some(0 | 3)), "{}", vm.run.report());
    assert!(!vm.run.errors().contains("AUDIT"), "{}", vm.run.report());
    assert_restores_exactly(&vm.bench, &newest(&vm.bench.list()));
}
