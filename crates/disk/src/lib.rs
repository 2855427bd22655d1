//! Disks under checkpoints: an NBD server whose writes go to an overlay over an untouched image,
//! cut into epochs.
//!
//! ```text
//!   QEMU ──NBD, unix socket──▶ Overlay ── what was written since the start, 4 KiB blocks in slots
//!                                 │            cut(): the blocks written since the cut before stay readable
//!                                 ▼
//!                              Layer    ── a checkpoint's blocks, for a VM that was restored (optional)
//!                                 ▼
//!                              Base     ── the image, raw or qcow2, never written
//!
//!   engine ──Disks, socket pair──▶ process::serve    a process of its own: the guest keeps its disk if the engine dies
//! ```
//!
//! Invariants: the base is opened for reading alone; what a flush acknowledged survives `kill -9`
//! and power loss; nothing that a client or a file says is trusted before it was checked, or
//! allocated before it was bounded. The bytes on disk are described in
//! `docs/formats/disk-overlay.md`.
//!
//! Left out: when to take a checkpoint, and how a store keeps blocks.

mod base;
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
pub use layers::{Below, Content, Layer, Range, Readable};
pub use overlay::{Extent, Lasting, Overlay, SlotFile};
pub use process::{Disks, Spec, Stats, serve};

use serde::{Deserialize, Serialize};
use std::fmt;

/// Bytes in a block, the unit of the overlay and of checkpoints.
pub const BLOCK_BYTES: usize = 4096;

/// The contents of one block.
pub type Block = [u8; BLOCK_BYTES];

pub(crate) const BLOCK: u64 = BLOCK_BYTES as u64;

/// The number of a block of a disk: its first byte is at this times [`BLOCK_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DiskBlock(pub u64);

impl fmt::Display for DiskBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The place of a block's content in an overlay's data file, counted in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Slot(pub u32);

/// A cut of a disk: what was written since the cut before. Numbers rise, also over failed ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DiskEpoch(pub u64);

impl fmt::Display for DiskEpoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
