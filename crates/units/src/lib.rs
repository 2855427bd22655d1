//! The types that every crate shares: addresses, pages, page sets, RAM layouts, ids, nanoseconds,
//! and the trait of a sink for events.
//!
//! A VM's RAM is one linear space of 4 KiB pages: the RAM blocks of its VMM, laid end to end.
//!
//! ```text
//!   block 0 "pc.ram"          block 1 "vga.vram"   block 2 "pc.bios" ...
//!  |0 ........ 65535|65536 ........ 69631|69632 .. 69695| ...      PageIndex
//! ```
//!
//! Invariant: a `PageIndex` is valid only together with the [`RamLayout`] that defines its space.
//! This crate does no I/O.

mod error_chain;
mod events;
mod guest;
mod human;
mod layout;
mod pages;
mod time;

pub use error_chain::{error_chain, error_with_fix};
pub use events::{EventSink, NoEvents, SharedEventSink};
pub use guest::{GuestPhys, GuestRegion};
pub use human::{human_bytes, human_duration, percentile};
pub use layout::{BlockKind, LayoutError, RamBlock, RamLayout};
pub use pages::{PageIndex, PageRange, PageSet};
pub use time::{duration_ns, elapsed_ns};

use serde::{Deserialize, Serialize};
use std::fmt;

/// The size of a page in bytes. Tracking, deduplication and the store all work on such pages.
pub const PAGE_BYTES: usize = 4096;

/// The contents of one page.
pub type Page = [u8; PAGE_BYTES];

/// A page of zeros.
pub const ZERO_PAGE: Page = [0; PAGE_BYTES];

/// An address in the virtual address space of the VMM process (not of this process, not of the
/// guest).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostVirt(pub u64);

impl HostVirt {
    /// Returns the address `len_bytes` higher, or `None` if it would overflow.
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

/// A byte range in the VMM process. For ranges of pages, both fields are multiples of
/// [`PAGE_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostRange {
    /// The address of the first byte.
    pub start: HostVirt,
    /// The length in bytes.
    pub len_bytes: u64,
}

impl HostRange {
    /// Returns the first address after the range.
    pub fn end(self) -> HostVirt {
        HostVirt(self.start.0.saturating_add(self.len_bytes))
    }

    /// Returns true if all of `other` lies in this range.
    pub fn contains(self, other: Self) -> bool {
        self.start <= other.start && other.end() <= self.end()
    }
}

/// The number of a checkpoint in its store. Numbers start at 1 and are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CheckpointId(pub u64);

impl fmt::Display for CheckpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of a checkpoint in its run. Epoch 0 holds all pages; each later epoch holds the pages
/// written since the epoch before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub u64);

impl Epoch {
    /// Returns the epoch after this one.
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
