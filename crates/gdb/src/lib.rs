//! The part of GDB's remote protocol that a proxy between GDB and QEMU's gdbstub needs: packet
//! framing ([`frame`], [`PacketDecoder`]), a connection with acknowledgements ([`GdbConnection`]),
//! and the few packets that the proxy interprets ([`GdbRequest`], [`StopReply`]).
//!
//! ```text
//!   GDB ◀─▶ GdbConnection ◀─▶ proxy ◀─▶ GdbConnection ◀─▶ gdbstub
//!                               │ interprets some packets, forwards the others
//! ```
//!
//! Source: "Debugging with GDB", appendix E. Payloads keep their escapes, so that a forwarded
//! packet is unchanged. Both ends are untrusted: a packet has at most [`PACKET_BYTES_MAX`] bytes.

mod connection;
mod packet;
mod request;

pub use connection::{GdbConnection, GdbMessage, wait_for_either};
pub use packet::{DecodedItem, PACKET_BYTES_MAX, PacketDecoder, frame};
pub use request::{Breakpoint, GdbRequest, StopReply, WriteWatch};

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of a connection to GDB or to a gdbstub.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The connection broke.
    #[error("the connection to {peer} failed")]
    Io {
        /// The other end.
        peer: &'static str,
        /// The cause.
        source: std::io::Error,
    },
    /// The other end does not follow the protocol.
    #[error("{peer} does not speak GDB's remote protocol: {problem}")]
    Protocol {
        /// The other end.
        peer: &'static str,
        /// What is wrong.
        problem: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_testing::{assert_golden, error_text};

    #[test]
    fn error_texts_are_golden() {
        let errors = [
            Error::Io { peer: "QEMU", source: std::io::ErrorKind::ConnectionReset.into() },
            Error::Protocol {
                peer: "the debugger",
                problem: format!("a packet of more than {PACKET_BYTES_MAX} bytes"),
            },
        ];
        let texts: Vec<_> = errors.iter().map(|error| error_text(error, None)).collect();
        assert_golden("tests/golden/errors.txt", &texts.concat());
    }
}
