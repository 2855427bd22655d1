//! Whoever attaches may be killed at any instant: the process runs on as if nobody had been there.
//!
//! Another process of this test program attaches to a target over and over until it is killed. A good part of its time falls into the
//! session, so that some of the kills meet the target with registers that are not its own. Where there is `strace`,
//! the kill also comes at each single step, one after the other.

use crate::oracle::Random;
use crate::target::{PAGE, Target, role_arguments, start_role, start_role_under};
use keyframe_kernel::Process;
use keyframe_kernel::attach::inject_userfaultfd;
use keyframe_kernel::fork::Snapshot;
use keyframe_units::{HostRange, HostVirt};
use std::process::Command;
use std::time::{Duration, Instant};

const TARGETS: u64 = 12;
/// Each can leave a descriptor behind, of which a process may have some thousand.
const KILLS: u64 = 25;
/// More than there are steps of any session.
const STEPS_MAX: u32 = 400;

/// Attaches to another test's target over and over, until killed.
#[test]
#[ignore = "a role of another test"]
fn role_that_attaches() {
    let Some(arguments) = role_arguments() else { return };
    let process = Process::open(arguments[0].parse().unwrap()).unwrap();
    println!("ready");
    let end = Instant::now() + Duration::from_mins(1);
    // The target may end first.
    while Instant::now() < end && inject_userfaultfd(&process).is_ok() {}
}

/// Attaches once.
#[test]
#[ignore = "a role of another test"]
fn role_that_attaches_once() {
    let Some(arguments) = role_arguments() else { return };
    let process = Process::open(arguments[0].parse().unwrap()).unwrap();
    println!("ready");
    inject_userfaultfd(&process).unwrap();
}

/// Takes snapshots over and over, until killed.
#[test]
#[ignore = "a role of another test"]
fn role_that_forks() {
    let Some(arguments) = role_arguments() else { return };
    let number = |index: usize| arguments[index].parse::<u64>().unwrap();
    let process = Process::open(number(0) as u32).unwrap();
    let ram = HostRange { start: HostVirt(number(1)), len_bytes: number(2) };
    println!("ready");
    let end = Instant::now() + Duration::from_mins(1);
    while Instant::now() < end && Snapshot::fork(&process, &[ram]).is_ok() {}
}

/// Kills `role` again and again while the target computes; what it computes, its signal mask and its tracer stay right.
fn kill_again_and_again(role: &str, seed: u64) {
    let mut random = Random(seed);
    for number in 0..TARGETS {
        let mut target = Target::start();
        let ram = target.map("anon", 64 * PAGE);
        target.on("advise", ram, 0, 64, "");
        target.ok("count");
        let mask = target.status("SigBlk");
        target.tell("toil 1500 2");
        assert_eq!(target.answer(), "waiting");
        for kill in 0..KILLS {
            let arguments = format!("{} {}", ram.start.0, ram.len_bytes);
            let mut killed = start_role(role, &target, &arguments);
            std::thread::sleep(Duration::from_micros(random.below(3000)));
            killed.kill();
            assert!(target.process.is_alive(), "{role}, target {number}, kill {kill}: the target died");
        }
        let answer = target.answer();
        assert!(answer.starts_with("ok "), "{role}, target {number}: {answer}");
        assert_eq!(target.status("SigBlk"), mask, "{role}, target {number}");
        assert_eq!(target.status("TracerPid"), "0");
        target.signal("RTMIN");
        assert_eq!(target.ask("counted"), "1", "{role}, target {number}: signals still come");
        // What the next one meets is as good as new, and cleans up.
        drop(Snapshot::fork(&target.process, &[ram]).unwrap());
        drop(inject_userfaultfd(&target.process).unwrap());
    }
}

#[test]
fn a_killed_attacher_leaves_the_process_running() {
    kill_again_and_again("killed::role_that_attaches", 11);
}

#[test]
fn a_killed_keeper_of_snapshots_leaves_the_process_running() {
    kill_again_and_again("killed::role_that_forks", 12);
}

/// The attacher dies at its first, second, third ... step that touches the target, until it has no further one.
#[test]
fn a_kill_at_each_step_leaves_the_process_running() {
    let test = "a_kill_at_each_step_leaves_the_process_running";
    if !Command::new("sh").args(["-c", "command -v strace >/dev/null"]).status().is_ok_and(|s| s.success()) {
        println!("skipped: {test}: no strace");
        return;
    }
    for state in ["toil 300 1", "sleep 300", "ppoll 300", "futex 300"] {
        let expected = match state {
            "futex 300" => "-1 110",
            "toil 300 1" => "ok ",
            _ => "0 0",
        };
        let mut target = Target::start();
        let mask = target.status("SigBlk");
        for step in 1.. {
            assert!(step < STEPS_MAX, "{state}: a session of more steps than there can be");
            target.tell(state);
            assert_eq!(target.answer(), "waiting");
            let kill = format!("inject=ptrace,process_vm_writev,pidfd_getfd:signal=KILL:when={step}");
            let strace = [
                "strace",
                "-f",
                "-qq",
                "-o",
                "/dev/null",
                "-e",
                "trace=ptrace,process_vm_writev,pidfd_getfd",
            ];
            let wrapper: Vec<&str> = strace.into_iter().chain(["-e", &kill]).collect();
            let mut role = start_role_under(&wrapper, "killed::role_that_attaches_once", &target, "");
            let finished = role.wait();
            let answer = target.answer();
            assert!(answer.starts_with(expected), "{state}, killed at step {step}: {answer}");
            assert_eq!(target.status("SigBlk"), mask, "{state}, killed at step {step}");
            assert_eq!(target.status("TracerPid"), "0");
            if finished {
                println!("{state}: killed at each of {} steps", step - 1);
                break;
            }
        }
    }
}
