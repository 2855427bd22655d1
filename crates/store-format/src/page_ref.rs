//! References to records: where a page lies in the packs.
//!
//! ```text
//!   PageRef, 64 bits:   | pack number (24) | byte offset in the pack (40) |      0 = a page of zeros
//! ```

/// A reference to a record: the number of its pack, and the offset in bytes at which it begins
/// there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageRef(pub u64);

const OFFSET_BITS: u32 = 40;
/// The length of a pack's header, in bytes. No record lies at a lower offset.
pub const PACK_HEADER_BYTES: usize = 64;
/// The highest pack number that a reference can name.
pub const PACK_NUMBER_MAX: u32 = (1 << 24) - 1;

impl PageRef {
    /// The reference of a page of zeros, which needs no record.
    pub const ZERO: Self = Self(0);

    /// Makes a reference to the record at byte `offset` of pack number `pack`. The writer's limits
    /// keep both in range.
    pub fn new(pack: u32, offset: u64) -> Self {
        debug_assert!(pack > 0 && pack <= PACK_NUMBER_MAX && offset < 1 << OFFSET_BITS);
        Self(u64::from(pack) << OFFSET_BITS | offset)
    }

    /// Returns the number of the pack.
    pub fn pack(self) -> u32 {
        (self.0 >> OFFSET_BITS) as u32
    }

    /// Returns the offset of the record in the pack, in bytes.
    pub fn offset(self) -> u64 {
        self.0 & ((1 << OFFSET_BITS) - 1)
    }

    /// Returns true if a derived record at `place` may refer to this one: it lies after the header
    /// of a pack, and before `place`.
    pub fn may_be_base_of(self, place: Self) -> bool {
        self.pack() > 0 && self.offset() >= PACK_HEADER_BYTES as u64 && self < place
    }
}

impl std::fmt::Debug for PageRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}@{}", self.pack(), self.offset())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_keep_pack_and_offset() {
        let r = PageRef::new(PACK_NUMBER_MAX, (1 << OFFSET_BITS) - 1);
        assert_eq!((r.pack(), r.offset()), (PACK_NUMBER_MAX, (1 << OFFSET_BITS) - 1));
        assert_eq!(PageRef::ZERO.pack(), 0);
    }
}
