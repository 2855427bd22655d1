//! No process serves the disks, or none watches the pauses.

use super::{Bench, Client};
use crate::control::VmState;
use crate::control::server::SharedStatus;
use crate::engine::Engine;
use crate::error::CheckpointError;
use crate::event::{Event, Helper, SharedEventSink};
use crate::watchdog_keeper::{StartWatchdog, WatchdogKeeper};
use keyframe_capture::BoxError;
use keyframe_disk_capture::{DiskCapture, DiskCut};
use keyframe_pause_watchdog::{self as pause_watchdog, Watchdog};
use keyframe_store::DiskMeta;
use keyframe_vmm::PauseWatchdog;
use keyframe_vmm::Vmm;
use keyframe_vmm::fake::Step;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Disks that are served, or are not.
#[derive(Clone, Default)]
struct ServedOrNot(Arc<Mutex<Option<String>>>);

impl DiskCapture for ServedOrNot {
    fn metas(&self) -> &[DiskMeta] {
        &[]
    }

    fn are_in_store(&self) -> bool {
        true
    }

    fn outage(&self) -> Option<String> {
        self.0.lock().unwrap().clone()
    }

    fn begin(&mut self, _: &mut [&mut dyn Vmm]) -> Result<DiskCut, BoxError> {
        Ok(DiskCut::nothing())
    }

    fn cut(&mut self, _: &mut [&mut dyn Vmm]) -> Result<(), BoxError> {
        Ok(())
    }
}

/// The status says that the VM is paused, and until when.
fn assert_told(status: &SharedStatus) {
    let status = status.lock().unwrap();
    assert_eq!(status.state, VmState::Paused);
    let why = status.last_error.clone().unwrap_or_default();
    assert!(why.contains("the image is locked") && why.contains("paused until"), "{why}");
}

/// Runs `engine` until the second look after the planned ones. The VM runs then, and each event was told
/// once.
fn assert_runs_on(bench: &Bench, engine: Engine<'_>, client: Client) {
    bench.control.before(Step::DrainEvents, || ());
    bench.control.before(Step::DrainEvents, move || drop(client.stop(None)));
    bench.run_engine(engine).unwrap();
    bench.assert_runs();
    assert_eq!(bench.told.count(|event| matches!(event, Event::PausedForDisks)), 1);
    assert_eq!(bench.told.count(|event| matches!(event, Event::ResumedWithDisks)), 1);
}

#[test]
fn a_vm_without_disks_is_paused_until_they_are_served_again() {
    let (bench, mut options) = Bench::new();
    options.interval = None;
    let disks = ServedOrNot::default();
    *disks.0.lock().unwrap() = Some("the image is locked".into());
    let engine = bench.engine_with(options, Some(Box::new(disks.clone())));
    let (client, status) = (Client::of(&engine), Arc::clone(&engine.status));
    let control = bench.control.clone();
    // The first look finds the outage, a later one its end.
    for _ in 0..2 {
        bench.control.before(Step::DrainEvents, || ());
    }
    bench.control.before(Step::DrainEvents, move || {
        assert!(!control.runs(), "the guest would see errors");
        assert_told(&status);
        *disks.0.lock().unwrap() = None;
    });
    assert_runs_on(&bench, engine, client);
}

/// The server ended while the engine paused the VM: QEMU answers nothing, and the engine has heard
/// of the stop.
#[test]
fn a_vm_whose_disks_end_within_a_pause_is_told_of_and_runs_on() {
    let (bench, mut options) = Bench::new();
    options.interval = None;
    let disks = ServedOrNot::default();
    let engine = bench.engine_with(options, Some(Box::new(disks.clone())));
    let (client, status) = (Client::of(&engine), Arc::clone(&engine.status));
    let (control, outage) = (bench.control.clone(), disks.clone());
    bench.control.before(Step::DrainEvents, move || {
        *outage.0.lock().unwrap() = Some("the image is locked".into());
        control.pause();
    });
    let control = bench.control.clone();
    bench.control.before(Step::DrainEvents, move || {
        assert_told(&status);
        *disks.0.lock().unwrap() = None;
        control.resume();
    });
    assert_runs_on(&bench, engine, client);
}

