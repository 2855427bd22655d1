//! A soak of `keyframe attach`: the engine or one of its helper processes is killed at a random
//! moment, and Keyframe attaches again, in a loop. No VM may be lost, and its guest's own checks
//! must stay silent.
//!
//! [`soak`] takes any command line whose guest prints a growing console, so that a generator of
//! command lines can feed it.

use crate::helpers::{helpers_of, kill};
use crate::{Boot, ExternalVm, PATIENCE, Process, TestEnv, assert_no_errors, number, wait_until};
use rustix::process::Signal;
use std::time::{Duration, Instant};

/// What is killed in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// The engine, with SIGKILL.
    Engine,
    /// The watchdog's process.
    Watchdog,
    /// The engine, by the signal of a terminal that goes away.
    Hangup,
    /// The engine and its watchdog, one right after the other.
    Both,
}

const VICTIMS: [Victim; 4] = [Victim::Engine, Victim::Watchdog, Victim::Hangup, Victim::Both];

/// A shape of a VM.
#[derive(Clone, Debug)]
pub struct Shape {
    /// A name for messages.
    pub name: String,
    /// The command line, with a guest that checks itself.
    pub boot: Boot,
    /// Further options of `keyframe attach`.
    pub options: Vec<String>,
}

/// Random numbers from a seed: xorshift.
pub struct Draws(u64);

impl Draws {
    /// The numbers of `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end
    }
}

/// Attaches to a VM of `shape`, kills, and attaches again, `rounds` times.
pub fn soak(shape: &Shape, rounds: usize, draws: &mut Draws) {
    let env = TestEnv::new();
    let mut vm = ExternalVm::start(&env, &shape.boot);
    vm.console.wait_for("KF READY");
    let first = draws.below(VICTIMS.len() as u64) as usize;
    for round in 0..rounds {
        let victim = VICTIMS[(first + round) % VICTIMS.len()];
        let context = format!("{}, round {round}, {victim:?}", shape.name);
        println!("-- {context}");
        let mut engine = attach(&env, &vm, shape, "100ms");
        let sealed = env.list().len();
        assert_goes_on(&mut vm, &context);
        wait_until("a checkpoint", || env.list().len() > sealed || !engine.is_running());
        std::thread::sleep(Duration::from_millis(draws.below(300)));
        strike(victim, &env, &mut engine, &context);
        // If both died in a pause by separate commands, the next attach ends it.
        if victim != Victim::Both {
            assert_goes_on(&mut vm, &context);
        }
    }
    // The last attach works as if nothing had been.
    let sealed = env.list().len();
    let mut engine = attach(&env, &vm, shape, "200ms");
    wait_until("checkpoints", || env.list().len() >= sealed + 2 || !engine.is_running());
    engine.signal(Signal::INT);
    assert!(engine.wait().success(), "{}: {}", shape.name, engine.report());
    assert_goes_on(&mut vm, &shape.name);
    env.ok(&["check", "--quiet", "--store", &env.store()]);
}

fn attach(env: &TestEnv, vm: &ExternalVm, shape: &Shape, interval: &str) -> Process {
    let mut options = vec!["--interval", interval];
    options.extend(shape.options.iter().map(String::as_str));
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut engine = env.attach(vm, &options);
        let begun =
            engine.wait_until(|p| p.errors().contains("a checkpoint every").then_some(true));
        if begun.is_some() && engine.is_running() {
            return engine;
        }
        // The watchdog of a killed engine has the monitor for some seconds.
        assert!(Instant::now() < deadline, "{}: {}", shape.name, engine.report());
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Kills `victim`. The engine has ended afterwards.
fn strike(victim: Victim, env: &TestEnv, engine: &mut Process, context: &str) {
    let watchdogs = helpers_of(engine.pid(), "__watchdog");
    assert_eq!(watchdogs.len(), 1, "{context}: {}", engine.report());
    match victim {
        Victim::Engine => engine.signal(Signal::KILL),
        Victim::Hangup => engine.signal(Signal::HUP),
        Victim::Both => {
            engine.signal(Signal::KILL);
            watchdogs.into_iter().for_each(kill);
        }
        Victim::Watchdog => {
            watchdogs.into_iter().for_each(kill);
            // Checkpoints go on with another watchdog.
            let status = env.json(&["status", "--json", "--name", "guest"]);
            let sealed = number(&status[0], "sealed");
            wait_until("checkpoints go on", || {
                let status = env.json(&["status", "--json", "--name", "guest"]);
                number(&status[0], "sealed") >= sealed + 3
            });
            assert!(engine.errors().contains("started again"), "{context}: {}", engine.report());
            engine.signal(Signal::INT);
        }
    }
    engine.wait();
}

/// The guest runs, prints, and has found nothing wrong.
fn assert_goes_on(vm: &mut ExternalVm, context: &str) {
    assert!(vm.console.is_running(), "{context}: the VM is lost; {}", vm.console.report());
    let before = vm.console.lines().len();
    let grown = vm.console.wait_until(|p| (p.lines().len() >= before + 2).then_some(()));
    assert!(grown.is_some(), "{context}: the guest stands still; {}", vm.console.report());
    assert_no_errors(&vm.console);
}
