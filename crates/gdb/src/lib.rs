//! gdb's remote serial protocol, as far as one needs it who stands between a debugger and a stub:
//! frames (`packet`), a connection with its acknowledgements (`link`), and the few packets that are
//! looked into (`words`).
//!
//! ```text
//!   gdb ──▶ Link ──▶ what is looked into │ what is passed on as it is ──▶ Link ──▶ QEMU's stub
//! ```
//!
//! Source: "Debugging with GDB", appendix E. Payloads stay as they were framed, with their escapes:
//! nothing that is passed on is taken apart. Both ends are from outside: a packet has at most
//! [`PACKET_BYTES_MAX`] bytes.

mod link;
mod packet;
mod words;

pub use link::{Link, Received, wait_for_either};
pub use packet::{Decoder, Item, PACKET_BYTES_MAX, frame};
pub use words::{Command, Point, StopReply, command};

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong on a connection.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It broke.
    #[error("the connection to {peer} failed")]
    Io {
        /// Whom it leads to.
        peer: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// What came is not the protocol.
    #[error("{peer} does not speak gdb's remote protocol: {problem}")]
    Protocol {
        /// Who.
        peer: &'static str,
        /// What is wrong.
        problem: String,
    },
}
