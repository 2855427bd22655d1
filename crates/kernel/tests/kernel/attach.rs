//! Attaching disturbs nothing: the process computes, waits and takes signals as if nobody had been
//! there.

use crate::target::Target;
use keyframe_kernel::attach::inject_userfaultfd;
use keyframe_kernel::{Error, Process};
use std::os::fd::AsRawFd;
use std::process::Command;

fn open_files(target: &Target) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", target.process.pid())).unwrap().count()
}

fn status(target: &Target, field: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{}/status", target.process.pid())).unwrap();
    text.lines().find(|line| line.starts_with(field)).unwrap().to_owned()
}

#[test]
fn the_descriptor_is_ours_and_the_process_keeps_none() {
    let mut target = Target::start();
    let before = open_files(&target);
    let attached = inject_userfaultfd(&target.process).unwrap();
    let link = std::fs::read_link(format!("/proc/self/fd/{}", attached.uffd.as_raw_fd())).unwrap();
    assert!(link.to_string_lossy().contains("userfaultfd"), "{link:?}");
    assert!(attached.stopped_ns > 0);
    assert_eq!(open_files(&target), before);
    assert_eq!(status(&target, "TracerPid"), "TracerPid:\t0");
    target.ok("count");
}

/// Each call is restarted by the kernel in a way of its own (by its number, by a restart block, by
/// a deadline).
#[test]
fn an_interrupted_system_call_goes_on() {
    let mut target = Target::start();
    for (call, expected) in [("sleep 400", "0 0"), ("ppoll 400", "0 0"), ("futex 400", "-1 110")] {
        assert_eq!(target.ask(call), "waiting");
        for _ in 0..20 {
            inject_userfaultfd(&target.process).unwrap();
        }
        assert_eq!(target.answer(), expected, "{call}");
    }
}

#[test]
fn no_register_is_disturbed() {
    const ROUNDS: &str = "spin 60000000";
    let mut target = Target::start();
    target.tell(ROUNDS);
    assert_eq!(target.answer(), "waiting");
    let undisturbed = target.answer();
    target.tell(ROUNDS);
    assert_eq!(target.answer(), "waiting");
    for _ in 0..100 {
        inject_userfaultfd(&target.process).unwrap();
    }
    assert_eq!(target.answer(), undisturbed);
}

/// Real-time signals are queued one by one, so each that is lost is missed in the count.
#[test]
fn no_signal_is_lost() {
    const SIGNALS: u64 = 300;
    let mut target = Target::start();
    target.ok("count");
    let mask = status(&target, "SigBlk");
    let pid = target.process.pid().to_string();
    let sender = std::thread::spawn(move || {
        let script = format!("for i in $(seq {SIGNALS}); do kill -s 36 {pid}; done");
        assert!(Command::new("bash").args(["-c", &script]).status().unwrap().success());
    });
    let mut attached = 0;
    while !sender.is_finished() || attached < 20 {
        inject_userfaultfd(&target.process).unwrap();
        attached += 1;
    }
    sender.join().unwrap();
    assert_eq!(target.ask("counted"), SIGNALS.to_string(), "after {attached} attachments");
    assert_eq!(status(&target, "SigBlk"), mask);
}

#[test]
fn a_stopped_process_stays_stopped() {
    let mut target = Target::start();
    target.tell("stopped");
    let stopped = |target: &Target| status(target, "State").contains("T (stopped)");
    let deadline = std::time::Instant::now() + std::time::Duration::from_mins(2);
    while !stopped(&target) {
        assert!(std::time::Instant::now() < deadline, "it stops itself");
        std::thread::yield_now();
    }
    for _ in 0..10 {
        inject_userfaultfd(&target.process).unwrap();
    }
    // It is on its way back into the stop for an instant after it was let go.
    while !stopped(&target) {
        assert!(std::time::Instant::now() < deadline, "it stops again");
        std::thread::yield_now();
    }
    target.signal("CONT");
    assert_eq!(target.answer(), target.process.pid().to_string());
}

/// SIGSTOP and SIGCONT cannot be blocked: they come in the middle.
#[test]
fn stops_and_continues_meanwhile_do_no_harm() {
    let mut target = Target::start();
    let pid = target.process.pid().to_string();
    let script = format!("for i in $(seq 100); do kill -STOP {pid}; kill -CONT {pid}; done");
    let sender =
        std::thread::spawn(move || Command::new("bash").args(["-c", &script]).status().unwrap());
    while !sender.is_finished() {
        inject_userfaultfd(&target.process).unwrap();
    }
    assert!(sender.join().unwrap().success());
    // A SIGSTOP that we took the place of comes after; so does ours.
    target.signal("CONT");
    target.ok("count");
}

