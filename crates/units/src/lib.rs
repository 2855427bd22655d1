//! The words that every crate shares: addresses, pages, page sets, the layout of a VM's RAM, and
//! ids.
//!
//! A VM's RAM is one linear space of 4 KiB pages, made of QEMU's RAM blocks laid end to end:
//!
//! ```text
//!   block 0 "pc.ram"          block 1 "vga.vram"   block 2 "pc.bios" ...
//!  |0 ........ 65535|65536 ........ 69631|69632 .. 69695| ...      PageIndex
//! ```
//!
//! Invariant: a `PageIndex` means nothing without the [`RamLayout`] that it was made with.
//! No I/O happens here.

mod error_chain;
mod guest;
mod human;
mod layout;
mod pages;
mod time;

pub use error_chain::error_chain;
pub use guest::{GuestPhys, GuestRegion};
pub use human::{human_bytes, human_duration, percentile};
pub use layout::{BlockKind, LayoutError, RamBlock, RamLayout};
pub use pages::{PageIndex, PageRange, PageSet};
pub use time::{duration_ns, elapsed_ns};

use serde::{Deserialize, Serialize};
use std::fmt;

/// Bytes in a page, the unit of tracking, of deduplication and of the store.
pub const PAGE_BYTES: usize = 4096;

/// The contents of one page.
pub type Page = [u8; PAGE_BYTES];

/// A page of zeros.
pub const ZERO_PAGE: Page = [0; PAGE_BYTES];

/// An address in the virtual address space of the QEMU process (not in ours, not in the guest's).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostVirt(pub u64);

impl HostVirt {
    /// The address `len_bytes` further on; `None` where it would overflow.
    pub fn checked_add(self, len_bytes: u64) -> Option<Self> {
        self.0.checked_add(len_bytes).map(Self)
    }
}

impl fmt::Debug for HostVirt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for HostVirt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A byte range of the QEMU process: `start` and `len_bytes`, both multiples of [`PAGE_BYTES`]
/// where pages are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostRange {
    /// The first byte.
    pub start: HostVirt,
    /// Length in bytes.
    pub len_bytes: u64,
}

impl HostRange {
    /// The first address behind the range.
    pub fn end(self) -> HostVirt {
        HostVirt(self.start.0.saturating_add(self.len_bytes))
    }

    /// True where `other` lies wholly in `self`.
    pub fn contains(self, other: Self) -> bool {
        self.start <= other.start && other.end() <= self.end()
    }
}

/// The number of a checkpoint in its store: 1 is the first ever taken there, numbers are never
/// reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CheckpointId(pub u64);

impl fmt::Display for CheckpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The place of a checkpoint in its run: 0 is the complete first one, each further one holds what
/// changed since.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub u64);

impl Epoch {
    /// The epoch that follows.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
