//! The pages that the next sealed checkpoint must hold: the *owed* pages.
//!
//! Draining a tracker is destructive. So its pages are recorded here at once, and are struck out
//! only when a checkpoint that holds them is sealed. An aborted checkpoint needs no clean-up: its
//! pages are still owed, and the next checkpoint copies them again.
//!
//! ```text
//!   tracker ──drain──▶ owed ──captured──▶ in flight (a set per checkpoint) ──sealed──▶ struck out
//!                       ▲                     │ one fails: all sets in flight are owed again,
//!                       └─────────────────────┘ since each is a difference to the one before
//! ```

use crate::ports::{BoxError, DirtyTracker, PausedFind};
use keyframe_units::{PageIndex, PageRange, PageSet};
use std::collections::VecDeque;

/// A tracker, and the pages that it has reported and that no sealed checkpoint holds (the *owed*
/// pages).
pub struct DirtyLog {
    tracker: Box<dyn DirtyTracker>,
    owed: PageSet,
    in_flight: VecDeque<PageSet>,
    /// All pages drained since [`DirtyLog::watch`].
    watched: Option<PageSet>,
}

impl DirtyLog {
    /// Creates a log that owes nothing, for a page space of `space_pages` pages. The first drain of
    /// `tracker` reports every page.
    pub fn new(tracker: Box<dyn DirtyTracker>, space_pages: u64) -> Self {
        Self { tracker, owed: PageSet::new(space_pages), in_flight: VecDeque::new(), watched: None }
    }

    /// Drains the tracker and returns the pages written since the last drain. Error: the tracker's
    /// scan failed; every page is owed then.
    pub fn drain(&mut self) -> Result<PageSet, BoxError> {
        self.drain_by(|tracker, written| tracker.drain(written))
    }

    /// Drains the tracker while the VM is paused. Returns the pages written since the last drain,
    /// or if `all_owed` is true, all pages that are owed. Error: the tracker's scan failed; every
    /// page is owed then.
    pub fn drain_paused(&mut self, all_owed: bool) -> Result<PageSet, BoxError> {
        let written = self.drain_by(|tracker, written| tracker.drain_paused(written))?;
        Ok(if all_owed { self.owed.clone() } else { written })
    }

    /// Returns true if the tracker can open a window before a pause.
    pub fn has_window(&self) -> bool {
        self.tracker.has_window()
    }

    /// Drains the tracker and opens its window, if it has one. Returns the pages written since the
    /// last drain, or if `all_owed` is true, all pages that are owed. Error: the tracker's scan
    /// failed; every page is owed then.
    pub fn open_window(&mut self, all_owed: bool) -> Result<PageSet, BoxError> {
        let written = self.drain_by(|tracker, written| tracker.open_window(written))?;
        Ok(if all_owed { self.owed.clone() } else { written })
    }

    /// Closes the tracker's window, if one is open.
    pub fn close_window(&mut self) {
        self.tracker.close_window();
    }

    /// Returns how the newest [`Self::drain_paused`] found the pages.
    pub fn paused_find(&self) -> PausedFind {
        self.tracker.paused_find()
    }

    fn drain_by(
        &mut self,
        drain: impl Fn(&mut dyn DirtyTracker, &mut PageSet) -> Result<(), BoxError>,
    ) -> Result<PageSet, BoxError> {
        let mut written = PageSet::new(self.owed.space_pages());
        match drain(&mut *self.tracker, &mut written) {
            Ok(()) => {
                self.owed.union_with(&written);
                if let Some(watched) = &mut self.watched {
                    watched.union_with(&written);
                }
                Ok(written)
            }
            Err(error) => {
                self.owe_everything();
                Err(error)
            }
        }
    }

    /// Drains the tracker and returns all pages that are owed, for the first round of a checkpoint.
    /// Error: the tracker's scan failed; every page is owed then.
    pub fn drain_owed(&mut self) -> Result<PageSet, BoxError> {
        self.drain()?;
        Ok(self.owed.clone())
    }

    /// Tells the tracker that `pages` were copied while the VM ran.
    pub fn mark_unfrozen_copies(&mut self, pages: &PageSet) {
        self.tracker.mark_unfrozen_copies(pages);
    }

    /// Estimates how many pages the next [`Self::drain_owed`] would return. Returns `None` if the
    /// tracker cannot count cheaply.
    pub fn estimate_pages(&mut self) -> Option<u64> {
        Some(self.tracker.estimate_pages()?.saturating_add(self.owed.len()))
    }

