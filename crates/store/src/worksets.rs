//! Working sets: the pages that a VM touched first after it was restored from a checkpoint, in that
//! order.
//!
//! ```text
//!   worksets/0000000012.wset   magic "KF:WST\r\n", version, then (see the envelope)
//!     12  8 checkpoint    20 16 store id    36  8 pages of the space    44  8 pages listed
//!     52 .. a varint each: zigzag(page - page before)                   end-32 32 BLAKE3
//! ```
//!
//! Advice, nothing else: it says in which order to read ahead. Missing, damaged or of another VM,
//! it is as if there were none, and no checkpoint depends on it. It is written by whoever restores,
//! without the writer's lock.
//!
//! Where none was recorded, the pages written until the next checkpoint of the run stand for it.

use crate::config::StoreId;
use crate::store::Inner;
use crate::{Loaded, Result, envelope};
use keyframe_bytes::ByteReader;
use keyframe_bytes::varint::{apply_zigzag, put_varint, zigzag_delta};
use keyframe_store_backend::layout;
use keyframe_units::{CheckpointId, PageIndex};

const MAGIC: envelope::Magic = *b"KF:WST\r\n";
/// More pages are not kept: 4 GiB touched before the rest came.
const PAGES_MAX: usize = 1 << 20;
/// A page takes ten bytes at most.
const BYTES_MAX: u64 = 128 + 10 * PAGES_MAX as u64;
/// How many checkpoints behind one are looked at for the next of its run.
const NEXT_MAX: usize = 16;

fn encode(store: StoreId, id: CheckpointId, space_pages: u64, pages: &[PageIndex]) -> Vec<u8> {
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
    let count = reader.u64_le().ok().filter(|count| fits && *count <= PAGES_MAX as u64)?;
    let mut pages = Vec::new();
    let mut previous = 0;
    for _ in 0..count {
        previous = apply_zigzag(previous, reader.varint().ok()?);
        pages.push(PageIndex(previous));
    }
    let sound = reader.is_empty() && pages.iter().all(|page| page.0 < space_pages);
    sound.then_some(pages)
}

impl Loaded {
    /// The pages that a VM restored from this checkpoint is expected to touch first, in that order:
    /// those that one touched, or, where none was ever restored lazily, those that it wrote until
    /// the next checkpoint. Empty where nothing is known.
    pub fn expected_first(&self) -> Vec<PageIndex> {
        self.working_set().or_else(|| self.inner.written_next(self)).unwrap_or_default()
    }

    /// The recorded working set.
    pub fn working_set(&self) -> Option<Vec<PageIndex>> {
        let bytes = self.inner.backend.read(&layout::workset(self.id), BYTES_MAX).ok()?;
        decode(&bytes, self.inner.config.id, self.id, self.meta.ram.len_pages())
    }

    /// Keeps `touched`, behind what was kept before, for the next restore.
    pub fn keep_working_set(&self, touched: &[PageIndex]) -> Result<()> {
        let space_pages = self.meta.ram.len_pages();
        let mut pages = self.working_set().unwrap_or_default();
        let known = pages.len();
        let mut seen: rustc_hash::FxHashSet<PageIndex> = pages.iter().copied().collect();
        pages.extend(touched.iter().filter(|page| page.0 < space_pages && seen.insert(**page)));
        pages.truncate(PAGES_MAX);
        if pages.len() == known {
            return Ok(());
        }
        let file = encode(self.inner.config.id, self.id, space_pages, &pages);
        self.inner.backend.put(&layout::workset(self.id), &file)
    }
}

impl Inner {
    /// The pages that changed between a checkpoint and the next one of its run, rising; a few more
    /// where the next one's map reaches further back. `None` where there is no next one, or its map
    /// is complete.
    fn written_next(&self, of: &Loaded) -> Option<Vec<PageIndex>> {
        let ids = self.checkpoint_ids().ok()?;
        let next = ids.iter().filter(|id| **id > of.id).take(NEXT_MAX).find_map(|id| {
            let meta = self.read_checkpoint(*id).ok()?.meta;
            (meta.run == of.meta.run && meta.ram.same_space(&of.meta.ram)).then_some(*id)
        })?;
        let map = self.read_map(next.0).ok()?;
        map.header.parent?;
        let ram_pages = of.meta.ram.len_pages();
        Some(map.pages().take_while(|page| page.0 < ram_pages).take(PAGES_MAX).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STORE: StoreId = StoreId([7; 16]);
    const ID: CheckpointId = CheckpointId(12);

    #[test]
    fn a_damaged_or_foreign_working_set_is_none() {
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
