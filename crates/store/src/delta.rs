//! A page as what differs from the page of another record.
//!
//! ```text
//!   base      | ......AAAA..........BB............. |        its own record, plain, before this one
//!   page      | ......CCCC..........DD............. |
//!   patch     gap 6, length 4, CCCC   gap 10, length 2, DD
//!
//!   payload   0  8 reference to the base's record    8  4 first bytes of the base's hash    12 .. the patch, as the
//!                                                                                              record's codec says
//!   patch     runs: a varint each: bytes since the run before that are as in the base; bytes of the run, at least 1; these
//! ```
//!
//! Invariants: the base is plain and lies before the record, so that no chain is longer than one step. A patch is at most
//! [`PATCH_BYTES_MAX`] long, and within the page. That the base is the record that was meant is told by its hash.

use crate::bytes::{Cursor, Problem, put_varint};
use crate::codec::{Codec, decompress_patch};
use crate::identity::{PageHash, PageRef};
use crate::record::PACK_HEADER_BYTES;
use keyframe_units::{PAGE_BYTES, Page};

/// What is more than half of a page is better off without a base.
pub const PATCH_BYTES_MAX: usize = PAGE_BYTES / 2;
/// Bytes of the payload before the patch.
pub const DELTA_HEADER_BYTES: usize = 12;
/// Equal bytes between two runs that are cheaper to write than another run.
const GAP_BYTES_MIN: usize = 3;
const LINE_BYTES: usize = 64;

/// How a page is made from another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delta {
    /// The other one.
    pub base: PageRef,
    check: [u8; 4],
    patch: Vec<u8>,
}

impl Delta {
    /// Begins a payload: the patch goes behind it.
    pub fn begin(base: PageRef, hash: PageHash, out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(&base.0.to_le_bytes());
        out.extend_from_slice(&check_of(hash));
    }

    /// The payload of a record on another base of the same content.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(&self.base.0.to_le_bytes());
        out.extend_from_slice(&self.check);
        out.extend_from_slice(&self.patch);
    }

    /// Parses the payload of the record at `place`.
    pub fn decode(codec: Codec, payload: &[u8], place: PageRef) -> Result<Self, Problem> {
        let mut cursor = Cursor::new(payload);
        let (base, check) = (PageRef(cursor.u64()?), cursor.array()?);
        if base.pack() == 0 || base.offset() < PACK_HEADER_BYTES as u64 || base >= place {
            return Err(format!("a delta cannot be on {base:?}"));
        }
        let patch = decompress_patch(codec, cursor.rest(), PATCH_BYTES_MAX)?;
        Ok(Self { base, check, patch })
    }

    /// Makes the page from the content of its base, whose record says `hash`.
    pub fn fill(&self, hash: PageHash, content: &Page, page: &mut Page) -> Result<(), Problem> {
        if check_of(hash) != self.check {
            return Err("a delta whose base is another record than it was".into());
        }
        *page = *content;
        apply(&self.patch, page)
    }
}

fn check_of(hash: PageHash) -> [u8; 4] {
    let [a, b, c, d, ..] = hash.to_bytes();
    [a, b, c, d]
}

/// Appends to `out` how `page` differs from `base`; false where that takes more than `len_bytes_max`.
pub fn diff(base: &Page, page: &Page, len_bytes_max: usize, out: &mut Vec<u8>) -> bool {
    let end_max = out.len() + len_bytes_max;
    let mut runs = Runs { page, out, written: 0 };
    let mut run: Option<(usize, usize)> = None;
    let lines = base.as_chunks::<LINE_BYTES>().0.iter().zip(page.as_chunks::<LINE_BYTES>().0);
    for (line, (old, new)) in lines.enumerate() {
        if is_same(old, new) {
            continue;
        }
        let words = old.as_chunks::<8>().0.iter().zip(new.as_chunks::<8>().0);
        for (word, (old, new)) in words.enumerate() {
            let changed = u64::from_le_bytes(*old) ^ u64::from_le_bytes(*new);
            if changed == 0 {
                continue;
            }
            let at = line * LINE_BYTES + word * 8;
            let first = at + changed.trailing_zeros() as usize / 8;
            let end = at + 8 - changed.leading_zeros() as usize / 8;
            run = Some(match run {
                Some((from, to)) if first - to < GAP_BYTES_MIN => (from, end),
                Some((from, to)) => {
                    runs.put(from, to);
                    (first, end)
                }
                None => (first, end),
            });
        }
        if runs.out.len() > end_max {
            return false;
        }
    }
    if let Some((from, to)) = run {
        runs.put(from, to);
    }
    out.len() <= end_max
}

/// Compares without a branch for each word.
fn is_same(a: &[u8; LINE_BYTES], b: &[u8; LINE_BYTES]) -> bool {
    let words = a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0);
    words.fold(0, |all, (a, b)| all | (u64::from_le_bytes(*a) ^ u64::from_le_bytes(*b))) == 0
}

struct Runs<'a> {
    page: &'a Page,
    out: &'a mut Vec<u8>,
    written: usize,
}

impl Runs<'_> {
    fn put(&mut self, from: usize, to: usize) {
        put_varint(self.out, (from - self.written) as u64);
        put_varint(self.out, (to - from) as u64);
        self.out.extend_from_slice(self.page.get(from..to).unwrap_or_default());
        self.written = to;
    }
}

/// Writes the runs of a patch over a page.
fn apply(patch: &[u8], page: &mut Page) -> Result<(), Problem> {
    let mut cursor = Cursor::new(patch);
    let mut at = 0usize;
    while !cursor.is_empty() {
        let (gap, len) = (cursor.varint()?, cursor.varint()?);
        let from = at as u64 + gap.min(PAGE_BYTES as u64);
        let to = from + len.min(PAGE_BYTES as u64 + 1);
        let Some(into) = page.get_mut(from as usize..to as usize).filter(|into| !into.is_empty()) else {
            return Err("a delta that reaches beyond its page".into());
        };
        into.copy_from_slice(cursor.take(into.len())?);
        at = to as usize;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::tests::noise;
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
    fn a_few_words_take_tens_of_bytes_and_equal_pages_none() {
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
    fn a_base_that_cannot_be_is_refused() {
        for base in [PLACE, PageRef(PLACE.0 + 1), PageRef::ZERO, PageRef(64), PageRef::new(1, 63)] {
            let mut payload = Vec::new();
            Delta::begin(base, HASH, &mut payload);
            payload.extend_from_slice(&[0, 1, 7]);
            let error = Delta::decode(Codec::Raw, &payload, PLACE).unwrap_err();
            assert!(error.contains("cannot be on"), "{base:?}: {error}");
        }
    }
}
