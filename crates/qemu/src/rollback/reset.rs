//! A reset that ends a run state in which `cont` resumes no VM, before a state is loaded.
//!
//! ```text
//!   shutdown ─▶ set-action reboot=reset ─▶ system_reset ─▶ set-action as the line says ─▶ prelaunch ─▶ load
//! ```
//!
//! The virtual CPUs stand still all the while. The reset may write ROMs to RAM, as that of the load
//! itself, so all of RAM is compared with the target afterwards.
//!
//! QEMU cannot be asked for its present actions, so those of its command line count.

use super::{LOOK_EVERY, stand};
use crate::guest_end::action_at;
use crate::standstill::{needs_reset, stood_still};
use crate::{Error, Qmp, Result, Vm};
use keyframe_qemu_cmdline::options;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::time::{Duration, Instant};

/// The longest time that a reset may take.
const RESET_TIMEOUT: Duration = Duration::from_secs(30);

/// Why the machine is reset before a load.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Reset {
    /// It is in a run state that only a reset ends.
    LeaveFinalState,
    /// The target's VM stood still in this run state, which the VM is brought into.
    Stand(String),
}

/// What QEMU does at a reboot and at a shutdown of the guest, as its command line says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LineActions {
    pub reboot: String,
    pub shutdown: String,
}

impl Reset {
    /// The reset that a VM in the run state `now` needs before the state `device_state` is loaded.
    pub(super) fn before_load(now: &str, device_state: &[u8]) -> Option<Self> {
        match stood_still(device_state) {
            Some(state) => (now != state).then_some(Self::Stand(state)),
            None => needs_reset(now).then_some(Self::LeaveFinalState),
        }
    }

    /// Resets the machine. It does no harm if it was reset before. Errors: QEMU refuses or does not
    /// answer; the run state is another one afterwards.
    pub(super) fn carry_out(&self, qmp: &mut Qmp, actions: &LineActions) -> Result<()> {
        match self {
            Self::LeaveFinalState => leave_final_state(qmp, actions),
            Self::Stand(state) => stand::stand_in(qmp, state, actions),
        }
    }
}

impl LineActions {
    /// Has QEMU do what its command line says again. QEMU cannot be asked for its present actions,
    /// so those of its line come back, also if a client had set others.
    pub(super) fn set_back(&self, qmp: &mut Qmp) -> Result<()> {
        let reboot = if self.reboot == "shutdown" { "shutdown" } else { "reset" };
        let shutdown = if self.shutdown == "pause" { "pause" } else { "poweroff" };
        let actions = json!({ "reboot": reboot, "shutdown": shutdown });
        qmp.execute("set-action", Some(actions)).map(drop)
    }
}

impl Vm {
    /// What QEMU does at a reboot and at a shutdown, as its command line says.
    pub(super) fn line_actions(&self) -> LineActions {
        let arguments = options::parse(self.full_command().get(1..).unwrap_or_default());
        arguments.map_or_else(
            |_| LineActions::default(),
            |line| LineActions {
                reboot: action_at(&line, "reboot"),
                shutdown: action_at(&line, "shutdown"),
            },
        )
    }
}

/// Resets the machine if `cont` would not resume it otherwise, and waits until its run state shows
/// the reset. Errors: QEMU refuses or does not answer; the run state stays.
fn leave_final_state(qmp: &mut Qmp, actions: &LineActions) -> Result<()> {
    if !needs_reset(qmp.status()?.name()) {
        return Ok(());
    }
    // Otherwise a reset could end QEMU.
    qmp.execute("set-action", Some(json!({ "reboot": "reset" })))?;
    // Before its answer, QEMU has decided what the reset does.
    let reset = qmp.execute("system_reset", None);
    if actions.reboot == "shutdown" {
        qmp.execute("set-action", Some(json!({ "reboot": "shutdown" })))?;
    }
    reset?;
    let deadline = Instant::now() + RESET_TIMEOUT;
    loop {
        let status = qmp.status()?;
        if !needs_reset(status.name()) {
            return Ok(());
        }
        if Instant::now() >= deadline {
            let problem = format!("it is still in the state {} after a reset", status.name());
            return Err(Error::Rollback { problem });
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_whether_a_reboot_ends_qemu() {
        let ends = |line: &str| {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            action_at(&options::parse(&words).unwrap(), "reboot") == "shutdown"
        };
        assert!(ends("-no-reboot"));
        assert!(ends("-no-shutdown -action reboot=shutdown,panic=pause"));
        assert!(ends("-no-reboot -action shutdown=pause"));
        assert!(!ends("-no-shutdown"));
        assert!(!ends("-no-reboot -action reboot=reset"));
    }
}
