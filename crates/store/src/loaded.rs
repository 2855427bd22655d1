//! A loaded checkpoint: reading its pages.

use crate::hold::Held;
use crate::open_store::OpenStore;
use crate::store::Store;
use crate::{Error, Result};
use keyframe_store_format::checkpoint::CheckpointFile;
use keyframe_store_format::meta::Meta;
use keyframe_store_format::page_map::PageMap;
use keyframe_store_format::page_ref::PageRef;
use keyframe_units::{CheckpointId, Page, PageIndex, PageRange, ZERO_PAGE};
use std::sync::Arc;

/// A sealed checkpoint with its page map in memory. Each page is read from the store on request.
/// Several threads may read at once.
#[derive(Debug)]
pub struct LoadedCheckpoint {
    /// Its number.
    pub id: CheckpointId,
    /// Its description.
    pub meta: Meta,
    /// The device state as QEMU gave it.
    pub device_state: Vec<u8>,
    pub(crate) inner: Arc<OpenStore>,
    map: PageMap,
    /// Keeps the packs open if a prune removes them.
    _held: Held,
}

/// A sealed checkpoint without its page map. Reading the map is most of the work if RAM is large.
#[derive(Clone, Debug)]
pub struct UnmappedCheckpoint {
    /// Its number.
    pub id: CheckpointId,
    /// Its description.
    pub meta: Meta,
    /// The device state as QEMU gave it.
    pub device_state: Vec<u8>,
    inner: Arc<OpenStore>,
}

impl Store {
    /// Returns checkpoint `id`, with its description, its device state and the map of its pages,
    /// but not the pages, in memory. Error: the checkpoint does not exist, or cannot be read.
    pub fn load(&self, id: CheckpointId) -> Result<LoadedCheckpoint> {
        self.load_unmapped(id)?.load()
    }

    /// Returns checkpoint `id` without its map, which [`UnmappedCheckpoint::load`] reads later.
    /// Error: the checkpoint does not exist, or cannot be read.
    pub fn load_unmapped(&self, id: CheckpointId) -> Result<UnmappedCheckpoint> {
        Ok(UnmappedCheckpoint::new(self.inner().clone(), id, self.inner().read_checkpoint(id)?))
    }
}

impl UnmappedCheckpoint {
    fn new(inner: Arc<OpenStore>, id: CheckpointId, file: CheckpointFile) -> Self {
        Self { id, meta: file.meta, device_state: file.device_state, inner }
    }

    /// Reads the page map. Error: the checkpoint does not exist, or cannot be read.
    pub fn load(self) -> Result<LoadedCheckpoint> {
        let Self { id, meta, device_state, inner } = self;
        let (map, _, held) = inner.hold_maps(id, &meta)?;
        Ok(LoadedCheckpoint { id, meta, device_state, inner, map, _held: held })
    }
}

impl LoadedCheckpoint {
    /// Returns the number of pages that are not zero.
    pub fn nonzero_pages(&self) -> u64 {
        self.map.nonzero_pages()
    }

    /// Returns true if the page is zero and needs no reading.
    pub fn is_zero(&self, page: PageIndex) -> bool {
        self.map.get(page) == PageRef::ZERO
    }

    /// Returns a token for the content of a page: two pages of this store with the same token have
    /// the same content. 0 is a page of zeros. Pages with different tokens may also have the same
    /// content.
    pub fn page_ref(&self, page: PageIndex) -> u64 {
        self.map.get(page).0
    }

    /// Returns the pages whose tokens ([`Self::page_ref`]) differ from those in `other`, a checkpoint
    /// of the same store, in ascending order.
    pub fn differing(&self, other: &Self) -> Vec<PageIndex> {
        self.map.differing(&other.map)
    }

    /// Passes every page of `range` that is not zero to `sink`, mostly in the order of the store.
    /// Verifies the checksum of each record, but not its page hash, which `check` verifies. Errors:
    /// a record cannot be read or is damaged; the first error of `sink`.
    pub fn read_pages<E: From<Error>>(
        &self,
        range: PageRange,
        sink: &mut dyn FnMut(PageIndex, &Page) -> Result<(), E>,
    ) -> Result<(), E> {
        self.inner.read_pages(&self.wanted(range), sink)
    }

    /// Reads pages as [`Self::read_pages`] does, on all cores if there are many. Calls `sink` on
    /// the caller's thread, with the pages only roughly in that order. Errors: those of
    /// [`Self::read_pages`].
    pub fn read_pages_by_all_cores<E: From<Error>>(
        &self,
        range: PageRange,
        sink: &mut dyn FnMut(PageIndex, &Page) -> Result<(), E>,
    ) -> Result<(), E> {
        self.inner.read_many(&self.wanted(range), sink)
    }

    /// Fills `out` with the RAM from page `first` on, zeros included, on all cores. Verifies pages
    /// as [`Self::read_pages`] does. Error: a record cannot be read or is damaged; the content of
    /// `out` is then undefined.
    pub fn read_into(&self, first: PageIndex, out: &mut [Page]) -> Result<()> {
        let range = PageRange::new(first, out.len() as u64);
        let mut wanted = Vec::with_capacity(out.len());
        let mut zeros = Vec::new();
        let (mut rest, mut next) = (out, first.0);
        for (page, to) in self.map.range(range) {
            let (between, others) =
                std::mem::take(&mut rest).split_at_mut((page.0 - next) as usize);
            if !between.is_empty() {
                zeros.push(between);
            }
            let Some((place, others)) = others.split_first_mut() else { break };
            wanted.push((to, place));
            (rest, next) = (others, page.0 + 1);
        }
        zeros.push(rest);
        self.inner.read_into(&mut wanted, zeros)
    }

    /// The records and pages of a range, in the order of the records.
    fn wanted(&self, range: PageRange) -> Vec<(PageRef, PageIndex)> {
        let mut wanted: Vec<_> = self.map.range(range).map(|(page, to)| (to, page)).collect();
        wanted.sort_unstable();
        wanted
    }

    /// Reads single pages, in any order, each once, as [`Self::read_pages`] does. Errors: those of
    /// [`Self::read_pages`].
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

    /// Returns the content of one page. A page outside the RAM layout is zero. Error: its record
    /// cannot be read, or is damaged.
    pub fn read_page(&self, page: PageIndex) -> Result<Page> {
        let mut out = ZERO_PAGE;
        self.read_pages(PageRange::new(page, 1), &mut |_, content| {
            out = *content;
            Ok::<_, Error>(())
        })?;
        Ok(out)
    }
}
