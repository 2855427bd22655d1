//! A signal asks for an end in each state of the engine.

use super::{Bench, Client, page};
use crate::control::{EngineResponse, OnExit};
use crate::engine::{RunEnd, Verdict};
use crate::event::Event;
use keyframe_units::PageIndex;
use keyframe_vmm::fake::Step;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Each step that the engine takes in a run with checkpoints.
const STEPS: [Step; 10] = [
    Step::Resume,
    Step::Exit,
    Step::DrainEvents,
    Step::Ram,
    Step::Arm,
    Step::Stop,
    Step::SaveDevices,
    Step::Disarm,
    Step::RanMeanwhile,
    Step::EndWatchdog,
];

fn signal_at(bench: &Bench, step: Step) {
    let interrupted = Arc::clone(&bench.interrupted);
    bench.control.before(step, move || interrupted.store(true, Ordering::Relaxed));
}

#[test]
fn a_signal_at_any_step_seals_what_was_captured_and_keeps_the_vm() {
    for step in STEPS {
        let (bench, mut options) = Bench::new();
        // For the step that only the end has.
        options.count = Some(3);
        let engine = bench.engine(options);
        signal_at(&bench, step);
        let report = bench.run_engine(engine).unwrap();
        bench.assert_runs();
        assert_eq!((report.end, report.failed), (RunEnd::Kept, 0), "{step:?}");
        assert_eq!(report.verdict(), Verdict::Complete, "{step:?}");
        let steps = bench.control.take_steps();
        let captures = steps.iter().filter(|step| **step == Step::Stop).count();
        assert_eq!(report.sealed as usize, captures, "{step:?}: a captured checkpoint is lost");
        assert_eq!(bench.checkpoints(), captures);
        assert!(!steps.contains(&Step::End));
        assert_eq!(bench.told.count(|event| matches!(event, Event::Finished { .. })), 1);
    }
}

#[test]
fn a_signal_ends_a_vm_that_its_run_is_to_end() {
    let (bench, mut options) = Bench::new();
    options.on_exit = OnExit::Kill;
    let engine = bench.engine(options);
    signal_at(&bench, Step::SaveDevices);
    let report = bench.run_engine(engine).unwrap();
    assert_eq!((report.end, report.sealed, report.failed), (RunEnd::Killed, 1, 0));
    assert!(bench.control.has_ended());
    assert_eq!(bench.checkpoint("latest"), bench.ram());
}

#[test]
fn a_signal_while_the_encoder_is_late_waits_for_the_seal() {
    let (bench, options) = Bench::new();
    bench.gate.close();
    for look in 1..=5 {
        let (interrupted, gate) = (Arc::clone(&bench.interrupted), Arc::clone(&bench.gate));
        bench.control.before(Step::DrainEvents, move || {
            if look == 5 {
                interrupted.store(true, Ordering::Relaxed);
            }
        });
        if look == 5 {
            // The VM is kept before the last checkpoint is sealed only if the gate stays closed.
            std::thread::spawn(move || {
                std::thread::sleep(std::time::Duration::from_millis(400));
                gate.open();
            });
        }
    }
    let report = bench.run(options).unwrap();
    bench.assert_runs();
    assert_eq!((report.end, report.sealed, report.failed), (RunEnd::Kept, 1, 0));
}

#[test]
fn a_signal_during_a_rollback_lets_it_complete() {
    for step in [Step::Stop, Step::SaveDevices, Step::ForbidRunning, Step::RollBack] {
        let (bench, mut options) = Bench::new();
        options.interval = None;
        let engine = bench.engine_with_checkpoint(options);
        bench.control.write_page(PageIndex(0), &page(50));
        let rolled_back = Client::of(&engine).roll_back("1");
        signal_at(&bench, step);
        let report = bench.run_engine(engine).unwrap();
        bench.assert_runs();
        assert!(matches!(rolled_back.recv().unwrap(), EngineResponse::RolledBack(_)), "{step:?}");
        assert_eq!((report.end, report.sealed, report.failed), (RunEnd::Kept, 3, 0), "{step:?}");
        assert_eq!(bench.ram(), bench.checkpoint("1"), "{step:?}");
    }
}

#[test]
fn a_signal_after_the_monitor_is_lost_keeps_the_vm() {
    let (bench, options) = Bench::new();
    bench.control.at(Step::SaveDevices, keyframe_vmm::fake::Incident::LoseMonitor);
    for look in 1..=4 {
        let interrupted = Arc::clone(&bench.interrupted);
        bench.control.before(Step::DrainEvents, move || {
            interrupted.store(look == 4, Ordering::Relaxed);
        });
    }
    let report = bench.run(options).unwrap();
    bench.assert_runs();
    assert_eq!((report.end, report.failed, report.given_up), (RunEnd::Kept, 1, true));
}
