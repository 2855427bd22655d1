//! The encoder is late, fails, or dies.

use super::{Bench, Client};
use crate::engine::Verdict;
use crate::error::Error;
use crate::event::Event;
use keyframe_vmm::fake::Step;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Opens the encoder's gate after the engine has looked at the VM `looks` times.
fn open_after(bench: &Bench, looks: usize) {
    for look in 1..=looks {
        let gate = Arc::clone(&bench.gate);
        bench.control.before(Step::DrainEvents, move || {
            if look == looks {
                gate.open();
            }
        });
    }
}

#[test]
fn a_late_encoder_delays_the_next_checkpoint_while_the_vm_runs() {
    // An audit allows one checkpoint in flight.
    let (bench, mut options) = Bench::new();
    options.count = Some(2);
    bench.gate.close();
    open_after(&bench, 6);
    let stops = Arc::new(AtomicUsize::new(0));
    let paused_while_closed = Arc::new(AtomicUsize::new(0));
    for _ in 0..2 {
        let (stops, gate) = (Arc::clone(&stops), Arc::clone(&bench.gate));
        let early = Arc::clone(&paused_while_closed);
        bench.control.before(Step::Stop, move || {
            stops.fetch_add(1, Ordering::Relaxed);
            early.fetch_add(usize::from(*gate.is_closed.lock().unwrap()), Ordering::Relaxed);
        });
    }
    let report = bench.run(options).unwrap();
    bench.assert_runs();
    assert_eq!((report.sealed, report.failed, report.verdict()), (2, 0, Verdict::Complete));
    assert_eq!(stops.load(Ordering::Relaxed), 2);
    assert_eq!(paused_while_closed.load(Ordering::Relaxed), 1, "the VM was paused for nothing");
    let is_late =
        |event: &Event| matches!(event, Event::Sealed(e) if e.id == 2 && e.backlog_ns > 1_000_000);
    assert_eq!(bench.told.count(is_late), 1);
    assert_eq!(bench.told.count(|event| matches!(event, Event::Late { .. })), 1);
}

#[test]
fn a_late_encoder_with_memory_left_lets_checkpoints_queue() {
    let (bench, mut options) = Bench::new();
    (options.audit, options.count) = (None, Some(4));
    bench.gate.close();
    // The fourth pause begins while none of the first three is sealed.
    for number in 1..=4 {
        let gate = Arc::clone(&bench.gate);
        bench.control.before(Step::Stop, move || {
            if number == 4 {
                gate.open();
            }
        });
    }
    let report = bench.run(options).unwrap();
    bench.assert_runs();
    assert_eq!((report.sealed, report.failed), (4, 0));
    assert_eq!(bench.checkpoint("latest"), bench.ram());
}

#[test]
fn a_full_store_loses_all_checkpoints_in_the_queue_and_the_next_is_whole() {
    let (bench, mut options) = Bench::new();
    (options.audit, options.count) = (None, Some(3));
    options.fault = Some("disk-full".parse().unwrap());
    bench.gate.close();
    for number in 1..=3 {
        let gate = Arc::clone(&bench.gate);
        bench.control.before(Step::Stop, move || {
            if number == 3 {
                gate.open();
            }
        });
    }
    let report = bench.run(options).unwrap();
    bench.assert_runs();
    assert_eq!((report.sealed, report.verdict()), (3, Verdict::Incomplete));
    assert!((1..=3).contains(&report.failed), "{}", report.failed);
    assert_eq!(bench.told.failures().len(), 1);
    assert_eq!(bench.checkpoint("latest"), bench.ram());
}

#[test]
fn checkpoints_in_the_queue_are_sealed_when_the_run_ends() {
    let (bench, mut options) = Bench::new();
    options.audit = None;
    bench.gate.close();
    let engine = bench.engine(options);
    let client = Client::of(&engine);
    for number in 1..=3 {
        let (gate, client) = (Arc::clone(&bench.gate), client.clone());
        bench.control.before(Step::Stop, move || {
            if number == 3 {
                drop(client.stop(None));
                gate.open();
            }
        });
    }
    drop(client);
    let report = bench.run_engine(engine).unwrap();
    bench.assert_runs();
    assert!(report.sealed >= 3, "{}", report.sealed);
    assert_eq!((report.failed, report.verdict()), (0, Verdict::Complete));
}

#[test]
fn a_dead_encoder_ends_neither_the_vm_nor_the_loop() {
    let (bench, options) = Bench::new();
    bench.encoder_panics.store(true, Ordering::Relaxed);
    let engine = bench.engine(options);
    let client = Client::of(&engine);
    for number in 1..=8 {
        let client = client.clone();
        bench.control.before(Step::DrainEvents, move || {
            if number == 8 {
                drop(client.stop(None));
            }
        });
    }
    drop(client);
    let error = bench.run_engine(engine).unwrap_err();
    assert!(matches!(error, Error::EncoderPanicked), "{error}");
    bench.assert_runs();
    assert_eq!((bench.checkpoints(), bench.told.sealed()), (0, 0));
    assert_eq!(bench.told.count(|event| matches!(event, Event::Kept { .. })), 1);
    assert_eq!(bench.told.count(|event| matches!(event, Event::Finished { .. })), 0);
}
