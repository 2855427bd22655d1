//! The records and maps that sealed checkpoints need.
//!
//! ```text
//!   chains of two checkpoints                   [9 8 0]  [7 6 0]         map 0 ◀── 6 ◀── 7 (sealed)
//!                                                                          ▲
//!   newest map first:  visible(9) = all                                    └───── 8 ◀── 9 (sealed)
//!                      visible(8) = visible(9) without the pages of 9
//!                      visible(0) = visible(8) without those of 8, and visible(6) without those of 6
//! ```
//!
//! Invariants: a record is live if a live map shows it at a visible page, or if a live derived
//! record refers to it ([`Live::close`]). So live records are closed over references. A map of a
//! run at work hides nothing that a later checkpoint of the run shows. The run builds upon maps of
//! the newest checkpoint's chain, under a map with all later changes.
//!
//! A prune reads all maps once. It remembers which packs each refers to ([`Known`]). So a later
//! look at few packs reads few maps: those that refer to one of them, new ones, and those above
//! such a map whose own checkpoint is gone.

use crate::chain::Changes;
use crate::open_store::OpenStore;
use crate::pack_shape::{PackShape, places};
use crate::{Error, Result};
use keyframe_store_backend::layout;
use keyframe_store_format::map_run::MapRun;
use keyframe_store_format::meta::Meta;
use keyframe_store_format::pack::PackEntry;
use keyframe_store_format::page_ref::PageRef;
use keyframe_units::{CheckpointId, PageIndex, PageRange};
use std::collections::{BTreeMap, BTreeSet};

/// A map that a checkpoint needs.
#[derive(Debug)]
pub struct LiveMap {
    parent: Option<u64>,
    /// True if its own checkpoint exists: then all its pages are visible.
    sealed: bool,
    ram_pages: u64,
}

/// The offsets of the live records of a pack.
#[derive(Debug, Default)]
pub struct Offsets {
    all: Vec<u64>,
    sorted: usize,
}

impl Offsets {
    fn push(&mut self, offset: u64) {
        self.all.push(offset);
        // Many maps refer to a record. Sorting now and then removes the duplicates.
        if self.all.len() > self.sorted * 2 + 1024 {
            self.settle();
        }
    }

    fn settle(&mut self) {
        self.all.sort_unstable();
        self.all.dedup();
        self.sorted = self.all.len();
    }
}

/// The facts that a prune remembers about the maps that it has read, so that it reads only other
/// maps again.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// The packs that each map refers to.
    pub mentions: BTreeMap<u64, Box<[u32]>>,
    /// The packs that existed.
    pub packs: BTreeSet<u32>,
    /// For each pack with live derived records, the packs that these refer to.
    pub depends: BTreeMap<u32, BTreeSet<u32>>,
}

impl Known {
    /// Returns true if map number `map` may refer to one of `packs`, or to a new pack.
    pub fn may_mention(&self, map: u64, packs: &BTreeSet<u32>) -> bool {
        let mentions = self.mentions.get(&map);
        mentions.is_none_or(|all| {
            all.iter().any(|pack| packs.contains(pack) || !self.packs.contains(pack))
        })
    }

    /// Returns `packs`, and the packs with live derived records that refer to them.
    pub fn with_dependents(&self, packs: &BTreeSet<u32>) -> BTreeSet<u32> {
        let dependents =
            self.depends.iter().filter(|(_, on)| !on.is_disjoint(packs)).map(|(of, _)| *of);
        packs.iter().copied().chain(dependents).collect()
    }
}

/// The records and maps that sealed checkpoints need.
#[derive(Debug, Default)]
pub struct Live {
    /// The packs that each map refers to, of the maps that were read.
    mentions: BTreeMap<u64, Box<[u32]>>,
    nodes: BTreeMap<u64, LiveMap>,
    wanted: BTreeMap<u32, Offsets>,
    /// The existing checkpoints.
    pub ids: BTreeSet<CheckpointId>,
}

impl Live {
    /// Reads all checkpoints and their maps. Error: [`Error::Unreadable`] if a checkpoint cannot be
    /// read.
    pub fn find(inner: &OpenStore) -> Result<Self> {
        Self::find_where(inner, &|_| true)
    }

