//! A request arrives during a capture.

use super::{Bench, Client, failed, page};
use crate::control::{EngineResponse, OnExit};
use crate::engine::{RunEnd, Verdict};
use keyframe_units::PageIndex;
use keyframe_vmm::fake::Step;

/// The steps of a pause.
const PAUSE: [Step; 5] =
    [Step::Arm, Step::Stop, Step::SaveDevices, Step::Resume, Step::RanMeanwhile];

#[test]
fn a_take_gets_a_checkpoint_of_its_own() {
    for step in PAUSE {
        let (bench, mut options) = Bench::new();
        // An audit has one copy of RAM, and here two captures are in flight.
        options.audit = None;
        options.interval = Some(std::time::Duration::from_secs(3600));
        let engine = bench.engine(options);
        let client = Client::of(&engine);
        let first = client.take("first");
        let (answers, taken) = std::sync::mpsc::channel();
        let (during, control) = (client.clone(), bench.control.clone());
        // After the start, which resumes the VM.
        bench.control.before(Step::DrainEvents, move || {
            control.before(step, move || {
                answers.send(during.take("second")).unwrap();
                drop(during.stop(None));
            });
        });
        drop(client);
        let report = bench.run_engine(engine).unwrap();
        bench.assert_runs();
        assert_eq!((report.sealed, report.failed, report.end), (2, 0, RunEnd::Kept), "{step:?}");
        let (EngineResponse::Taken(first), EngineResponse::Taken(second)) =
            (first.recv().unwrap(), taken.recv().unwrap().recv().unwrap())
        else {
            panic!("a take was not answered with its checkpoint")
        };
        assert_eq!((&*first.tags, &*second.tags), (&["first".into()][..], &["second".into()][..]));
        assert!(first.id < second.id);
        assert_eq!((first.parent, second.parent), (None, Some(first.id)));
    }
}

#[test]
fn a_stop_seals_the_capture_and_then_does_what_it_asks() {
    for (step, on_exit) in PAUSE
        .into_iter()
        .flat_map(|s| [(s, None), (s, Some(OnExit::Kill)), (s, Some(OnExit::Keep))])
    {
        let (bench, options) = Bench::new();
        let engine = bench.engine(options);
        let client = Client::of(&engine);
        let (answers, stopping) = std::sync::mpsc::channel();
        let control = bench.control.clone();
        bench.control.before(Step::DrainEvents, move || {
            control.before(step, move || answers.send(client.stop(on_exit)).unwrap());
        });
        let report = bench.run_engine(engine).unwrap();
        assert!(matches!(stopping.recv().unwrap().recv().unwrap(), EngineResponse::Stopping));
        assert_eq!((report.sealed, report.verdict()), (1, Verdict::Complete), "{step:?}");
        assert_eq!(bench.checkpoint("latest"), bench.ram());
        if on_exit == Some(OnExit::Kill) {
            assert_eq!(report.end, RunEnd::Killed);
            assert!(bench.control.has_ended());
        } else {
            assert_eq!(report.end, RunEnd::Kept);
            bench.assert_runs();
        }
    }
}

#[test]
fn a_rollback_waits_until_the_capture_is_sealed() {
    let (bench, options) = Bench::new();
    let engine = bench.engine_with_checkpoint(options);
    let client = Client::of(&engine);
    let (answers, rolled_back) = std::sync::mpsc::channel();
    let (during, control) = (client.clone(), bench.control.clone());
    let target = bench.ram();
    bench.control.write_page(PageIndex(3), &page(77));
    bench.control.before(Step::RanMeanwhile, move || {
        answers.send(during.roll_back("1")).unwrap();
        let stop = during.clone();
        control.before(Step::RollBack, move || drop(stop.stop(None)));
    });
    drop(client);
    let report = bench.run_engine(engine).unwrap();
    bench.assert_runs();
    assert_eq!((report.sealed, report.failed), (4, 0));
    let EngineResponse::RolledBack(done) = rolled_back.recv().unwrap().recv().unwrap() else {
        panic!("the VM was not rolled back")
    };
    assert_eq!((done.checkpoint, done.before, done.now), (1, Some(3), Some(4)));
    assert!(done.runs);
    assert_eq!(bench.ram(), target);
    assert_eq!(bench.checkpoint("4"), target);
    assert_ne!(bench.checkpoint("2"), target);
    assert_eq!(bench.checkpoint("3"), bench.checkpoint("2"));
}

#[test]
fn a_client_that_goes_away_changes_nothing() {
    let (bench, mut options) = Bench::new();
    options.audit = None;
    let engine = bench.engine(options);
    let client = Client::of(&engine);
    bench.control.before(Step::SaveDevices, move || {
        drop(client.take("abandoned"));
        drop(client.stop(None));
    });
    let report = bench.run_engine(engine).unwrap();
    bench.assert_runs();
    assert_eq!((report.sealed, report.failed), (2, 0));
    assert_eq!(bench.store.resolve("abandoned").unwrap().0, 2);
}

#[test]
fn a_take_whose_tag_is_not_allowed_is_refused_without_a_pause() {
    let (bench, mut options) = Bench::new();
    options.interval = None;
    let engine = bench.engine(options);
    let client = Client::of(&engine);
    let taken = client.take("no tag");
    drop(client.stop(None));
    drop(client);
    let report = bench.run_engine(engine).unwrap();
    bench.assert_runs();
    assert!(failed(&taken).contains("no tag"));
    assert_eq!((report.sealed, report.failed), (0, 0));
    assert!(!bench.control.take_steps().contains(&Step::Stop));
}

#[test]
fn a_request_after_the_one_that_ends_the_run_is_told_so() {
    let (bench, options) = Bench::new();
    let engine = bench.engine(options);
    let client = Client::of(&engine);
    drop(client.stop(None));
    let late = client.take("late");
    drop(client);
    bench.run_engine(engine).unwrap();
    bench.assert_runs();
    assert!(failed(&late).contains("ending"));
}
