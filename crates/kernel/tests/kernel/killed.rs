//! Whoever attaches may be killed at any instant: the process runs on as if nobody had been there.
//!
//! Another process of this test program attaches to a target over and over until it is killed. A
//! good part of its time falls into the session, so that many of the kills meet the target with
//! registers that are not its own. Where there is `strace`, the kill also comes at each single
//! step, one after the other.

use crate::oracle::Random;
use crate::target::{PAGE, Target, role_arguments, start_role, start_role_under};
use keyframe_kernel::Process;
use keyframe_kernel::attach::inject_userfaultfd;
use keyframe_kernel::frozen_copy::FrozenCopy;
use keyframe_testing::{has_program, skip};
use keyframe_units::{HostRange, HostVirt};
use std::time::{Duration, Instant};

const TARGETS: u64 = 8;
/// Each can leave a descriptor behind, of which a process may have some thousand.
const KILLS: u64 = 40;
/// More than there are steps of any session.
const STEPS_MAX: u32 = 500;
/// By then a thread has run again, however busy the machine is.
const SETTLES_WITHIN: Duration = Duration::from_mins(2);
/// The calls by which a session touches the target.
const STEPS: &str = "ptrace,process_vm_writev,pidfd_getfd";

/// The process, and the rest of the arguments as a range, where there is one.
fn arguments() -> Option<(Process, Vec<HostRange>)> {
    let arguments = role_arguments()?;
    let number = |text: &String| text.parse::<u64>().unwrap();
    // The process may have died, which is another's to find.
    let Ok(process) = Process::open(number(&arguments[0]) as u32) else { std::process::exit(1) };
    let ranges = arguments[1..].chunks(2);
    let ranges =
        ranges.map(|r| HostRange { start: HostVirt(number(&r[0])), len_bytes: number(&r[1]) });
    Some((process, ranges.collect()))
}

fn again_and_again(once: impl Fn() -> bool) {
    println!("ready");
    let end = Instant::now() + Duration::from_mins(1);
    while Instant::now() < end && once() {}
}

/// Attaches to another test's target over and over, until killed.
#[test]
#[ignore = "a role of another test"]
fn role_that_attaches() {
    let Some((process, _)) = arguments() else { return };
    again_and_again(|| inject_userfaultfd(&process).is_ok());
}

/// Takes snapshots over and over, until killed.
#[test]
#[ignore = "a role of another test"]
fn role_that_forks() {
    let Some((process, ranges)) = arguments() else { return };
    again_and_again(|| FrozenCopy::fork(&process, &ranges).is_ok());
}

/// One session of either kind. Not the test program's exit, which would write to whoever listens no
/// more.
#[test]
#[ignore = "a role of another test"]
fn role_of_one_session() {
    let Some((process, ranges)) = arguments() else { return };
    println!("ready");
    let done = if ranges.is_empty() {
        inject_userfaultfd(&process).is_ok()
    } else {
        FrozenCopy::fork(&process, &ranges).is_ok()
    };
    std::process::exit(i32::from(!done));
}

fn descriptors(process: &Process) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", process.pid())).unwrap().count()
}

/// Kills `role` again and again while the target computes; what it computes, its signal mask and
/// its signals stay right.
fn kill_again_and_again(role: &str, seed: u64) {
    let mut random = Random(seed);
    let mut left_behind = 0;
    for number in 0..TARGETS {
        let context = format!("{role}, target {number}");
        let mut target = Target::start();
        let ram = target.map("anon", 64 * PAGE);
        target.on("advise", ram, 0, 64, "");
        target.ok("count");
        let (mask, files) = (target.status("SigBlk"), descriptors(&target.process));
        target.tell("toil 1200 2");
        assert_eq!(target.answer(), "waiting");
        for kill in 0..KILLS {
            let arguments = format!("{} {}", ram.start.0, ram.len_bytes);
            let mut killed = start_role(role, &target, &arguments);
            std::thread::sleep(Duration::from_micros(random.below(3000)));
            killed.kill();
            assert!(target.process.is_alive(), "{context}, kill {kill}: the target died");
        }
        let answer = target.answer();
        assert!(answer.starts_with("ok "), "{context}: {answer}");
        assert_eq!(target.status("SigBlk"), mask, "{context}");
        assert_eq!(target.status("TracerPid"), "0", "{context}");
        target.signal("36");
        assert_eq!(target.ask("counted"), "1", "{context}: signals still come");
        left_behind += descriptors(&target.process) - files;
        // What the next one meets is as good as new, and its work is done.
        drop(FrozenCopy::fork(&target.process, &[ram]).unwrap());
        assert!(inject_userfaultfd(&target.process).unwrap().guarded);
    }
    println!("{role}: {left_behind} descriptors left behind by {} kills", TARGETS * KILLS);
}

