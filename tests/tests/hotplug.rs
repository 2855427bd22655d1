//! Tests memory hotplug: the next checkpoint begins a new run, complete and exact, and restores
//! with that memory in place.

use keyframe_qemu::{Qmp, RunStatus, find_ram_blocks};
use keyframe_tests::{
    Boot, PATIENCE, Process, Scope, Sequence, TestEnv, assert_restores_exactly, hash_lines, number,
    record_skip,
};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};
use serde_json::{Value, json};
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const DIMM_BYTES: u64 = 128 << 20;
/// The test writes to the DIMM at this distance in bytes, so that written pages are not neighbours.
const STEP_BYTES: usize = 0x10_3000;
/// How long a working monitor may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// A run whose VM has a monitor for the test, and slots for memory.
struct Plugged {
    env: TestEnv,
    run: Process,
    socket: PathBuf,
    pid: u32,
}

impl Plugged {
    fn start(options: &[&str]) -> Self {
        let env = TestEnv::new();
        let socket = env.path().join("own.sock");
        let monitor = format!("unix:{},server=on,wait=off", socket.display());
        let boot = Boot::new("hash").with(&["-m", "160M,slots=2,maxmem=1G", "-qmp", &monitor]);
        let common = ["--interval", "400ms", "--name", "guest", "--audit", "audit"];
        let mut run = env.start(&[&common, options].concat(), &boot);
        run.wait_for("KF READY");
        let status = env.json(&["status", "--json", "--name", "guest"]);
        let pid = number(&status[0], "qemu_pid") as u32;
        Self { env, run, socket, pid }
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

    /// Unplugs the first DIMM and its memory. Returns false, and records a skip, if the guest does not
    /// release it.
    fn unplug(&self) -> bool {
        self.must("device_del", json!({ "id": "dimm1" }));
        let deadline = Instant::now() + Duration::from_secs(10);
        let devices = || self.qmp().execute("query-memory-devices", None).unwrap();
        while !devices().as_array().unwrap().is_empty() {
            if Instant::now() > deadline {
                record_skip(Scope::Part, "this guest does not release the DIMM");
                return false;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        self.must("object-del", json!({ "id": "mem1" }));
        true
    }

    /// Writes to the DIMM in place of the guest, which does not use it by itself. It writes outside
    /// the pauses: the audit's copy could contain a write inside a pause that the checkpoint
    /// rightly lacks.
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

    /// Stops the engine until this is dropped; its VM runs.
    fn stop_between_pauses(&self) -> Stopped<'_> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut qmp = self.qmp();
            qmp.set_timeout(ANSWER_TIMEOUT);
            let stopped = Stopped::new(&self.run);
            // An unanswered request holds one of QEMU's threads.
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

    /// Waits for `count` further checkpoints; returns the list of all.
    fn more(&mut self, count: usize) -> Vec<Value> {
        let mark = self.env.list().len();
        let taken = self.run.wait_until(|_| {
            let list = self.env.list();
            (list.len() >= mark + count).then_some(list)
        });
        taken.unwrap_or_else(|| panic!("no more checkpoints; {}", self.run.report()))
    }

    /// The size of all RAM blocks in checkpoint `id`, and true if one of them belongs to backend
    /// `name`.
    fn ram(&self, id: &str, name: &str) -> (u64, bool) {
        let shown = self.env.json(&["show", "--json", "--store", &self.env.store(), id]);
        let has = shown["ram"]
            .as_array()
            .unwrap()
            .iter()
            .any(|b| b["name"].as_str().unwrap().contains(name));
        (number(&shown, "ram_bytes"), has)
    }
}

/// A stopped process, with all its threads.
struct Stopped<'a>(&'a Process);

impl<'a> Stopped<'a> {
    fn new(process: &'a Process) -> Self {
        process.signal(Signal::STOP);
        let pid = Pid::from_raw(process.pid() as i32).expect("a pid");
        // An ended process is left to the test that reads its exit code.
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

/// Plugs memory, writes to it, takes checkpoints and restores them.
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
    // The memory is tracked from then on: a later checkpoint has the writes after the first one.
    if writes {
        vm.write_to_dimm(1, 0x5a);
    }
    let list = vm.more(2);
    assert_eq!(runs(&list).len(), 2, "{list:?}");
    let (small, large) = (vm.ram(&before, "mem1"), vm.ram(&newest(&list), "mem1"));
    assert_eq!((small.1, large), (false, (small.0 + DIMM_BYTES, true)));
    vm.env.ok(&["stop"]);
    let code = vm.run.wait().code();
    // The checkpoint that was under way when the DIMM came is lost, with a warning.
    assert!(matches!(code, Some(0 | 3)), "{code:?}: {}", vm.run.report());
    assert!(
        !vm.run.errors().contains("AUDIT") && !vm.run.errors().contains("audit of"),
        "{}",
        vm.run.report()
    );
    let mut sequence = Sequence::new(16);
    sequence.check(&hash_lines(&vm.run.lines()), 3);
    vm.env.ok(&["check", "--read-data", "--quiet", "--store", &vm.env.store()]);

    let id = newest(&vm.env.list());
    assert_restores_exactly(&vm.env, &id);
    let mut restored = vm.env.restore(&id, &[]);
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
    if !vm.unplug() {
        return;
    }
    let begun = |p: &Process| p.errors().matches("a new run begins").count();
    let third = vm.run.wait_until(|run| (begun(run) == 2).then_some(()));
    assert!(third.is_some(), "no third run; {}", vm.run.report());
    let list = vm.more(2);
    assert_eq!(runs(&list).len(), 3, "{list:?}");
    assert_eq!(vm.ram(&newest(&list), "mem1"), vm.ram(&before, "mem1"));
    vm.env.ok(&["stop"]);
    assert!(matches!(vm.run.wait().code(), Some(0 | 3)), "{}", vm.run.report());
    assert!(!vm.run.errors().contains("AUDIT"), "{}", vm.run.report());
    assert_restores_exactly(&vm.env, &newest(&vm.env.list()));
}

#[test]
fn a_dimm_that_is_exchanged_between_two_checkpoints_begins_a_new_run() {
    let mut vm = Plugged::start(&[]);
    vm.plug(1);
    vm.run.wait_for_error("a new run begins");
    vm.write_to_dimm(1, 0xa5);
    vm.more(2);
    {
        let _stopped = vm.stop_between_pauses();
        if !vm.unplug() {
            return;
        }
        vm.plug(1);
    }
    let begun = |p: &Process| p.errors().matches("a new run begins").count();
    let third = vm.run.wait_until(|run| (begun(run) == 2).then_some(()));
    assert!(third.is_some(), "no third run; {}", vm.run.report());
    vm.write_to_dimm(1, 0x5a);
    let list = vm.more(2);
    assert_eq!(runs(&list).len(), 3, "{list:?}");
    vm.env.ok(&["stop"]);
    assert!(matches!(vm.run.wait().code(), Some(0 | 3)), "{}", vm.run.report());
    assert!(!vm.run.errors().contains("AUDIT"), "{}", vm.run.report());
    assert_restores_exactly(&vm.env, &newest(&vm.env.list()));
}

#[test]
fn a_device_with_which_qemu_dies_at_a_save_can_be_plugged_in_without_harm() {
    let mut plugged = Plugged::start(&[]);
    plugged.more(2);
    for id in ["c1", "c2"] {
        let backend = json!({ "type": "null", "data": {} });
        plugged.must("chardev-add", json!({ "id": id, "backend": backend }));
    }
    let device =
        json!({ "driver": "pci-serial-2x", "id": "ser0", "chardev1": "c1", "chardev2": "c2" });
    plugged.must("device_add", device);
    plugged.run.wait_for_error("device ser0 (pci-serial-2x)");
    let taken = plugged.env.run(&["take", "--name", "guest"]);
    assert!(!taken.status.success(), "a checkpoint of such a device: {}", plugged.run.report());
    assert!(String::from_utf8_lossy(&taken.stderr).contains("unplug"), "{taken:?}");
    assert_eq!(plugged.qmp().status().unwrap(), RunStatus::Running);
}

/// The last error that the run's status shows.
fn last_error(vm: &Plugged) -> String {
    let status = vm.env.json(&["status", "--json", "--name", "guest"]);
    status[0]["last_error"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn a_checkpoint_has_the_devices_of_its_time_and_a_rollback_across_a_plug_is_refused() {
    let mut vm = Plugged::start(&[]);
    let before = newest(&vm.more(1));
    vm.must("device_add", json!({ "driver": "virtio-rng-pci", "id": "r1" }));
    vm.must("device_add", json!({ "driver": "virtio-rng-pci" }));
    vm.more(2);
    let refused = vm.env.run(&["rollback", &before, "--name", "guest"]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && text.contains("which the VM has now"), "{text}");
    // A disk that the guest can write to and that no part of the run captures.
    let image = vm.env.path().join("late.img");
    std::fs::write(&image, vec![0; 1 << 20]).unwrap();
    let file = json!({ "driver": "file", "filename": image });
    vm.must("blockdev-add", json!({ "driver": "raw", "node-name": "late", "file": file }));
    vm.must("device_add", json!({ "driver": "virtio-blk-pci", "id": "b1", "drive": "late" }));
    vm.run.wait_for_error("this run does not capture");
    assert!(last_error(&vm).contains("b1"), "{}", last_error(&vm));
    assert_eq!(vm.qmp().status().unwrap(), RunStatus::Running);
    vm.env.ok(&["stop"]);
    assert!(matches!(vm.run.wait().code(), Some(0 | 3)), "{}", vm.run.report());
    let last = newest(&vm.env.list());
    assert_restores_exactly(&vm.env, &last);
}
