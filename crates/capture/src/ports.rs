//! What the checkpoint cycle asks of the rest of the world.

use crate::cycle::Phase;
use keyframe_units::{Page, PageIndex, PageRange, PageSet, RamLayout};
use std::sync::Arc;

/// Any error of an implementation, carried through with its own text and sources.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Finds pages that were written.
pub trait Tracker: Send {
    /// Adds to `written` each page written since the last call, and protects it again, as one step
    /// per page. **This is destructive**: the bits are gone. On the first call every page that may
    /// hold something other than zeros counts.
    ///
    /// On an error some pages may have been protected and not reported: the caller must take all
    /// pages as written.
    fn drain(&mut self, written: &mut PageSet) -> Result<(), BoxError>;

    /// As [`Tracker::drain`], while the VM stands still and few pages are expected: its processors
    /// are free to help.
    fn drain_still(&mut self, written: &mut PageSet) -> Result<(), BoxError> {
        self.drain(written)
    }

    /// Copies of `pages` were made while the VM ran: what they hold need not be what the last drain
    /// saw. A tracker that judges by content must report them again.
    fn copied_unfrozen(&mut self, pages: &PageSet) {
        let _ = pages;
    }

    /// About how many pages the next [`Tracker::drain`] would find, where that can be told without
    /// draining and cheaply.
    fn count(&mut self) -> Option<u64> {
        None
    }
}

/// Called with pages that the VM is about to write for the first time since they were protected.
pub type FirstWriteHook = Arc<dyn Fn(PageRange) + Send + Sync>;

/// Holds up the first write to a protected page: the ground of copy-on-write.
pub trait FirstWrites: Send + Sync {
    /// From here on calls `hook` before each such write; the writer waits meanwhile. When this
    /// returns, the former hook runs no more.
    fn set_hook(&self, hook: Option<FirstWriteHook>);

    /// The pages that could be written since they were protected without the hook being told (they
    /// were discarded, or merged by the kernel): a copy of such a page that was made later is worth
    /// nothing.
    fn unannounced(&self) -> Result<PageSet, BoxError>;
}

/// Freezes all of the VM's RAM at once, in the pause.
pub trait Freezer: Send {
    /// RAM as it is now, readable until dropped, while the VM goes on writing.
    fn freeze(&mut self) -> Result<Box<dyn PageReader>, BoxError>;
}

/// Copies pages of the VM's RAM.
pub trait PageReader: Send + Sync {
    /// Copies the pages of `ranges`, in their order and end to end, into `dst`, whose length is
    /// theirs together.
    fn read(&self, ranges: &[PageRange], dst: &mut [u8]) -> Result<(), BoxError>;
}

/// What stopping the VM found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// It ran, and is now paused by us.
    ByUs,
    /// It was paused already; it must stay so.
    Already,
}

/// What resuming the VM found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resumed {
    /// It stood still for the whole pause and runs again.
    ByUs,
    /// Somebody else (the watchdog, a user's monitor) let it run during the pause: what was
    /// captured is torn.
    ByOther,
}

/// Controls the VM.
pub trait Machine: Send {
    /// The RAM blocks as they are now, with the bytes they use.
    fn ram(&mut self) -> Result<RamLayout, BoxError>;

    /// Called just before [`Machine::stop`], while the VM still runs, for what need not be done in
    /// the pause. It is undone by [`Machine::resumed`]; and at once where this or the stop fails.
    fn before_stop(&mut self) -> Result<(), BoxError> {
        Ok(())
    }

    /// Pauses the VM, with a watchdog armed that resumes it should we die or take too long.
    fn stop(&mut self) -> Result<Stopped, BoxError>;

    /// The state of all devices. May write guest memory on the way.
    fn save_devices(&mut self) -> Result<Vec<u8>, BoxError>;

    /// Ends the pause. `stopped` is what [`Machine::stop`] answered: a VM that was paused already
    /// is left so.
    fn resume(&mut self, stopped: Stopped) -> Result<(), BoxError>;

    /// After the pause: disarms the watchdog, and tells who resumed the VM.
    fn resumed(&mut self, stopped: Stopped) -> Result<Resumed, BoxError>;
}

/// Takes the pages of checkpoints in and seals them.
pub trait Sink: Send {
    /// What the caller says of a checkpoint when it is captured.
    type Label: Send;
    /// What sealing tells.
    type Sealed;

    /// Pages of the checkpoint in progress, each once; a later put of the same page replaces an
    /// earlier one.
    fn put(&mut self, pages: &[(PageIndex, &Page)]) -> Result<(), BoxError>;

    /// Makes the checkpoint durable and visible.
    fn seal(&mut self, captured: &Captured, label: Self::Label) -> Result<Self::Sealed, BoxError>;

    /// Forgets everything put since the last seal.
    fn abandon(&mut self);
}

pub use crate::cycle::Captured;

/// Watches a cycle go by: for status, for audits, for fault injection.
pub trait Observer: Send {
    /// The cycle has reached `phase`.
    fn reached(&mut self, phase: Phase) {
        let _ = phase;
    }

    /// The VM is paused and its last pages have been copied: what `reader` reads now is what the
    /// checkpoint must hold.
    fn paused(&mut self, reader: &dyn PageReader, ram: &RamLayout) -> Result<(), BoxError> {
        let _ = (reader, ram);
        Ok(())
    }
}

/// Watches nothing.
pub struct NoObserver;
impl Observer for NoObserver {}
