//! Which tests run at the same time: half as many as there are processors and at least three, since
//! tests often wait for their guests. An exclusive test runs alone.
//!
//! ```text
//!   shared      at least three   waits for a slot, and while a test runs alone or waits to
//!   exclusive   one              waits until all other tests have ended
//! ```
//!
//! A thread that has a slot gets further ones at once, since a test may have several directories.
//! If `KEYFRAME_TEST_TIMES` names a file, each test appends a line to it when it ends: the seconds
//! that the test took, and its name.

use keyframe_locks::IgnorePoison;
use std::cell::Cell;
use std::io::Write;
use std::marker::PhantomData;
use std::num::NonZero;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

#[derive(Default)]
struct State {
    shared: usize,
    is_exclusive: bool,
    waiting_exclusive: usize,
}

static STATE: Mutex<State> =
    Mutex::new(State { shared: 0, is_exclusive: false, waiting_exclusive: 0 });
static CHANGED: Condvar = Condvar::new();

thread_local! {
    static HELD: Cell<usize> = const { Cell::new(0) };
    static BEGAN: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// The right of a test to run. Take and drop it on the test's own thread.
#[derive(Debug)]
pub struct Slot(PhantomData<*const ()>);

fn state() -> MutexGuard<'static, State> {
    STATE.lock().ignore_poison()
}

impl Slot {
    /// Waits until the test may run beside others.
    pub fn shared() -> Self {
        Self::take(false)
    }

    /// Waits until no other test runs. Call it before the test takes any other slot.
    pub fn exclusive() -> Self {
        Self::take(true)
    }

    fn take(is_exclusive: bool) -> Self {
        let held = HELD.get();
        let mut state = state();
        if held == 0 {
            let slots = std::thread::available_parallelism().map_or(1, NonZero::get) / 2;
            state.waiting_exclusive += usize::from(is_exclusive);
            let must_wait = |s: &mut State| {
                s.is_exclusive
                    || if is_exclusive {
                        s.shared > 0
                    } else {
                        s.waiting_exclusive > 0 || s.shared >= slots.max(3)
                    }
            };
            state = CHANGED.wait_while(state, must_wait).ignore_poison();
            state.waiting_exclusive -= usize::from(is_exclusive);
            state.shared += usize::from(!is_exclusive);
            state.is_exclusive = is_exclusive;
            BEGAN.set(Some(Instant::now()));
        }
        drop(state);
        HELD.set(held + 1);
        Self(PhantomData)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        HELD.set(HELD.get() - 1);
        if HELD.get() > 0 {
            return;
        }
        let mut state = state();
        if state.is_exclusive {
            state.is_exclusive = false;
        } else {
            state.shared -= 1;
        }
        drop(state);
        CHANGED.notify_all();
        if let Some(began) = BEGAN.take() {
            record_time(began.elapsed());
        }
    }
}

fn record_time(took: Duration) {
    let Some(file) = std::env::var_os("KEYFRAME_TEST_TIMES") else { return };
    let thread = std::thread::current();
    let line = format!("{:8.1} s  {}\n", took.as_secs_f64(), thread.name().unwrap_or("a test"));
    // One write, so that lines of two tests do not mix. A test does not fail for a missing line.
    let _ = std::fs::OpenOptions::new()
        .append(true)
        .create(true)
        .open(file)
        .and_then(|mut f| f.write_all(line.as_bytes()));
}
