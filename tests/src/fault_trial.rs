//! Injects faults into a protected VM, one after the other, and checks the invariants all the time.
//!
//! ```text
//!   protected ──fault──▶ the client is answered (or waits, if it must) ──recover──▶ protected by the other host
//! ```
//!
//! The invariants: the client gets no wrong answer and keeps its connection. After one host has said
//! that it took over, the VM does not run on the other.

use crate::protection::{Client, Hosts, Seen};
use crate::{Boot, Process, TestEnv};
use keyframe_test_hosts::Direction;
use rustix::process::Signal;
use std::time::{Duration, Instant};

/// The workload of a trial's guest.
pub const LEDGER: &str = "ledger kf.dev=/dev/vda kf.ip=10.78.0.15";
const NAMES: [&str; 2] = ["a", "b"];
/// How long one condition may take.
const LIMIT: Duration = Duration::from_mins(3);
/// Further entries that show that the VM runs.
const ENTRIES: u64 = 10;

/// A fault. The primary's host is the one that runs the VM at that time. Times are in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Power loss of the primary's host.
    HostDies,
    /// SIGKILL of the primary's engine alone.
    EngineDies,
    /// SIGSTOP of the primary's engine until the standby has taken over.
    EngineStalls,
    /// SIGSTOP of the primary's engine for a time; the standby may take over.
    EngineStumbles(u64),
    /// The primary's cable is cut until the standby has taken over.
    PrimaryCut,
    /// The standby's cable is cut for a time.
    StandbyCut(u64),
    /// A host's cable loses one direction for a time; the standby may take over.
    OneWay(Side, Direction, u64),
    /// The primary's cable is cut for 200 ms of each 500 ms, this many times.
    LinkFlaps(u64),
    /// Power loss of the standby's host.
    StandbyDies,
    /// SIGSTOP of the standby's engine for a time.
    StandbyStalls(u64),
    /// The witness is stopped for a time.
    WitnessAway(u64),
    /// The witness stops, then the standby's host dies; then the witness starts again.
    WitnessAndStandbyDie,
    /// A planned switch-over.
    SwitchOver,
}

/// One of the two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The host that runs the VM.
    Primary,
    /// The other host.
    Standby,
}

impl Fault {
    /// The fault that two random numbers select: `n` its kind, `detail` its parameters.
    pub fn from_random(n: u64, detail: u64) -> Self {
        match n % 14 {
            0 | 1 => Self::HostDies,
            2 => Self::EngineDies,
            3 => Self::EngineStalls,
            4 => Self::EngineStumbles(50 + detail % 700),
            5 => Self::PrimaryCut,
            6 => Self::StandbyCut(100 + detail % 2000),
            7 => Self::LinkFlaps(1 + detail % 5),
            8 => Self::StandbyDies,
            9 => Self::StandbyStalls(100 + detail % 3000),
            10 => Self::WitnessAway(100 + detail % 2000),
            11 => Self::WitnessAndStandbyDie,
            12 => {
                let side = if detail & 1 == 0 { Side::Primary } else { Side::Standby };
                let way = if detail & 2 == 0 { Direction::In } else { Direction::Out };
                Self::OneWay(side, way, 100 + (detail >> 2) % 8000)
            }
            _ => Self::SwitchOver,
        }
    }
}

/// The engine on a host: a primary or a standby.
struct Engine {
    process: Process,
    began_as_primary: bool,
}

impl Engine {
    /// True if this engine has the VM, even if the VM may not run. An engine that hears that the
    /// other host has the VM becomes a standby again.
    fn has_vm(&self) -> bool {
        let output = self.process.errors();
        let count = |text: &str| output.matches(text).count();
        usize::from(self.began_as_primary) + count("took over: VM")
            > count("the VM runs on the other host")
    }
}

/// A protected VM with a client, on hosts of its own.
pub struct Trial {
    /// The test's directory.
    pub env: TestEnv,
    /// The hosts and their network.
    pub hosts: Hosts,
    witness: Option<Process>,
    engines: [Option<Engine>; 2],
    /// The number of the host that runs the VM: 0 is `a`.
    at: usize,
    client: Client,
    /// True during a planned switch-over, when the old QEMU exists, paused.
    is_switching: bool,
    failovers: u32,
    script: Vec<String>,
    options: &'static [&'static str],
}

