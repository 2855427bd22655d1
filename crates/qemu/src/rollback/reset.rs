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

use super::LOOK_EVERY;
use crate::guest_end::action_at;
use crate::standstill::needs_reset;
use crate::{Error, Result, Vm};
use keyframe_qemu_cmdline::options;
use serde_json::json;
use std::time::{Duration, Instant};

/// The longest time that a reset may take.
const RESET_TIMEOUT: Duration = Duration::from_secs(30);

impl Vm {
    /// Resets the machine if `cont` would not resume it otherwise, and waits until its run state
    /// shows the reset. Errors: QEMU refuses or does not answer; the run state stays.
    pub(super) fn leave_final_state(&mut self) -> Result<()> {
        if !needs_reset(self.qmp().status()?.name()) {
            return Ok(());
        }
        let arguments = options::parse(self.full_command().get(1..).unwrap_or_default());
        let ends = arguments.is_ok_and(|line| action_at(&line, "reboot") == "shutdown");
        let qmp = self.qmp();
        // Otherwise a reset could end QEMU.
        qmp.execute("set-action", Some(json!({ "reboot": "reset" })))?;
        // Before its answer, QEMU has decided what the reset does.
        let reset = qmp.execute("system_reset", None);
        if ends {
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
