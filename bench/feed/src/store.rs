//! The traits of a store that is measured.

use crate::Result;
use keyframe_units::{Page, PageIndex};
use std::path::Path;

/// Receives the pages of an image.
pub type FeedSink<'a> = &'a mut dyn FnMut(PageIndex, &Page);

/// The resources of programs that a store has run.
#[derive(Clone, Copy, Debug)]
pub struct ProgramUsage {
    /// The sum of their CPU times.
    pub cpu_ns: u64,
    /// The largest memory of one of them.
    pub peak_bytes: u64,
}

/// A store of checkpoints.
pub trait Store {
    /// Makes an empty store in the new directory `dir`, for a guest with `image_pages` pages.
    fn create(&self, dir: &Path, image_pages: u64) -> Result<Box<dyn StoreWriter>>;

    /// Opens the closed store in `dir`.
    fn open(&self, dir: &Path) -> Result<Box<dyn StoreReader>>;

    /// Does the work that the closed store in `dir` does when idle. Returns false if there is none.
    fn settle(&self, _dir: &Path) -> Result<bool> {
        Ok(false)
    }

    /// Returns the usage of the programs that it has run to their end; `None` if it works in this
    /// process.
    fn programs(&self) -> Option<ProgramUsage> {
        None
    }
}

/// A store that is fed.
pub trait StoreWriter {
    /// Prepares a checkpoint of these pages. It is called before [`StoreWriter::checkpoint`] and not
    /// measured.
    fn prepare(&mut self, _pages: &[(PageIndex, &Page)]) -> Result<()> {
        Ok(())
    }

    /// Takes a checkpoint of these pages, in rising order. All other pages are as at the checkpoint
    /// before; at first they are zero. When this returns, the checkpoint survives a loss of power.
    fn checkpoint(&mut self, pages: &[(PageIndex, &Page)]) -> Result<()>;

    /// Closes the store.
    fn close(self: Box<Self>) -> Result<()>;
}

/// A store that is read.
pub trait StoreReader {
    /// Passes every page of a checkpoint that is not zero to `sink`, in any order. The first checkpoint
    /// has number 0.
    fn image(&mut self, checkpoint: usize, sink: FeedSink<'_>) -> Result<()>;

    /// Fills `out`, which is zero, with the image of a checkpoint.
    fn fill(&mut self, checkpoint: usize, out: &mut [Page]) -> Result<()> {
        self.image(checkpoint, &mut |page, content| {
            if let Some(out) = out.get_mut(page.0 as usize) {
                *out = *content;
            }
        })
    }

    /// Returns whether the store reads with all cores.
    fn uses_all_cores(&self) -> bool {
        false
    }
}
