//! The lines for the events of replays and analyses.

use keyframe_replay_driver::ReplayEvent;
use keyframe_units::{error_chain, error_with_fix};

/// Returns the line for `event`; `None` if the event has no line.
pub fn line(event: &ReplayEvent) -> Option<String> {
    Some(match event {
        ReplayEvent::RecorderKilled { recording } => format!(
            "{}: its recorder was killed; it ends with what QEMU had written by then",
            recording.display()
        ),
        ReplayEvent::IntervalFailed { index, error } => {
            format!("interval {index}: {}", error_with_fix(error, error.fix()))
        }
        ReplayEvent::IntervalWithoutPart { index, reason } => format!("interval {index}: {reason}"),
        ReplayEvent::DebuggerLost { error } => error_chain(error),
        ReplayEvent::DebuggerWriteRefused => {
            "the debugger wants to write registers or memory: what is \
                                        recorded cannot be changed"
                .into()
        }
        ReplayEvent::DivergedUnderDebugger { icount } => format!(
            "the replay has come off its log at instruction {icount}: go back from there, by one \
             instruction, and on"
        ),
        _ => return None,
    })
}