impl Trial {
    /// Starts a protected VM with `cpus` vCPUs and a client, and waits for the first answers.
    /// `options` are those of `protect` and of `standby`.
    pub fn new(cpus: u32, options: &'static [&'static str]) -> Self {
        let env = TestEnv::without_store();
        let hosts = Hosts::new(&env);
        let witness = Some(hosts.witness(&env));
        let standby = hosts.standby(&env, "b", &[&["--peer", "10.78.0.1:7430"], options].concat());
        let boot = Boot { cpus, ..hosts.ledger_guest(LEDGER) };
        let mut vm = hosts.protect(&env, options, &boot);
        hosts.wait_until_protected(&env, "a", &mut vm);
        let client = hosts.client();
        let engines = [(vm, true), (standby, false)]
            .map(|(process, began_as_primary)| Some(Engine { process, began_as_primary }));
        let mut trial = Self {
            env,
            hosts,
            witness,
            engines,
            at: 0,
            client,
            is_switching: false,
            failovers: 0,
            script: Vec::new(),
            options,
        };
        trial.wait_for_entries(ENTRIES);
        trial
    }

    fn fail(&self, what: &str) -> ! {
        let report = |n: usize| {
            self.engines[n].as_ref().map_or_else(String::new, |engine| engine.process.report())
        };
        let (a, b) = (report(0), report(1));
        panic!(
            "{what}\nafter {:?}\nhost a: {a}\nhost b: {b}\nclient: {:?}",
            self.script,
            self.seen().entries
        )
    }

    /// The client's answers so far.
    pub fn seen(&self) -> Seen {
        self.client.seen()
    }

    /// The number of times that the VM has changed hosts.
    pub fn failovers(&self) -> u32 {
        self.failovers
    }

    /// The host that runs the VM.
    pub fn primary(&self) -> &'static str {
        NAMES[self.at]
    }

    /// The other host.
    pub fn other(&self) -> &'static str {
        NAMES[1 - self.at]
    }

    /// The text that the engine of a host has printed.
    pub fn errors(&self, host: &str) -> String {
        let engine = &self.engines[usize::from(host != "a")];
        engine.as_ref().map(|engine| engine.process.errors()).unwrap_or_default()
    }

    /// Sends a signal to the engine of a host, and not to QEMU.
    pub fn signal(&self, host: &str, signal: Signal) {
        if let Some(engine) = &self.engines[usize::from(host != "a")] {
            engine.process.signal(signal);
        }
    }

    /// Checks the invariants once.
    pub fn check_invariants(&self) {
        if let Some(wrong) = self.seen().wrong {
            self.fail(&wrong);
        }
        let has = |n: usize| self.engines[n].as_ref().is_some_and(Engine::has_vm);
        let both = || {
            let both_have = has(0) && has(1) && !self.is_switching;
            both_have && self.is_vm_running_on(0) && self.is_vm_running_on(1)
        };
        // A second look: a process that has just been killed exists for a moment.
        if both() && {
            std::thread::sleep(Duration::from_millis(2));
            both()
        } {
            self.fail("both hosts run the VM");
        }
    }

    fn is_vm_running_on(&self, n: usize) -> bool {
        self.hosts.running_qemus(NAMES[n]) > 0
    }

    /// Waits until `probe` returns true, and checks the invariants all the time.
    pub fn wait_until(&mut self, what: &str, mut probe: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + LIMIT;
        loop {
            self.check_invariants();
            if probe(self) {
                return;
            }
            if Instant::now() > deadline {
                self.fail(&format!("not within {} s: {what}", LIMIT.as_secs()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for `time`, and checks the invariants all the time.
    pub fn run_for(&mut self, time: Duration) {
        let end = Instant::now() + time;
        self.wait_until("time passes", |_| Instant::now() >= end);
    }

    /// Waits until the client has `more` further answers.
    pub fn wait_for_entries(&mut self, more: u64) {
        let entries = self.seen().entries + more;
        self.wait_until("the client is answered", |trial| trial.seen().entries >= entries);
    }

    /// Waits until the standby has taken over.
    fn wait_until_taken_over(&mut self) {
        let other = 1 - self.at;
        self.wait_until("the standby takes over", |trial| {
            trial.engines[other].as_ref().is_some_and(Engine::has_vm)
        });
    }

    /// Kills the witness. [`Self::start_witness`] starts it again.
    pub fn stop_witness(&mut self) {
        if let Some(mut witness) = self.witness.take() {
            witness.signal(Signal::KILL);
            witness.wait();
        }
    }

    /// Starts the witness again, with the state that it has stored.
    pub fn start_witness(&mut self) {
        if self.witness.is_none() {
            self.witness = Some(self.hosts.witness(&self.env));
        }
    }

    /// Kills all processes of a host, as a power failure does.
    pub fn kill_host(&mut self, host: &str) {
        let n = usize::from(host != "a");
        if n == 0 { &self.hosts.a } else { &self.hosts.b }.kill_all();
        self.engines[n] = None;
    }

    /// Waits until the VM is protected, and notes the fault. On a busy machine the VM may have lost
    /// its standby since the last recovery, and the fault would then be another one than meant.
    fn begin(&mut self, fault: Fault) {
        self.wait_until("the VM is still protected", |trial| {
            let output = trial.errors(trial.primary());
            output.rfind("loses nothing") > output.rfind("the VM runs unprotected")
        });
        println!("{} entries; next: {fault:?}", self.seen().entries);
        self.script.push(format!("{fault:?}"));
    }

    /// Injects a fault and waits for its consequences. [`Self::recover`] has to follow.
    pub fn inject(&mut self, fault: Fault) {
        self.begin(fault);
        match fault {
            Fault::HostDies
            | Fault::EngineDies
            | Fault::EngineStalls
            | Fault::EngineStumbles(_)
            | Fault::PrimaryCut
            | Fault::LinkFlaps(_) => self.disturb_primary(fault),
            Fault::StandbyCut(_) | Fault::StandbyDies | Fault::StandbyStalls(_) => {
                self.disturb_standby(fault);
            }
            Fault::OneWay(side, way, ms) => {
                let host = if side == Side::Primary { self.primary() } else { self.other() };
                self.hosts.mute(host, way, true);
                self.run_for(Duration::from_millis(ms));
                self.hosts.mute(host, way, false);
            }
            Fault::WitnessAway(ms) => {
                self.stop_witness();
                self.wait_for_entries(ENTRIES);
                self.run_for(Duration::from_millis(ms));
                self.wait_for_entries(ENTRIES);
                self.start_witness();
            }
            Fault::WitnessAndStandbyDie => self.lose_witness_and_standby(),
            Fault::SwitchOver => self.switch_over(),
        }
    }

    /// The faults of the primary's host, engine and cable.
    fn disturb_primary(&mut self, fault: Fault) {
        let primary = self.primary();
        match fault {
            Fault::HostDies => {
                self.kill_host(primary);
                self.wait_until_taken_over();
            }
            Fault::EngineDies => {
                self.signal(primary, Signal::KILL);
                self.wait_until_taken_over();
            }
            Fault::EngineStalls => {
                self.signal(primary, Signal::STOP);
                self.wait_until_taken_over();
                self.wait_for_entries(ENTRIES);
                self.signal(primary, Signal::CONT);
            }
            Fault::EngineStumbles(ms) => {
                self.signal(primary, Signal::STOP);
                self.run_for(Duration::from_millis(ms));
                self.signal(primary, Signal::CONT);
            }
            Fault::PrimaryCut => {
                self.hosts.cut(primary, true);
                self.wait_until_taken_over();
                self.wait_for_entries(ENTRIES);
                self.hosts.cut(primary, false);
            }
            Fault::LinkFlaps(times) => {
                for _ in 0..times {
                    self.hosts.cut(primary, true);
                    self.run_for(Duration::from_millis(200));
                    self.hosts.cut(primary, false);
                    self.run_for(Duration::from_millis(300));
                }
            }
            _ => unreachable!("{fault:?} is no fault of the primary"),
        }
    }

    /// The faults of the standby's host, engine and cable.
    fn disturb_standby(&mut self, fault: Fault) {
        let standby = self.other();
        match fault {
            Fault::StandbyCut(ms) => {
                self.hosts.cut(standby, true);
                self.run_for(Duration::from_millis(ms));
                self.hosts.cut(standby, false);
            }
            Fault::StandbyDies => {
                self.kill_host(standby);
                self.wait_for_entries(ENTRIES);
            }
            Fault::StandbyStalls(ms) => {
                self.signal(standby, Signal::STOP);
                self.run_for(Duration::from_millis(ms));
                self.signal(standby, Signal::CONT);
            }
            _ => unreachable!("{fault:?} is no fault of the standby"),
        }
    }

    /// Without witness and standby the primary may not run the VM.
    fn lose_witness_and_standby(&mut self) {
        let standby = self.other();
        self.stop_witness();
        self.kill_host(standby);
        self.wait_until("the VM is paused", |trial| !trial.is_vm_running_on(trial.at));
        let entries = self.seen().entries;
        self.run_for(Duration::from_millis(500));
        if self.seen().entries > entries {
            self.fail("the VM runs although its host may not run it");
        }
        self.start_witness();
    }

    /// Moves the VM to the standby with `keyframe failover`. On a busy machine the VM may return.
    fn switch_over(&mut self) {
        let (primary, old, other) = (self.primary(), self.at, 1 - self.at);
        let count_returns = |trial: &Self| {
            let output = trial.errors(primary);
            ["could not go over", "it was to take over, and is silent"]
                .iter()
                .map(|text| output.matches(text).count())
                .sum::<usize>()
        };
        let returns = count_returns(self);
        let mut command = self.hosts.command(&self.env, primary, &["failover"]);
        self.is_switching = true;
        let output = command.output().expect("run keyframe failover");
        if !output.status.success() {
            self.fail(&format!("no switch-over: {}", String::from_utf8_lossy(&output.stderr)));
        }
        self.wait_until("the VM changes hosts, or returns", |trial| {
            let is_over = |engine: &mut Engine| !engine.process.is_running() || !engine.has_vm();
            trial.engines[old].as_mut().is_none_or(is_over)
                && trial.engines[other].as_ref().is_some_and(Engine::has_vm)
                || count_returns(trial) > returns
        });
        self.is_switching = false;
    }

    /// Starts a standby on each host whose engine has ended, and waits until the VM is protected.
    pub fn recover(&mut self) {
        let was = self.at;
        self.wait_for_entries(ENTRIES);
        let mut asked = Instant::now();
        self.wait_until("the VM is protected again", |trial| {
            for n in 0..2 {
                trial.start_standby_if_ended(n);
            }
            if !trial.find_vm() || asked.elapsed() < Duration::from_millis(50) {
                return false;
            }
            asked = Instant::now();
            let status = trial.hosts.status(&trial.env, NAMES[trial.at]);
            status.is_some_and(|status| status["state"] == "protected")
        });
        self.failovers += u32::from(self.at != was);
        self.wait_for_entries(ENTRIES);
    }

    /// Starts a standby on host `n` if its engine has ended.
    fn start_standby_if_ended(&mut self, n: usize) {
        if self.engines[n].as_mut().is_some_and(|engine| engine.process.is_running()) {
            return;
        }
        self.engines[n] = None;
        let peer = format!("10.78.0.{}:7430", 2 - n);
        let options = [&["--peer", &peer], self.options].concat();
        let process = self.hosts.standby(&self.env, NAMES[n], &options);
        self.engines[n] = Some(Engine { process, began_as_primary: false });
    }

    /// Notes which host has the VM. Returns false as long as both claim it, or neither: the engine
    /// that lost it has yet to learn so.
    fn find_vm(&mut self) -> bool {
        let look =
            |trial: &Self| [0, 1].map(|n| trial.engines[n].as_ref().is_some_and(Engine::has_vm));
        let has = look(self);
        match has {
            // The VM may have moved between the two looks of `has`; a second one tells.
            [false, false] if look(self) == has => self.fail("the VM is lost"),
            [false, false] | [true, true] => false,
            [first, _] => {
                self.at = usize::from(!first);
                true
            }
        }
    }

    /// Ends the client and asserts that it saw nothing wrong.
    pub fn end(self) -> Seen {
        self.client.end()
    }
}
