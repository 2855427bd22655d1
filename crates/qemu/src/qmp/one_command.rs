//! The command that is a whole pause: QEMU stops the VM, saves its devices, and resumes the VM when
//! it has written the last byte, if the VM ran before.
//!
//! ```text
//!   begin ─▶ STOP ─▶ QEMU waits for the pipe ─▶ release ─▶ RESUME ─▶ answer
//!            └ not if another client had paused the VM ┘
//! ```

use super::{Pause, Qmp, now_us};
use crate::{Result, RunStatus};
use keyframe_vmm::ForeignOperation;
use serde_json::{Value, json};

const COMMAND: &str = "xen-save-devices-state";
/// The states of a migration that is not under way.
const MIGRATION_IS_OVER: &[&str] = &["none", "completed", "failed", "cancelled"];

/// A command whose answer has not arrived yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PauseCommand {
    id: u64,
    /// STOP events before the command.
    stops: u64,
    /// Whether the VM ran before it, if events may lag behind answers.
    ran: Option<bool>,
}

impl Qmp {
    /// Sends the command. QEMU writes the device state to `target`.
    pub(crate) fn begin_pause(&mut self, target: &str) -> Result<PauseCommand> {
        self.drain(COMMAND)?;
        let lags = self.channel.events_lag();
        let ran = if lags { Some(self.status()?.is_running()) } else { None };
        self.pause = Some(Pause { stop_us: lags.then(now_us), ..Pause::default() });
        let stops = self.stops;
        // With `live`, QEMU would give away the images of a VM that does not run.
        let arguments = json!({ "filename": target, "live": false });
        Ok(PauseCommand { id: self.send(COMMAND, Some(arguments), None)?, stops, ran })
    }

    /// The command's answer; `None` if it has not arrived. Does not wait.
    pub(crate) fn pause_answer(&mut self, command: PauseCommand) -> Result<Option<Value>> {
        while let Some(message) = self.channel.receive_now(COMMAND)? {
            if self.keep_event(&message) {
                continue;
            }
            if let Some(answer) = self.match_answer(&message, command.id, COMMAND) {
                return answer.map(Some);
            }
        }
        Ok(None)
    }

    /// Whether the command stopped the VM. False if another client had paused it.
    pub(crate) fn has_stopped(&self, command: PauseCommand) -> bool {
        command.ran.unwrap_or(self.stops > command.stops)
    }

    /// Notes that QEMU is about to be released: a RESUME event from here on is its own.
    pub(crate) fn note_release(&mut self) {
        if let Some(pause) = &mut self.pause {
            pause.cont_us.get_or_insert_with(now_us);
        }
    }

    /// Notes that the VM ran before it was released.
    pub(crate) fn note_torn_pause(&mut self) {
        if let Some(pause) = &mut self.pause {
            pause.resumed = true;
        }
    }

    /// Resumes a VM that QEMU has stopped for the command and has not resumed after it. QEMU 10.0
    /// leaves a guest so that was suspended (ACPI S3).
    pub(crate) fn resume_suspended(&mut self, command: PauseCommand) -> Result<()> {
        let resumed = self.pause.as_ref().is_none_or(|pause| pause.resumed || pause.resumed_by_us);
        if command.ran.is_some() || !self.has_stopped(command) || resumed {
            return Ok(());
        }
        // A dump by another client leaves the VM in the same state as long as it lasts.
        let is_left = self.status()? == RunStatus::Other("save-vm".into());
        if is_left && !self.is_dumping()? {
            self.execute("cont", None)?;
        }
        Ok(())
    }

    /// A migration or a dump by another client that is under way.
    pub(crate) fn foreign_operation(&mut self) -> Result<Option<ForeignOperation>> {
        let answer = self.execute("query-migrate", None)?;
        let status = answer.get("status").and_then(Value::as_str).unwrap_or("none");
        if !MIGRATION_IS_OVER.contains(&status) {
            return Ok(Some(ForeignOperation::Migration));
        }
        Ok(self.is_dumping()?.then_some(ForeignOperation::Dump))
    }

    /// Whether another client has QEMU dump the guest's memory.
    pub(crate) fn is_dumping(&mut self) -> Result<bool> {
        let answer = self.execute("query-dump", None)?;
        Ok(answer.get("status").and_then(Value::as_str) == Some("active"))
    }
}
