//! Brings the VM into the run state of a checkpoint whose VM stood still, before its state is loaded.
//!
//! ```text
//!   stands so already ─▶ nothing
//!   otherwise          ─▶ system_reset ─▶ set-action reboot=shutdown ─▶ cont, system_reset ─▶ shutdown
//! ```
//!
//! QEMU has no command for a run state, and a load changes none. With `reboot=shutdown`, a reset of a
//! running VM stops it in the state `shutdown`, without a reset. For a moment the virtual CPUs run the
//! first instructions of the firmware. The load replaces RAM and devices; the caller checks that the
//! firmware has written to no disk.

use super::reset::LineActions;
use super::{LOOK_EVERY, RollbackObstacle};
use crate::standstill::stood_still;
use crate::{Error, Qmp, Result, Vm};
use serde_json::json;
use std::time::{Duration, Instant};

/// The longest time until the VM is in another run state.
const STATE_TIMEOUT: Duration = Duration::from_secs(30);
/// The longest time for which the VM may run until its reset stops it.
const RUN_MAX: Duration = Duration::from_secs(1);

impl Vm {
    /// Fails if the checkpoint with `device_state` is of a VM that stood still, and this VM cannot be
    /// brought into the same run state.
    pub(super) fn check_can_stand(&mut self, device_state: &[u8]) -> Result<()> {
        let Some(state) = stood_still(device_state) else { return Ok(()) };
        let stands = self.qmp().status()?.name() == state;
        // Otherwise QEMU is to end with its guest.
        let pauses = self.line_actions().shutdown == "pause";
        let can_stand = if state == "shutdown" { pauses } else { stands };
        if can_stand { Ok(()) } else { Err(RollbackObstacle::TargetStands { state }.refuse()) }
    }
}

/// Brings the VM into the run state `state`. After an error it stands still in any state.
pub(super) fn stand_in(qmp: &mut Qmp, state: &str, line: &LineActions) -> Result<()> {
    if qmp.status()?.name() == state {
        return Ok(());
    }
    qmp.execute("set-action", Some(json!({ "reboot": "reset" })))?;
    let stood = reset(qmp).and_then(|()| {
        // Both at once: a client may have set `shutdown=poweroff`, with which the reset would end
        // QEMU.
        let actions = json!({ "reboot": "shutdown", "shutdown": "pause" });
        qmp.execute("set-action", Some(actions))?;
        let shut = qmp.cont().and_then(|()| qmp.execute("system_reset", None));
        let shut = shut.and_then(|_| await_state(qmp, state));
        if shut.is_err() {
            let _ = qmp.stop();
        }
        qmp.forget_stop();
        shut
    });
    let set_back = line.set_back(qmp);
    stood.and(set_back)
}

/// Fails unless the VM is in the run state `state`.
pub(super) fn require_state(qmp: &mut Qmp, state: &str) -> Result<()> {
    match qmp.status()?.name() {
        now if now == state => Ok(()),
        now => Err(Error::Rollback { problem: format!("its state is {now}, not {state}") }),
    }
}

/// Resets the machine, whose virtual CPUs stand still.
fn reset(qmp: &mut Qmp) -> Result<()> {
    qmp.execute("system_reset", None)?;
    await_state(qmp, "prelaunch")
}

/// Waits until the VM is in the run state `state`. Error: it runs for longer than [`RUN_MAX`], or is
/// in another state after [`STATE_TIMEOUT`]; QEMU does not answer.
fn await_state(qmp: &mut Qmp, state: &str) -> Result<()> {
    let began = Instant::now();
    loop {
        let status = qmp.status()?;
        if status.name() == state {
            return Ok(());
        }
        let limit = if status.is_running() { RUN_MAX } else { STATE_TIMEOUT };
        if began.elapsed() >= limit {
            let problem = format!("it is still in the state {}, not {state}", status.name());
            return Err(Error::Rollback { problem });
        }
        std::thread::sleep(LOOK_EVERY);
    }
}
