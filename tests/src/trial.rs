//! What befalls a protected VM, one fault after the other, and what has to hold through all of it.
//!
//! ```text
//!   protected ──fault──▶ the client goes on (or stands, where it must) ──recover──▶ protected again, by whoever does not run it
//! ```
//!
//! Invariants, looked at all the time: the client is never answered wrongly, nor its connection
//! broken; at no instant has one host the VM running when the other has said that it took over.

use crate::protection::{Client, Hosts, Seen};
use crate::{Bench, Boot, Process};
use keyframe_test_hosts::Direction;
use rustix::process::Signal;
use std::time::{Duration, Instant};

/// What the guest of a trial does.
pub const LEDGER: &str = "ledger kf.dev=/dev/vda kf.ip=10.78.0.15";
const NAMES: [&str; 2] = ["a", "b"];
const LIMIT: Duration = Duration::from_mins(3);
/// Entries that show that the VM goes on.
const ENTRIES: u64 = 10;

/// What can befall it. The primary's host is the one where the VM runs then, the standby's the
/// other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Power loss of the primary's host.
    HostDies,
    /// SIGKILL of the primary's engine alone.
    EngineDies,
    /// SIGSTOP of the primary's engine until the standby has taken over.
    EngineStalls,
    /// The same for so many ms: the standby may take over or not.
    EngineStumbles(u64),
    /// The primary's cable, until the standby has taken over.
    PrimaryCut,
    /// The standby's, for so many ms.
    StandbyCut(u64),
    /// One way of a host's cable, for so many ms: the standby may take over or not.
    OneWay(Side, Direction, u64),
    /// The primary's cable, 200 ms out of 500, so many times.
    LinkFlaps(u64),
    /// Power loss of the standby's host.
    StandbyDies,
    /// SIGSTOP of the standby's engine for so many ms.
    StandbyStalls(u64),
    /// The witness, for so many ms.
    WitnessAway(u64),
    /// The witness, then the standby's host; then the witness is back.
    WitnessAndStandbyDie,
    /// A planned switch-over.
    SwitchOver,
}

/// Whose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The host that runs the VM.
    Primary,
    /// The other one.
    Standby,
}

impl Fault {
    /// The n-th of the kinds, with what else a number says.
    pub fn drawn(n: u64, detail: u64) -> Self {
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

/// A host's keyframe.
struct Home {
    process: Process,
    /// It was started as the primary.
    first: bool,
}

impl Home {
    /// It has the VM, whether or not that may run. One that had it and was told that the other host
    /// has it is a standby again.
    fn has_vm(&self) -> bool {
        let said = self.process.errors();
        let count = |text: &str| said.matches(text).count();
        usize::from(self.first) + count("took over: VM") > count("the VM runs on the other host")
    }
}

/// A protected VM on hosts of its own, with a client.
pub struct Trial {
    /// Where it is.
    pub bench: Bench,
    /// Its hosts.
    pub hosts: Hosts,
    witness: Option<Process>,
    homes: [Option<Home>; 2],
    /// Where the VM runs.
    at: usize,
    client: Client,
    /// The VM is on its way between hosts that both live: its old QEMU is there, paused.
    switching: bool,
    failovers: u32,
    script: Vec<String>,
    options: &'static [&'static str],
}

impl Trial {
    /// Protected, with a client that was answered. `options` are those of all that protects it.
    pub fn new(cpus: u32, options: &'static [&'static str]) -> Self {
        let bench = Bench::without_store();
        let hosts = Hosts::new(&bench);
        let witness = Some(hosts.witness(&bench));
        let standby =
            hosts.standby(&bench, "b", &[&["--peer", "10.78.0.1:7430"], options].concat());
        let boot = Boot { cpus, ..hosts.ledger(LEDGER) };
        let mut vm = hosts.protect(&bench, options, &boot);
        hosts.until_protected(&bench, "a", &mut vm);
        let client = hosts.client();
        let homes =
            [(vm, true), (standby, false)].map(|(process, first)| Some(Home { process, first }));
        let mut trial = Self {
            bench,
            hosts,
            witness,
            homes,
            at: 0,
            client,
            switching: false,
            failovers: 0,
            script: Vec::new(),
            options,
        };
        trial.go_on(ENTRIES);
        trial
    }

    fn fail(&self, what: &str) -> ! {
        let said = |n: usize| {
            self.homes[n].as_ref().map_or_else(String::new, |home| home.process.report())
        };
        let (a, b) = (said(0), said(1));
        panic!(
            "{what}\nbehind {:?}\nhost a: {a}\nhost b: {b}\nclient: {:?}",
            self.script,
            self.seen().entries
        )
    }

