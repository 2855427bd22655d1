//! Finds written pages by reading and hashing every page. It needs the kernel only for reading.
//!
//! It serves as the oracle of the other trackers, and as the fallback if the kernel cannot protect
//! pages. It takes as long as reading all of RAM, also in the pause.
//!
//! Invariants: the hash is cryptographic and each process chooses a new key, so a guest cannot
//! write a page unnoticed. A page that was copied while the VM ran is reported again by the next
//! scan, even if its content has not changed between the scans: the guest may have changed it for
//! the moment of the copy.

use crate::ports::{BoxError, DirtyTracker, PageReader};
use keyframe_units::{PAGE_BYTES, PageIndex, PageRange, PageSet};
use rayon::prelude::*;
use std::sync::Arc;

/// Pages per read.
const BATCH_PAGES: u64 = 4096;
/// 128 bits: a collision needs about 2^64 tries.
const HASH_BYTES: usize = 16;

type PageHash = [u8; HASH_BYTES];

/// Finds written pages by comparison: hashes all of RAM at each scan, and reports the pages whose
/// hash differs from that of the previous scan.
pub struct CompareTracker {
    reader: Arc<dyn PageReader>,
    key: [u8; 32],
    hashes: Vec<PageHash>,
    /// Pages that were copied while the VM ran: their copies may differ from the hashed content.
    unsettled: PageSet,
    buffer: Vec<u8>,
}

impl CompareTracker {
    /// Creates a tracker of a page space of `space_pages` pages, read through `reader`. `key` keys
    /// the hashes; it must be random and secret.
    pub fn new(reader: Arc<dyn PageReader>, space_pages: u64, key: [u8; 32]) -> Self {
        // Before the first scan a page counts as zeros, which need not be captured.
        let zero = hash(&key, &[0; PAGE_BYTES]);
        let buffer = vec![0; (BATCH_PAGES.min(space_pages) as usize) * PAGE_BYTES];
        Self {
            reader,
            key,
            hashes: vec![zero; space_pages as usize],
            unsettled: PageSet::new(space_pages),
            buffer,
        }
    }
}

impl DirtyTracker for CompareTracker {
    fn drain(&mut self, written: &mut PageSet) -> Result<(), BoxError> {
        let space_pages = self.hashes.len() as u64;
        let mut first = 0;
        while first < space_pages {
            let range = PageRange::new(PageIndex(first), BATCH_PAGES.min(space_pages - first));
            let bytes = self
                .buffer
                .get_mut(..range.len_bytes() as usize)
                .ok_or("the page buffer is too short")?;
            self.reader.read(&[range], bytes)?;
            let key = &self.key;
            let fresh: Vec<PageHash> =
                bytes.par_chunks_exact(PAGE_BYTES).map(|page| hash(key, page)).collect();
            for (page, fresh) in range.iter().zip(fresh) {
                let Some(known) = self.hashes.get_mut(page.0 as usize) else { continue };
                if *known != fresh || self.unsettled.contains(page) {
                    *known = fresh;
                    written.insert(page);
                }
            }
            first += range.len_pages;
        }
        self.unsettled.clear();
        Ok(())
    }

    fn mark_unfrozen_copies(&mut self, pages: &PageSet) {
        self.unsettled.union_with(pages);
    }
}

fn hash(key: &[u8; 32], page: &[u8]) -> PageHash {
    let mut short = [0; HASH_BYTES];
    short.copy_from_slice(&blake3::keyed_hash(key, page).as_bytes()[..HASH_BYTES]);
    short
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    struct Ram(Mutex<Vec<u8>>);
    impl PageReader for Ram {
        fn read(&self, ranges: &[PageRange], dst: &mut [u8]) -> Result<(), BoxError> {
            let ram = self.0.lock().unwrap();
            let from = ranges[0].first.0 as usize * PAGE_BYTES;
            dst.copy_from_slice(&ram[from..from + dst.len()]);
            Ok(())
        }
    }

    #[test]
    fn exactly_the_pages_that_differ_are_found() {
        const PAGES: u64 = BATCH_PAGES + 7;
        let ram = Arc::new(Ram(Mutex::new(vec![0; PAGES as usize * PAGE_BYTES])));
        let mut tracker =
            CompareTracker::new(Arc::clone(&ram) as Arc<dyn PageReader>, PAGES, [7; 32]);
        let mut drain = || {
            let mut set = PageSet::new(PAGES);
            tracker.drain(&mut set).unwrap();
            set.iter().map(|p| p.0).collect::<Vec<_>>()
        };
        let write =
            |page: u64, value: u8| ram.0.lock().unwrap()[page as usize * PAGE_BYTES + 99] = value;
        assert_eq!(drain(), [0u64; 0], "zeros need not be captured");
        write(3, 1);
        write(PAGES - 1, 1);
        assert_eq!(drain(), [3, PAGES - 1]);
        write(3, 0);
        write(5, 0);
        assert_eq!(drain(), [3], "a page that is written with the same content has not changed");
    }

    #[test]
    fn a_page_that_was_copied_while_the_vm_ran_is_found_again_though_it_holds_the_same() {
        let ram = Arc::new(Ram(Mutex::new(vec![0; 8 * PAGE_BYTES])));
        let mut tracker = CompareTracker::new(Arc::clone(&ram) as Arc<dyn PageReader>, 8, [7; 32]);
        let mut drained = Vec::new();
        for round in 0..3 {
            let mut set = PageSet::new(8);
            ram.0.lock().unwrap()[2 * PAGE_BYTES] = 5;
            tracker.drain(&mut set).unwrap();
            drained.push(set.iter().map(|p| p.0).collect::<Vec<_>>());
            if round == 0 {
                // Copied as something else, then written back.
                tracker.mark_unfrozen_copies(&set);
            }
        }
        assert_eq!(drained, [vec![2], vec![2], vec![]]);
    }
}
