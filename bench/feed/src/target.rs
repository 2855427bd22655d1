//! What a store must do to be measured.

use crate::Result;
use keyframe_units::{Page, PageIndex};
use std::path::Path;

/// Takes the pages of an image.
pub type PageSink<'a> = &'a mut dyn FnMut(PageIndex, &Page);

/// A way to keep checkpoints.
pub trait Store {
    /// An empty store in the new directory `dir`, for a guest of `image_pages` pages.
    fn create(&self, dir: &Path, image_pages: u64) -> Result<Box<dyn Writing>>;

    /// The store in `dir`, which was closed.
    fn open(&self, dir: &Path) -> Result<Box<dyn Reading>>;

    /// What the store in `dir`, which was closed, does when nothing else is to be done; false where
    /// that is nothing.
    fn settle(&self, _dir: &Path) -> Result<bool> {
        Ok(false)
    }

    /// CPU time and peak memory of programs that it has run to their end; `None` where all happens
    /// in this process.
    fn programs(&self) -> Option<(u64, u64)> {
        None
    }
}

/// A store that is being fed.
pub trait Writing {
    /// What happens to these pages before [`Writing::checkpoint`] and is no part of what is
    /// measured.
    fn prepare(&mut self, _pages: &[(PageIndex, &Page)]) -> Result<()> {
        Ok(())
    }

    /// Takes a checkpoint of these pages, numbers rising; all others are as at the one before, and
    /// zero at first. Once this returns, it survives power loss.
    fn checkpoint(&mut self, pages: &[(PageIndex, &Page)]) -> Result<()>;

    /// Ends it.
    fn close(self: Box<Self>) -> Result<()>;
}

/// A store that is being read.
pub trait Reading {
    /// Gives every page of a checkpoint that is not zero to `sink`, in any order; 0 is the first
    /// checkpoint.
    fn image(&mut self, checkpoint: usize, sink: PageSink<'_>) -> Result<()>;

    /// Fills `out`, which is zero, with a checkpoint's image.
    fn fill(&mut self, checkpoint: usize, out: &mut [Page]) -> Result<()> {
        self.image(checkpoint, &mut |page, content| {
            if let Some(out) = out.get_mut(page.0 as usize) {
                *out = *content;
            }
        })
    }

    /// Whether that is done by as many threads as there are cores.
    fn uses_all_cores(&self) -> bool {
        false
    }
}
