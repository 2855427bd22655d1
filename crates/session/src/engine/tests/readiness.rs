//! When a session tells that it is ready.

use super::{Bench, Client};
use crate::Event;
use crate::control::{EngineStatus, VmState};

/// The statuses with which the session told that it is ready, each with the number of checkpoints
/// that were sealed before.
fn told(bench: &Bench) -> Vec<(usize, EngineStatus)> {
    let events = bench.told.0.lock().unwrap();
    let sealed_before = |at: usize| {
        events.iter().take(at).filter(|event| matches!(event, Event::Sealed(_))).count()
    };
    let ready = events.iter().enumerate().filter_map(|(at, event)| match event {
        Event::Ready(status) => Some((sealed_before(at), EngineStatus::clone(status))),
        _ => None,
    });
    ready.collect()
}

#[test]
fn it_is_ready_once_after_the_first_seal() {
    let (bench, mut options) = Bench::new();
    options.count = Some(3);
    bench.run(options).unwrap();
    let told = told(&bench);
    assert_eq!(told.len(), 1);
    let (sealed, status) = &told[0];
    assert_eq!((*sealed, status.sealed), (1, 1));
    assert_eq!(status.last.as_ref().map(|last| last.id), Some(1));
    assert_eq!(status.state, VmState::Running);
}

#[test]
fn a_session_of_one_checkpoint_is_ready_before_it_ends() {
    let (bench, mut options) = Bench::new();
    options.count = Some(1);
    bench.run(options).unwrap();
    assert_eq!(told(&bench).len(), 1);
}

#[test]
fn without_an_interval_it_is_ready_once_the_vm_runs() {
    let (bench, mut options) = Bench::new();
    options.interval = None;
    let engine = bench.engine(options);
    drop(Client::of(&engine).stop(None));
    bench.run_engine(engine).unwrap();
    let told = told(&bench);
    assert_eq!(told.len(), 1);
    assert_eq!((told[0].0, told[0].1.sealed, told[0].1.state), (0, 0, VmState::Running));
}
