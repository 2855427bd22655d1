//! The pages put since the last seal, by outcome.

use keyframe_store_format::meta::Counts;
use keyframe_units::{PageIndex, PageSet};

/// The outcome of a put of a page or a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// The page is zero: nothing is stored.
    Zero,
    /// The page had this content at the last checkpoint.
    Unchanged,
    /// The store held this content.
    Dedup,
    /// A new record was appended.
    Stored {
        /// Its length in bytes, compressed, with header.
        bytes: u64,
    },
}

/// The pages put since the last seal, by the outcome of the last put of each.
#[derive(Debug)]
pub struct Puts {
    pub all: PageSet,
    zero: PageSet,
    unchanged: PageSet,
    dedup: PageSet,
    /// Of these: content that a disk brought into the store.
    dedup_disk: PageSet,
    pub stored_bytes: u64,
}

impl Puts {
    /// Creates empty sets over `space_pages` pages.
    pub fn new(space_pages: u64) -> Self {
        let set = || PageSet::new(space_pages);
        Self {
            all: set(),
            zero: set(),
            unchanged: set(),
            dedup: set(),
            dedup_disk: set(),
            stored_bytes: 0,
        }
    }

    /// Forgets all puts.
    pub fn clear(&mut self) {
        let Self { all, zero, unchanged, dedup, dedup_disk, .. } = self;
        for set in [all, zero, unchanged, dedup, dedup_disk] {
            set.clear();
        }
        self.stored_bytes = 0;
    }

    /// Records the outcome `put` of a put of `page`. `of_disk` is true if a disk brought the
    /// content into the store.
    pub fn note(&mut self, page: PageIndex, put: PutOutcome, of_disk: bool) {
        self.all.insert(page);
        if of_disk && put == PutOutcome::Dedup {
            self.dedup_disk.insert(page);
        } else {
            self.dedup_disk.remove(page);
        }
        for (set, kind) in [
            (&mut self.zero, PutOutcome::Zero),
            (&mut self.unchanged, PutOutcome::Unchanged),
            (&mut self.dedup, PutOutcome::Dedup),
        ] {
            if put == kind {
                set.insert(page);
            } else {
                set.remove(page);
            }
        }
    }

    /// Returns the numbers of pages by outcome, for the description of the checkpoint.
    pub fn counts(&self) -> Counts {
        let (dirty_pages, zero_pages) = (self.all.len(), self.zero.len());
        let (dedup_pages, unchanged_pages) = (self.dedup.len(), self.unchanged.len());
        Counts {
            dirty_pages,
            zero_pages,
            dedup_pages,
            dedup_disk_pages: self.dedup_disk.len(),
            unchanged_pages,
            stored_pages: dirty_pages - zero_pages - dedup_pages - unchanged_pages,
            stored_bytes: self.stored_bytes,
            map_bytes: 0,
            device_bytes: 0,
        }
    }
}
