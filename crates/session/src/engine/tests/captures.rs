//! A capture fails.

use super::{Bench, Client, PAGES, page};
use crate::engine::{CheckpointReason, RunEnd, Verdict};
use keyframe_store::CheckpointId;
use keyframe_units::PageIndex;
use keyframe_vmm::fake::{Incident, Step};

#[test]
fn a_failed_step_of_the_pause_costs_one_checkpoint_and_the_next_holds_its_pages() {
    for step in [Step::Arm, Step::Stop, Step::SaveDevices, Step::Resume, Step::Disarm] {
        let (bench, mut options) = Bench::new();
        options.count = Some(2);
        // The first resume is the start of the VM.
        let script = bench.control.clone();
        bench.control.before(Step::DrainEvents, move || {
            script.at(step, Incident::Fail("it failed".into()));
        });
        let report = bench.run(options).unwrap();
        bench.assert_runs();
        assert_eq!((report.end, report.sealed, report.failed), (RunEnd::Kept, 2, 1), "{step:?}");
        assert_eq!(report.verdict(), Verdict::Incomplete);
        let failures = bench.told.failures();
        assert_eq!(failures.len(), 1, "{step:?}");
        assert!(failures[0].contains("it failed; nothing is lost"), "{}", failures[0]);
        assert_eq!(bench.checkpoint("latest"), bench.ram(), "{step:?}");
    }
}

#[test]
fn a_capture_whose_vm_ran_meanwhile_is_torn_and_not_sealed() {
    for incident in [Incident::ResumedByOther, Incident::WatchdogFires] {
        let (bench, mut options) = Bench::new();
        options.count = Some(1);
        bench.control.at(Step::SaveDevices, incident.clone());
        let report = bench.run(options).unwrap();
        bench.assert_runs();
        assert_eq!((report.sealed, report.failed), (1, 1), "{incident:?}");
        assert_eq!(bench.checkpoints(), 1);
    }
}

#[test]
fn a_scan_in_a_pause_does_not_end_the_standstill_around_it() {
    let (bench, mut options) = Bench::new();
    options.interval = None;
    bench.control.pin_ram();
    let mut engine = bench.engine(options);
    assert!(engine.machines.members_mut()[0].vm.begin_standstill().unwrap());
    engine.capture(CheckpointReason::Take, None, None).unwrap();
    assert!(!bench.control.runs() && bench.control.is_watchdog_armed());
    engine.machines.members_mut()[0].vm.end_standstill().unwrap();
    bench.assert_runs();
    let client = Client::of(&engine);
    drop(client.stop(None));
    drop(client);
    let report = bench.run_engine(engine).unwrap();
    bench.assert_runs();
    assert_eq!((report.sealed, report.failed), (1, 0));
}

#[test]
fn a_scan_whose_vm_ran_meanwhile_is_torn_and_its_pages_are_owed() {
    for incident in [Incident::ResumedByOther, Incident::WatchdogFires] {
        let (bench, mut options) = Bench::new();
        options.interval = None;
        bench.control.pin_ram();
        let mut engine = bench.engine(options);
        bench.control.at(Step::Resume, incident.clone());
        assert!(engine.capture(CheckpointReason::Take, None, None).is_err(), "{incident:?}");
        bench.assert_runs();
        engine.capture(CheckpointReason::Take, None, None).unwrap();
        let client = Client::of(&engine);
        drop(client.stop(None));
        drop(client);
        let report = bench.run_engine(engine).unwrap();
        bench.assert_runs();
        assert_eq!((report.sealed, report.failed), (1, 1), "{incident:?}");
        assert_eq!(bench.checkpoint("latest"), bench.ram(), "{incident:?}");
    }
}

#[test]
fn a_vm_whose_stop_was_not_answered_runs_again() {
    let (bench, mut options) = Bench::new();
    options.count = Some(1);
    bench.control.at(Step::Stop, Incident::LoseAnswer);
    let report = bench.run(options).unwrap();
    bench.assert_runs();
    assert_eq!((report.sealed, report.failed), (1, 1));
}

#[test]
fn a_scan_that_breaks_half_way_owes_every_page() {
    let (bench, mut options) = Bench::new();
    options.count = Some(2);
    options.fault = Some("scan-error:3".parse().unwrap());
    let report = bench.run(options).unwrap();
    bench.assert_runs();
    assert_eq!((report.sealed, report.failed), (2, 1));
    assert_eq!(bench.checkpoint("latest"), bench.ram());
}

#[test]
fn a_failure_that_repeats_is_told_once() {
    let (bench, mut options) = Bench::new();
    options.count = Some(1);
    for _ in 0..5 {
        bench.control.at(Step::SaveDevices, Incident::Fail("no state".into()));
    }
    let report = bench.run(options).unwrap();
    bench.assert_runs();
    assert_eq!((report.sealed, report.failed), (1, 5));
    assert_eq!(bench.told.failures().len(), 1);
}

#[test]
fn pages_that_the_guest_writes_between_checkpoints_are_in_the_next() {
    let (bench, mut options) = Bench::new();
    options.count = Some(3);
    for number in 0..3 {
        let control = bench.control.clone();
        let last = PageIndex(PAGES as u64 - 1);
        bench.control.before(Step::Stop, move || control.write_page(last, &page(100 + number)));
    }
    let report = bench.run(options).unwrap();
    bench.assert_runs();
    assert_eq!((report.sealed, report.failed, report.verdict()), (3, 0, Verdict::Complete));
    for number in 0..3 {
        let id = CheckpointId(u64::from(number) + 1).to_string();
        let ram = bench.checkpoint(&id);
        assert_eq!(ram[ram.len() - 4096..], page(100 + number), "checkpoint {id}");
    }
}
