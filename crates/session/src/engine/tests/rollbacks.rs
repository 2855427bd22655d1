//! A rollback fails half way: the VM runs as it was, or it is lost and never runs.

use super::{Bench, Client, failed, page};
use crate::control::{EngineRequest, EngineResponse};
use crate::engine::{Engine, RunEnd, RunReport};
use crate::event::Event;
use keyframe_units::{CheckpointId, PageIndex};
use keyframe_vmm::fake::{Incident, Step};
use keyframe_vmm::{RollbackStep, RunState};
use std::sync::mpsc::Receiver;
use std::time::Duration;

/// An engine with checkpoint 1 that takes checkpoints only on request and tells its events to the
/// bench.
fn engine(bench: &Bench) -> Engine<'_> {
    let (_, mut options) = Bench::new();
    options.interval = None;
    options.events = bench.told.clone();
    options.audit = None;
    bench.engine_with_checkpoint(options)
}

/// A run with checkpoint 1, after which the guest writes a page, a rollback to it, and a stop.
struct Rollback<'a> {
    bench: &'a Bench,
    answer: Receiver<EngineResponse>,
    report: RunReport,
    /// The RAM just before the rollback.
    former: Vec<u8>,
}

impl<'a> Rollback<'a> {
    /// `prepare` runs just before the rollback, after checkpoint 1 is sealed.
    fn run(bench: &'a Bench, prepare: impl FnOnce(&Bench)) -> Self {
        Self::run_with(bench, |_| (), prepare)
    }

