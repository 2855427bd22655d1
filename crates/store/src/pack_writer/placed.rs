//! What a put gets, and what it returns.

use keyframe_store_format::disk_meta::SectorCounts;
use keyframe_store_format::page_ref::PageRef;
use keyframe_store_format::record::RecordKind;
use keyframe_units::{Page, PageIndex};

/// A page that is put into the store.
#[derive(Clone, Copy, Debug)]
pub struct PageInput<'a> {
    /// The content of the page.
    pub content: &'a Page,
    /// The number of the page in the page space, and its record until now. `None` for a page that
    /// gets no base.
    pub home: Option<(PageIndex, PageRef)>,
}

/// The record of a page that was put into the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placed {
    /// The store held the content, in a record of this kind.
    Known(PageRef, RecordKind),
    /// A new record of this length, in bytes.
    New(PageRef, u64),
}

/// The record of a disk's block that was put into the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedBlock {
    /// The record of the block.
    pub placed: Placed,
    /// True if the new record is composed of parts.
    pub composed: bool,
    /// The sectors of the block, by how each was stored.
    pub sectors: SectorCounts,
}

/// The time that the steps of putting pages took, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct PutTimes {
    pub hash: u64,
    pub look_up: u64,
    pub compress: u64,
    pub append: u64,
}