#[test]
fn a_vm_that_stands_for_want_of_space_is_resumed_by_the_owner_of_the_full_disk() {
    for (left_out, stops, resumes) in [(None, 1, 1), (Some("logs"), 2, 0)] {
        let (bench, mut options) = Bench::new();
        options.interval = None;
        let engine = bench.engine_with(options, Some(Box::new(ServedOrNot::default())));
        let (client, status) = (Client::of(&engine), Arc::clone(&engine.status));
        for stop in 0..2 {
            let control = bench.control.clone();
            bench.control.before(Step::DrainEvents, move || match (stop, left_out) {
                (0, _) => control.run_out_of_space(left_out, 3),
                (_, None) => {}
                // The VM's user resumes it too early.
                (_, Some(_)) => {
                    assert!(!control.runs(), "the engine has resumed the VM");
                    control.resume();
                    control.run_out_of_space(left_out, 2);
                }
            });
            bench.control.before(Step::DrainEvents, || ());
        }
        let control = bench.control.clone();
        bench.control.before(Step::DrainEvents, move || {
            assert_eq!(control.runs(), left_out.is_none(), "{left_out:?}");
            let why = status.lock().unwrap().last_error.clone();
            assert_eq!(why.is_some_and(|why| why.contains("disk logs")), left_out.is_some());
            drop(client.stop(None));
        });
        bench.run_engine(engine).unwrap();
        let told = |of: fn(&Event) -> bool| bench.told.count(of);
        let own = told(|event| matches!(event, Event::StoppedForSpace { .. }));
        let users = told(|event| matches!(event, Event::StoppedByLeftOutDisk { .. }));
        assert_eq!(own + users, stops, "{left_out:?}");
        assert_eq!(users > 0, left_out.is_some());
        assert_eq!(told(|event| matches!(event, Event::ResumedWithSpace)), resumes);
    }
}

/// A process that answers as a watchdog does, and watches nothing.
fn stand_in() -> Watchdog {
    let answers = "while read line; do case $line in D|B) echo K;; esac; done";
    let mut command = Command::new("sh");
    command.args(["-c", answers]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    Watchdog::new(child, stdin, stdout).unwrap()
}

fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

const LIMIT: Duration = Duration::from_secs(1);

#[test]
fn a_watchdog_that_has_ended_is_started_again_before_the_next_pause() {
    let (bench, _) = Bench::new();
    let pids = Arc::new(Mutex::new(Vec::new()));
    let started = Arc::clone(&pids);
    let start: StartWatchdog = Box::new(move || {
        let watchdog = stand_in();
        started.lock().unwrap().push(watchdog.pid());
        Ok(watchdog)
    });
    let events: SharedEventSink = bench.told.clone();
    let mut keeper = WatchdogKeeper::start(start, events).unwrap();
    let newest = || *pids.lock().unwrap().last().unwrap();
    for round in 1..4 {
        keeper.arm(LIMIT).unwrap();
        assert!(!keeper.disarm().unwrap());
        kill(newest());
        // A pause in which it ends is torn.
        if round == 2 {
            assert!(keeper.disarm().is_err());
        }
        let deadline = std::time::Instant::now() + super::RUN_MAX;
        while bench.told.count(|event| matches!(event, Event::HelperRestarted { .. })) < round {
            keeper.arm(LIMIT).unwrap();
            assert!(std::time::Instant::now() < deadline, "none was started");
        }
        assert!(!keeper.disarm().unwrap());
    }
    let is_watchdog =
        |event: &Event| matches!(event, Event::HelperRestarted { helper: Helper::Watchdog, .. });
    assert_eq!((bench.told.count(is_watchdog), pids.lock().unwrap().len()), (3, 4));
    assert!(!keeper.health().is_lost());
    Box::new(keeper).end();
}

#[test]
fn a_run_without_a_watchdog_takes_no_more_checkpoints_and_tells_why() {
    let (bench, mut options) = Bench::new();
    options.count = Some(100_000);
    let may_start = Arc::new(AtomicBool::new(true));
    let allowed = Arc::clone(&may_start);
    let last = Arc::new(Mutex::new(0));
    let started = Arc::clone(&last);
    let start: StartWatchdog = Box::new(move || {
        if !allowed.load(Ordering::Relaxed) {
            let problem = "no memory".into();
            return Err(pause_watchdog::Error::Problem { problem }.into());
        }
        let watchdog = stand_in();
        *started.lock().unwrap() = watchdog.pid();
        Ok(watchdog)
    });
    let keeper = WatchdogKeeper::start(start, bench.told.clone()).unwrap();
    let engine = bench.engine_watched_by(options, keeper);
    bench.control.before(Step::RanMeanwhile, move || {
        may_start.store(false, Ordering::Relaxed);
        kill(*last.lock().unwrap());
    });
    let report = bench.run_engine(engine).unwrap();
    bench.assert_runs();
    assert!(report.given_up);
    let is_final = |event: &Event| match event {
        Event::Failed { failure, .. } => {
            failure.is_final && matches!(&*failure.error, CheckpointError::NoWatchdog(_))
        }
        _ => false,
    };
    assert_eq!(bench.told.count(is_final), 1);
}