    /// Records that a checkpoint that holds every owed page is captured.
    pub fn record_captured(&mut self) {
        let empty = PageSet::new(self.owed.space_pages());
        self.in_flight.push_back(std::mem::replace(&mut self.owed, empty));
    }

    /// Records that the oldest checkpoint in flight is sealed.
    pub fn record_sealed(&mut self) {
        self.in_flight.pop_front();
    }

    /// Owes the pages of all checkpoints in flight again, since one of them failed. Returns the
    /// number of these checkpoints.
    pub fn give_back(&mut self) -> u64 {
        let lost = self.in_flight.len() as u64;
        for set in self.in_flight.drain(..) {
            self.owed.union_with(&set);
        }
        lost
    }

    /// Drops the tracker. Every later drain fails.
    pub fn untrack(&mut self) {
        self.tracker = Box::new(EndedTracker);
    }

    /// Returns the number of captured checkpoints that are not sealed yet.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.len() as u64
    }

    /// Remembers all pages that are drained from now on, also if checkpoints of them are sealed.
    pub fn watch(&mut self) {
        self.watched = Some(PageSet::new(self.owed.space_pages()));
    }

    /// Returns the pages that were drained since [`Self::watch`]; `None` if it was not called.
    pub fn watched(&self) -> Option<&PageSet> {
        self.watched.as_ref()
    }

    /// Returns the pages of the newest captured checkpoint that is not sealed yet; `None` if there is
    /// none.
    pub fn newest_in_flight(&self) -> Option<&PageSet> {
        self.in_flight.back()
    }

    /// Returns the drained pages that neither a sealed checkpoint nor one in flight holds.
    pub fn owed(&self) -> &PageSet {
        &self.owed
    }

    /// Returns the number of drained pages that neither a sealed checkpoint nor one in flight
    /// holds.
    pub fn owed_pages(&self) -> u64 {
        self.owed.len()
    }

    /// Owes every page and forgets the checkpoints in flight, for a sink that holds none of them.
    pub fn restart(&mut self) {
        self.in_flight.clear();
        self.owe_everything();
    }

    fn owe_everything(&mut self) {
        let all = PageRange::new(PageIndex(0), self.owed.space_pages());
        self.owed.insert_range(all);
        if let Some(watched) = &mut self.watched {
            watched.insert_range(all);
        }
    }
}

/// Takes the tracker's place when tracking has ended.
struct EndedTracker;

impl DirtyTracker for EndedTracker {
    fn drain(&mut self, _: &mut PageSet) -> Result<(), BoxError> {
        Err("dirty tracking of this VM has ended".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reports each scripted result once.
    struct Script(Vec<Result<Vec<u64>, &'static str>>);
    impl DirtyTracker for Script {
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
        log.record_captured();
        assert_eq!(pages(&log.drain_owed().unwrap()), [5]);
    }

    #[test]
    fn one_that_fails_takes_all_behind_it_along() {
        let mut log = log(vec![Ok(vec![1]), Ok(vec![2]), Ok(vec![3]), Ok(vec![4]), Ok(vec![])]);
        for _ in 0..3 {
            log.drain_owed().unwrap();
            log.record_captured();
        }
        log.record_sealed();
        log.drain_owed().unwrap();
        assert_eq!((log.give_back(), log.in_flight()), (2, 0));
        assert_eq!(pages(&log.drain_owed().unwrap()), [2, 3, 4]);
    }

    #[test]
    fn what_is_watched_stays_when_it_is_sealed_and_is_everything_after_a_broken_scan() {
        let mut log = log(vec![Ok(vec![1]), Ok(vec![2]), Ok(vec![3]), Err("EFAULT")]);
        log.drain_owed().unwrap();
        assert!(log.watched().is_none());
        log.watch();
        for _ in 0..2 {
            log.drain_owed().unwrap();
            log.record_captured();
            log.record_sealed();
        }
        assert_eq!(pages(log.watched().unwrap()), [2, 3]);
        assert!(log.drain().is_err());
        assert_eq!(log.watched().unwrap().len(), 8);
    }

    #[test]
    fn after_a_broken_scan_every_page_is_owed() {
        let mut log = log(vec![Err("EFAULT"), Ok(vec![])]);
        assert!(log.drain_owed().is_err());
        assert_eq!(log.drain_owed().unwrap().len(), 8);
    }
}