    fn run_with(
        bench: &'a Bench,
        configure: impl FnOnce(&mut Engine<'_>),
        prepare: impl FnOnce(&Bench),
    ) -> Self {
        let mut engine = engine(bench);
        configure(&mut engine);
        let client = Client::of(&engine);
        bench.control.write_page(PageIndex(5), &page(200));
        let former = bench.ram();
        prepare(bench);
        let answer = client.roll_back("1");
        drop(client.stop(None));
        drop(client);
        let report = bench.run_engine(engine).unwrap();
        Self { bench, answer, report, former }
    }

    /// Asserts that the rollback failed with `text` and the VM runs as it was.
    fn assert_unharmed(&self, text: &str) {
        let told = failed(&self.answer);
        assert!(told.contains(text), "{told}");
        self.bench.assert_runs();
        assert!(!self.bench.control.is_running_forbidden());
        assert!(self.bench.ram() == self.former, "the VM is not as it was");
        assert_eq!((self.report.end, self.report.given_up), (RunEnd::Kept, false));
        assert_eq!(self.bench.told.count(|event| matches!(event, Event::RolledBack { .. })), 0);
    }
}

#[test]
fn a_rollback_puts_the_vm_back_and_keeps_what_was_before() {
    let (bench, _) = Bench::new();
    let done = Rollback::run(&bench, |_| ());
    let EngineResponse::RolledBack(answer) = done.answer.recv().unwrap() else { panic!() };
    assert_eq!((answer.before, answer.now, answer.pages, answer.runs), (Some(2), Some(3), 1, true));
    bench.assert_runs();
    assert_eq!(bench.ram(), bench.checkpoint("1"));
    assert_eq!(bench.checkpoint("2"), done.former);
    assert_eq!(bench.checkpoint("3"), bench.checkpoint("1"));
    assert_eq!(bench.told.count(|event| matches!(event, Event::RolledBack { .. })), 1);
}

#[test]
fn what_a_reset_overwrites_is_right_before_the_devices_are_loaded() {
    let (bench, _) = Bench::new();
    let done = Rollback::run(&bench, |bench| {
        bench.control.write_at_reset(PageIndex(7), &page(99));
    });
    let EngineResponse::RolledBack(answer) = done.answer.recv().unwrap() else { panic!() };
    assert_eq!(answer.pages, 1, "the page of the reset was not loaded with the state");
    assert_eq!(bench.control.ram_at_load().as_flattened(), bench.checkpoint("1"));
    assert_eq!(bench.ram(), bench.checkpoint("1"));
}

#[test]
fn what_a_reset_overwrites_is_right_after_the_way_back_from_a_failed_rollback() {
    let (bench, _) = Bench::new();
    let done = Rollback::run(&bench, |bench| {
        bench.control.write_at_reset(PageIndex(5), &page(98));
        bench.control.write_at_reset(PageIndex(7), &page(99));
        bench.control.at(Step::RollBack, Incident::LoseAnswer);
    });
    done.assert_unharmed("the answer was lost");
    assert_eq!(bench.control.ram_at_load().as_flattened(), done.former);
}

/// A run with checkpoint 1, after which the guest writes a page, a fast rollback to it, another page
/// and checkpoint 2. `prepare` runs just before the rollback.
fn roll_back_fast(
    bench: &Bench,
    prepare: impl FnOnce(&Bench),
) -> (Receiver<EngineResponse>, RunReport) {
    let engine = engine(bench);
    let client = Client::of(&engine);
    bench.control.write_page(PageIndex(5), &page(200));
    prepare(bench);
    let answer = client.ask(EngineRequest::Rollback { checkpoint: "1".into(), fast: true });
    drop(client.take("next"));
    drop(client.stop(None));
    drop(client);
    (answer, bench.run_engine(engine).unwrap())
}

#[test]
fn a_fast_rollback_keeps_nothing_and_the_next_checkpoint_is_whole() {
    let (bench, _) = Bench::new();
    let (answer, _) = roll_back_fast(&bench, |bench| {
        let control = bench.control.clone();
        // As the reset of a machine writes its ROMs.
        bench.control.before(Step::RollBack, move || control.write_page(PageIndex(7), &page(99)));
        // The guest runs on before the next checkpoint; the first resume is that of the run's start.
        bench.control.before(Step::Resume, || ());
        let control = bench.control.clone();
        bench.control.before(Step::Resume, move || {
            control.write_page(PageIndex(9), &page(55));
        });
    });
    let EngineResponse::RolledBack(answer) = answer.recv().unwrap() else { panic!() };
    assert_eq!((answer.before, answer.now, answer.pages, answer.runs), (None, None, 2, true));
    bench.assert_runs();
    assert_eq!(bench.checkpoints(), 2);
    let next = bench.store.load(CheckpointId(2)).unwrap();
    assert_eq!(next.meta.parent, Some(CheckpointId(1)));
    assert_eq!(bench.ram(), bench.checkpoint("2"));
    assert_ne!(bench.checkpoint("1"), bench.checkpoint("2"), "the guest has written a page");
}

#[test]
fn a_second_fast_rollback_writes_only_what_was_written_since_the_first() {
    let (bench, mut options) = Bench::new();
    options.interval = None;
    let engine = bench.engine_with_checkpoint(options);
    let client = Client::of(&engine);
    for page_number in 5..8 {
        bench.control.write_page(PageIndex(page_number), &page(200));
    }
    let reset = || client.ask(EngineRequest::Rollback { checkpoint: "1".into(), fast: true });
    let first = reset();
    // The second resume is that of the first rollback.
    bench.control.before(Step::Resume, || ());
    let control = bench.control.clone();
    bench.control.before(Step::Resume, move || control.write_page(PageIndex(9), &page(55)));
    let taken = client.take("between");
    let second = reset();
    drop(client.stop(None));
    bench.run_engine(engine).unwrap();
    for (answer, pages) in [(first, 3), (second, 1)] {
        let EngineResponse::RolledBack(answer) = answer.recv().unwrap() else { panic!() };
        assert_eq!(answer.pages, pages);
    }
    assert!(matches!(taken.recv().unwrap(), EngineResponse::Taken(_)));
    assert_eq!(bench.ram(), bench.checkpoint("1"));
}

#[test]
fn a_fast_rollback_that_fails_half_way_leaves_the_vm_paused() {
    let (bench, _) = Bench::new();
    let (answer, report) = roll_back_fast(&bench, |bench| {
        bench.control.at(Step::RollBack, Incident::Fail("the state is refused".into()));
    });
    let told = failed(&answer);
    assert!(told.contains("the state is refused; nor could it be put back"), "{told}");
    assert!(told.contains("a fast rollback keeps no checkpoint of it"), "{told}");
    assert!(!bench.control.runs() && !bench.control.has_ended());
    assert!(report.given_up);
}

#[test]
fn a_fast_rollback_without_a_checkpoint_of_the_run_is_refused() {
    let (bench, mut options) = Bench::new();
    options.interval = None;
    let mut engine = bench.engine_with_checkpoint(options);
    // As if the checkpoint were of another run.
    engine.newest = None;
    bench.control.take_steps();
    let client = Client::of(&engine);
    let answer = client.ask(EngineRequest::Rollback { checkpoint: "1".into(), fast: true });
    drop(client.stop(None));
    drop(client);
    bench.run_engine(engine).unwrap();
    assert!(failed(&answer).contains("no checkpoint of this run is sealed yet"));
    bench.assert_runs();
    assert!(!bench.control.take_steps().contains(&Step::Stop));
}

/// The VM stands in `state` when the rollback begins.
fn stand(bench: &Bench, state: RunState) {
    let control = bench.control.clone();
    bench.control.before(Step::CheckRollback, move || control.stand(state));
}

#[test]
fn a_vm_that_stood_still_by_itself_runs_after_a_rollback() {
    let states = [RunState::ShutDown, RunState::Other("io-error".into())];
    for (state, runs) in states.map(|state| (state, true)).into_iter().chain([
        (RunState::Paused, false),
        // A debugger has stopped it.
        (RunState::Other("debug".into()), false),
    ]) {
        let (bench, _) = Bench::new();
        let done = Rollback::run(&bench, |bench| stand(bench, state.clone()));
        let EngineResponse::RolledBack(answer) = done.answer.recv().unwrap() else { panic!() };
        assert_eq!((answer.runs, bench.control.runs()), (runs, runs), "{state:?}");
        assert_eq!(bench.ram(), bench.checkpoint("1"));
    }
}

#[test]
fn a_vm_that_comes_back_from_a_reset_is_not_resumed_and_its_other_state_is_told() {
    let (bench, _) = Bench::new();
    let done = Rollback::run(&bench, |bench| {
        stand(bench, RunState::ShutDown);
        let control = bench.control.clone();
        bench.control.before(Step::RollBack, move || {
            control.at(Step::RollBack, Incident::Fail("the state is refused".into()));
        });
    });
    let told = failed(&done.answer);
    assert!(told.contains("the state is refused"), "{told}");
    assert!(told.contains("QEMU calls its state paused, not shutdown"), "{told}");
    assert!(!bench.control.runs() && !bench.control.is_running_forbidden());
    assert!(bench.ram() == done.former, "the VM is not as it was");
}

#[test]
fn a_page_that_differs_after_the_load_is_written_and_captured() {
    let (bench, _) = Bench::new();
    let done = Rollback::run(&bench, |bench| {
        let control = bench.control.clone();
        // As the reset of a machine writes its ROMs: the tracker reports the page.
        bench.control.before(Step::RollBack, move || control.write_page(PageIndex(7), &page(99)));
    });
    let EngineResponse::RolledBack(answer) = done.answer.recv().unwrap() else { panic!() };
    assert_eq!(answer.pages, 2);
    assert_eq!(bench.ram(), bench.checkpoint("1"));
    assert_eq!(bench.checkpoint("3"), bench.checkpoint("1"));
    let loads = bench.control.take_steps().into_iter().filter(|step| *step == Step::RollBack);
    assert_eq!(loads.count(), 1, "a second load can crash the VMM");
}

#[test]
fn a_rollback_that_an_operation_of_the_user_forbids_touches_nothing() {
    let (bench, _) = Bench::new();
    let done = Rollback::run(&bench, |bench| {
        bench.control.take_steps();
        bench.control.at(Step::CheckRollback, Incident::Fail("it migrates".into()));
    });
    done.assert_unharmed("it migrates");
    assert_eq!(bench.checkpoints(), 1);
    assert!(!bench.control.take_steps().contains(&Step::Stop));
}

#[test]
fn an_operation_that_the_user_begins_during_a_rollback_goes_on() {
    let (bench, _) = Bench::new();
    let done = Rollback::run(&bench, |bench| {
        let control = bench.control.clone();
        bench.control.before(Step::SaveDevices, move || {
            control.at(Step::CheckRollback, Incident::Fail("it migrates".into()));
        });
    });
    done.assert_unharmed("it migrates; the VM is as it was");
    assert!(!bench.control.take_steps().contains(&Step::RollBack));
}

#[test]
fn a_vm_that_cannot_be_paused_is_not_rolled_back() {
    for step in [Step::Arm, Step::Stop] {
        let (bench, _) = Bench::new();
        let done = Rollback::run(&bench, |bench| {
            bench.control.at(step, Incident::Fail("it failed".into()));
        });
        done.assert_unharmed("pause the VM: it failed");
        assert_eq!(bench.checkpoints(), 1);
    }
}

#[test]
fn a_state_that_cannot_be_kept_is_not_given_up() {
    let (bench, _) = Bench::new();
    let done = Rollback::run(&bench, |bench| {
        bench.control.at(Step::SaveDevices, Incident::Fail("no state".into()));
    });
    done.assert_unharmed("the VM is as it was");
    assert!(!bench.control.take_steps().contains(&Step::RollBack));
}

#[test]
fn a_vm_that_the_watchdog_resumed_is_not_rolled_back() {
    let (bench, _) = Bench::new();
    let done = Rollback::run(&bench, |bench| {
        bench.control.at(Step::ForbidRunning, Incident::WatchdogFires);
    });
    done.assert_unharmed("the watchdog resumed the VM because the rollback took too long");
    assert!(!bench.control.take_steps().contains(&Step::RollBack));
}

#[test]
fn a_state_that_is_not_sealed_in_time_is_not_given_up() {
    let (bench, _) = Bench::new();
    let configure = |engine: &mut Engine<'_>| engine.seal_timeout = Duration::from_secs(1);
    let gate = bench.gate.clone();
    let done = Rollback::run_with(&bench, configure, |bench| {
        bench.gate.close();
        // Only after the rollback has resumed the VM.
        bench.control.before(Step::Resume, || ());
        bench.control.before(Step::Resume, move || gate.open());
    });
    done.assert_unharmed("the checkpoint was not sealed in time; the VM is as it was");
}

/// The user lets a VM run that seems to hang: what it executes then is of no checkpoint.
#[test]
fn a_vm_that_its_user_resumes_during_a_rollback_is_as_it_was() {
    for (step, is_loaded) in [(Step::ForbidRunning, false), (Step::RollBack, true)] {
        let (bench, _) = Bench::new();
        let done = Rollback::run(&bench, |bench| bench.control.at(step, Incident::ResumedByOther));
        done.assert_unharmed("another client has resumed the VM during the rollback");
        assert_eq!(bench.control.take_steps().contains(&Step::RollBack), is_loaded, "{step:?}");
    }
}

#[test]
fn a_vm_that_loads_no_state_goes_back_to_what_it_was() {
    let (bench, _) = Bench::new();
    let done = Rollback::run(&bench, |bench| {
        bench.control.at(Step::RollBack, Incident::Fail("the state is refused".into()));
        // The first resume is that of the run's start.
        bench.control.before(Step::Resume, || ());
        let control = bench.control.clone();
        bench.control.before(Step::Resume, move || {
            assert!(!control.is_running_forbidden(), "the watchdog would end a VM that is whole");
        });
    });
    done.assert_unharmed("the state is refused; the VM is as it was");
}

#[test]
fn a_vm_whose_former_state_is_lost_never_runs() {
    let (bench, _) = Bench::new();
    let done = Rollback::run(&bench, |bench| {
        bench.control.at(Step::RollBack, Incident::Fail("the state is refused".into()));
        bench.control.at(Step::RollBack, Incident::Fail("the former one too".into()));
        let control = bench.control.clone();
        bench.control.before(Step::EndWatchdog, move || {
            assert!(control.is_running_forbidden(), "the watchdog may resume the VM");
        });
    });
    let told = failed(&done.answer);
    assert!(told.contains("the state is refused; nor could it be put back"), "{told}");
    assert!(told.contains("the former one too; the VM is left paused"), "{told}");
    assert!(!bench.control.runs() && !bench.control.has_ended());
    assert!(done.report.given_up);
    assert_eq!(done.report.end, RunEnd::Kept);
    // What it was is in the store.
    assert_eq!(bench.checkpoint("2"), done.former);
}

/// The watchdog knows what it needs before each step, and nothing once the rollback has ended.
#[test]
fn the_watchdog_can_end_a_rollback_in_the_engines_place() {
    let (bench, _) = Bench::new();
    let done = Rollback::run(&bench, |bench| {
        let control = bench.control.clone();
        bench.control.before(Step::RollBack, move || {
            let (plan, steps) = control.rollback();
            let plan = plan.expect("a plan");
            assert_eq!((plan.ran, plan.runs, plan.is_intact), (true, true, true));
            assert!(plan.words.contains("\"checkpoint\":1,\"before\":2"), "{}", plan.words);
            assert_eq!(steps, [RollbackStep::Loads]);
        });
        bench.control.at(Step::RollBack, Incident::Fail("the state is refused".into()));
        let control = bench.control.clone();
        // On the way back: the machine is in an unknown state until "before" is loaded.
        bench.control.before(Step::RollBack, move || {
            let plan = control.rollback().0.expect("a plan");
            assert!(plan.words.contains("\"checkpoint\":2,"), "{}", plan.words);
            assert!(plan.runs && !plan.is_intact);
        });
    });
    done.assert_unharmed("the state is refused; the VM is as it was");
    assert_eq!(bench.control.rollback().0, None);
}

#[test]
fn a_vm_that_ends_during_the_rollback_is_reported_as_ended() {
    let (bench, _) = Bench::new();
    let done = Rollback::run(&bench, |bench| {
        bench.control.at(Step::RollBack, Incident::End(3));
    });
    let _ = failed(&done.answer);
    assert!(matches!(done.report.end, RunEnd::VmEnded(exit) if exit.code() == Some(3)));
    assert!(!bench.control.take_steps().contains(&Step::End));
    assert_eq!(bench.checkpoint("2"), done.former);
}

#[test]
fn a_vm_whose_resume_fails_after_the_rollback_is_resumed_by_the_watchdog() {
    let (bench, _) = Bench::new();
    let done = Rollback::run(&bench, |bench| {
        // The first resume is that of the run's start.
        bench.control.before(Step::RollBack, {
            let control = bench.control.clone();
            move || control.at(Step::Resume, Incident::Fail("no answer".into()))
        });
    });
    assert!(failed(&done.answer).contains("resume the VM: no answer"));
    bench.assert_runs();
    assert_eq!(bench.ram(), bench.checkpoint("1"));
}

#[test]
fn an_unknown_checkpoint_is_refused_without_a_pause() {
    let (bench, mut options) = Bench::new();
    options.interval = None;
    let engine = bench.engine(options);
    let client = Client::of(&engine);
    let answer = client.roll_back("nowhere");
    drop(client.stop(None));
    drop(client);
    bench.run_engine(engine).unwrap();
    assert!(failed(&answer).contains("nowhere"));
    bench.assert_runs();
    assert!(!bench.control.take_steps().contains(&Step::Stop));
}
