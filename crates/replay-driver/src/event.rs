//! What replays and analyses tell the program that runs them, while they run.
//!
//! Events have typed fields and no text. The program decides which of them its user reads, and in
//! which words.

use crate::Error;
use std::path::PathBuf;
use std::sync::Arc;

/// Takes events in. Its method is called from several threads, and the caller waits for it.
pub trait EventSink: Send + Sync {
    /// `event` has happened.
    fn event(&self, event: &Event);
}

/// Ignores all events.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoEvents;

impl EventSink for NoEvents {
    fn event(&self, _: &Event) {}
}

/// A sink that several owners share.
pub type SharedEventSink = Arc<dyn EventSink>;

/// One thing that has happened.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// The process that made a recording was killed. The recording ends with the log that QEMU had
    /// written by then.
    RecorderKilled {
        /// The recording's directory.
        recording: PathBuf,
    },
    /// Replays begin.
    ReplaysBegin {
        /// Number of instructions that they execute, all together.
        instructions: u64,
    },
    /// Replays have advanced.
    Replayed {
        /// Number of instructions since the last such event.
        instructions: u64,
    },
    /// The part of an interval could not be made or written.
    IntervalFailed {
        /// The interval.
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
    /// A debugger wants to write registers or memory, which is refused. Told once for a debugger.
    DebuggerWriteRefused,
    /// A replay under a debugger has diverged from its log.
    DivergedUnderDebugger {
        /// The instruction before which it has stopped.
        icount: u64,
    },
}
