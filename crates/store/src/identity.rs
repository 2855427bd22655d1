//! Which page is which: where a page lies (`PageRef`) and what it holds (`PageHash`).
//!
//! ```text
//!   PageRef, 64 bits:   | pack number (24) | byte offset in the pack (40) |      0 = a page of zeros
//!   PageHash, 128 bits: BLAKE3(key = the store's secret key, page)[0..16]
//! ```
//!
//! Invariant: a guest cannot construct two pages of one hash, for the key is random, per store, and never leaves the
//! host. What is left is chance: with 2^40 distinct pages (4 PiB) the probability of any collision is below 2^-48.

use keyframe_units::Page;

/// Where the record of a page begins.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageRef(pub u64);

const OFFSET_BITS: u32 = 40;
/// The highest pack number that a reference can name.
pub const PACK_NUMBER_MAX: u32 = (1 << 24) - 1;

impl PageRef {
    /// A page of zeros, which needs no record.
    pub const ZERO: Self = Self(0);

    /// The record at `offset` of pack number `pack`. Both must be in range, which the writer's limits ensure.
    pub fn new(pack: u32, offset: u64) -> Self {
        debug_assert!(pack > 0 && pack <= PACK_NUMBER_MAX && offset < 1 << OFFSET_BITS);
        Self(u64::from(pack) << OFFSET_BITS | offset)
    }

    /// The number of the pack.
    pub fn pack(self) -> u32 {
        (self.0 >> OFFSET_BITS) as u32
    }

    /// The offset of the record in the pack, in bytes.
    pub fn offset(self) -> u64 {
        self.0 & ((1 << OFFSET_BITS) - 1)
    }
}

impl std::fmt::Debug for PageRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}@{}", self.pack(), self.offset())
    }
}

/// The identity of a page's content within one store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageHash(pub [u64; 2]);

impl PageHash {
    pub fn of(key: &HashKey, page: &Page) -> Self {
        let hash = blake3::keyed_hash(&key.0, page);
        let (low, rest) = hash.as_bytes().split_at(8);
        let word = |bytes: &[u8]| bytes.iter().take(8).rev().fold(0u64, |w, b| w << 8 | u64::from(*b));
        Self([word(low), word(rest)])
    }

    pub fn to_bytes(self) -> [u8; 16] {
        let mut out = [0; 16];
        let (low, high) = out.split_at_mut(8);
        low.copy_from_slice(&self.0[0].to_le_bytes());
        high.copy_from_slice(&self.0[1].to_le_bytes());
        out
    }

    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        let both = u128::from_le_bytes(bytes);
        Self([both as u64, (both >> 64) as u64])
    }
}

/// The store's secret key. Its `Debug` form does not show it.
#[derive(Clone)]
pub struct HashKey(pub [u8; 32]);

impl std::fmt::Debug for HashKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HashKey(secret)")
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

    #[test]
    fn another_key_gives_another_identity_and_bytes_come_back() {
        let page = [7u8; 4096];
        let a = PageHash::of(&HashKey([1; 32]), &page);
        assert_ne!(a, PageHash::of(&HashKey([2; 32]), &page));
        assert_eq!(PageHash::from_bytes(a.to_bytes()), a);
        assert_eq!(a.to_bytes(), blake3::keyed_hash(&[1; 32], &page).as_bytes()[..16]);
        assert!(!format!("{:?}", HashKey([0xab; 32])).contains("ab"));
    }
}
