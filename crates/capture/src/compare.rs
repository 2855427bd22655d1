//! Finds written pages by reading and hashing every page: needs nothing of the kernel but reading.
//!
//! It is the oracle of the other trackers and the fallback where the kernel cannot protect, and as
//! slow as reading all of RAM (some 0.3 s for 1 GiB), in the pause too.
//!
//! Invariants: the hash is cryptographic and keyed afresh in each process, so that no guest can
//! write a page without being seen. A page that was copied while the VM ran is found again by the
//! next look, whatever it holds: its copy may be of a moment between two looks at which the page
//! held the same.

use crate::ports::{BoxError, PageReader, Tracker};
use keyframe_units::{PAGE_BYTES, PageIndex, PageRange, PageSet};
use rayon::prelude::*;
use std::sync::Arc;

/// Pages read in one go.
const BATCH_PAGES: u64 = 4096;
/// Enough against collisions: 2^64 pages would have to be tried for one.
const HASH_BYTES: usize = 16;

type PageHash = [u8; HASH_BYTES];

/// Compares RAM with hashes of what it held.
pub struct CompareTracker {
    reader: Arc<dyn PageReader>,
    key: [u8; 32],
    hashes: Vec<PageHash>,
    /// Pages whose copies need not be what was hashed.
    unsettled: PageSet,
    buffer: Vec<u8>,
}

impl CompareTracker {
    /// Looks at `space_pages` pages through `reader`. `key` must be random and secret.
    pub fn new(reader: Arc<dyn PageReader>, space_pages: u64, key: [u8; 32]) -> Self {
        // Until the first look a page counts as zeros, which need not be captured.
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

impl Tracker for CompareTracker {
    fn drain(&mut self, written: &mut PageSet) -> Result<(), BoxError> {
        let space_pages = self.hashes.len() as u64;
        let mut first = 0;
        while first < space_pages {
            let range = PageRange::new(PageIndex(first), BATCH_PAGES.min(space_pages - first));
            let bytes = self
                .buffer
                .get_mut(..range.len_bytes() as usize)
                .ok_or("the buffer is too short")?;
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

    fn copied_unfrozen(&mut self, pages: &PageSet) {
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
        assert_eq!(drain(), [3], "what is written with the same content has not changed");
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
                tracker.copied_unfrozen(&set);
            }
        }
        assert_eq!(drained, [vec![2], vec![2], vec![]]);
    }
}
