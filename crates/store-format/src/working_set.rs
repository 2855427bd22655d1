//! The file of a working set: the pages that a VM touched first after a restore, in that order.
//!
//! ```text
//!   magic "KF:WST\r\n", version, then (see [`crate::envelope`])
//!     12  8 checkpoint    20 16 store id    36  8 pages of the space    44  8 pages listed
//!     52 .. a varint each: zigzag(page - page before)                   end-32 32 BLAKE3
//! ```

use crate::envelope;
use crate::identity::StoreId;
use keyframe_bytes::ByteReader;
use keyframe_bytes::varint::{apply_zigzag, put_varint, zigzag_delta};
use keyframe_units::{CheckpointId, PageIndex};

const MAGIC: envelope::Magic = *b"KF:WST\r\n";
/// The largest number of pages in a working set: 4 GiB.
pub const WORKING_SET_PAGES_MAX: usize = 1 << 20;
/// The longest file that is read, in bytes. A page takes ten bytes at most.
pub const WORKING_SET_BYTES_MAX: u64 = 128 + 10 * WORKING_SET_PAGES_MAX as u64;

/// Encodes the file with the working set `pages` of checkpoint `id`, out of a page space of
/// `space_pages` pages.
pub fn encode(store: StoreId, id: CheckpointId, space_pages: u64, pages: &[PageIndex]) -> Vec<u8> {
    let mut out = envelope::begin(MAGIC);
    out.extend_from_slice(&id.0.to_le_bytes());
    out.extend_from_slice(&store.0);
    for number in [space_pages, pages.len() as u64] {
        out.extend_from_slice(&number.to_le_bytes());
    }
    let mut previous = 0;
    for page in pages {
        put_varint(&mut out, zigzag_delta(previous, page.0));
        previous = page.0;
    }
    envelope::finish(out)
}

/// Parses the file of the working set of checkpoint `id`, and returns its pages. Returns `None` if
/// the file is damaged, or belongs to another checkpoint, store or page space than one of
/// `space_pages` pages.
pub fn decode(
    bytes: &[u8],
    store: StoreId,
    id: CheckpointId,
    space_pages: u64,
) -> Option<Vec<PageIndex>> {
    let mut reader = ByteReader::new(envelope::open(bytes, MAGIC, "").ok()?);
    let fits = reader.u64_le().ok()? == id.0
        && reader.array::<16>().ok()? == store.0
        && reader.u64_le().ok()? == space_pages;
    let count =
        reader.u64_le().ok().filter(|count| fits && *count <= WORKING_SET_PAGES_MAX as u64)?;
    let mut pages = Vec::new();
    let mut previous = 0;
    for _ in 0..count {
        previous = apply_zigzag(previous, reader.varint().ok()?);
        pages.push(PageIndex(previous));
    }
    let sound = reader.is_empty() && pages.iter().all(|page| page.0 < space_pages);
    sound.then_some(pages)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STORE: StoreId = StoreId([7; 16]);
    const ID: CheckpointId = CheckpointId(12);

    #[test]
    fn a_damaged_or_foreign_working_set_is_refused() {
        let bytes = encode(STORE, ID, 100, &[PageIndex(99), PageIndex(0), PageIndex(50)]);
        assert!(decode(&bytes, STORE, ID, 100).is_some());
        assert!(decode(&bytes, STORE, CheckpointId(13), 100).is_none());
        assert!(decode(&bytes, StoreId([8; 16]), ID, 100).is_none());
        assert!(decode(&bytes, STORE, ID, 99).is_none(), "of another VM");
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(&flipped, STORE, ID, 100).is_none(), "bit {bit}");
        }
    }

    proptest! {
        #[test]
        fn working_sets_come_back_in_their_order(pages in prop::collection::vec(0u64..5000, 0..200)) {
            let pages: Vec<PageIndex> = pages.into_iter().map(PageIndex).collect();
            prop_assert_eq!(decode(&encode(STORE, ID, 5000, &pages), STORE, ID, 5000), Some(pages));
        }

        #[test]
        fn arbitrary_content_never_panics(count in any::<u64>(), tail in prop::collection::vec(any::<u8>(), 0..60)) {
            let mut bytes = envelope::begin(MAGIC);
            bytes.extend_from_slice(&ID.0.to_le_bytes());
            bytes.extend_from_slice(&STORE.0);
            for number in [u64::MAX, count % 64] {
                bytes.extend_from_slice(&number.to_le_bytes());
            }
            bytes.extend_from_slice(&tail);
            let _ = decode(&envelope::finish(bytes), STORE, ID, u64::MAX);
        }
    }
}
