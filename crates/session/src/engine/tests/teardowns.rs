//! A part fails as the run ends: everything else is still released, and each error is reported.

use super::{Bench, Client};
use crate::control::OnExit;
use crate::engine::RunEnd;
use crate::error::{Error, Result};
use crate::event::Event;
use keyframe_capture::BoxError;
use keyframe_disk_capture::{DiskCapture, DiskCut, DiskError};
use keyframe_store::{DiskMeta, Tuning};
use keyframe_vmm::Vmm;
use keyframe_vmm::fake::{Incident, Step};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

/// Notes its calls. Fails at its end, or as it is cut.
#[derive(Clone, Default)]
struct FakeDisks {
    calls: Arc<Mutex<Vec<&'static str>>>,
    fails_to_cut: bool,
    fails_to_end: bool,
}

impl FakeDisks {
    fn note(&self, call: &'static str) {
        self.calls.lock().unwrap().push(call);
    }

    fn count(&self, call: &str) -> usize {
        self.calls.lock().unwrap().iter().filter(|noted| **noted == call).count()
    }
}

impl DiskCapture for FakeDisks {
    fn metas(&self) -> &[DiskMeta] {
        &[]
    }

    fn begin(&mut self, _: &mut [&mut dyn Vmm]) -> Result<DiskCut, BoxError> {
        self.note("begin");
        Ok(DiskCut::nothing())
    }

    fn cut(&mut self, _: &mut [&mut dyn Vmm]) -> Result<(), BoxError> {
        self.note("cut");
        if self.fails_to_cut { Err("the disks cannot be cut".into()) } else { Ok(()) }
    }

    fn captured(&mut self, seq: Option<u64>, _: &mut [&mut dyn Vmm]) {
        self.note(if seq.is_some() { "captured" } else { "not captured" });
    }

    fn sealed(&mut self, _: u64, _: &mut [&mut dyn Vmm]) {
        self.note("sealed");
    }

    fn detach(&mut self, _: &mut [&mut dyn Vmm]) {
        self.note("detach");
    }

    fn end(self: Box<Self>) -> Result<Option<PathBuf>, DiskError> {
        self.note("end");
        if self.fails_to_end { Err(DiskError::NotServed) } else { Ok(Some("/writes".into())) }
    }

    fn keep(self: Box<Self>) -> Option<PathBuf> {
        self.note("keep");
        Some("/writes".into())
    }
}

/// Asserts that the run directory, the store's lock and the watchdog are released.
fn assert_released(bench: &Bench) {
    assert!(!bench.run_dir().join("control.sock").exists(), "the control socket is left");
    assert!(!crate::run_dir::lives(&bench.run_dir()), "the run directory is locked");
    let writer = bench.store.lock_writer_tuned("the next run", Tuning::default());
    assert!(writer.is_ok(), "the store is locked");
    assert!(bench.control.take_steps().contains(&Step::EndWatchdog), "the watchdog is left");
}

#[test]
fn a_disk_that_fails_at_the_end_leaves_nothing_else_behind() {
    let (bench, mut options) = Bench::new();
    (options.count, options.on_exit) = (Some(2), OnExit::Kill);
    let disks = FakeDisks { fails_to_end: true, ..FakeDisks::default() };
    let engine = bench.engine_with(options, Some(Box::new(disks.clone())));
    let error = bench.run_engine(engine).unwrap_err();
    assert!(matches!(error, Error::DisksNotServed), "{error}");
    assert!(bench.control.has_ended());
    assert_eq!((bench.told.sealed(), bench.checkpoints()), (2, 2));
    assert_eq!((disks.count("sealed"), disks.count("detach"), disks.count("end")), (2, 1, 1));
    assert_eq!(bench.told.count(|event| matches!(event, Event::Finished { .. })), 0);
    assert_released(&bench);
}

#[test]
fn every_error_of_a_teardown_is_reported_in_order() {
    let (bench, mut options) = Bench::new();
    options.on_exit = OnExit::Kill;
    bench.control.at(Step::End, Incident::Fail("it does not end".into()));
    bench.encoder_panics.store(true, Ordering::Relaxed);
    let disks = FakeDisks { fails_to_end: true, ..FakeDisks::default() };
    let engine = bench.engine_with(options, Some(Box::new(disks.clone())));
    let client = Client::of(&engine);
    bench.control.before(Step::RanMeanwhile, move || drop(client.stop(None)));
    let error = bench.run_engine(engine).unwrap_err();
    let Error::Several(errors) = error else { panic!("{error}") };
    let texts: Vec<_> = errors.iter().map(ToString::to_string).collect();
    let expected =
        ["the encoder's thread has failed", "it does not end", "the disks are not served any more"];
    assert_eq!(texts, expected);
    assert_eq!(disks.count("end"), 1);
    assert_released(&bench);
}

