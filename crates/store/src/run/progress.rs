//! The checkpoint in progress: the maps of a run in memory, and what changed since the last seal.
//!
//! Invariant: the maps are those of the last seal plus the puts since. [`RunProgress::undo`] leads
//! back.

use crate::chain::{Chain, ChainPlan, Changes};
use crate::run::puts::{PutOutcome, Puts};
use keyframe_store_format::disk_map::{DiskMap, FormerRange, block_numbers};
use keyframe_store_format::map_run::{MapHeader, MapRun};
use keyframe_store_format::page_map::PageMap;
use keyframe_store_format::page_ref::PageRef;
use keyframe_units::{PageIndex, PageRange};

/// The checkpoint in progress of a run, and the last sealed one.
#[derive(Debug)]
pub struct RunProgress {
    pub map: PageMap,
    pub disk_map: DiskMap,
    pub puts: Puts,
    /// The pages and blocks whose records differ from those of the last seal.
    pub changed: Changes,
    /// The former content of the blocks written since the last seal, oldest first.
    undo_blocks: Vec<FormerRange>,
    /// For each page of `changed` its record at the last seal. Empty before the first seal, when
    /// all pages were zero.
    undo: Vec<(PageIndex, PageRef)>,
    /// No seal yet.
    is_first: bool,
    /// The disks were replaced by those of another checkpoint. The changes are not known then, so
    /// the next map is complete.
    has_other_disks: bool,
}

impl RunProgress {
    /// Creates the progress of a new run with RAM of `ram_pages` pages of zeros and the disks of
    /// `disk_map`.
    pub fn new(ram_pages: u64, disk_map: DiskMap) -> Self {
        Self {
            map: PageMap::default(),
            disk_map,
            puts: Puts::new(ram_pages),
            changed: Changes::none(ram_pages),
            undo_blocks: Vec::new(),
            undo: Vec::new(),
            is_first: true,
            has_other_disks: false,
        }
    }

    /// Sets the record of `page`, which was put with the outcome `put`. `of_disk` is true if a disk
    /// brought the content into the store.
    pub fn set_page(&mut self, page: PageIndex, to: PageRef, put: PutOutcome, of_disk: bool) {
        if let PutOutcome::Stored { bytes } = put {
            self.puts.stored_bytes += bytes;
        }
        let was = self.map.get(page);
        // A second put of the same content keeps the outcome of the first one.
        if was != to || !self.puts.all.contains(page) {
            self.puts.note(page, put, of_disk);
        }
        if was != to {
            self.map.set(page, to);
            if self.changed.pages.insert(page) && !self.is_first {
                self.undo.push((page, was));
            }
        }
    }

    /// Sets the record of `block`.
    pub fn set_block(&mut self, block: PageIndex, to: PageRef) {
        let range = PageRange::new(block, 1);
        self.undo_blocks.push(self.disk_map.former(range));
        self.disk_map.set(block, to);
        self.changed.blocks.insert(block_numbers(range));
    }

    /// Makes the blocks of `range` zero.
    pub fn set_zero_blocks(&mut self, range: PageRange) {
        self.undo_blocks.push(self.disk_map.former(range));
        self.disk_map.set_zero(range);
        if range.len_pages > 0 {
            self.changed.blocks.insert(block_numbers(range));
        }
    }

    /// Replaces the content of all disks, whose blocks are `all`, by `map`.
    pub fn replace_disks(&mut self, all: PageRange, map: DiskMap) {
        self.undo_blocks.push(self.disk_map.former(all));
        (self.disk_map, self.has_other_disks) = (map, true);
    }

    /// Restores the state of the last seal.
    pub fn undo(&mut self) {
        if self.is_first {
            self.map = PageMap::default();
        }
        for (page, was) in std::mem::take(&mut self.undo) {
            self.map.set(page, was);
        }
        for former in std::mem::take(&mut self.undo_blocks).into_iter().rev() {
            self.disk_map.put_back(former);
        }
        self.clear();
    }

    /// Returns true if nothing was put since the last seal.
    pub fn is_empty(&self) -> bool {
        self.puts.all.is_empty() && self.undo_blocks.is_empty()
    }

    /// Records that the checkpoint in progress is sealed.
    pub fn seal(&mut self) {
        self.is_first = false;
        self.clear();
    }

    fn clear(&mut self) {
        self.puts.clear();
        self.changed.clear();
        self.undo.clear();
        self.undo_blocks.clear();
        self.has_other_disks = false;
    }

    /// Calls `show` with every reference of the run to a record. `show` may replace the reference.
    pub fn repoint(&mut self, show: &mut dyn FnMut(&mut PageRef)) {
        self.map.repoint(show);
        self.disk_map.repoint(show);
        let undo = self.undo.iter_mut().map(|(_, to)| to);
        undo.filter(|to| **to != PageRef::ZERO).for_each(&mut *show);
        for former in &mut self.undo_blocks {
            former.repoint(show);
        }
    }

    /// Returns the map of the next seal, with the number `id`, for the run with the id `run` and a
    /// page space of `space_pages` pages, and the numbers of the maps of its chain, newest first.
    pub fn next_map(
        &self,
        chain: &Chain,
        id: u64,
        run: [u8; 16],
        space_pages: u64,
    ) -> (MapRun, Vec<u64>) {
        let complete_pages = self.map.nonzero_pages() + self.disk_map.known_blocks();
        let plan = if self.has_other_disks {
            ChainPlan { changed: None, below: Vec::new() }
        } else {
            chain.plan(&self.changed, complete_pages)
        };
        let header = MapHeader { id, parent: plan.below.first().copied(), run, space_pages };
        let mut map = match &plan.changed {
            None => MapRun::new(header, self.map.iter()),
            Some(changed) => {
                MapRun::new(header, changed.pages.iter().map(|page| (page, self.map.get(page))))
            }
        };
        let mut add = |range: PageRange, to| map.extend(range, to);
        match &plan.changed {
            None => self.disk_map.each(0..space_pages, &mut add),
            Some(changed) => {
                for range in changed.blocks.iter() {
                    self.disk_map.each(range.clone(), &mut add);
                }
            }
        }
        let mut map_chain = vec![id];
        map_chain.extend(plan.below);
        (map, map_chain)
    }
}
