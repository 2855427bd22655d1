//! Connections between hosts that share a key: TLS 1.3, both sides authenticated, and frames over
//! it.
//!
//! ```text
//!   key file ──BLAKE3──▶ the key of an authority that exists nowhere else ──signs──▶ a fresh certificate of each party
//!   Party ──connect / accept──▶ Channel ──send, receive──▶ | length 4 | kind 1 | payload |        little-endian
//! ```
//!
//! As corosync's authkey: one file, copied to every host. Who has it is let in; there is nothing
//! else to configure.
//!
//! Invariants: nothing is read from or believed of a party that has not shown that it has the key;
//! no frame is longer than [`FRAME_BYTES_MAX`], and is told so before memory is taken; every wait
//! ends.
//!
//! Left out: what frames mean; finding out that the other side is gone (the caller's heartbeats).

mod channel;
#[doc(hidden)]
pub mod fuzzing;
mod key;

pub use channel::{Channel, Frame, Input};
pub use key::{Key, Party};

/// The longest frame, kind and payload.
pub const FRAME_BYTES_MAX: usize = 32 << 20;

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The key file cannot be used.
    #[error("key file {path}: {problem}")]
    Key {
        /// The file.
        path: String,
        /// Why not.
        problem: String,
    },
    /// The network failed.
    #[error("{operation} {peer}")]
    Io {
        /// What was done.
        operation: &'static str,
        /// The other side.
        peer: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The other side has not shown that it has the key, or breaks the protocol.
    #[error("{peer}: {problem}")]
    Tls {
        /// The other side.
        peer: String,
        /// What is wrong.
        problem: String,
    },
    /// It sent what is no frame.
    #[error("{peer} announced a frame of {len_bytes} bytes (1 to {FRAME_BYTES_MAX} are possible)")]
    Frame {
        /// The other side.
        peer: String,
        /// The length that it said.
        len_bytes: u64,
    },
    /// It closed the connection.
    #[error("{peer} has closed the connection")]
    Closed {
        /// The other side.
        peer: String,
    },
}

impl Error {
    /// What a person can do about it, where we know.
    #[must_use]
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::Key { .. } => Some(
                "make one, for its owner's eyes alone, and copy it to each host: (umask 077; head -c 32 /dev/urandom | base64 > KEY)"
                    .into(),
            ),
            Self::Tls { .. } => Some("both hosts need the same key file (--key)".into()),
            Self::Io { .. } => Some("see that the other host is up, listens there, and is let through".into()),
            Self::Frame { .. } | Self::Closed { .. } => None,
        }
    }
}

/// What this crate's functions return.
pub type Result<T, E = Error> = std::result::Result<T, E>;
