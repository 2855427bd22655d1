//! Page hashes: the identity of a page's content within one store.
//!
//! ```text
//!   PageHash, 128 bits: BLAKE3(key = the store's secret key, page)[0..16]
//! ```
//!
//! Invariant: a guest cannot construct two pages with the same hash, because the key is random,
//! differs from store to store and never leaves the host. What is left is chance: with 2^40
//! distinct pages (4 PiB) the probability of any collision is below 2^-48.

use blake3::IncrementCounter;
use blake3::platform::Platform;
use keyframe_units::Page;

/// The identity of a page's content within one store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageHash(pub [u64; 2]);

/// The largest number of pages that [`PageHash::of_many`] hashes at once.
pub const LANES: usize = 16;
/// A page is four chunks of BLAKE3. Their chaining values are the leaves of a tree.
const CHUNKS: usize = 4;
const CHUNK_BYTES: usize = 1024;
const CV_BYTES: usize = 32;
const CHUNK_START: u8 = 1;
const CHUNK_END: u8 = 2;
const PARENT: u8 = 4;
const ROOT: u8 = 8;
const KEYED: u8 = 16;

impl PageHash {
    /// Computes the hash of a page under the store's key.
    pub fn of(key: &HashKey, page: &Page) -> Self {
        Self::first_of(blake3::keyed_hash(&key.0, page).as_bytes())
    }

    /// Returns the hashes of up to [`LANES`] pages, in their order. Elements beyond the number of
    /// pages have no meaning.
    ///
    /// One page has four chunks, which leaves most SIMD lanes of a wide processor empty. So this
    /// hashes the same chunk of all pages side by side, then their parents. `blake3` has no public
    /// interface for that. This uses its hidden one; a test compares the results with
    /// [`Self::of`].
    ///
    /// `blake3` itself hands over inputs that lie one after the other. Its code for AVX2 and
    /// AVX-512 relies on that: where fewer inputs are left than a register has lanes, it reads up
    /// to 48 bytes beyond the first of them. Pages lie anywhere, so these bytes may be unmapped.
    /// This therefore fills the lanes with blank chunks, and such a rest never occurs.
    pub fn of_many(key: &HashKey, pages: &[&Page]) -> [Self; LANES] {
        let platform = Platform::detect();
        let count = pages.len().min(LANES);
        let filled = count.next_multiple_of(platform.simd_degree()).min(LANES);
        let mut words = [0; CV_BYTES / 4];
        for (word, bytes) in words.iter_mut().zip(key.0.as_chunks().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        let mut values = [0; LANES * CV_BYTES];
        // For each page the values of its four chunks in order: the children of its two parents.
        let mut children = [[[0; CV_BYTES]; CHUNKS]; LANES];
        let mut chunks = [&[0; CHUNK_BYTES]; LANES];
        for number in 0..CHUNKS {
            for (chunk, page) in chunks.iter_mut().zip(pages) {
                *chunk = page.as_chunks().0.get(number).unwrap_or(*chunk);
            }
            let (chunks, out) = (&chunks[..filled], &mut values[..filled * CV_BYTES]);
            let no = IncrementCounter::No;
            platform.hash_many(
                chunks,
                &words,
                number as u64,
                no,
                KEYED,
                CHUNK_START,
                CHUNK_END,
                out,
            );
            for (children, value) in children.iter_mut().zip(values.as_chunks().0) {
                children[number] = *value;
            }
        }
        let mut roots = [0; LANES * 2 * CV_BYTES];
        let parents = |from: &[u8], flags: u8, out: &mut [u8]| {
            let mut blocks = [&[0; 2 * CV_BYTES]; 2 * LANES];
            let blocks_of = from.as_chunks().0;
            blocks.iter_mut().zip(blocks_of).for_each(|(block, from)| *block = from);
            let blocks = &blocks[..blocks_of.len()];
            platform.hash_many(
                blocks,
                &words,
                0,
                IncrementCounter::No,
                KEYED | PARENT | flags,
                0,
                0,
                out,
            );
        };
        let children = children.as_flattened().as_flattened();
        parents(&children[..count * CHUNKS * CV_BYTES], 0, &mut roots[..count * 2 * CV_BYTES]);
        parents(&roots[..count * 2 * CV_BYTES], ROOT, &mut values[..count * CV_BYTES]);
        let mut out = [Self([0; 2]); LANES];
        out.iter_mut()
            .zip(values.as_chunks().0)
            .for_each(|(hash, value)| *hash = Self::first_of(value));
        out
    }

    fn first_of(value: &[u8; CV_BYTES]) -> Self {
        Self::from_bytes(*value.first_chunk().unwrap_or(&[0; 16]))
    }

    /// Returns the 16 bytes that files hold.
    pub fn to_bytes(self) -> [u8; 16] {
        let mut out = [0; 16];
        let (low, high) = out.split_at_mut(8);
        low.copy_from_slice(&self.0[0].to_le_bytes());
        high.copy_from_slice(&self.0[1].to_le_bytes());
        out
    }

    /// Makes the hash from its 16 bytes: the inverse of [`Self::to_bytes`].
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        let both = u128::from_le_bytes(bytes);
        Self([both as u64, (both >> 64) as u64])
    }
}

