//! The part of GDB's remote protocol that a proxy between GDB and QEMU's gdbstub needs: packet
//! framing ([`frame`], [`PacketDecoder`]), a connection with acknowledgements ([`GdbConnection`]),
//! and the few packets that the proxy interprets ([`GdbRequest`], [`StopReply`]).
//!
//! ```text
//!   GDB ◀─▶ GdbConnection ◀─▶ proxy: interprets some packets, forwards the others ◀─▶ GdbConnection ◀─▶ gdbstub
//! ```
//!
//! Source: "Debugging with GDB", appendix E. Payloads keep their escapes, so that a forwarded packet
//! is unchanged. Both ends are untrusted: a packet has at most [`PACKET_BYTES_MAX`] bytes.

mod connection;
mod packet;
mod request;

pub use connection::{GdbConnection, Received, wait_for_either};
pub use packet::{DecodedItem, PACKET_BYTES_MAX, PacketDecoder, frame};
pub use request::{Breakpoint, GdbRequest, StopReply};

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong on a connection.
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
