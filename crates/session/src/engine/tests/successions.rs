//! A rollback by a successor fails half way: the VM runs on, is started again as it was, or has ended.

use super::{Bench, Client, PAGES, failed, page};
use crate::control::EngineResponse;
use crate::engine::{RunEnd, RunReport, Successor};
use crate::event::Event;
use keyframe_units::{PAGE_BYTES, PageIndex, PageRange};
use keyframe_vmm::fake::{FakeControl, FakeVm, Incident, Step};
use std::sync::mpsc::Receiver;

/// A run with checkpoint 1, after which the guest writes a page, and a rollback to it by a successor.
/// `prepare` runs just before. Returns the answer, the run's end, and the RAM before the rollback.
fn roll_back(
    bench: &Bench,
    prepare: impl FnOnce(&FakeControl),
) -> (Receiver<EngineResponse>, RunReport, Vec<u8>) {
    let (_, mut options) = Bench::new();
    options.interval = None;
    options.events = bench.told.clone();
    options.audit = None;
    let engine = bench.engine_with_checkpoint(options);
    let client = Client::of(&engine);
    bench.control.write_page(PageIndex(5), &page(200));
    bench.control.is_succeeded();
    let former = bench.ram();
    prepare(&bench.control);
    let answer = client.roll_back("1");
    drop(client.stop(None));
    drop(client);
    (answer, bench.run_engine(engine).unwrap(), former)
}

/// The RAM of a successor, which must run.
fn ram_of(successor: Option<Successor>) -> Vec<u8> {
    let mut vm = successor.expect("a successor").vm;
    let control = vm.as_any_mut().downcast_mut::<FakeVm>().unwrap().control();
    assert!(control.runs(), "the successor does not run");
    let mut ram = vec![0; PAGES * PAGE_BYTES];
    control.read_pages(&[PageRange::new(PageIndex(0), PAGES as u64)], &mut ram);
    ram
}

fn fail(text: &str) -> Incident {
    Incident::Fail(text.into())
}

#[test]
fn a_successor_is_the_checkpoint_and_what_was_before_is_kept() {
    let (bench, _) = Bench::new();
    let (answer, report, former) = roll_back(&bench, |_| ());
    let EngineResponse::RolledBack(done) = answer.recv().unwrap() else { panic!() };
    assert_eq!((done.before, done.now, done.runs), (Some(2), None, true));
    assert!(done.successor_pid.is_some());
    assert_eq!(report.end, RunEnd::Succeeded);
    assert!(bench.control.has_ended());
    assert_eq!(ram_of(report.successor), bench.checkpoint("1"));
    assert_eq!(bench.checkpoint("2"), former);
    assert!(!bench.control.is_running_forbidden());
}

#[test]
fn a_vm_runs_on_if_it_cannot_be_succeeded() {
    for step in [Step::PrepareSuccessor, Step::EndPredecessor] {
        let (bench, _) = Bench::new();
        let (answer, report, former) = roll_back(&bench, |control| control.at(step, fail("why")));
        let told = failed(&answer);
        assert!(told.contains("why"), "{told}");
        bench.assert_runs();
        assert!(bench.ram() == former, "{step:?}");
        assert!(!bench.control.is_running_forbidden(), "{step:?}");
        assert_eq!((report.end, report.given_up), (RunEnd::Kept, false), "{step:?}");
        assert!(report.successor.is_none());
    }
}

#[test]
fn a_vm_whose_successor_does_not_start_is_started_again_as_it_was() {
    let (bench, _) = Bench::new();
    let (answer, report, former) =
        roll_back(&bench, |control| control.at(Step::StartSuccessor, fail("no memory")));
    let told = failed(&answer);
    assert!(told.contains("no memory") && told.contains("the VM is as it was"), "{told}");
    assert_eq!(report.end, RunEnd::Succeeded);
    assert!(ram_of(report.successor) == former);
    assert_eq!(bench.told.count(|event| matches!(event, Event::RolledBack { .. })), 0);
}

#[test]
fn a_vm_that_cannot_be_started_again_has_ended_and_its_checkpoint_is_named() {
    let (bench, _) = Bench::new();
    let (answer, report, _) = roll_back(&bench, |control| {
        control.at(Step::StartSuccessor, fail("no memory"));
        control.at(Step::StartSuccessor, fail("still no memory"));
    });
    let told = failed(&answer);
    assert!(told.contains("no memory") && told.contains("the VM has ended"), "{told}");
    assert!(told.contains("keyframe restore 2"), "{told}");
    assert!(matches!(report.end, RunEnd::VmEnded(_)), "{:?}", report.end);
    assert!(report.successor.is_none());
}
