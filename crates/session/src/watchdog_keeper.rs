//! A watchdog that is started again if its process ends.
//!
//! ```text
//!   arm ──▶ there? ──yes──▶ armed
//!              └──no──▶ started again? ──yes──▶ armed
//!                            └──no──▶ the checkpoint fails; tried again later, a few times ──▶ lost
//! ```
//!
//! Invariants: no VM is paused for a checkpoint without an armed watchdog. If a watchdog's process
//! ends while the VM is paused, the checkpoint of this pause fails, because nothing tells whether
//! the watchdog has resumed the VM.

use crate::event::{Event, Helper, SharedEventSink};
use keyframe_capture::BoxError;
use keyframe_pause_watchdog::{Error, Watchdog};
use keyframe_vmm::{PauseWatchdog, RollbackPlan, RollbackStep, VmmError, VmmErrorKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How many starts may fail, one after the other.
const TRIES_MAX: u32 = 5;
/// The wait after the first failed start. It doubles with each further one.
const WAIT_MIN: Duration = Duration::from_millis(500);

/// A handle that tells whether a VM has a watchdog.
#[derive(Clone, Debug, Default)]
pub struct WatchdogHealth(Arc<AtomicBool>);

impl WatchdogHealth {
    /// Returns true if the VM has no watchdog, and none can be started.
    pub fn is_lost(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// A function that starts a watchdog. Error: its process cannot be started.
pub type StartWatchdog = Box<dyn FnMut() -> Result<Watchdog, BoxError> + Send>;

/// Keeps a watchdog at work: starts another one if its process ends.
pub struct WatchdogKeeper {
    start: StartWatchdog,
    events: SharedEventSink,
    current: Option<Watchdog>,
    /// Whether there has been one.
    has_started: bool,
    health: WatchdogHealth,
    /// Failed starts since the last good one, and when the next one may be tried.
    failed: u32,
    not_before: Instant,
}

impl WatchdogKeeper {
    /// Starts the first watchdog. Error: it cannot be started.
    pub fn start(mut start: StartWatchdog, events: SharedEventSink) -> Result<Self, VmmError> {
        let current = Some(start().map_err(not_started)?);
        Ok(Self { current, has_started: true, ..Self::later(start, events) })
    }

    /// Makes a keeper that starts the first watchdog just before the first pause.
    pub fn later(start: StartWatchdog, events: SharedEventSink) -> Self {
        let (health, not_before) = (WatchdogHealth::default(), Instant::now());
        let (current, has_started) = (None, false);
        Self { start, events, current, has_started, health, failed: 0, not_before }
    }

    /// Returns a handle that tells later whether there is a watchdog.
    pub fn health(&self) -> WatchdogHealth {
        self.health.clone()
    }

    /// Calls `order`. If that fails, the process has ended or does not answer; then it is ended,
    /// and the next pause gets another one.
    fn order<T>(
        &mut self,
        order: impl FnOnce(&mut Watchdog) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let current = self.current.as_mut().ok_or_else(ended)?;
        let done = order(current);
        if done.is_err()
            && let Some(current) = self.current.take()
        {
            current.kill();
        }
        done
    }

    /// Arms the watchdog, or another one if its process has ended.
    fn arm_by(&mut self, arm: impl Fn(&mut Watchdog) -> Result<(), Error>) -> Result<(), VmmError> {
        if self.current.is_some() && self.order(&arm).is_ok() {
            return Ok(());
        }
        self.replace()?;
        Ok(self.order(arm)?)
    }

    fn replace(&mut self) -> Result<&mut Watchdog, VmmError> {
        if self.health.is_lost() || Instant::now() < self.not_before {
            return Err(ended().into());
        }
        match (self.start)() {
            Ok(new) => {
                self.failed = 0;
                let pid = new.pid();
                if std::mem::replace(&mut self.has_started, true) {
                    self.events.event(&Event::HelperRestarted { helper: Helper::Watchdog, pid });
                }
                Ok(self.current.insert(new))
            }
            Err(error) => {
                self.failed += 1;
                self.not_before = Instant::now() + WAIT_MIN * (1 << self.failed.min(8));
                if self.failed >= TRIES_MAX {
                    self.health.0.store(true, Ordering::Release);
                }
                Err(not_started(error))
            }
        }
    }
}

fn not_started(error: BoxError) -> VmmError {
    VmmError::new(VmmErrorKind::Other, error, None)
}

fn ended() -> Error {
    Error::Problem { problem: "it has ended, and no other one has been started".into() }
}

impl PauseWatchdog for WatchdogKeeper {
    fn ensure(&mut self) -> Result<(), VmmError> {
        if self.current.is_none() {
            self.replace()?;
        }
        Ok(())
    }

    fn arm(&mut self, limit: Duration) -> Result<(), VmmError> {
        self.arm_by(|watchdog| watchdog.arm(limit))
    }

    fn arm_for_saved_pause(&mut self, limit: Duration) -> Result<(), VmmError> {
        self.arm_by(|watchdog| watchdog.arm_for_saved_pause(limit))
    }

    fn disarm(&mut self) -> Result<bool, VmmError> {
        Ok(self.order(Watchdog::disarm)?.0)
    }

    fn forbid_running(&mut self) -> Result<bool, VmmError> {
        Ok(self.order(Watchdog::between)?.0)
    }

    fn plan_rollback(&mut self, plan: Option<&RollbackPlan>) -> Result<(), VmmError> {
        Ok(self.order(|watchdog| watchdog.plan_rollback(plan))?)
    }

    fn note_step(&mut self, step: &RollbackStep) -> Result<(), VmmError> {
        Ok(self.order(|watchdog| watchdog.note_step(step))?)
    }

    fn resume_now(&mut self) {
        if let Some(watchdog) = &mut self.current {
            PauseWatchdog::resume_now(watchdog);
        }
    }

    fn end(self: Box<Self>) {
        if let Some(watchdog) = self.current {
            watchdog.end();
        }
    }
}
