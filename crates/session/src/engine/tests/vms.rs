//! The VM ends, another client pauses it, or its monitor is lost.

use super::{Bench, Client, VM, page};
use crate::RecordingOptions;
use crate::SessionOptions;
use crate::control::{EngineResponse, VmState};
use crate::engine::Engine;
use crate::engine::{RunEnd, Verdict};
use crate::event::Event;
use crate::machines::Member;
use keyframe_units::PageIndex;
use keyframe_vmm::fake::{FakeControl, Incident, Step};
use keyframe_vmm::{GuestEnd, VmOrigin};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Has the VM end by itself at the look number `looks` from now.
fn end_after(control: &FakeControl, looks: usize) {
    for look in 1..=looks {
        let end = control.clone();
        control.before(Step::DrainEvents, move || {
            if look == looks {
                end.end(0);
            }
        });
    }
}

#[test]
fn a_vm_that_ends_during_a_pause_is_no_failed_checkpoint() {
    for step in [Step::Stop, Step::SaveDevices, Step::Disarm, Step::RanMeanwhile] {
        let (bench, options) = Bench::new();
        bench.control.at(step, Incident::End(0));
        let report = bench.run(options).unwrap();
        assert!(matches!(report.end, RunEnd::VmEnded(exit) if exit.success()), "{step:?}");
        assert_eq!((report.sealed, report.failed), (0, 0), "{step:?}");
        assert_eq!(report.verdict(), Verdict::Complete, "{step:?}");
        assert!(bench.told.failures().is_empty());
        assert!(!bench.control.take_steps().contains(&Step::End), "the engine ended the VM");
    }
}

#[test]
fn no_checkpoint_follows_when_qemu_has_lost_parts_of_a_recordings_log() {
    let (bench, mut options) = Bench::new();
    options.recorded = Some(RecordingOptions {
        recording: "r".into(),
        log: bench.dir.path().join("log"),
        has_lost_log: Arc::new(AtomicBool::new(true)),
        machine: None,
        begin: None,
    });
    let engine = bench.engine(options);
    let (client, status) = (Client::of(&engine), engine.status.clone());
    let (report, told) = std::sync::mpsc::channel();
    for look in 1..=6 {
        let (client, status, report) = (client.clone(), status.clone(), report.clone());
        let end = bench.control.clone();
        bench.control.before(Step::DrainEvents, move || match look {
            3 => report.send(client.take("late")).unwrap(),
            5 => {
                let shown = status.lock().unwrap().last_error.clone();
                assert!(shown.unwrap().contains("lost parts of the recording's log"));
            }
            6 => end.end(0),
            _ => {}
        });
    }
    let ended = engine.run().unwrap();
    assert_eq!((ended.sealed, ended.failed), (1, 0), "the one at the begin");
    assert_eq!(bench.told.count(|event| matches!(event, Event::LogLost)), 1);
    let taken = told.recv().unwrap().recv().unwrap();
    assert!(matches!(taken, EngineResponse::Failed(why) if why.contains("lost parts")));
}

#[test]
fn a_vm_that_is_killed_during_a_pause_is_no_failed_checkpoint() {
    for step in [Step::Stop, Step::SaveDevices, Step::RanMeanwhile] {
        let (bench, options) = Bench::new();
        bench.control.at(step, Incident::Kill);
        let report = bench.run(options).unwrap();
        assert!(matches!(report.end, RunEnd::VmEnded(exit) if !exit.success()), "{step:?}");
        assert_eq!((report.sealed, report.failed), (0, 0), "{step:?}");
        assert_eq!((report.verdict(), report.given_up), (Verdict::Failed, false), "{step:?}");
        assert!(bench.told.failures().is_empty(), "{step:?}");
    }
}