#[test]
fn a_killed_attacher_leaves_the_process_running() {
    kill_again_and_again("killed::role_that_attaches", 11);
}

#[test]
fn a_killed_keeper_of_snapshots_leaves_the_process_running() {
    kill_again_and_again("killed::role_that_forks", 12);
}

/// A session on a target that does `state` meanwhile, killed at its first, second, third ... step
/// that touches the target, until it has no further one. The target answers as ever, each time.
fn kill_at_each_step(state: &str, expected: &str, of_fork: bool) {
    let mut target = Target::start();
    let mask = target.status("SigBlk");
    let ram = target.map("anon", 64 * PAGE);
    target.on("advise", ram, 0, 64, "");
    let arguments =
        if of_fork { format!("{} {}", ram.start.0, ram.len_bytes) } else { String::new() };
    for step in 1..STEPS_MAX {
        let context = format!("{state}, fork: {of_fork}, killed at step {step}");
        target.tell(state);
        assert_eq!(target.answer(), "waiting");
        let (trace, kill) =
            (format!("trace={STEPS}"), format!("inject={STEPS}:signal=KILL:when={step}"));
        let strace = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", &trace, "-e", &kill];
        let mut role =
            start_role_under(&strace, "killed::role_of_one_session", &target.process, &arguments);
        let finished = role.wait();
        let answer = target.answer();
        assert!(answer.starts_with(expected), "{context}: {answer}");
        // The answer may be older than the kill: then the thread has yet to run to where it puts
        // its mask back.
        let since = Instant::now();
        while target.status("SigBlk") != mask && since.elapsed() < SETTLES_WITHIN {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(target.status("SigBlk"), mask, "{context}");
        assert_eq!(target.status("TracerPid"), "0", "{context}");
        if finished {
            println!("{state}, fork: {of_fork}: killed at each of {} steps", step - 1);
            return;
        }
    }
    panic!("{state}, fork: {of_fork}: more steps than there can be");
}

/// In code of its own, and in each kind of system call that the kernel restarts in a way of its
/// own.
#[test]
fn a_kill_at_each_step_leaves_the_process_running() {
    if !has_program("strace") {
        skip!("no strace (Debian package strace)");
    }
    kill_at_each_step("toil 200 1", "ok ", false);
    kill_at_each_step("sleep 200", "0 0", false);
    kill_at_each_step("ppoll 200", "0 0", false);
    kill_at_each_step("futex 200", "-1 110", false);
}

#[test]
fn a_kill_at_each_step_of_a_snapshot_leaves_the_process_running() {
    if !has_program("strace") {
        skip!("no strace (Debian package strace)");
    }
    kill_at_each_step("toil 200 1", "ok ", true);
    kill_at_each_step("ppoll 200", "0 0", true);
}

/// A wait that was interrupted and let go on is the kernel's alone to go on with: who comes next
/// waits for its end, if that is near.
#[test]
fn a_wait_that_was_let_go_on_is_not_stopped_again() {
    for (kind, expected) in [("sleep", "0 0"), ("futex", "-1 110")] {
        let mut target = Target::start();
        // The first may come before the wait.
        let attach = |target: &Target| {
            for _ in 0..3 {
                assert!(inject_userfaultfd(&target.process).unwrap().guarded, "{kind}");
            }
            let call =
                std::fs::read_to_string(format!("/proc/{}/syscall", target.process.pid())).unwrap();
            call.starts_with(&format!("{} ", libc::SYS_restart_syscall))
        };
        target.tell(&format!("{kind} 150"));
        assert_eq!(target.answer(), "waiting");
        assert!(!attach(&target), "{kind}: it was stopped again in its wait");
        assert_eq!(target.answer(), expected);
        target.tell(&format!("{kind} 60000"));
        assert_eq!(target.answer(), "waiting");
        assert!(attach(&target), "{kind}: it was not attached to before the end");
    }
}
