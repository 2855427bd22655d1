//! The pages of an epoch as they travel from a protected VM to its standby: as few bytes as its
//! last version, its neighbours or LZ4 make of them.
//!
//! ```text
//!   page space   | RAM, block behind block | disk 0 | disk 1 | ...                       in pages of 4 KiB
//!   stream s     pages p with p / 512 % streams == s, each page always on the same one
//!
//!   Encoder ──batch, batch, ...──▶ Decoder ──▶ Epoch (a buffer) ──complete──▶ applied to the Image
//!     └ what the standby has of the pages sent last          └ reads bases from the epoch, else from the image
//! ```
//!
//! Invariants:
//! 1. A base is what the standby has: the encoder forgets what an epoch that was abandoned has changed, on both sides.
//! 2. A page that looks like another one is compared byte by byte before it is sent as that one: no content that a guest makes
//!    up takes the place of another.
//! 3. Whatever a batch's bytes are, decoding it ends with pages within the space or with an error, and takes no more memory than
//!    the space has pages.
//!
//! Left out: connections, when an epoch is complete, and what it is acknowledged with
//! (`replication`, the binary).

mod batch;
mod decoder;
mod encoder;
#[doc(hidden)]
pub mod fuzzing;

pub use decoder::{Decoder, Epoch, Image};
pub use encoder::{Encoder, Sent};

use keyframe_units::PageIndex;

/// Neighbouring pages that travel on one stream.
const STREAM_PAGES: u64 = 512;

/// The stream of `streams` that a page travels on.
#[must_use]
pub fn stream_of(page: PageIndex, streams: usize) -> usize {
    (page.0 / STREAM_PAGES % (streams.max(1) as u64)) as usize
}

/// Why a batch cannot be taken in.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is not what an encoder makes.
    #[error("a batch of pages, byte {at}: {problem}")]
    Malformed {
        /// Where, in the batch.
        at: usize,
        /// What is wrong.
        problem: String,
    },
    /// What was to be the base could not be read.
    #[error("read page {page} of the standby's image")]
    Image {
        /// Which one.
        page: u64,
        /// Why not.
        source: std::io::Error,
    },
}

/// What this crate's functions return.
pub type Result<T, E = Error> = std::result::Result<T, E>;
