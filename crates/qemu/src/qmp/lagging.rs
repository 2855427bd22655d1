//! `stop` and `cont` over libvirt, whose events may arrive after the answers.
//!
//! ```text
//!   status ─▶ stop ─▶ its STOP event, by QEMU's clock not before our stop was sent: ours   ─▶ ...
//!   ... ─▶ cont ─▶ its RESUME event; each RESUME of another client came before it on the same way
//! ```
//!
//! Both clocks are the host's. An event that never comes fails the checkpoint: without events it is
//! not known whether the VM was paused throughout.

use super::{Pause, Qmp, Stopped, now_us};
use crate::{Error, Result};
use std::time::{Duration, Instant};

/// How long the event of our own command may take.
const EVENT_TIMEOUT: Duration = Duration::from_secs(3);
/// How long to wait for an event that may not come at all.
const EVENT_GRACE: Duration = Duration::from_millis(100);

impl Qmp {
    /// Pauses the VM, and finds out whether our `stop` did it.
    pub(super) fn stop_lagging(&mut self) -> Result<Stopped> {
        self.drain("stop")?;
        let ran = self.status()?.is_running();
        let stop_us = now_us();
        self.pause = Some(Pause { stop_us: Some(stop_us), ..Pause::default() });
        let stops = self.stops;
        self.execute("stop", None)?;
        let ours = |qmp: &Self| qmp.stops > stops && qmp.stopped_us.is_some_and(|us| us >= stop_us);
        // Another client may have paused it, or let it run, since we looked.
        let seen = |qmp: &Self| qmp.stops > stops;
        if ran && !self.wait_until(EVENT_TIMEOUT, seen)? {
            return Err(self.no_event("STOP"));
        }
        let was_running = self.wait_until(EVENT_GRACE, ours)?;
        Ok(Stopped { was_running })
    }

    /// Waits until it is known whether another client resumed the VM in our pause.
    pub(super) fn await_resume(&mut self) -> Result<()> {
        let Some(pause) = &self.pause else { return Ok(()) };
        if pause.cont_us.is_some() {
            let known =
                |qmp: &Self| qmp.pause.as_ref().is_none_or(|p| p.resumed || p.resumed_by_us);
            if !self.wait_until(EVENT_TIMEOUT, known)? {
                return Err(self.no_event("RESUME"));
            }
            return Ok(());
        }
        // Another client's pause, or ours before its end: no event of ours tells that the others
        // have arrived.
        self.wait_until(EVENT_GRACE, |qmp| qmp.pause.as_ref().is_none_or(|p| p.resumed))?;
        let runs = self.status()?.is_running();
        if let Some(pause) = &mut self.pause {
            pause.resumed |= runs;
        }
        Ok(())
    }

    /// Reads events until `done` is true; false if that does not happen within `timeout`.
    fn wait_until(&mut self, timeout: Duration, done: impl Fn(&Self) -> bool) -> Result<bool> {
        let deadline = Instant::now() + timeout;
        while !done(self) {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.channel.receive("wait for an event", left) {
                Ok(message) => self.keep_event(&message),
                Err(Error::Timeout { .. }) => return Ok(false),
                Err(e) => return Err(e),
            };
        }
        Ok(true)
    }

    fn no_event(&self, name: &str) -> Error {
        Error::Timeout {
            monitor: self.channel.name().into(),
            operation: format!("wait for the {name} event"),
            waited_ms: u64::try_from(EVENT_TIMEOUT.as_millis()).unwrap_or(u64::MAX),
        }
    }
}