    /// What the client was answered so far.
    pub fn seen(&self) -> Seen {
        self.client.seen()
    }

    /// How often the VM has changed hosts.
    pub fn failovers(&self) -> u32 {
        self.failovers
    }

    /// The host that has the VM.
    pub fn primary(&self) -> &'static str {
        NAMES[self.at]
    }

    /// The other one.
    pub fn other(&self) -> &'static str {
        NAMES[1 - self.at]
    }

    /// What the keyframe of a host has said.
    pub fn said(&self, host: &str) -> String {
        let home = &self.homes[usize::from(host != "a")];
        home.as_ref().map(|home| home.process.errors()).unwrap_or_default()
    }

    /// Signals the keyframe of a host, and nothing beside it.
    pub fn signal(&self, host: &str, signal: Signal) {
        if let Some(home) = &self.homes[usize::from(host != "a")] {
            home.process.signal(signal);
        }
    }

    /// One look at the invariants.
    pub fn look(&self) {
        if let Some(wrong) = self.seen().wrong {
            self.fail(&wrong);
        }
        let has = |n: usize| self.homes[n].as_ref().is_some_and(Home::has_vm);
        let both = || has(0) && has(1) && !self.switching && self.running(0) && self.running(1);
        // Once more: one that has just been killed is still there for a moment.
        if both() && {
            std::thread::sleep(Duration::from_millis(2));
            both()
        } {
            self.fail("both hosts run the VM");
        }
    }

    fn running(&self, n: usize) -> bool {
        self.hosts.running_qemus(NAMES[n]) > 0
    }

    /// Waits, and looks all the while.
    pub fn until(&mut self, what: &str, mut probe: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + LIMIT;
        loop {
            self.look();
            if probe(self) {
                return;
            }
            if Instant::now() > deadline {
                self.fail(&format!("not within {} s: {what}", LIMIT.as_secs()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Lets time pass, and looks all the while.
    pub fn pass(&mut self, time: Duration) {
        let end = Instant::now() + time;
        self.until("time passes", |_| Instant::now() >= end);
    }

    /// The client is answered so many more times.
    pub fn go_on(&mut self, more: u64) {
        let until = self.seen().entries + more;
        self.until("the client goes on", |trial| trial.seen().entries >= until);
    }

    /// The other host has taken over.
    fn until_taken_over(&mut self) {
        let other = 1 - self.at;
        self.until("the standby takes over", |trial| {
            trial.homes[other].as_ref().is_some_and(Home::has_vm)
        });
    }

    /// Stops the witness; it may be started again.
    pub fn witness_away(&mut self) {
        if let Some(mut witness) = self.witness.take() {
            witness.signal(Signal::KILL);
            witness.wait();
        }
    }

    /// Starts the witness again, with what it knew.
    pub fn witness_back(&mut self) {
        if self.witness.is_none() {
            self.witness = Some(self.hosts.witness(&self.bench));
        }
    }

    /// Power loss of a host.
    pub fn kill_host(&mut self, host: &str) {
        let n = usize::from(host != "a");
        if n == 0 { &self.hosts.a } else { &self.hosts.b }.kill_all();
        self.homes[n] = None;
    }

    /// Says what comes. On a busy machine the VM may have lost its standby since it was protected,
    /// and what befalls it then is another fault than was meant.
    fn begin(&mut self, fault: Fault) {
        self.until("the VM is still protected", |trial| {
            let said = trial.said(trial.primary());
            said.rfind("loses nothing") > said.rfind("the VM runs unprotected")
        });
        println!("{} entries; next: {fault:?}", self.seen().entries);
        self.script.push(format!("{fault:?}"));
    }

    /// Has it happen, and waits for what has to follow; [`Self::recover`] comes after it.
    pub fn befall(&mut self, fault: Fault) {
        self.begin(fault);
        let (primary, standby) = (self.primary(), self.other());
        match fault {
            Fault::HostDies => {
                self.kill_host(primary);
                self.until_taken_over();
            }
            Fault::EngineDies => {
                self.signal(primary, Signal::KILL);
                self.until_taken_over();
            }
            Fault::EngineStalls => {
                self.signal(primary, Signal::STOP);
                self.until_taken_over();
                self.go_on(ENTRIES);
                self.signal(primary, Signal::CONT);
            }
            Fault::EngineStumbles(ms) => {
                self.signal(primary, Signal::STOP);
                self.pass(Duration::from_millis(ms));
                self.signal(primary, Signal::CONT);
            }
            Fault::PrimaryCut => {
                self.hosts.cut(primary, true);
                self.until_taken_over();
                self.go_on(ENTRIES);
                self.hosts.cut(primary, false);
            }
            Fault::StandbyCut(ms) => {
                self.hosts.cut(standby, true);
                self.pass(Duration::from_millis(ms));
                self.hosts.cut(standby, false);
            }
            Fault::OneWay(side, way, ms) => {
                let host = if side == Side::Primary { primary } else { standby };
                self.hosts.mute(host, way, true);
                self.pass(Duration::from_millis(ms));
                self.hosts.mute(host, way, false);
            }
            Fault::LinkFlaps(times) => {
                for _ in 0..times {
                    self.hosts.cut(primary, true);
                    self.pass(Duration::from_millis(200));
                    self.hosts.cut(primary, false);
                    self.pass(Duration::from_millis(300));
                }
            }
            Fault::StandbyDies => {
                self.kill_host(standby);
                self.go_on(ENTRIES);
            }
            Fault::StandbyStalls(ms) => {
                self.signal(standby, Signal::STOP);
                self.pass(Duration::from_millis(ms));
                self.signal(standby, Signal::CONT);
            }
            Fault::WitnessAway(ms) => {
                self.witness_away();
                self.go_on(ENTRIES);
                self.pass(Duration::from_millis(ms));
                self.go_on(ENTRIES);
                self.witness_back();
            }
            Fault::WitnessAndStandbyDie => {
                self.witness_away();
                self.kill_host(standby);
                self.until("the VM stands still", |trial| !trial.running(trial.at));
                let stood = self.seen().entries;
                self.pass(Duration::from_millis(500));
                if self.seen().entries > stood {
                    self.fail("it goes on without the right to");
                }
                self.witness_back();
            }
            Fault::SwitchOver => {
                let (old, other) = (self.at, 1 - self.at);
                let back = |trial: &Self| {
                    let said = trial.said(primary);
                    ["could not go over", "it was to take over, and is silent"]
                        .iter()
                        .map(|text| said.matches(text).count())
                        .sum::<usize>()
                };
                let before = back(self);
                let mut command = self.hosts.command(&self.bench, primary, &["failover"]);
                self.switching = true;
                let output = command.output().expect("run keyframe failover");
                if !output.status.success() {
                    self.fail(&format!(
                        "no switch-over: {}",
                        String::from_utf8_lossy(&output.stderr)
                    ));
                }
                self.until("the VM goes over, or back", |trial| {
                    let gave = |home: &mut Home| !home.process.is_running() || !home.has_vm();
                    trial.homes[old].as_mut().is_none_or(gave)
                        && trial.homes[other].as_ref().is_some_and(Home::has_vm)
                        || back(trial) > before
                });
                self.switching = false;
            }
        }
    }

    /// Whoever has ended is started again as the standby, until the VM is protected.
    pub fn recover(&mut self) {
        let was = self.at;
        self.go_on(ENTRIES);
        let mut asked = Instant::now();
        self.until("the VM is protected again", |trial| {
            #[expect(clippy::needless_range_loop, reason = "it numbers hosts")]
            for n in 0..2 {
                let is_running =
                    trial.homes[n].as_mut().is_some_and(|home| home.process.is_running());
                if is_running {
                    continue;
                }
                trial.homes[n] = None;
                let peer = format!("10.78.0.{}:7430", 2 - n);
                let process = trial.hosts.standby(
                    &trial.bench,
                    NAMES[n],
                    &[&["--peer", &peer], trial.options].concat(),
                );
                trial.homes[n] = Some(Home { process, first: false });
            }
            let look = || [0, 1].map(|n| trial.homes[n].as_ref().is_some_and(Home::has_vm));
            let has = look();
            match has {
                // The second look is for one that took it over between the two of the first.
                [false, false] if look() == has => trial.fail("the VM is lost"),
                // The old one has yet to learn.
                [false, false] | [true, true] => return false,
                [first, _] => trial.at = usize::from(!first),
            }
            if asked.elapsed() < Duration::from_millis(50) {
                return false;
            }
            asked = Instant::now();
            let status = trial.hosts.status(&trial.bench, NAMES[trial.at]);
            status.is_some_and(|status| status["state"] == "protected")
        });
        self.failovers += u32::from(self.at != was);
        self.go_on(ENTRIES);
    }

    /// Ends the client; nothing that it saw was wrong.
    pub fn end(self) -> Seen {
        self.client.end()
    }
}