#[test]
fn disks_stay_with_a_vm_that_runs_on() {
    let (bench, mut options) = Bench::new();
    options.count = Some(1);
    let disks = FakeDisks::default();
    let engine = bench.engine_with(options, Some(Box::new(disks.clone())));
    let report = bench.run_engine(engine).unwrap();
    bench.assert_runs();
    assert_eq!(report.end, RunEnd::Kept);
    assert_eq!((disks.count("keep"), disks.count("end")), (1, 0));
    assert_eq!(bench.told.count(|event| matches!(event, Event::WritesKept { .. })), 1);
    assert_released(&bench);
}

#[test]
fn disks_that_cannot_be_cut_fail_the_checkpoint_and_not_the_vm() {
    let (bench, options) = Bench::new();
    let disks = FakeDisks { fails_to_cut: true, ..FakeDisks::default() };
    let engine = bench.engine_with(options, Some(Box::new(disks.clone())));
    let client = Client::of(&engine);
    bench.control.before(Step::RanMeanwhile, || ());
    bench.control.before(Step::RanMeanwhile, move || drop(client.stop(None)));
    let report = bench.run_engine(engine).unwrap();
    bench.assert_runs();
    assert_eq!((report.sealed, disks.count("not captured")), (0, report.failed as usize));
    assert!(report.failed >= 2);
    let failures = bench.told.failures();
    assert!(failures[0].contains("the disks cannot be cut"), "{}", failures[0]);
    assert_released(&bench);
}

/// What the guest writes between a failed pause and the next one must be in the cut of the next.
#[test]
fn each_pause_has_its_own_cut_of_the_disks() {
    let (bench, mut options) = Bench::new();
    options.count = Some(2);
    let disks = FakeDisks::default();
    let engine = bench.engine_with(options, Some(Box::new(disks.clone())));
    // A block of RAM is resized in the second pause, so that this capture is tried again.
    bench.control.before(Step::SaveDevices, || ());
    let control = bench.control.clone();
    bench.control.before(Step::SaveDevices, move || control.use_fewer_pages(1));
    let report = bench.run_engine(engine).unwrap();
    bench.assert_runs();
    assert_eq!((report.sealed, report.failed), (2, 0));
    let calls = disks.calls.lock().unwrap();
    let captures: Vec<_> = calls.iter().filter(|call| **call != "sealed").take(9).collect();
    let tried = ["begin", "cut", "not captured"];
    let taken = ["begin", "cut", "captured"];
    assert_eq!(captures, [taken, tried, taken].concat().iter().collect::<Vec<_>>());
}

#[test]
fn a_run_whose_start_fails_ends_the_vm_whose_guest_has_not_run() {
    let (bench, options) = Bench::new();
    bench.control.at(Step::Resume, Incident::Fail("no start".into()));
    let disks = FakeDisks::default();
    let engine = bench.engine_with(options, Some(Box::new(disks.clone())));
    let error = bench.run_engine(engine).unwrap_err();
    assert_eq!(error.to_string(), "no start");
    assert!(bench.control.has_ended());
    assert_eq!(disks.count("end"), 1);
    assert_released(&bench);
}

#[test]
fn a_run_that_breaks_keeps_its_vm_and_reports_why() {
    let (bench, mut options) = Bench::new();
    options.on_exit = OnExit::Kill;
    let control = bench.control.clone();
    bench.control.before(Step::DrainEvents, move || {
        control.at(Step::Exit, Incident::Fail("the process table is gone".into()));
    });
    let disks = FakeDisks::default();
    let engine = bench.engine_with(options, Some(Box::new(disks.clone())));
    let error = bench.run_engine(engine).unwrap_err();
    assert_eq!(error.to_string(), "the process table is gone");
    bench.assert_runs();
    assert_eq!(disks.count("keep"), 1);
    assert_eq!(bench.told.count(|event| matches!(event, Event::Kept { .. })), 1);
    assert_released(&bench);
}
