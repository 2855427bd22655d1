//! The events of running replays and analyses. They have typed fields; the program that runs a
//! replay turns them into text for its user.

use crate::Error;
pub use keyframe_units::{EventSink, NoEvents};
use std::path::PathBuf;

/// The sink of a replay's events, which its threads share.
pub type SharedReplayEventSink = keyframe_units::SharedEventSink<ReplayEvent>;

/// An event of a replay or an analysis.
#[derive(Debug)]
#[non_exhaustive]
pub enum ReplayEvent {
    /// The process that made a recording was killed. The recording ends with the log that QEMU had
    /// written by then.
    RecorderKilled {
        /// The recording's directory.
        recording: PathBuf,
    },
    /// Replays begin.
    ReplaysBegin {
        /// The number of instructions that they execute, all together.
        instructions: u64,
    },
    /// Replays have advanced.
    Replayed {
        /// The number of instructions since the last such event.
        instructions: u64,
    },
    /// The part of an interval could not be made or written.
    IntervalFailed {
        /// The interval, or the first one of its range.
        index: u32,
        /// The reason.
        error: Error,
    },
    /// An interval has no part, and another interval's failure is returned as the error.
    IntervalWithoutPart {
        /// The interval.
        index: u32,
        /// The reason.
        reason: String,
    },
    /// A debugger's connection failed. The VM waits for the next debugger.
    DebuggerLost {
        /// The reason.
        error: Error,
    },
    /// A debugger wants to write registers or memory, which is refused. The event occurs once for
    /// each debugger.
    DebuggerWriteRefused,
    /// A replay under a debugger has diverged from its log.
    DivergedUnderDebugger {
        /// The instruction before which it has stopped.
        icount: u64,
    },
}
