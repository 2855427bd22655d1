//! Connections between hosts that share a key: mutual TLS 1.3, and frames.
//!
//! ```text
//!   key file ─BLAKE3─▶ key of a private authority ─signs─▶ a fresh certificate of each party
//!   Party ─connect, accept─▶ Channel ─send, receive─▶ | length 4 | kind 1 | payload |
//! ```
//!
//! The length is little-endian and counts kind and payload. As with corosync's authkey, one file is
//! copied to every host; each host that has it may connect.
//!
//! Invariants: a party's frames are accepted only after it has proved that it has the key. A frame
//! longer than [`FRAME_BYTES_MAX`] is refused before memory is allocated for it. Every wait is
//! bounded.
//!
//! Left out: the meaning of frames; detection of a dead host, for which the callers send
//! heartbeats.

mod channel;
#[doc(hidden)]
pub mod fuzzing;
mod key;

pub use channel::{Channel, FrameBuffer, LinkFrame};
pub use key::{Party, SharedKey};

/// The largest number of bytes of a frame: kind and payload.
pub const FRAME_BYTES_MAX: usize = 32 << 20;

/// The reason why a key or a connection cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The key file cannot be used.
    #[error("key file {path}: {problem}")]
    Key {
        /// The path of the file.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A network operation failed.
    #[error("{operation} {peer}")]
    Io {
        /// The operation, such as "connect to".
        operation: &'static str,
        /// The address of the other host.
        peer: String,
        /// The cause.
        source: std::io::Error,
    },
    /// The other host has not proved that it has the key, or it breaks the protocol.
    #[error("{peer}: {problem}")]
    Tls {
        /// The address of the other host.
        peer: String,
        /// What is wrong.
        problem: String,
    },
    /// The other host announced a frame of an impossible length.
    #[error("{peer} announced a frame of {len_bytes} bytes; 1 to {FRAME_BYTES_MAX} are allowed")]
    Frame {
        /// The address of the other host.
        peer: String,
        /// The announced length in bytes.
        len_bytes: u64,
    },
    /// The other host closed the connection.
    #[error("{peer} has closed the connection")]
    Closed {
        /// The address of the other host.
        peer: String,
    },
}

impl Error {
    /// Returns what the user can do about the error, if that is known.
    #[must_use]
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::Key { .. } => Some(
                "create one that only its owner can read, and copy it to each host: (umask 077; \
                 head -c 32 /dev/urandom | base64 > KEY)"
                    .into(),
            ),
            Self::Tls { .. } => Some("both hosts need the same key file (--key)".into()),
            Self::Io { .. } => Some(
                "check that the other host runs, listens at this address, and is reachable \
                 through the firewall"
                    .into(),
            ),
            Self::Frame { .. } | Self::Closed { .. } => None,
        }
    }
}

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_testing::{assert_golden, error_text};

    #[test]
    fn error_texts_are_golden() {
        let peer = || String::from("10.0.0.2:7420");
        let errors = [
            Error::Key { path: "KEY".into(), problem: "it is too short".into() },
            Error::Io {
                operation: "connect to",
                peer: peer(),
                source: std::io::ErrorKind::ConnectionRefused.into(),
            },
            Error::Tls { peer: peer(), problem: "the handshake ended early".into() },
            Error::Frame { peer: peer(), len_bytes: 0 },
            Error::Closed { peer: peer() },
        ];
        let texts: Vec<_> = errors.iter().map(|error| error_text(error, error.fix())).collect();
        assert_golden("tests/golden/errors.txt", &texts.concat());
    }
}