/// The store's secret key, with which page hashes are keyed. Its `Debug` form does not show it.
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
    use crate::testing::noise;
    use proptest::prelude::*;

    #[test]
    fn another_key_gives_another_hash_and_bytes_come_back() {
        let page = [7u8; 4096];
        let a = PageHash::of(&HashKey([1; 32]), &page);
        assert_ne!(a, PageHash::of(&HashKey([2; 32]), &page));
        assert_eq!(PageHash::from_bytes(a.to_bytes()), a);
        assert_eq!(a.to_bytes(), blake3::keyed_hash(&[1; 32], &page).as_bytes()[..16]);
        assert!(!format!("{:?}", HashKey([0xab; 32])).contains("ab"));
    }

    /// Maps a page with unmapped memory after it: of many pages, two that lie side by side, of which
    /// the second one is unmapped again.
    fn page_before_a_gap() -> memmap2::MmapMut {
        let mut pages: Vec<_> =
            (0..64).map(|_| memmap2::MmapMut::map_anon(4096).unwrap()).collect();
        pages.sort_unstable_by_key(|page| page.as_ptr());
        let is_adjacent =
            |pair: &[memmap2::MmapMut]| pair[0].as_ptr_range().end == pair[1].as_ptr();
        let at = pages.windows(2).position(is_adjacent).expect("two adjacent pages");
        pages.swap_remove(at)
    }

    #[test]
    fn no_byte_beyond_a_page_is_read() {
        let key = HashKey([3; 32]);
        let other = noise(1);
        for count in 1..=LANES {
            for last in 0..count {
                let mapped = page_before_a_gap();
                let page: &Page = mapped.as_array().unwrap();
                let mut pages = [&other; LANES];
                pages[last] = page;
                let hashes = PageHash::of_many(&key, &pages[..count]);
                assert_eq!(hashes[last], PageHash::of(&key, page), "{last} of {count}");
            }
        }
    }

    proptest! {
        #[test]
        fn pages_hashed_side_by_side_get_the_hashes_of_single_pages(
            seeds in prop::collection::vec(any::<u64>(), 0..=LANES), key in any::<[u8; 32]>(),
        ) {
            let (key, pages) = (HashKey(key), seeds.into_iter().map(noise).collect::<Vec<_>>());
            let borrowed: Vec<&Page> = pages.iter().collect();
            let hashes = PageHash::of_many(&key, &borrowed);
            for (page, hash) in pages.iter().zip(hashes) {
                prop_assert_eq!(hash, PageHash::of(&key, page));
            }
        }
    }
}
