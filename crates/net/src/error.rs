//! Errors of switches and gates.

use crate::PortId;
use serde::{Deserialize, Serialize};

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a switch or a gate. The text names the object and the operation. The switch's
/// process sends its errors to the controller unchanged.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error("{operation}")]
    Io {
        /// The operation and its object, such as "listen at /run/lan".
        operation: String,
        /// The operating system's answer.
        #[serde(with = "as_text")]
        source: std::io::Error,
    },
    /// A VM has not read the packets that were sent to it.
    #[error("{port} has packets that its VM has not taken after {waited_ms} ms: {problem}")]
    NotQuiet {
        /// The VM's connection.
        port: PortId,
        /// The time that the switch waited, in milliseconds.
        waited_ms: u64,
        /// The state of the connection.
        problem: String,
    },
    /// The packets in flight are not all known, so the checkpoint must be given up.
    #[error("packets in flight are not all known: {reason}")]
    Torn {
        /// The event that ended the hold or the connection.
        reason: String,
    },
    /// The operation needs a held switch, and this one delivers packets.
    #[error("{operation}: the switch is not held")]
    NotHeld {
        /// The operation that needs the hold.
        operation: String,
    },
    /// No such port is connected.
    #[error("{operation}: no {port} is connected")]
    UnknownPort {
        /// The port that the controller named.
        port: PortId,
        /// The operation that names the port.
        operation: String,
    },
    /// A recorded port has packets, and the controller named no port that stands for it.
    #[error(
        "restore packets in flight: no port stands for the recorded {port}, which has {frames} \
         packets"
    )]
    Unmapped {
        /// The recorded port.
        port: PortId,
        /// The number of its frames.
        frames: usize,
    },
    /// The bytes are not a valid recording of packets in flight.
    #[error("packets in flight, byte {offset}: {problem}")]
    InFlight {
        /// The offset of the problem, in bytes.
        offset: usize,
        /// The problem.
        problem: String,
    },
    /// Another version of Keyframe recorded the packets.
    #[error("packets in flight: format version {found}, and {known} is the latest known")]
    LaterVersion {
        /// The version in the recording.
        found: u32,
        /// The version that this Keyframe reads.
        known: u32,
    },
    /// The switch cannot listen at that path.
    #[error("listen at {path}: {problem}")]
    Listen {
        /// The socket's path.
        path: String,
        /// The reason.
        problem: String,
    },
    /// Another process controls the switch.
    #[error("the switch is controlled by another process (one at a time)")]
    Busy,
    /// The control connection ended, or the other end sent an invalid message.
    #[error("the switch's control connection: {problem}")]
    Control {
        /// The problem.
        problem: String,
    },
}

impl Error {
    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::NotQuiet { .. } => Some(
                "the guest has to take its packets: wait until it has booted and its interface is \
                 up, or give the VM no NIC on this LAN; under load the next try may succeed"
                    .into(),
            ),
            Self::Torn { .. } => Some("release and take the checkpoint again".into()),
            Self::Listen { .. } => {
                Some("name another path, or stop the process that listens there".into())
            }
            Self::LaterVersion { .. } => Some("restore with a later Keyframe".into()),
            Self::Busy => Some("end the other keyframe that attaches to this LAN".into()),
            _ => None,
        }
    }

    /// Makes an [`Error::Io`] of `operation`, for `map_err`.
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

/// Serializes an I/O error as its text.
mod as_text {
    use serde::{Deserialize, Deserializer, Serializer};

    /// Serializes an I/O error as its text. Error: that of the serializer.
    pub fn serialize<S: Serializer>(error: &std::io::Error, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(error)
    }

    /// Deserializes an I/O error from its text. Error: the value is not a text.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<std::io::Error, D::Error> {
        String::deserialize(from).map(std::io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_testing::{assert_golden, error_text};

    #[test]
    fn error_texts_are_golden() {
        let port = PortId { lan: "/run/lan.sock".into(), pid: 7, number: 0 };
        let errors = [
            Error::Io {
                operation: "connect to the switch's control socket /run/switch.sock".into(),
                source: std::io::ErrorKind::NotFound.into(),
            },
            Error::NotQuiet {
                port: port.clone(),
                waited_ms: 50,
                problem: "a packet waits in QEMU, because the NIC does not take it".into(),
            },
            Error::Torn { reason: "the hold reached its time limit and ended by itself".into() },
            Error::NotHeld { operation: "collect packets in flight".into() },
            Error::UnknownPort { port: port.clone(), operation: "restore".into() },
            Error::Unmapped { port, frames: 3 },
            Error::InFlight { offset: 40, problem: "the checksum does not match".into() },
            Error::LaterVersion { found: 2, known: 1 },
            Error::Listen {
                path: "/run/lan.sock".into(),
                problem: "another process listens there".into(),
            },
            Error::Busy,
            Error::control("the switch has ended"),
        ];
        let texts: Vec<_> = errors.iter().map(|error| error_text(error, error.fix())).collect();
        assert_golden("tests/golden/errors.txt", &texts.concat());
    }
}
