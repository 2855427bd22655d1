//! Measures a failover: the time from a host's loss of power to the client's next answer.

use super::method::Setup;
use super::test_bed::{GuestOnHosts, TestBed};
use crate::Error;
use keyframe_test_hosts::ledger::{self, Ledger};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The number of entries before the loss of power.
const ENTRIES_BEFORE: usize = 20;
const WAIT_S: f64 = 60.0;
const DISK_BYTES: u64 = 8 << 20;

/// An answer within this time after the loss of power was already on its way. No failover is faster.
const IN_FLIGHT: Duration = Duration::from_millis(20);

/// The results of the client.
#[derive(Default)]
struct Shared {
    over: AtomicBool,
    /// The time of each answer.
    answers: Mutex<Vec<Instant>>,
    wrong: Mutex<Option<String>>,
}

/// Protects a guest and cuts the power of its host. Returns the time until the guest answers again.
pub fn measure(test_bed: &mut TestBed<'_>) -> Result<Duration, Error> {
    let setup = Setup::Replicated { policy: "adaptive", hold_output: "net" };
    let running = test_bed.start(Some(setup), "kf.work=ledger kf.dev=/dev/vda", &disk)?;
    let shared = Arc::new(Shared::default());
    let client = Arc::clone(&shared);
    let thread = running.test_bed().network.c.inside(move || enter(&client));
    thread.map_err(Error::io("start a client"))?;
    let took = fail_over(&running, &shared);
    shared.over.store(true, Ordering::Relaxed);
    took
}

fn fail_over(running: &GuestOnHosts<'_>, shared: &Shared) -> Result<Duration, Error> {
    let test_bed = running.test_bed();
    // The first answer that `fits`.
    let answer = |fits: &dyn Fn(usize, Instant) -> bool| {
        if let Some(wrong) = shared.wrong.lock().ok().and_then(|wrong| wrong.clone()) {
            return Err(Error::failed("fail over", format!("{wrong}; {}", running.report())));
        }
        let answers = shared.answers.lock().map_or_else(|_| Vec::new(), |answers| answers.clone());
        Ok(answers.into_iter().enumerate().find(|(n, at)| fits(*n, *at)).map(|(_, at)| at))
    };
    test_bed.interrupt.wait("the guest answers", WAIT_S, || answer(&|n, _| n >= ENTRIES_BEFORE))?;
    running.check()?;
    let killed = Instant::now();
    test_bed.network.a.kill_all();
    let dead = Instant::now() + IN_FLIGHT;
    let next =
        test_bed.interrupt.wait("the guest answers again", WAIT_S, || answer(&|_, at| at > dead));
    let next = next.map_err(|e| Error::failed(e.to_string(), running.report()))?;
    Ok(next.duration_since(killed))
}

/// Enters values until the end of the measurement.
fn enter(shared: &Shared) {
    let address = SocketAddr::from(([10, 78, 0, 15], ledger::PORT));
    let is_over = || shared.over.load(Ordering::Relaxed);
    let connected = Ledger::connect(address, Instant::now() + Duration::from_secs(30), is_over);
    let entered = connected.and_then(|mut ledger| {
        while !is_over() {
            ledger.enter()?;
            if let Ok(mut answers) = shared.answers.lock() {
                answers.push(Instant::now());
            }
        }
        Ok(())
    });
    if let (Err(text), Ok(mut wrong)) = (entered, shared.wrong.lock()) {
        *wrong = Some(text);
    }
}

/// Returns QEMU's options for the ledger's disk, whose contents must agree with its memory.
fn disk(dir: &Path) -> Result<Vec<String>, Error> {
    let path = dir.join("ledger.img");
    let made = std::fs::File::create(&path).and_then(|file| file.set_len(DISK_BYTES));
    made.map_err(Error::io("make a disk"))?;
    Ok(vec!["-drive".into(), format!("file={},if=virtio,format=raw,id=ledger", path.display())])
}
