//! Errors of switches and gates.

use crate::PortId;
use serde::{Deserialize, Serialize};

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed operation of a switch or a gate. The error names the object and the operation. The
/// switch's process sends it to its controller unchanged.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error("{operation}")]
    Io {
        /// What was done to what.
        operation: String,
        /// Why it failed.
        #[serde(with = "as_text")]
        source: std::io::Error,
    },
    /// A VM does not take in what was sent to it.
    #[error("{port} does not come to rest within {waited_ms} ms: {problem}")]
    NotQuiet {
        /// The VM's connection.
        port: PortId,
        /// How long was waited.
        waited_ms: u64,
        /// What is seen.
        problem: String,
    },
    /// What is in flight cannot be told any more: the checkpoint has to be given up.
    #[error("packets in flight are not all known: {reason}")]
    Torn {
        /// Why.
        reason: String,
    },
    /// The switch delivers packets, and must not for what was asked.
    #[error("{operation}: the switch is not held")]
    NotHeld {
        /// What was asked.
        operation: String,
    },
    /// There is no such port.
    #[error("{operation}: no {port} is connected")]
    UnknownPort {
        /// The port named.
        port: PortId,
        /// What was asked.
        operation: String,
    },
    /// A recorded port has packets and nowhere to put them.
    #[error(
        "restore packets in flight: nothing stands for the recorded {port}, which has {frames}"
    )]
    Unmapped {
        /// The recorded port.
        port: PortId,
        /// Its frames.
        frames: usize,
    },
    /// Recorded packets cannot be read.
    #[error("packets in flight, byte {offset}: {problem}")]
    InFlight {
        /// Where.
        offset: usize,
        /// What is wrong.
        problem: String,
    },
    /// Recorded by a later Keyframe.
    #[error("packets in flight: format version {found}, and {known} is the latest known")]
    LaterVersion {
        /// The version found.
        found: u32,
        /// The latest known.
        known: u32,
    },
    /// There is no listening at that path.
    #[error("listen at {path}: {problem}")]
    Listen {
        /// The socket's path.
        path: String,
        /// Why not.
        problem: String,
    },
    /// The switch has a controller.
    #[error("the switch is controlled by another process (one at a time)")]
    Busy,
    /// The other end of the control connection ended, or says what cannot be understood.
    #[error("the switch's control connection: {problem}")]
    Control {
        /// What is wrong.
        problem: String,
    },
}

impl Error {
    /// What a person can do about it, where we know.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::NotQuiet { .. } => Some(
                "the guest has to take its packets: wait until it has booted and its interface is up, or give the VM no \
                 NIC on this LAN; under load the next try may succeed"
                    .into(),
            ),
            Self::Torn { .. } => Some("release and take the checkpoint again".into()),
            Self::Listen { .. } => Some("name another path, or end the process that listens there".into()),
            Self::LaterVersion { .. } => Some("restore with a later Keyframe".into()),
            Self::Busy => Some("end the other keyframe that attaches to this LAN".into()),
            _ => None,
        }
    }

    /// For `map_err`: an I/O error of `operation`.
    pub(crate) fn io<E: Into<std::io::Error>>(
        operation: impl Into<String>,
    ) -> impl FnOnce(E) -> Self {
        let operation = operation.into();
        move |source| Self::Io { operation, source: source.into() }
    }

    pub(crate) fn control(problem: impl Into<String>) -> Self {
        Self::Control { problem: problem.into() }
    }
}

/// An I/O error is sent as its text.
mod as_text {
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(error: &std::io::Error, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(error)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<std::io::Error, D::Error> {
        String::deserialize(from).map(std::io::Error::other)
    }
}