    /// Reads all checkpoints and the maps for which `is_wanted` returns true, and finds all live
    /// records that these maps refer to. Errors: a checkpoint or a map is damaged; the backend
    /// fails.
    pub fn find_where(inner: &OpenStore, is_wanted: &dyn Fn(u64) -> bool) -> Result<Self> {
        let mut live = Self::default();
        live.find_nodes(inner)?;
        let mut wanted = BTreeMap::<u32, Offsets>::new();
        let (mut shown, mut mentions) = (Vec::new(), BTreeMap::new());
        live.each_map(inner, is_wanted, &mut |id, _, run, visible| {
            let packs = run.refs().chunk_by(|a, b| a.pack() == b.pack()).filter_map(<[_]>::first);
            let packs: BTreeSet<u32> = packs.map(|to| to.pack()).collect();
            mentions.insert(id, packs.into_iter().collect());
            shown.clear();
            shown.extend(run.records().filter(|(page, _)| shows(visible, *page)).map(|(_, to)| to));
            debug_assert!(!shown.contains(&PageRef::ZERO));
            for of_pack in shown.chunk_by(|a, b| a.pack() == b.pack()) {
                let Some(first) = of_pack.first() else { continue };
                let offsets = wanted.entry(first.pack()).or_default();
                for to in of_pack {
                    offsets.push(to.offset());
                }
            }
            Ok(())
        })?;
        wanted.values_mut().for_each(Offsets::settle);
        (live.wanted, live.mentions) = (wanted, mentions);
        Ok(live)
    }

    /// Reads all checkpoints. Runs may seal new ones meanwhile, and another process may forget
    /// listed ones. If that happens to the newest of a run, neither the forgotten one nor the new
    /// one would show the maps that the run builds upon. So this lists them again until no listed
    /// one was forgotten. A later checkpoint builds upon those that were read.
    fn find_nodes(&mut self, inner: &OpenStore) -> Result<()> {
        // Numbers are not used again, so a forgotten checkpoint does not come back.
        let mut looked_at = BTreeSet::new();
        loop {
            let mut is_all = true;
            for id in inner.settled_checkpoint_ids()? {
                if !looked_at.insert(id) {
                    continue;
                }
                match inner.read_meta(id) {
                    // Forgotten since the listing.
                    Err(Error::UnknownCheckpoint { .. }) => is_all = false,
                    Err(source) => return Err(Error::Unreadable { id, source: Box::new(source) }),
                    Ok(meta) => self.add(id, &meta),
                }
            }
            if is_all {
                return Ok(());
            }
        }
    }

    fn add(&mut self, id: CheckpointId, meta: &Meta) {
        self.ids.insert(id);
        for (at, map) in meta.map_chain.iter().enumerate() {
            let node = self.nodes.entry(*map).or_insert_with(|| LiveMap {
                parent: meta.map_chain.get(at + 1).copied(),
                sealed: false,
                ram_pages: meta.ram.len_pages(),
            });
            node.sealed |= at == 0;
        }
    }

    /// Returns true if a checkpoint needs map number `id`.
    pub fn has_map(&self, id: u64) -> bool {
        self.nodes.contains_key(&id)
    }

    /// Returns the numbers of the packs to which each of the maps that were read refers, and
    /// removes them from here.
    pub fn take_mentions(&mut self) -> BTreeMap<u64, Box<[u32]>> {
        std::mem::take(&mut self.mentions)
    }

    /// Returns the offsets of the live records of pack number `pack`, in rising order.
    pub fn offsets(&self, pack: u32) -> &[u64] {
        self.wanted.get(&pack).map_or(&[], |offsets| &offsets.all)
    }

