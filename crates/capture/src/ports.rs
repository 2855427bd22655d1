//! The traits through which a capture reaches the guest's memory, the store and its observer.
//!
//! The VMM's trait is [`crate::machine::Machine`].

use crate::checkpoint::{CapturePhase, CapturedCheckpoint};
use keyframe_units::{Page, PageIndex, PageRange, PageSet, RamLayout};
use std::sync::Arc;

/// An error of an implementation, with its own text and sources.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// How a tracker found the last pages of a checkpoint, in the pause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PausedFind {
    /// It looked at all of RAM, as it was to.
    #[default]
    Scan,
    /// A window of page faults named them.
    Window,
    /// A window was open, but it could not name all pages for the reason with this name. So all of
    /// RAM was scanned in the same pause.
    FellBack(&'static str),
}

impl PausedFind {
    /// Returns the way in which several trackers together found the pages: that of the slowest.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::FellBack(gap), _) | (_, Self::FellBack(gap)) => Self::FellBack(gap),
            (Self::Window, Self::Window) => Self::Window,
            _ => Self::Scan,
        }
    }
}

/// Finds the pages that the guest wrote.
pub trait DirtyTracker: Send {
    /// Adds to `written` each page written since the last call, and protects it again in the same
    /// step. **Destructive**: the tracker forgets the pages. The first call reports every page
    /// that may hold anything but zeros.
    ///
    /// # Errors
    ///
    /// After an error some pages may have been protected without being reported, so the caller
    /// must take every page as written.
    fn drain(&mut self, written: &mut PageSet) -> Result<(), BoxError>;

    /// Drains as [`DirtyTracker::drain`], while the VM is paused. An implementation may assume that
    /// few pages were written and that the VM's processors are free to help. Errors: those of
    /// [`DirtyTracker::drain`].
    fn drain_paused(&mut self, written: &mut PageSet) -> Result<(), BoxError> {
        self.drain(written)
    }

    /// Returns true if [`DirtyTracker::open_window`] opens a window, so that the next
    /// [`DirtyTracker::drain_paused`] need not look at all of RAM.
    fn has_window(&self) -> bool {
        false
    }

    /// Drains as [`DirtyTracker::drain`], shortly before a pause, and records from then on which
    /// pages are written. The next [`DirtyTracker::drain_paused`] reports these pages. It leaves
    /// them unprotected, so that the next drain reports them again. Errors: those of
    /// [`DirtyTracker::drain`].
    fn open_window(&mut self, written: &mut PageSet) -> Result<(), BoxError> {
        self.drain(written)
    }

    /// Ends the recording of an open window, after the pause or in place of it.
    fn close_window(&mut self) {}

    /// Returns how the newest [`DirtyTracker::drain_paused`] found the pages.
    fn paused_find(&self) -> PausedFind {
        PausedFind::Scan
    }

    /// Tells the tracker that `pages` were copied while the VM ran, so the copies may differ from
    /// the contents at the last drain. A tracker that compares contents must report them again.
    fn mark_unfrozen_copies(&mut self, pages: &PageSet) {
        let _ = pages;
    }

    /// Estimates how many pages the next [`DirtyTracker::drain`] would report. Returns `None` if
    /// counting them needs a drain or is expensive.
    fn estimate_pages(&mut self) -> Option<u64> {
        None
    }
}

/// The function that a [`FirstWriteMonitor`] calls with pages that the VM is about to write for the
/// first time since they were protected.
pub type FirstWriteHook = Arc<dyn Fn(PageRange) + Send + Sync>;

/// Delays the first write to each protected page: the basis of copy-on-write.
pub trait FirstWriteMonitor: Send + Sync {
    /// Calls `hook` before the first write to each page since it was protected, from now on; the
    /// writing processor waits until the hook returns. `None` removes the hook. The previous hook
    /// is no longer called once this method has returned.
    fn set_hook(&self, hook: Option<FirstWriteHook>);

    /// Returns the pages that may have changed since they were protected without a call of the
    /// hook: they were discarded, or the kernel merged them. A later copy of such a page is
    /// invalid. Error: the kernel does not tell.
    fn unannounced(&self) -> Result<PageSet, BoxError>;
}

/// Freezes all of the VM's RAM at once, while the VM is paused.
pub trait RamFreezer: Send {
    /// Returns a reader of the RAM as it is now. It stays valid until it is dropped, while the VM
    /// runs on and writes. Error: the kernel refuses, or the VM's memory cannot be frozen.
    fn freeze(&mut self) -> Result<Box<dyn PageReader>, BoxError>;
}

/// Copies pages of the VM's RAM.
pub trait PageReader: Send + Sync {
    /// Copies the pages of `ranges` into `dst`, in their order and without gaps. The length of
    /// `dst` must be the total length of `ranges` in bytes. Error: the VM has ended, or its memory
    /// cannot be read; `dst` then has undefined content.
    fn read(&self, ranges: &[PageRange], dst: &mut [u8]) -> Result<(), BoxError>;
}

/// Receives the pages of checkpoints and seals the checkpoints.
pub trait CheckpointSink: Send {
    /// The caller's data about one checkpoint, handed through from the capture.
    type Label: Send;
    /// The result of sealing a checkpoint.
    type Sealed;

    /// Adds pages to the checkpoint in progress. No page occurs twice in `pages`; a page of a later
    /// call replaces the same page of an earlier one. Error: the sink cannot take the pages; the
    /// checkpoint then cannot be sealed.
    fn put(&mut self, pages: &[(PageIndex, &Page)]) -> Result<(), BoxError>;

    /// Makes the checkpoint durable and visible. `label` is the caller's data about it. Returns the
    /// sink's result, for the caller. Error: the checkpoint cannot be made durable; no reader sees
    /// it then.
    fn seal(
        &mut self,
        captured: &CapturedCheckpoint,
        label: Self::Label,
    ) -> Result<Self::Sealed, BoxError>;

    /// Drops every page that was put since the last seal.
    fn abandon(&mut self);

    /// Gives the sink time for work of its own. The encoder calls this now and then while there is
    /// nothing to put or seal. Does nothing by default.
    fn idle(&mut self) {}
}

/// Watches a capture, for status output, audits and fault injection.
pub trait CaptureObserver: Send {
    /// Receives the phase that the capture has reached. Does nothing by default.
    fn reached(&mut self, phase: CapturePhase) {
        let _ = phase;
    }

    /// Inspects the VM while it is paused and its last pages are copied. `reader` reads the
    /// contents that the checkpoint must hold; `ram` is the layout of the page space. An error
    /// fails the checkpoint. Does nothing by default.
    fn paused(&mut self, reader: &dyn PageReader, ram: &RamLayout) -> Result<(), BoxError> {
        let _ = (reader, ram);
        Ok(())
    }
}

/// An observer that does nothing.
pub struct NoObserver;
impl CaptureObserver for NoObserver {}
