//! Disks under checkpoints: an NBD server that writes to an overlay over an unchanged image. The
//! overlay is cut into epochs.
//!
//! ```text
//!   QEMU ──NBD, unix socket──▶ Overlay ── all blocks written since the start, 4 KiB each, in slots
//!                                 │        cut(): the blocks written since the last cut stay
//!                                 ▼               readable
//!                              Layer    ── blocks of a checkpoint, for a restored VM (optional)
//!                                 ▼
//!                              Base     ── the image, raw or qcow2, never written
//!
//!   engine ──Disks, socket pair──▶ process::serve    a process of its own: if the engine dies,
//!                                                    the guest keeps its disk; if this one dies,
//!                                                    the engine starts another
//! ```
//!
//! Invariants: the base is opened read-only. A write that was acknowledged to a client survives
//! `kill -9` of this process. It survives a power loss once a flush after it is acknowledged; in a
//! pause ([`Disk::pause`]), once [`Disk::settled`] has returned. An overlay that is
//! [`Lasting::Temporary`] survives no power loss. Input from clients and files is checked before it
//! is used, and its size is checked before memory is allocated for it.
//! `docs/formats/disk-overlay.md` describes the bytes on disk.
//!
//! Left out: when checkpoints are taken, and how a store keeps blocks.

mod base;
pub mod chain;
pub mod commit;
mod disk;
mod error;
mod extents;
#[doc(hidden)]
pub mod fuzzing;
mod layers;
mod lock;
pub mod nbd;
pub mod overlay;
pub mod process;
#[cfg(test)]
mod tests;

pub use base::{Base, ImageFormat};
pub use disk::Disk;
pub use error::{Error, Result};
pub use layers::{Below, Content, DiskRange, Layer, Readable};
pub use overlay::{Extent, Lasting, Overlay, SlotFile};
pub use process::{
    DiskHeir, DiskSpec, DiskStats, Disks, ServerEvent, ServerObserver, Staging, serve,
};

use serde::{Deserialize, Serialize};
use std::fmt;

/// The size of a block in bytes. A block is the unit of overlays and checkpoints.
pub const BLOCK_BYTES: usize = 4096;

/// The content of one block.
pub type Block = [u8; BLOCK_BYTES];

pub(crate) const BLOCK: u64 = BLOCK_BYTES as u64;

/// The number of a block of a disk. Its first byte is at this number times [`BLOCK_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DiskBlock(pub u64);

impl fmt::Display for DiskBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of a block in an overlay's data file. Its first byte is at this number times
/// [`BLOCK_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Slot(pub u32);

/// The number of an epoch of a disk. An epoch holds the blocks that were written between two cuts.
/// Each cut gets a higher number than all cuts before it. No number is used twice, also not after a
/// checkpoint has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DiskEpoch(pub u64);

impl fmt::Display for DiskEpoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