    /// Returns the numbers of the packs with live records.
    pub fn packs(&self) -> impl Iterator<Item = u32> + '_ {
        self.wanted.keys().copied()
    }

    /// Adds the records to which the live derived records of `shape` refer. Returns these derived
    /// records with their references. References are plain and lie in earlier places, so one pass
    /// over the packs in rising order is enough. Also reads live records that `shape` does not
    /// list, because these may be unreadable only for a moment and their references must stay.
    /// Errors: a listed record is damaged; the backend fails.
    pub fn close(
        &mut self,
        inner: &OpenStore,
        shape: &PackShape,
    ) -> Result<Vec<(PageRef, Vec<PageRef>)>> {
        let live = self.offsets(shape.number);
        let composed = shape.entries.iter().filter(|entry| entry.kind().is_derived());
        let wanted: Vec<PageRef> = composed
            .filter(|entry| live.binary_search(&entry.offset()).is_ok())
            .map(|entry| PageRef::new(shape.number, entry.offset()))
            .collect();
        let is_listed =
            |at: &&u64| shape.entries.binary_search_by_key(*at, PackEntry::offset).is_ok();
        let missing: Vec<u64> = live.iter().filter(|at| !is_listed(at)).copied().collect();
        let mut found = inner.references_of(&wanted)?;
        for place in places(shape.number, &missing) {
            match inner.references_of(&[place]) {
                // Its references are not known.
                Err(Error::Damaged { .. }) => {}
                parts => found.extend(parts?),
            }
        }
        found.sort_unstable();
        for to in found.iter().flat_map(|(_, records)| records) {
            self.wanted.entry(to.pack()).or_default().push(to.offset());
        }
        Ok(found)
    }

    /// Sorts the offsets, after [`Self::close`] of all packs.
    pub fn settle(&mut self) {
        self.wanted.values_mut().for_each(Offsets::settle);
    }

    /// Calls `visit` with every map for which `is_wanted` returns true, the newest first, and with
    /// its visible pages. May also call it with other maps. Errors: a map is damaged; the backend
    /// fails; an error of `visit`.
    pub fn each_map(
        &self,
        inner: &OpenStore,
        is_wanted: &dyn Fn(u64) -> bool,
        visit: &mut dyn FnMut(u64, &LiveMap, &MapRun, &Changes) -> Result<()>,
    ) -> Result<()> {
        // The visible pages of a map without a checkpoint depend on the maps above it, so these are
        // read too.
        let (mut read, mut looked_through) = (BTreeSet::new(), BTreeSet::new());
        for (id, node) in &self.nodes {
            if is_wanted(*id) || node.parent.is_some_and(|parent| looked_through.contains(&parent))
            {
                read.insert(*id);
                if !node.sealed {
                    looked_through.insert(*id);
                }
            }
        }
        let mut pending = BTreeMap::<u64, Changes>::new();
        for (id, node) in self.nodes.iter().rev().filter(|(id, _)| read.contains(id)) {
            let run = inner.read_map(*id)?;
            if run.header.parent != node.parent || run.header.space_pages < node.ram_pages {
                let object = inner.backend.describe(&layout::map(*id));
                return Err(Error::damaged(
                    object,
                    "it does not belong where a checkpoint's chain has it",
                ));
            }
            let mut visible = pending.remove(id).unwrap_or_else(|| Changes::none(node.ram_pages));
            if node.sealed {
                show_all(&mut visible, node.ram_pages, run.header.space_pages);
            }
            if let Some(parent) = node.parent.filter(|parent| looked_through.contains(parent)) {
                let mut below = visible.clone();
                run.ranges().for_each(|range| hide(&mut below, range));
                match pending.get_mut(&parent) {
                    Some(visible) => visible.union_with(&below),
                    None => {
                        pending.insert(parent, below);
                    }
                }
            }
            visit(*id, node, &run, &visible)?;
        }
        Ok(())
    }
}

/// Returns true if `page`, a page of RAM or a block of a disk, is in `visible`.
pub fn shows(visible: &Changes, page: PageIndex) -> bool {
    if page.0 < visible.pages.space_pages() {
        visible.pages.contains(page)
    } else {
        visible.blocks.contains(&page.0)
    }
}

fn show_all(visible: &mut Changes, ram_pages: u64, space_pages: u64) {
    visible.pages.insert_range(PageRange::new(PageIndex(0), ram_pages));
    if ram_pages < space_pages {
        visible.blocks.insert(ram_pages..space_pages);
    }
}

fn hide(visible: &mut Changes, range: PageRange) {
    let (first, end) = (range.first.0, range.end().0);
    let border = visible.pages.space_pages().clamp(first, end);
    for page in first..border {
        visible.pages.remove(PageIndex(page));
    }
    if border < end {
        visible.blocks.remove(border..end);
    }
}
