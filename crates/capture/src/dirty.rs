//! The pages that the next sealed checkpoint owes.
//!
//! Draining a tracker is destructive, so the pages that it reports are written down here before
//! anything else happens, and struck out only when a checkpoint that holds them is sealed. An
//! aborted checkpoint needs no clean-up: whatever went wrong, its pages are still owed and the next
//! checkpoint copies them again.
//!
//! ```text
//!   tracker ──drain──▶ owed ──captured──▶ in flight (one set for each checkpoint) ──sealed──▶ struck out
//!                       ▲                     │ any of them fails: all that are in flight
//!                       └─────────────────────┘ (a later one is a difference to an earlier one)
//! ```

use crate::ports::{BoxError, Tracker};
use keyframe_units::{PageIndex, PageRange, PageSet};
use std::collections::VecDeque;

/// A tracker and the pages it reported that no sealed checkpoint holds.
pub struct DirtyLog {
    tracker: Box<dyn Tracker>,
    owed: PageSet,
    in_flight: VecDeque<PageSet>,
}

impl DirtyLog {
    /// Nothing is owed yet: the tracker's first report is complete.
    pub fn new(tracker: Box<dyn Tracker>, space_pages: u64) -> Self {
        Self { tracker, owed: PageSet::new(space_pages), in_flight: VecDeque::new() }
    }

    /// Drains the tracker. Returns the pages written since the last drain. If that fails, every
    /// page is owed.
    pub fn drain(&mut self) -> Result<PageSet, BoxError> {
        self.drain_by(|tracker, written| tracker.drain(written))
    }

    /// As [`Self::drain`], in the pause; with `owed`, all that is owed.
    pub fn drain_still(&mut self, owed: bool) -> Result<PageSet, BoxError> {
        let written = self.drain_by(|tracker, written| tracker.drain_still(written))?;
        Ok(if owed { self.owed.clone() } else { written })
    }

    fn drain_by(
        &mut self,
        drain: impl Fn(&mut dyn Tracker, &mut PageSet) -> Result<(), BoxError>,
    ) -> Result<PageSet, BoxError> {
        let mut written = PageSet::new(self.owed.space_pages());
        match drain(&mut *self.tracker, &mut written) {
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

    /// Copies of `pages` were made while the VM ran.
    pub fn copied_unfrozen(&mut self, pages: &PageSet) {
        self.tracker.copied_unfrozen(pages);
    }

    /// About how many pages the next [`Self::drain_owed`] would find; none where that cannot be
    /// told cheaply.
    pub fn estimate_pages(&mut self) -> Option<u64> {
        Some(self.tracker.count()?.saturating_add(self.owed.len()))
    }

    /// A checkpoint that holds every owed page is captured.
    pub fn captured(&mut self) {
        let empty = PageSet::new(self.owed.space_pages());
        self.in_flight.push_back(std::mem::replace(&mut self.owed, empty));
    }

    /// The oldest checkpoint in flight is sealed.
    pub fn sealed(&mut self) {
        self.in_flight.pop_front();
    }

    /// A checkpoint in flight failed: the pages of all of them are owed again. Returns how many
    /// checkpoints that were.
    pub fn give_back(&mut self) -> u64 {
        let lost = self.in_flight.len() as u64;
        for set in self.in_flight.drain(..) {
            self.owed.union_with(&set);
        }
        lost
    }

    /// Drops the tracker. Every drain fails from here on.
    pub fn untrack(&mut self) {
        self.tracker = Box::new(Untracked);
    }

    /// Captured checkpoints that are not sealed yet.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.len() as u64
    }

    /// Pages drained that neither a sealed checkpoint nor one in flight holds.
    pub fn owed_pages(&self) -> u64 {
        self.owed.len()
    }

    /// Every page is owed, and no checkpoint is in flight: there is a sink that has none of them.
    pub fn restart(&mut self) {
        self.in_flight.clear();
        self.owe_everything();
    }

    fn owe_everything(&mut self) {
        self.owed.insert_range(PageRange::new(PageIndex(0), self.owed.space_pages()));
    }
}

/// What is left when tracking has ended.
struct Untracked;

impl Tracker for Untracked {
    fn drain(&mut self, _: &mut PageSet) -> Result<(), BoxError> {
        Err("this VM is not tracked any more".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    fn log(script: Vec<Result<Vec<u64>, &'static str>>) -> DirtyLog {
        DirtyLog::new(Box::new(Script(script)), 8)
    }

    fn pages(set: &PageSet) -> Vec<u64> {
        set.iter().map(|p| p.0).collect()
    }

    #[test]
    fn pages_of_an_aborted_checkpoint_are_owed_by_the_next() {
        let mut log = log(vec![Ok(vec![1, 2]), Ok(vec![3]), Ok(vec![4]), Ok(vec![5])]);
        assert_eq!(pages(&log.drain_owed().unwrap()), [1, 2]);
        assert_eq!(pages(&log.drain().unwrap()), [3]);
        // Aborted here: never captured.
        assert_eq!(pages(&log.drain_owed().unwrap()), [1, 2, 3, 4]);
        log.captured();
        assert_eq!(pages(&log.drain_owed().unwrap()), [5]);
    }

    #[test]
    fn one_that_fails_takes_all_behind_it_along() {
        let mut log = log(vec![Ok(vec![1]), Ok(vec![2]), Ok(vec![3]), Ok(vec![4]), Ok(vec![])]);
        for _ in 0..3 {
            log.drain_owed().unwrap();
            log.captured();
        }
        log.sealed();
        log.drain_owed().unwrap();
        assert_eq!((log.give_back(), log.in_flight()), (2, 0));
        assert_eq!(pages(&log.drain_owed().unwrap()), [2, 3, 4]);
    }

    #[test]
    fn after_a_broken_scan_every_page_is_owed() {
        let mut log = log(vec![Err("EFAULT"), Ok(vec![])]);
        assert!(log.drain_owed().is_err());
        assert_eq!(log.drain_owed().unwrap().len(), 8);
    }
}
