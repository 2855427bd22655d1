//! The lines for the events of a VM with a standby.

use crate::Importance::{self, Always, Usual};
use keyframe_failover::{Error, FailoverEvent, notice_text};
use keyframe_units::{error_chain, human_duration};

/// Returns the line for `event`, and its importance; `None` if the event has no line.
pub fn line(event: &FailoverEvent) -> Option<(Importance, String)> {
    let said = match event {
        FailoverEvent::Notice { role, notice } => (Usual, notice_text(*role, notice)),
        FailoverEvent::ConnectFailed(error) => {
            let text = format!(
                "no standby; it is tried again, and meanwhile the VM runs unprotected: {}",
                with_fix(error)
            );
            (Usual, text)
        }
        FailoverEvent::EpochFailed(error) => {
            (Usual, format!("an epoch failed: {}", with_fix(error)))
        }
        FailoverEvent::GuardFailed { error, restarts: true } => {
            (Always, format!("{}; another one is started", with_fix(error)))
        }
        FailoverEvent::GateFailed(error) => {
            (Always, format!("the gate of the VM's network: {}", error_chain(&**error)))
        }
        FailoverEvent::OutputNotHeld => {
            let text = "warning: the VM's packets do not wait for the standby (--hold-output none): after a takeover its \
                        clients may have seen answers that it has forgotten";
            (Always, text.into())
        }
        FailoverEvent::GuardFailed { error, .. }
        | FailoverEvent::ResumeFailed(error)
        | FailoverEvent::LookFailed(error) => (Always, with_fix(error)),
        FailoverEvent::FenceHookFailed(error) => (Always, format!("run the fence hook: {error}")),
        FailoverEvent::WritesKept(directory) => {
            let text =
                format!("what the VM has written to its disks is in {}", directory.display());
            (Usual, text)
        }
        FailoverEvent::RunsElsewhere { term } => {
            (Usual, format!("the VM runs on the other host, in term {term}"))
        }
        other => return standby(other),
    };
    Some(said)
}

/// Events of standbys and witnesses.
fn standby(event: &FailoverEvent) -> Option<(Importance, String)> {
    let said = match event {
        FailoverEvent::StandbyListens(address) => {
            (Usual, format!("standby: waits for a primary at {address}"))
        }
        FailoverEvent::NoPeer => {
            let text = "note: without --peer (the address at which the other host will listen) \
                        the VM has no standby once it runs here";
            (Usual, text.into())
        }
        FailoverEvent::CommandLineNote(note) => (Usual, format!("note: {note}")),
        FailoverEvent::QemuWaits { vm, qemu_pid } => {
            (Usual, format!("a QEMU waits for VM {vm} (pid {qemu_pid})"))
        }
        FailoverEvent::WaitingQemuEnded(exit) => {
            let text = format!(
                "the QEMU that waited has ended ({exit}); the primary is asked to begin again"
            );
            (Always, text)
        }
        FailoverEvent::ConnectionRefused(error) => {
            (Usual, format!("a connection is refused: {}", with_fix(error)))
        }
        FailoverEvent::PrimaryRefused(error) => {
            (Usual, format!("a primary is refused: {}", with_fix(error)))
        }
        FailoverEvent::TookOver { vm, epoch, ready_ns } => {
            let text = format!(
                "took over: VM {vm} runs here from epoch {epoch} on, {} after it had the right to",
                human_duration(*ready_ns)
            );
            (Usual, text)
        }
        FailoverEvent::NameNotKept(error) => {
            let text = format!(
                "warning: the VM is found by the standby's name alone: {}",
                with_fix(error)
            );
            (Always, text)
        }
        FailoverEvent::WitnessSilent(error) => {
            (Always, format!("{}: the question is not answered", with_fix(error)))
        }
        _ => return None,
    };
    Some(said)
}

fn with_fix(error: &Error) -> String {
    keyframe_units::error_with_fix(error, error.fix())
}
