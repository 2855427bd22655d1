//! The pages that the next sealed checkpoint owes.
//!
//! Draining a tracker is destructive, so the pages that it reports are written down here before anything else happens,
//! and struck out only when a checkpoint that holds them is sealed. An aborted checkpoint needs no clean-up: whatever
//! went wrong, its pages are still owed and the next checkpoint copies them again.
//!
//! ```text
//!   tracker ──drain──▶ owed ──(copied, encoded, sealed)──▶ settle: owed = {}
//!                       ▲                     │
//!                       └────── aborted ──────┘  nothing to do
//! ```

use crate::ports::{BoxError, Tracker};
use keyframe_units::{PageRange, PageSet};

/// A tracker and the pages it reported that no sealed checkpoint holds.
pub struct DirtyLog<T> {
    tracker: T,
    owed: PageSet,
}

impl<T: Tracker> DirtyLog<T> {
    /// Nothing is owed yet: the tracker's first report is complete.
    pub fn new(tracker: T, space_pages: u64) -> Self {
        Self { tracker, owed: PageSet::new(space_pages) }
    }

    /// Drains the tracker. Returns the pages written since the last drain. If that fails, every page is owed.
    pub fn drain(&mut self) -> Result<PageSet, BoxError> {
        let mut written = PageSet::new(self.owed.space_pages());
        match self.tracker.drain(&mut written) {
            Ok(()) => {
                self.owed.union_with(&written);
                Ok(written)
            }
            Err(error) => {
                self.owe_everything();
                Err(error)
            }
        }
    }

    /// As [`Self::drain`], and returns all that is owed: the first round of a checkpoint.
    pub fn drain_owed(&mut self) -> Result<PageSet, BoxError> {
        self.drain()?;
        Ok(self.owed.clone())
    }

    /// A checkpoint that holds every owed page is sealed.
    pub fn settle(&mut self) {
        self.owed.clear();
    }

    /// Pages drained that no sealed checkpoint holds.
    pub fn owed_pages(&self) -> u64 {
        self.owed.len()
    }

    fn owe_everything(&mut self) {
        let all = PageRange::new(keyframe_units::PageIndex(0), self.owed.space_pages());
        self.owed.insert_range(all);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_units::PageIndex;

    /// Reports what it is told to, once.
    struct Script(Vec<Result<Vec<u64>, &'static str>>);
    impl Tracker for Script {
        fn drain(&mut self, written: &mut PageSet) -> Result<(), BoxError> {
            match self.0.remove(0) {
                Ok(pages) => pages.into_iter().for_each(|p| {
                    written.insert(PageIndex(p));
                }),
                Err(text) => return Err(text.into()),
            }
            Ok(())
        }
    }

    fn pages(set: &PageSet) -> Vec<u64> {
        set.iter().map(|p| p.0).collect()
    }

    #[test]
    fn pages_of_an_aborted_checkpoint_are_owed_by_the_next() {
        let script = Script(vec![Ok(vec![1, 2]), Ok(vec![3]), Ok(vec![4]), Ok(vec![5])]);
        let mut log = DirtyLog::new(script, 8);
        assert_eq!(pages(&log.drain_owed().unwrap()), [1, 2]);
        assert_eq!(pages(&log.drain().unwrap()), [3]);
        // Aborted here: never settled.
        assert_eq!(pages(&log.drain_owed().unwrap()), [1, 2, 3, 4]);
        log.settle();
        assert_eq!(pages(&log.drain_owed().unwrap()), [5]);
    }

    #[test]
    fn after_a_broken_scan_every_page_is_owed() {
        let mut log = DirtyLog::new(Script(vec![Err("EFAULT"), Ok(vec![])]), 5);
        assert!(log.drain_owed().is_err());
        assert_eq!(pages(&log.drain_owed().unwrap()), [0, 1, 2, 3, 4]);
    }
}
