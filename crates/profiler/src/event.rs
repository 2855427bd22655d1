//! What a measurement tells the program that runs it, while it runs.

use std::time::Duration;

/// Takes events in. Its method is called from several threads, and the measurement waits for it.
pub trait EventSink: Sync {
    /// `event` has happened.
    fn event(&self, event: &Event);
}

/// Ignores all events.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoEvents;

impl EventSink for NoEvents {
    fn event(&self, _: &Event) {}
}

/// One thing that has happened in a measurement.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// A VM was started. Its measurement waits for a text on its console, or for its settling.
    GuestStarted,
    /// QEMU would not have survived this process's death while its memory was attached to.
    UnguardedAttach {
        /// QEMU's process.
        qemu_pid: u32,
    },
    /// The epochs of one VM begin.
    EpochsBegin {
        /// The number of its vCPUs, if known.
        vcpus: Option<u32>,
        /// How long all of its epochs take.
        total: Duration,
    },
    /// A VM that was launched could not be ended.
    NotEnded {
        /// The reason.
        error: crate::Error,
    },
    /// An epoch was measured.
    EpochMeasured {
        /// Its nominal length.
        length: Duration,
    },
}
