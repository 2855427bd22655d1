//! A checkpoint, loaded: reading its pages.

use crate::checkpoint::CheckpointFile;
use crate::hold::Held;
use crate::identity::PageRef;
use crate::meta::Meta;
use crate::page_map::PageMap;
use crate::store::Inner;
use crate::{Error, Result};
use keyframe_units::{CheckpointId, Page, PageIndex, PageRange, ZERO_PAGE};
use std::sync::Arc;

/// A sealed checkpoint with its page map in memory. Pages are read from the store as they are asked
/// for; several threads may do so at once.
#[derive(Debug)]
pub struct Loaded {
    /// Its number.
    pub id: CheckpointId,
    /// What it tells about itself.
    pub meta: Meta,
    /// The device state as QEMU gave it.
    pub device_state: Vec<u8>,
    pub(crate) inner: Arc<Inner>,
    map: PageMap,
    /// Whatever a prune removes.
    _held: Held,
}

/// A sealed checkpoint whose page map was not read yet, which is most of the work where RAM is
/// large.
#[derive(Clone, Debug)]
pub struct Unmapped {
    /// Its number.
    pub id: CheckpointId,
    /// What it tells about itself.
    pub meta: Meta,
    /// The device state as QEMU gave it.
    pub device_state: Vec<u8>,
    inner: Arc<Inner>,
}

impl Unmapped {
    pub(crate) fn new(inner: Arc<Inner>, id: CheckpointId, file: CheckpointFile) -> Self {
        Self { id, meta: file.meta, device_state: file.device_state, inner }
    }

    /// Reads the page map.
    pub fn load(self) -> Result<Loaded> {
        let Self { id, meta, device_state, inner } = self;
        let (map, _, held) = inner.hold_maps(id, &meta)?;
        Ok(Loaded { id, meta, device_state, inner, map, _held: held })
    }
}

impl Loaded {
    /// Pages that are not zero.
    pub fn nonzero_pages(&self) -> u64 {
        self.map.nonzero_pages()
    }

    /// True where the page is zero and needs no reading.
    pub fn is_zero(&self, page: PageIndex) -> bool {
        self.map.get(page) == PageRef::ZERO
    }

    /// What stands for the content of a page: two pages of this store with the same token hold the
    /// same bytes, and 0 stands for zeros. (Different tokens may still hold the same bytes, where a
    /// store was damaged once.)
    pub fn page_ref(&self, page: PageIndex) -> u64 {
        self.map.get(page).0
    }

    /// Gives every page of `range` that is not zero to `sink`, each verified by its record's
    /// checksum (its hash is what `check` compares: see docs/design/restore.md), mostly in the
    /// order in which they lie in the store. Ends with the first error, the sink's own included.
    pub fn read_pages<E: From<Error>>(
        &self,
        range: PageRange,
        sink: &mut dyn FnMut(PageIndex, &Page) -> Result<(), E>,
    ) -> Result<(), E> {
        self.inner.read_pages(&self.wanted(range), sink)
    }

    /// The same by as many threads as there are cores, where there is much to read: for who has no
    /// threads of its own. `sink` is called on this one, with pages in roughly that order.
    pub fn read_pages_by_all_cores<E: From<Error>>(
        &self,
        range: PageRange,
        sink: &mut dyn FnMut(PageIndex, &Page) -> Result<(), E>,
    ) -> Result<(), E> {
        self.inner.read_many(&self.wanted(range), sink)
    }

    /// Fills `out` with the image from page `first` on, zeros among it, by as many threads as there
    /// are cores: for who has memory for it, as each page goes to its place without a stop. Each is
    /// verified as in [`Self::read_pages`]; after an error `out` holds anything.
    pub fn read_into(&self, first: PageIndex, out: &mut [Page]) -> Result<()> {
        let range = PageRange::new(first, out.len() as u64);
        let mut wanted = Vec::with_capacity(out.len());
        let mut zeros = Vec::new();
        let (mut rest, mut next) = (out, first.0);
        for (page, to) in self.map.range(range) {
            let (between, behind) =
                std::mem::take(&mut rest).split_at_mut((page.0 - next) as usize);
            if !between.is_empty() {
                zeros.push(between);
            }
            let Some((place, behind)) = behind.split_first_mut() else { break };
            wanted.push((to, place));
            (rest, next) = (behind, page.0 + 1);
        }
        zeros.push(rest);
        self.inner.read_into(&mut wanted, zeros)
    }

    /// The records of a range, rising.
    fn wanted(&self, range: PageRange) -> Vec<(PageRef, PageIndex)> {
        let mut wanted: Vec<_> = self.map.range(range).map(|(page, to)| (to, page)).collect();
        wanted.sort_unstable();
        wanted
    }

    /// The same for single pages, in any order, each once.
    pub fn read_some<E: From<Error>>(
        &self,
        pages: &[PageIndex],
        sink: &mut dyn FnMut(PageIndex, &Page) -> Result<(), E>,
    ) -> Result<(), E> {
        let places = pages.iter().map(|page| (self.map.get(*page), *page));
        let mut wanted: Vec<(PageRef, PageIndex)> =
            places.filter(|(to, _)| *to != PageRef::ZERO).collect();
        wanted.sort_unstable();
        self.inner.read_pages(&wanted, sink)
    }

    /// Reads one page; zeros also for a page outside the RAM layout.
    pub fn read_page(&self, page: PageIndex) -> Result<Page> {
        let mut out = ZERO_PAGE;
        self.read_pages(PageRange::new(page, 1), &mut |_, content| {
            out = *content;
            Ok::<_, Error>(())
        })?;
        Ok(out)
    }
}
