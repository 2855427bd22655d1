//! The RAM of a rollback's target, and the comparison of a VM's RAM with it. Pages that are needed
//! twice are held in memory.

use crate::error::{Error, RollbackError};
use keyframe_capture::{BoxError, PageReader};
use keyframe_inspect::guest_memory::ReadStop;
use keyframe_store::LoadedCheckpoint;
use keyframe_units::{PAGE_BYTES, Page, PageIndex, PageRange, RamLayout, ZERO_PAGE};
use keyframe_vmm::RamSource;
use std::io;
use std::path::Path;

/// How often RAM is compared at most. The last comparison finds no difference.
pub const COMPARISONS: u32 = 3;
/// Pages that are compared at once: 16 MiB.
pub const BATCH_PAGES: usize = 4096;

/// Writes a page of the VM's RAM.
pub type WritePage<'a> = &'a mut dyn FnMut(PageIndex, &Page) -> Result<(), BoxError>;

/// Pages of a checkpoint that are held in memory.
#[derive(Default)]
pub struct HeldPages {
    /// In ascending order.
    pages: Vec<PageIndex>,
    /// The content of each.
    contents: Vec<Page>,
}

/// The RAM of a checkpoint of one VM.
pub struct TargetRam<'a> {
    checkpoint: &'a LoadedCheckpoint,
    /// The pages that were read before.
    ahead: &'a HeldPages,
    /// Those that [`TargetRam::hold`] has read.
    held: HeldPages,
}

/// An error of [`TargetRam::each`].
pub enum ReadOrUse<E> {
    /// The store cannot be read.
    Read(keyframe_store::Error),
    /// The caller failed.
    Use(E),
}

impl<E> From<keyframe_store::Error> for ReadOrUse<E> {
    fn from(error: keyframe_store::Error) -> Self {
        Self::Read(error)
    }
}

/// Takes a page and its content.
type PageSink<'s, E> = &'s mut dyn FnMut(PageIndex, &Page) -> Result<(), ReadOrUse<E>>;

impl HeldPages {
    /// Reads `pages` of `checkpoint`, which are in ascending order. Error: the store cannot be read.
    pub fn read(
        checkpoint: &LoadedCheckpoint,
        pages: Vec<PageIndex>,
    ) -> Result<Self, keyframe_store::Error> {
        let mut contents = vec![ZERO_PAGE; pages.len()];
        checkpoint.read_some(&pages, &mut |page, content| {
            let place = pages.binary_search(&page).ok().and_then(|at| contents.get_mut(at));
            if let Some(place) = place {
                *place = *content;
            }
            Ok::<_, keyframe_store::Error>(())
        })?;
        Ok(Self { pages, contents })
    }

    fn get(&self, page: PageIndex) -> Option<&Page> {
        self.pages.binary_search(&page).ok().and_then(|at| self.contents.get(at))
    }
}

impl<'a> TargetRam<'a> {
    /// Creates the RAM of `checkpoint`; `ahead` holds the pages that were read earlier.
    pub fn new(checkpoint: &'a LoadedCheckpoint, ahead: &'a HeldPages) -> Self {
        Self { checkpoint, ahead, held: HeldPages::default() }
    }

    /// Reads `pages`, which are in ascending order, and holds them, in place of those that it held
    /// before. Error: the store cannot be read.
    pub fn hold(&mut self, pages: &[PageIndex]) -> Result<(), keyframe_store::Error> {
        let others = pages.iter().copied().filter(|page| self.ahead.get(*page).is_none());
        self.held = HeldPages::read(self.checkpoint, others.collect())?;
        Ok(())
    }

    /// Gives `sink` each of `pages` once, zeros included, in any order. Errors: the store cannot be
    /// read; the first error of `sink`.
    pub fn each<E>(&self, pages: &[PageIndex], sink: PageSink<'_, E>) -> Result<(), ReadOrUse<E>> {
        let mut others = Vec::new();
        for page in pages {
            match self.ahead.get(*page).or_else(|| self.held.get(*page)) {
                Some(content) => sink(*page, content)?,
                None if self.checkpoint.is_zero(*page) => sink(*page, &ZERO_PAGE)?,
                None => others.push(*page),
            }
        }
        self.checkpoint.read_some(&others, sink)
    }
}

impl RamSource for TargetRam<'_> {
    fn read(
        &self,
        range: PageRange,
        sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
    ) -> io::Result<()> {
        self.read_some(&range.iter().collect::<Vec<_>>(), sink)
    }

    fn read_some(
        &self,
        pages: &[PageIndex],
        sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
    ) -> io::Result<()> {
        let given = self.each(pages, &mut |page, content| {
            if *content == ZERO_PAGE { Ok(()) } else { sink(page, content).map_err(ReadOrUse::Use) }
        });
        given.map_err(|e| match e {
            ReadOrUse::Read(e) => ReadStop::Store(e).into(),
            ReadOrUse::Use(e) => e,
        })
    }
}

/// Writes those of the rising `pages` in which the paused VM differs from `target`, and returns
/// them. `store` is the path of the target's store, for errors.
pub fn write_wrong_pages(
    target: &TargetRam<'_>,
    store: &Path,
    reader: &dyn PageReader,
    write: WritePage<'_>,
    pages: &[PageIndex],
) -> Result<Vec<PageIndex>, RollbackError> {
    let failed = |operation| move |source| RollbackError::Step { operation, source };
    let mut wrong = Vec::new();
    let mut here = Vec::new();
    for batch in pages.chunks(BATCH_PAGES) {
        here.clear();
        here.resize(batch.len() * PAGE_BYTES, 0);
        reader.read(&ranges(batch), &mut here).map_err(failed("read the VM's RAM"))?;
        let here = here.as_chunks::<PAGE_BYTES>().0;
        let compared = target.each(batch, &mut |page, right| {
            let is_right = batch.binary_search(&page).is_ok_and(|at| here[at] == *right);
            if !is_right {
                wrong.push(page);
                let written = write(page, right);
                written.map_err(failed("write the VM's RAM")).map_err(ReadOrUse::Use)?;
            }
            Ok(())
        });
        compared.map_err(|e| match e {
            ReadOrUse::Read(e) => Error::store(store, e).into(),
            ReadOrUse::Use(e) => e,
        })?;
    }
    Ok(wrong)
}

/// Joins rising pages to ranges.
fn ranges(pages: &[PageIndex]) -> Vec<PageRange> {
    let joined = pages.chunk_by(|a, b| a.0 + 1 == b.0);
    joined.map(|pages| PageRange::new(pages[0], pages.len() as u64)).collect()
}

/// The pages of a block that are in use.
pub fn used(layout: &RamLayout, number: usize) -> PageRange {
    let used_bytes = layout.blocks().get(number).map_or(0, |block| block.used_bytes);
    PageRange::new(layout.pages_of(number).first, used_bytes / PAGE_BYTES as u64)
}