#[test]
fn the_checkpoints_before_a_vm_failed_in_a_pause_stay() {
    let (bench, options) = Bench::new();
    let control = bench.control.clone();
    bench.control.before(Step::SaveDevices, || ());
    bench.control.before(Step::SaveDevices, move || {
        control.at(Step::SaveDevices, Incident::End(9));
    });
    let report = bench.run(options).unwrap();
    assert!(matches!(report.end, RunEnd::VmEnded(exit) if exit.code() == Some(9)));
    assert_eq!((report.sealed, report.failed, report.verdict()), (1, 0, Verdict::Failed));
    assert_eq!(bench.told.count(|event| matches!(event, Event::QemuFailed { .. })), 1);
    assert_eq!(bench.checkpoint("latest"), bench.ram());
}

#[test]
fn a_monitor_lost_before_a_pause_ends_checkpoints_and_not_the_vm() {
    let (bench, mut options) = Bench::new();
    // With a count, the run has nothing left to do.
    options.count = Some(3);
    bench.control.at(Step::Stop, Incident::LoseMonitor);
    let report = bench.run(options).unwrap();
    bench.assert_runs();
    assert_eq!((report.end, report.sealed, report.failed), (RunEnd::Kept, 0, 1));
    assert!(report.given_up);
    assert_eq!(report.verdict(), Verdict::Failed);
    let failures = bench.told.failures();
    assert_eq!(failures.len(), 1);
    assert!(failures[0].contains("has closed the monitor"), "{}", failures[0]);
    assert!(failures[0].ends_with("no more checkpoints are taken; the VM runs on"));
    assert_eq!(bench.told.count(|e| matches!(e, Event::CountNotReached { count: 3, .. })), 1);
}

#[test]
fn a_vm_whose_monitor_is_lost_during_a_pause_runs_again() {
    for step in [Step::SaveDevices, Step::Resume, Step::RanMeanwhile] {
        let (bench, options) = Bench::new();
        let control = bench.control.clone();
        bench.control.before(Step::DrainEvents, move || {
            control.at(step, Incident::LoseMonitor);
            // A launched VM is watched to its end.
            let runs = control.clone();
            control.before(Step::Exit, move || assert!(runs.runs(), "{step:?}"));
            end_after(&control, 6);
        });
        let report = bench.run(options).unwrap();
        assert!(matches!(report.end, RunEnd::VmEnded(exit) if exit.success()), "{step:?}");
        assert_eq!((report.sealed, report.failed, report.given_up), (0, 1, true), "{step:?}");
        assert!(!bench.control.take_steps().contains(&Step::End), "the engine ended the VM");
    }
}

#[test]
fn a_take_after_the_monitor_is_lost_is_refused_and_the_state_is_unknown() {
    let (bench, options) = Bench::new();
    bench.control.at(Step::SaveDevices, Incident::LoseMonitor);
    let engine = bench.engine(options);
    let (client, status) = (Client::of(&engine), engine.status.clone());
    let (report, told) = std::sync::mpsc::channel();
    for look in 1..=8 {
        let (client, status, report) = (client.clone(), status.clone(), report.clone());
        bench.control.before(Step::DrainEvents, move || match look {
            5 => report.send(client.take("late")).unwrap(),
            8 => {
                assert_eq!(status.lock().unwrap().state, VmState::Unknown);
                drop(client.stop(None));
            }
            _ => {}
        });
    }
    drop(client);
    let report = bench.run_engine(engine).unwrap();
    bench.assert_runs();
    assert!(report.given_up);
    let answer = told.recv().unwrap().recv().unwrap();
    assert!(matches!(answer, EngineResponse::Failed(text) if text.contains("no more checkpoints")));
}

#[test]
fn an_attached_vm_whose_monitor_is_lost_is_left_running() {
    let (bench, options) = Bench::new();
    bench.control.set_origin(VmOrigin::Attached);
    bench.control.at(Step::SaveDevices, Incident::LoseMonitor);
    let report = bench.run(options).unwrap();
    bench.assert_runs();
    assert_eq!((report.end, report.given_up), (RunEnd::Detached, true));
    assert_eq!(bench.told.count(|event| matches!(event, Event::Detached { .. })), 1);
    let steps = bench.control.take_steps();
    assert!(steps.contains(&Step::ResumeByNewConnection));
}

