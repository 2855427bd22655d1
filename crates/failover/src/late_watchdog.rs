//! The watchdog of a VM that runs already: it is started before the first pause, and started again
//! if that fails.

use keyframe_qemu::watchdog::{Watchdog, Watched};
use keyframe_session::launch::start_watchdog;
use keyframe_vmm::{PauseWatchdog, VmmError};
use std::time::Duration;

/// A watchdog that is started when it is first needed. A VM that just runs needs none, so a host
/// that has no room for one more process does not end it.
pub struct LateWatchdog {
    watched: Watched,
    started: Option<Watchdog>,
}

impl LateWatchdog {
    /// Will watch the pauses of the VM that `watched` connects to.
    pub fn new(watched: Watched) -> Self {
        Self { watched, started: None }
    }

    fn started(&mut self) -> Result<&mut Watchdog, VmmError> {
        match &mut self.started {
            Some(started) => Ok(started),
            none => Ok(none.insert(start_watchdog(&self.watched)?)),
        }
    }
}

impl PauseWatchdog for LateWatchdog {
    fn arm(&mut self, limit: Duration) -> Result<(), VmmError> {
        PauseWatchdog::arm(self.started()?, limit)
    }

    fn disarm(&mut self) -> Result<bool, VmmError> {
        PauseWatchdog::disarm(self.started()?)
    }

    fn forbid_running(&mut self) -> Result<bool, VmmError> {
        self.started()?.forbid_running()
    }

    fn resume_now(&mut self) {
        if let Some(started) = &mut self.started {
            started.resume_now();
        }
    }

    fn end(self: Box<Self>) {
        if let Some(started) = self.started {
            started.end();
        }
    }
}
