//! Tests run side by side, half as many as there are processors and three at least, since much of
//! the time they wait for their guests; but for those that need the machine for themselves.
//!
//! ```text
//!   shared   three at least           waits for a place, and while a test is alone or waits to be
//!   alone    one                      waits until all others have ended
//! ```
//!
//! A thread that has a turn gets further ones at once: a test may have several places to work in.
//! With `KEYFRAME_TEST_TIMES=FILE` each test leaves a line in FILE when its turn ends: how many
//! seconds it took, and its name.

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
    alone: bool,
    waiting: usize,
}

static STATE: Mutex<State> = Mutex::new(State { shared: 0, alone: false, waiting: 0 });
static CHANGED: Condvar = Condvar::new();

thread_local! {
    static HELD: Cell<usize> = const { Cell::new(0) };
    static BEGAN: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// What a test holds while it runs. It is given back where it was taken, on the test's own thread.
#[derive(Debug)]
pub struct Turn(PhantomData<*const ()>);

fn state() -> MutexGuard<'static, State> {
    STATE.lock().ignore_poison()
}

impl Turn {
    /// Beside other tests.
    pub fn shared() -> Self {
        Self::take(false)
    }

    /// While no other test runs. Before anything else that takes a turn.
    pub fn alone() -> Self {
        Self::take(true)
    }

    fn take(alone: bool) -> Self {
        let held = HELD.get();
        let mut state = state();
        if held == 0 {
            let places = std::thread::available_parallelism().map_or(1, NonZero::get) / 2;
            state.waiting += usize::from(alone);
            let must_wait = |s: &mut State| {
                s.alone
                    || if alone { s.shared > 0 } else { s.waiting > 0 || s.shared >= places.max(3) }
            };
            state = CHANGED.wait_while(state, must_wait).ignore_poison();
            state.waiting -= usize::from(alone);
            state.shared += usize::from(!alone);
            state.alone = alone;
            BEGAN.set(Some(Instant::now()));
        }
        drop(state);
        HELD.set(held + 1);
        Self(PhantomData)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        HELD.set(HELD.get() - 1);
        if HELD.get() > 0 {
            return;
        }
        let mut state = state();
        if state.alone {
            state.alone = false;
        } else {
            state.shared -= 1;
        }
        drop(state);
        CHANGED.notify_all();
        if let Some(began) = BEGAN.take() {
            note(began.elapsed());
        }
    }
}

fn note(took: Duration) {
    let Some(file) = std::env::var_os("KEYFRAME_TEST_TIMES") else { return };
    let thread = std::thread::current();
    let line = format!("{:8.1} s  {}\n", took.as_secs_f64(), thread.name().unwrap_or("a test"));
    // One write, so that lines of two tests do not mix. Without the line nothing is lost but the
    // line.
    let _ = std::fs::OpenOptions::new()
        .append(true)
        .create(true)
        .open(file)
        .and_then(|mut f| f.write_all(line.as_bytes()));
}
