//! The events of a running measurement. They have typed fields; the program that runs the
//! measurement turns them into text for its user.

pub use keyframe_units::{EventSink, NoEvents};
use std::time::Duration;

/// An event of a measurement, for users.
#[derive(Debug)]
#[non_exhaustive]
pub enum ProfilerEvent {
    /// A VM was launched. Its measurement begins later, after a text on its console or a time.
    GuestStarted,
    /// QEMU was in danger while this process attached to it: had this process died, QEMU would have
    /// died with it.
    UnguardedAttach {
        /// QEMU's process.
        qemu_pid: u32,
    },
    /// The epochs of one VM begin.
    EpochsBegin {
        /// The number of its vCPUs, if known.
        vcpus: Option<u32>,
        /// The time for which all of its epochs take.
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
