//! The encoding of an epoch's pages on their way from a protected VM to its standby.
//!
//! The encoder sends each page as a difference from its last version, as a copy of another page, as
//! words or with LZ4: whichever takes the fewest bytes.
//!
//! ```text
//!   page space   | RAM block | RAM block | ... | disk 0 | disk 1 | ...      in pages of 4 KiB
//!   stream s     pages p with p / 512 % streams == s
//!
//!   Encoder ──batch, batch, ...──▶ Decoder ──▶ Epoch (a buffer) ──complete──▶ applied to the Image
//! ```
//!
//! Invariants:
//! 1. The base of a difference is the standby's content. If an epoch is abandoned, the encoder
//!    forgets the pages that it changed.
//! 2. A page is sent as a copy of another only after both were compared byte by byte.
//! 3. Decoding any bytes gives pages within the space or an error, and takes no more memory than
//!    the space has pages.
//!
//! Absent: connections, the completion of epochs, and acknowledgements (`replication`, `failover`).

mod batch;
mod decoder;
mod encoder;
#[doc(hidden)]
pub mod fuzzing;

pub use decoder::{EpochBuffer, EpochDecoder, EpochImage};
pub use encoder::{EpochEncoder, SentPages};

use keyframe_units::PageIndex;

/// The number of neighbouring pages that one stream carries.
const STREAM_PAGES: u64 = 512;

/// Returns the number, from 0, of the stream that carries a page, if there are `streams` streams.
#[must_use]
pub fn stream_of(page: PageIndex, streams: usize) -> usize {
    (page.0 / STREAM_PAGES % (streams.max(1) as u64)) as usize
}

/// The reason why a batch cannot be decoded.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The batch is malformed.
    #[error("a batch of pages, byte {at}: {problem}")]
    Malformed {
        /// The offset of the problem in the batch, in bytes.
        at: usize,
        /// The problem.
        problem: String,
    },
    /// The base of a difference could not be read.
    #[error("read page {page} of the standby's image")]
    Image {
        /// The number of the page.
        page: u64,
        /// The reason.
        source: std::io::Error,
    },
}

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