/// A stop that falls into the attachment takes place after it.
#[test]
fn no_stop_is_lost() {
    let mut target = Target::start();
    let stopped = |target: &Target| status(target, "State").contains("T (stopped)");
    for round in 0..150 {
        let deadline = std::time::Instant::now() + std::time::Duration::from_mins(2);
        let pid = rustix::process::Pid::from_raw(target.process.pid().cast_signed()).unwrap();
        let attaching = std::thread::scope(|scope| {
            let attaching = scope
                .spawn(|| (0..4).try_for_each(|_| inject_userfaultfd(&target.process).map(drop)));
            // Somewhere in these four.
            std::thread::sleep(std::time::Duration::from_micros(round % 50 * 20));
            rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
            attaching.join().unwrap()
        });
        attaching.unwrap();
        while !stopped(&target) {
            assert!(std::time::Instant::now() < deadline, "round {round}: the stop was lost");
            std::thread::yield_now();
        }
        target.signal("CONT");
    }
    target.ok("count");
}

#[test]
fn a_process_that_exits_meanwhile_gives_an_error_and_keeps_its_status() {
    for _ in 0..10 {
        let mut target = Target::start();
        target.ok("count");
        target.tell("exit");
        let error = loop {
            if let Err(error) = inject_userfaultfd(&target.process) {
                break error;
            }
        };
        assert!(matches!(error, Error::Gone { .. }), "{error:?}");
        assert_eq!(target.exit_code(), Some(7));
        assert!(matches!(target.process.maps(), Err(Error::Gone { .. })));
    }
}

#[test]
fn another_tracer_is_named() {
    if !keyframe_testing::has_program("strace") {
        keyframe_testing::skip!("no strace (Debian package strace)");
    }
    let target = Target::start();
    let attach =
        format!("exec 2>/dev/null; exec strace -qq -o /dev/null -p {}", target.process.pid());
    let mut strace = Command::new("sh").args(["-c", &attach]).spawn().unwrap();
    let tracer = format!("TracerPid:\t{}", strace.id());
    let deadline = std::time::Instant::now() + std::time::Duration::from_mins(2);
    while status(&target, "TracerPid") != tracer && std::time::Instant::now() < deadline {
        std::thread::yield_now();
    }
    let result = inject_userfaultfd(&target.process);
    strace.kill().unwrap();
    strace.wait().unwrap();
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Traced { tracer, .. } if tracer == strace.id()), "{error:?}");
    assert!(error.fix().unwrap().contains(&strace.id().to_string()));
}

#[test]
fn a_process_that_is_not_there_is_an_error() {
    assert!(matches!(Process::open(0), Err(Error::Open { .. })));
    assert!(matches!(Process::open(u32::MAX), Err(Error::Open { .. })));
    let mut target = Target::start();
    target.end();
    assert!(!target.process.is_alive());
    assert!(inject_userfaultfd(&target.process).is_err());
    assert!(matches!(Process::open(target.process.pid()), Err(Error::Open { .. })));
}

/// We cannot trace ourselves: an error, nothing hangs.
#[test]
fn our_own_process_cannot_be_attached_to() {
    let own = Process::open(std::process::id()).unwrap();
    let error = inject_userfaultfd(&own).unwrap_err();
    assert!(matches!(error, Error::Attach { .. }), "{error:?}");
}

/// What an attachment costs, told and not judged.
#[test]
fn how_long_it_is_stopped() {
    let mut target = Target::start();
    for state in ["ppoll 3000", "toil 3000 1"] {
        target.tell(state);
        assert_eq!(target.answer(), "waiting");
        let begun = std::time::Instant::now();
        let mut stopped: Vec<u64> = (0..300)
            .map(|_| inject_userfaultfd(&target.process).unwrap().stopped_ns / 1000)
            .collect();
        let each_us = begun.elapsed().as_micros() / 300;
        stopped.sort_unstable();
        println!(
            "{state}: stopped for {} us (median), {} us (p99); in all {each_us} us",
            stopped[150], stopped[297]
        );
        target.answer();
    }
}