#[test]
fn a_vm_that_another_client_pauses_gets_no_checkpoint_until_it_runs() {
    let (bench, mut options) = Bench::new();
    options.count = Some(1);
    bench.control.at(Step::DrainEvents, Incident::PausedByOther);
    for look in 1..=4 {
        let control = bench.control.clone();
        bench.control.before(Step::DrainEvents, move || {
            if look == 4 {
                assert!(!control.runs());
                assert!(!control.take_steps().contains(&Step::Stop));
                control.at(Step::DrainEvents, Incident::ResumedByOther);
            }
        });
    }
    let report = bench.run(options).unwrap();
    bench.assert_runs();
    assert_eq!((report.sealed, report.failed), (1, 0));
}

#[test]
fn a_take_of_a_paused_vm_leaves_it_paused() {
    let (bench, options) = Bench::new();
    bench.control.at(Step::DrainEvents, Incident::PausedByOther);
    let engine = bench.engine(options);
    let client = Client::of(&engine);
    let taken = client.take("standing");
    let stop = client.clone();
    bench.control.before(Step::SaveDevices, move || drop(stop.stop(None)));
    drop(client);
    let report = bench.run_engine(engine).unwrap();
    assert!(!bench.control.runs() && !bench.control.has_ended());
    assert_eq!((report.sealed, report.failed, report.end), (1, 0, RunEnd::Kept));
    assert!(matches!(taken.recv().unwrap(), EngineResponse::Taken(_)));
}

/// An engine whose VMM is to stand still when the guest ends.
fn holding(bench: &Bench, options: SessionOptions) -> Engine<'_> {
    let (vm, watchdog) = bench.control.attach();
    let member =
        |vm: crate::session_vm::SessionVm| Member::new(VM.into(), vm.held_at_its_end(), true);
    bench.engine_of((vm, Box::new(watchdog)), member, options, None)
}

#[test]
fn a_guest_that_ends_gets_a_last_checkpoint_before_its_vmm_ends() {
    for (end, tag, verdict) in [
        (GuestEnd::PoweredOff, "web-powered-off", Verdict::Complete),
        (GuestEnd::Panicked, "web-panicked", Verdict::GuestPanicked),
    ] {
        let (bench, mut options) = Bench::new();
        options.interval = None;
        let control = bench.control.clone();
        // The first look is after the VMM was told to stand still.
        bench.control.before(Step::DrainEvents, move || {
            control.write_page(PageIndex(3), &page(99));
            control.end_guest(end);
        });
        let report = bench.run_engine(holding(&bench, options)).unwrap();
        assert!(matches!(report.end, RunEnd::VmEnded(exit) if exit.success()), "{end:?}");
        assert_eq!((report.sealed, report.failed, report.verdict()), (1, 0, verdict));
        assert_eq!(bench.checkpoint(tag), bench.ram());
        let told = |event: &Event| matches!(event, Event::GuestEnded { last: Some(_), .. });
        assert_eq!(bench.told.count(told), 1);
    }
}

#[test]
fn a_last_checkpoint_that_fails_does_not_keep_the_vmm_from_its_end() {
    let (bench, mut options) = Bench::new();
    options.interval = None;
    bench.control.at(Step::SaveDevices, Incident::Fail("no state".into()));
    let control = bench.control.clone();
    bench.control.before(Step::DrainEvents, move || control.end_guest(GuestEnd::Reset));
    let report = bench.run_engine(holding(&bench, options)).unwrap();
    assert!(matches!(report.end, RunEnd::VmEnded(exit) if exit.success()));
    assert_eq!(report.sealed, 0);
}

#[test]
fn an_engine_that_leaves_its_vm_lets_it_end_with_its_guest() {
    let (bench, options) = Bench::new();
    let engine = holding(&bench, options);
    let client = Client::of(&engine);
    let control = bench.control.clone();
    bench.control.before(Step::DrainEvents, move || {
        assert!(control.is_held());
        drop(client.stop(None));
    });
    let report = bench.run_engine(engine).unwrap();
    assert_eq!(report.end, RunEnd::Kept);
    bench.assert_runs();
    assert!(!bench.control.is_held());
}
