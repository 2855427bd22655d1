//! Run states in which a VM stands still although no client paused it.
//!
//! | state | cause | `cont` |
//! |---|---|---|
//! | `shutdown` | the guest has shut down, under `-no-shutdown` | refused before a reset |
//! | `internal-error` | QEMU or KVM failed | refused before a reset |
//! | `io-error` | a disk failed, under `werror=stop` or `rerror=stop` | the request is repeated |
//! | `watchdog` | the guest's watchdog expired, under `-action watchdog=pause` | goes on |
//! | `suspended` | the guest sleeps | does nothing; a wake-up resets the machine |
//! | `guest-panicked` | the guest panicked, under `-action panic=pause` | goes on |
//!
//! A checkpoint of such a VM holds the state, and a restored VM stands still in it. Only the VM's
//! user ends it.

use crate::{Qmp, Result, RunStatus, Vm, stream};

/// The states, by QEMU's names.
const STATES: &[&str] =
    &["shutdown", "internal-error", "io-error", "watchdog", "guest-panicked", "suspended"];
/// Those in which `cont` resumes no VM before a reset.
const NEED_RESET: &[&str] = &["shutdown", "internal-error", "suspended"];

/// True if `cont` resumes no VM in the run state `name` before a reset.
pub(crate) fn needs_reset(name: &str) -> bool {
    NEED_RESET.contains(&name)
}

/// The run state in `device_state`, if its VM stood still although no client had paused it.
pub(crate) fn stood_still(device_state: &[u8]) -> Option<String> {
    let state = stream::run_state(device_state).ok().flatten();
    state.filter(|name| STATES.contains(&&**name))
}

impl Qmp {
    /// Resumes a VM whose state was loaded from a checkpoint. Leaves it paused if it stood still in
    /// the checkpoint although no client had paused it. Error: QEMU does not answer.
    pub fn start_loaded(&mut self) -> Result<()> {
        match self.status()? {
            status if STATES.contains(&status.name()) => Ok(()),
            _ => self.cont(),
        }
    }
}

impl RunStatus {
    /// Returns the name that QEMU gives this run state.
    pub fn name(&self) -> &str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Prelaunch => "prelaunch",
            Self::InMigrate => "inmigrate",
            Self::Shutdown => "shutdown",
            Self::Other(name) => name,
        }
    }
}

impl Vm {
    /// `device_state` of the VM as it is now, with its run state if it stands still although no
    /// client paused it.
    pub(crate) fn note_standstill(&mut self, device_state: Vec<u8>) -> Result<Vec<u8>> {
        if self.qmp().stopped_by_us() {
            return Ok(device_state);
        }
        let status = self.qmp().status()?;
        if STATES.contains(&status.name()) {
            return Ok(stream::with_run_state(&device_state, status.name())?);
        }
        Ok(device_state)
    }
}
