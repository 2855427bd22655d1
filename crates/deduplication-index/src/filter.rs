//! A split block Bloom filter: shows that a hash is not in a spill, without reading the file.
//!
//! ```text
//!   hash ─▶ block of 256 bits = second word * blocks / 2^64 ─▶ one bit in each of its eight words of 32
//! ```
//!
//! A query takes one access to memory. With [`KEY_BITS`] for each entry, about one new page of two
//! hundred is looked up in vain (Putze, Sanders, Singler: Cache-, Hash- and Space-Efficient Bloom
//! Filters, 2007; the constants are those of Apache Parquet). No library, because page hashes need
//! no further hashing, and because the bytes are part of a file format.

use keyframe_store_format::page_hash::PageHash;

/// Bits for each entry.
const KEY_BITS: usize = 12;
/// The size of a block of the filter, in bytes.
pub const BLOCK_BYTES: usize = 32;
const WORDS: usize = 8;
const SALTS: [u32; WORDS] = [
    0x47b6_137b,
    0x4497_4d91,
    0x8824_ad5b,
    0xa2b7_289d,
    0x7054_95c7,
    0x2df1_424b,
    0x9efc_4947,
    0x5c6b_fb31,
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(align(32))]
struct Block([u32; WORDS]);

/// A Bloom filter: a set of hashes with false positives.
#[derive(Debug, PartialEq, Eq)]
pub struct Filter(Vec<Block>);

impl Filter {
    /// Creates an empty filter for `entries` hashes.
    pub fn new(entries: usize) -> Self {
        Self(vec![Block([0; WORDS]); blocks(entries)])
    }

    /// Adds a hash.
    pub fn insert(&mut self, hash: PageHash) {
        let at = self.at(hash);
        if let Some(block) = self.0.get_mut(at) {
            block.0.iter_mut().zip(mask(hash)).for_each(|(word, bit)| *word |= bit);
        }
    }

    /// Returns false if the hash was certainly not inserted.
    pub fn may_have(&self, hash: PageHash) -> bool {
        let block = self.0.get(self.at(hash));
        block.is_some_and(|block| {
            // Tests all eight words without a branch.
            block.0.iter().zip(mask(hash)).fold(0, |missing, (word, bit)| missing | (!word & bit))
                == 0
        })
    }

    /// Returns the size of its memory in bytes.
    pub fn bytes(&self) -> usize {
        self.0.capacity() * BLOCK_BYTES
    }

    /// Appends the filter's bytes to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        self.0
            .iter()
            .flat_map(|block| block.0)
            .for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
    }

    /// Creates the filter from the bytes that [`Self::encode`] appended.
    pub fn decode(bytes: &[u8]) -> Self {
        let block = |bytes: &[u8; BLOCK_BYTES]| {
            let words = bytes.as_chunks::<4>().0;
            Block(std::array::from_fn(|at| {
                words.get(at).map_or(0, |word| u32::from_le_bytes(*word))
            }))
        };
        Self(bytes.as_chunks().0.iter().map(block).collect())
    }

    fn at(&self, hash: PageHash) -> usize {
        ((u128::from(hash.0[1]) * self.0.len() as u128) >> 64) as usize
    }
}

/// Returns the number of blocks of a filter for `entries` hashes.
pub fn blocks(entries: usize) -> usize {
    (entries * KEY_BITS).div_ceil(BLOCK_BYTES * 8).max(1)
}

fn mask(hash: PageHash) -> [u32; WORDS] {
    let low = hash.0[0] as u32;
    SALTS.map(|salt| 1 << (low.wrapping_mul(salt) >> 27))
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_store_format::page_hash::HashKey;

    fn hash(number: u64) -> PageHash {
        let mut page = [0; 4096];
        page[..8].copy_from_slice(&number.to_le_bytes());
        PageHash::of(&HashKey([9; 32]), &page)
    }

    #[test]
    fn it_misses_none_and_lets_few_others_pass() {
        let mut filter = Filter::new(4000);
        (0..4000).for_each(|n| filter.insert(hash(n)));
        let mut bytes = Vec::new();
        filter.encode(&mut bytes);
        assert_eq!(bytes.len(), filter.bytes());
        let back = Filter::decode(&bytes);
        assert_eq!(back, filter);
        assert!((0..4000).all(|n| back.may_have(hash(n))));
        let others = (4000..12_000).filter(|n| back.may_have(hash(*n))).count();
        assert!(others < 120, "{others} of 8000");
    }
}
