//! The value of an index entry: the place of a record and its kind, in 64 bits.
//!
//! ```text
//!   | pack number 24 | kind 2 | unproven 1 | copy 1 | offset 36 |
//! ```

use keyframe_store_format::page_ref::PageRef;
use keyframe_store_format::record::RecordKind;

const OFFSET_BITS: u32 = 36;
/// The flag of an entry that is in a spill too.
pub const COPY: u64 = 1 << 36;
/// The flag of a derived record of an earlier writer that was not read yet, so that its references
/// may be gone.
pub const UNPROVEN: u64 = 1 << 37;
const KIND_SHIFT: u32 = 38;
const PACK_SHIFT: u32 = 40;
/// A record that the index has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The place of the record.
    pub place: PageRef,
    /// The kind of the record.
    pub kind: RecordKind,
    /// True for a derived record of an earlier writer that was not read yet.
    pub unproven: bool,
}

/// Returns the value of an entry for a record at `place` of kind `kind`. Returns `None` if the
/// offset is too large for an entry.
pub fn encode(place: PageRef, kind: RecordKind) -> Option<u64> {
    let at = u64::from(place.pack()) << PACK_SHIFT | place.offset();
    (place.offset() < 1 << OFFSET_BITS).then_some(at | u64::from(kind.number()) << KIND_SHIFT)
}

/// Returns the place of the record that an entry's value names.
pub fn place(value: u64) -> PageRef {
    PageRef(value >> PACK_SHIFT << PACK_SHIFT | value & ((1 << OFFSET_BITS) - 1))
}

fn kind(value: u64) -> RecordKind {
    RecordKind::of_number((value >> KIND_SHIFT & 3) as u8).unwrap_or(RecordKind::Page)
}

/// Returns true if an entry's value names a derived record.
pub fn is_derived(value: u64) -> bool {
    kind(value).is_derived()
}

/// Returns the record that an entry's value names.
pub fn decode(value: u64) -> Found {
    Found { place: place(value), kind: kind(value), unproven: value & UNPROVEN != 0 }
}

/// Returns the value of an entry whose record has moved to `to`. Returns `None` if the offset is
/// too large for an entry.
pub fn moved(value: u64, to: PageRef) -> Option<u64> {
    let flags = value & (UNPROVEN | 3 << KIND_SHIFT);
    Some(encode(to, RecordKind::Page)? | flags)
}
