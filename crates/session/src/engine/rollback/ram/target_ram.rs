//! The RAM of a rollback's target. Pages that are needed twice are held in memory.

use keyframe_inspect::guest_memory::ReadStop;
use keyframe_store::LoadedCheckpoint;
use keyframe_units::{Page, PageIndex, PageRange, ZERO_PAGE};
use keyframe_vmm::RamSource;
use std::io;

/// The RAM of a checkpoint of one VM.
pub struct TargetRam<'a> {
    checkpoint: &'a LoadedCheckpoint,
    /// The pages that are held, in ascending order.
    held: &'a [PageIndex],
    contents: Vec<Page>,
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

impl<'a> TargetRam<'a> {
    /// Reads the pages `held` of `checkpoint`, in ascending order, and holds them. Error: the store
    /// cannot be read.
    pub fn new(
        checkpoint: &'a LoadedCheckpoint,
        held: &'a [PageIndex],
    ) -> Result<Self, keyframe_store::Error> {
        let mut contents = vec![ZERO_PAGE; held.len()];
        checkpoint.read_some(held, &mut |page, content| {
            if let Some(place) = held.binary_search(&page).ok().and_then(|at| contents.get_mut(at))
            {
                *place = *content;
            }
            Ok::<_, keyframe_store::Error>(())
        })?;
        Ok(Self { checkpoint, held, contents })
    }

    /// Gives `sink` each of `pages` once, zeros included, in any order. Errors: the store cannot be
    /// read; the first error of `sink`.
    pub fn each<E>(&self, pages: &[PageIndex], sink: PageSink<'_, E>) -> Result<(), ReadOrUse<E>> {
        let mut others = Vec::new();
        for page in pages {
            let held = self.held.binary_search(page).ok().and_then(|at| self.contents.get(at));
            match held {
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
