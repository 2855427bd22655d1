//! Delta records: a page as its difference from the page of another record, its base.
//!
//! ```text
//!   base      | ......AAAA..........BB............. |        a plain record before this one
//!   page      | ......CCCC..........DD............. |
//!   patch     gap 6, length 4, CCCC   gap 10, length 2, DD
//!
//!   payload   0  8 reference to the base's record    8  4 first bytes of the base's hash    12 .. the patch, coded with the
//!                                                                                              record's codec
//!   patch     see keyframe_pages::patch
//! ```
//!
//! Invariants: the base is plain and lies before the record, so no chain is longer than one step. A
//! patch is at most [`PATCH_BYTES_MAX`] long and changes bytes within the page only. The hash in
//! the payload shows whether the base is the record that the writer used.

use crate::codec::{Codec, decompress_patch};
use crate::page_hash::PageHash;
use crate::page_ref::PageRef;
use keyframe_bytes::ByteReader;
use keyframe_pages::bytes::Problem;
use keyframe_pages::patch::{self, PATCH_BYTES_MAX};
use keyframe_units::Page;

/// The length of the payload before the patch, in bytes.
pub const DELTA_HEADER_BYTES: usize = 12;

/// A page as a patch over the page of another record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delta {
    /// The record that holds the other page.
    pub base: PageRef,
    check: [u8; 4],
    patch: Vec<u8>,
}

impl Delta {
    /// Writes the head of a payload to `out`. The caller appends the patch.
    pub fn begin(base: PageRef, hash: PageHash, out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(&base.0.to_le_bytes());
        out.extend_from_slice(&check_of(hash));
    }

    /// Writes the payload to `out`, with an uncompressed patch.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(&self.base.0.to_le_bytes());
        out.extend_from_slice(&self.check);
        out.extend_from_slice(&self.patch);
    }

    /// Parses the payload of the record at `place`. Error: the payload is malformed, or refers to a
    /// record that does not precede it.
    pub fn decode(codec: Codec, payload: &[u8], place: PageRef) -> Result<Self, Problem> {
        let mut reader = ByteReader::new(payload);
        let (base, check) = (PageRef(reader.u64_le()?), reader.array()?);
        if !base.may_be_base_of(place) {
            return Err(format!("a delta cannot be on {base:?}"));
        }
        let patch = decompress_patch(codec, reader.remaining(), PATCH_BYTES_MAX)?;
        Ok(Self { base, check, patch })
    }

    /// Makes `page` from the content of its base, whose record has `hash`. Error: the patch is
    /// malformed, or `hash` is not that of the delta's base.
    pub fn fill(&self, hash: PageHash, content: &Page, page: &mut Page) -> Result<(), Problem> {
        *page = *content;
        self.apply(hash, page)
    }

    /// Turns the content of its base, whose record has `hash`, into the page. Error: the patch is
    /// malformed, or `hash` is not that of the delta's base.
    pub fn apply(&self, hash: PageHash, page: &mut Page) -> Result<(), Problem> {
        if check_of(hash) != self.check {
            return Err("a delta whose base holds another record than when it was written".into());
        }
        patch::apply(&self.patch, page)
    }

    /// Returns the memory that the patch takes, in bytes.
    pub fn patch_bytes(&self) -> usize {
        self.patch.capacity()
    }
}

fn check_of(hash: PageHash) -> [u8; 4] {
    let [a, b, c, d, ..] = hash.to_bytes();
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::noise;
    use keyframe_pages::patch::diff;
    use keyframe_units::PAGE_BYTES;
    use proptest::prelude::*;

    const PLACE: PageRef = PageRef((3 << 40) + 10_000);
    const BASE: PageRef = PageRef((1 << 40) + 64);
    const HASH: PageHash = PageHash([7, 8]);

    fn patched(base: &Page, page: &Page) -> Option<Vec<u8>> {
        let mut out = b"before".to_vec();
        diff(base, page, PATCH_BYTES_MAX, &mut out).then(|| out[6..].to_vec())
    }

    proptest! {
        #[test]
        fn pages_come_back(
            seed in any::<u64>(), writes in prop::collection::vec((0usize..4096, prop::collection::vec(any::<u8>(), 1..40)), 0..60),
        ) {
            let base = noise(seed);
            let mut page = base;
            for (at, bytes) in &writes {
                let end = (at + bytes.len()).min(PAGE_BYTES);
                page[*at..end].copy_from_slice(&bytes[..end - at]);
            }
            let Some(patch) = patched(&base, &page) else {
                let changed = base.iter().zip(&page).filter(|(a, b)| a != b).count();
                prop_assert!(changed * 4 > PATCH_BYTES_MAX);
                return Ok(());
            };
            prop_assert!(patch.len() <= PATCH_BYTES_MAX);
            let mut payload = Vec::new();
            Delta::begin(BASE, HASH, &mut payload);
            payload.extend_from_slice(&patch);
            let delta = Delta::decode(Codec::Raw, &payload, PLACE).unwrap();
            let mut back = [0xee; PAGE_BYTES];
            delta.fill(HASH, &base, &mut back).unwrap();
            prop_assert_eq!(back, page);
            prop_assert!(delta.fill(PageHash([6, 8]), &base, &mut back).is_err());
            let mut again = Vec::new();
            delta.encode(&mut again);
            prop_assert_eq!(again, payload);
        }

        #[test]
        fn arbitrary_payloads_never_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..3000), sane in any::<bool>(), small in prop::collection::vec(0u8..20, 0..300),
        ) {
            let mut payload = bytes;
            if sane {
                Delta::begin(BASE, HASH, &mut payload);
                payload.extend_from_slice(&small);
            }
            for codec in [Codec::Raw, Codec::Lz4] {
                if let Ok(delta) = Delta::decode(codec, &payload, PLACE) {
                    prop_assert!(delta.base < PLACE && delta.patch.len() <= PATCH_BYTES_MAX);
                    let mut page = [0; PAGE_BYTES];
                    let _ = delta.fill(HASH, &[1; PAGE_BYTES], &mut page);
                }
            }
        }
    }

    #[test]
    fn a_few_changed_words_take_tens_of_bytes_and_equal_pages_none() {
        let base = noise(1);
        let mut page = base;
        for at in [8, 1000, 4088] {
            page[at] ^= 1;
            page[at + 1] ^= 1;
        }
        let patch = patched(&base, &page).unwrap();
        assert!(patch.len() <= 3 * 5, "{patch:?}");
        assert_eq!(patched(&base, &base), Some(Vec::new()));
        assert_eq!(patched(&base, &noise(2)), None);
    }

    #[test]
    fn an_impossible_base_is_refused() {
        for base in [PLACE, PageRef(PLACE.0 + 1), PageRef::ZERO, PageRef(64), PageRef::new(1, 63)] {
            let mut payload = Vec::new();
            Delta::begin(base, HASH, &mut payload);
            payload.extend_from_slice(&[0, 1, 7]);
            let error = Delta::decode(Codec::Raw, &payload, PLACE).unwrap_err();
            assert!(error.contains("cannot be on"), "{base:?}: {error}");
        }
    }
}
