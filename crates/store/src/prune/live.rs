//! What sealed checkpoints need: maps, and of their records those that some image shows.
//!
//! ```text
//!   chains of two checkpoints that are kept     [9 8 0]  [7 6 0]         map 0 ◀── 6 ◀── 7 (sealed)
//!                                                                          ▲
//!   newest map first:  visible(9) = all                                    └───── 8 ◀── 9 (sealed)
//!                      visible(8) = visible(9) without the pages of 9
//!                      visible(0) = visible(8) without those of 8, and visible(6) without those of 6
//! ```
//!
//! Invariants: a record is live where a live map shows it at a visible page, or where a live record
//! is composed of it ([`Live::close`]): live records are closed over references. A map of a run
//! that goes on hides nothing that a later checkpoint of it shows: what it builds upon are maps of
//! the newest checkpoint's chain, under a map with all that changed since.
//!
//! All maps are read once in a prune. Which packs each mentions is remembered ([`Known`]), so that
//! later looks at few packs read few maps: those that mention one of them, those that are new, and
//! what lies over such a one whose own checkpoint is gone.

use crate::chain::Changes;
use crate::identity::PageRef;
use crate::map_run::MapRun;
use crate::meta::Meta;
use crate::pack_file::Content;
use crate::prune::packs::{self, Shape};
use crate::record::Entry;
use crate::store::Inner;
use crate::{Error, Result};
use keyframe_store_backend::layout;
use keyframe_units::{CheckpointId, PageIndex, PageRange, ZERO_PAGE};
use std::collections::{BTreeMap, BTreeSet};

/// More changes than come while a folder is read.
const LISTINGS_MAX: u32 = 16;

/// A map that a checkpoint needs.
#[derive(Debug)]
pub struct Node {
    parent: Option<u64>,
    /// Its own checkpoint is there: all that it gives is visible.
    sealed: bool,
    ram_pages: u64,
}

/// Offsets of a pack's live records.
#[derive(Debug, Default)]
pub struct Offsets {
    all: Vec<u64>,
    sorted: usize,
}

impl Offsets {
    fn push(&mut self, offset: u64) {
        self.all.push(offset);
        // Many maps mention a record: sorted now and then, it takes memory once.
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

/// What is known of maps that were read: maps that are not in here are read again.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// The packs that each map mentions.
    pub mentions: BTreeMap<u64, Box<[u32]>>,
    /// The packs that there were.
    pub packs: BTreeSet<u32>,
    /// Of packs with live records that are composed of others': which packs those are in.
    pub depends: BTreeMap<u32, BTreeSet<u32>>,
}

impl Known {
    /// Whether a map may mention one of `packs`, or one that there was not.
    pub fn may_mention(&self, map: u64, packs: &BTreeSet<u32>) -> bool {
        let mentions = self.mentions.get(&map);
        mentions.is_none_or(|all| {
            all.iter().any(|pack| packs.contains(pack) || !self.packs.contains(pack))
        })
    }

    /// `packs`, and those that have live records composed of theirs.
    pub fn with_dependents(&self, packs: &BTreeSet<u32>) -> BTreeSet<u32> {
        let dependents =
            self.depends.iter().filter(|(_, on)| !on.is_disjoint(packs)).map(|(of, _)| *of);
        packs.iter().copied().chain(dependents).collect()
    }
}

/// What sealed checkpoints need.
#[derive(Debug, Default)]
pub struct Live {
    /// Of the maps that were read.
    mentions: BTreeMap<u64, Box<[u32]>>,
    nodes: BTreeMap<u64, Node>,
    wanted: BTreeMap<u32, Offsets>,
    /// Checkpoints that there are.
    pub ids: BTreeSet<CheckpointId>,
}

impl Live {
    /// Looks at all checkpoints and their maps. Error: [`Error::Unreadable`] where what one needs
    /// cannot be known.
    pub fn find(inner: &Inner) -> Result<Self> {
        Self::find_where(inner, &|_| true)
    }

    /// The same of the maps that are wanted: all live records that these mention.
    pub fn find_where(inner: &Inner, is_wanted: &dyn Fn(u64) -> bool) -> Result<Self> {
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

    /// Reads all checkpoints that there are. Beside a run they come and go: where one is forgotten
    /// that was listed, the one that was sealed before it went may not have been, and all that the
    /// run goes on with would be known of neither. So it is listed again until nothing is new; what
    /// is sealed behind that builds on what was read.
    fn find_nodes(&mut self, inner: &Inner) -> Result<()> {
        // Numbers are not used again: what is gone stays so.
        let mut looked_at = BTreeSet::new();
        loop {
            let mut is_all = true;
            for id in inner.settled_checkpoint_ids()? {
                if !looked_at.insert(id) {
                    continue;
                }
                is_all = false;
                match inner.read_meta(id) {
                    // Forgotten since it was listed.
                    Err(Error::UnknownCheckpoint { .. }) => {}
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
            let node = self.nodes.entry(*map).or_insert_with(|| Node {
                parent: meta.map_chain.get(at + 1).copied(),
                sealed: false,
                ram_pages: meta.ram.len_pages(),
            });
            node.sealed |= at == 0;
        }
    }

    /// The maps that are needed.
    pub fn has_map(&self, id: u64) -> bool {
        self.nodes.contains_key(&id)
    }

    /// Which packs each map mentions that was read.
    pub fn take_mentions(&mut self) -> BTreeMap<u64, Box<[u32]>> {
        std::mem::take(&mut self.mentions)
    }

    /// Offsets of the live records of a pack, rising.
    pub fn offsets(&self, pack: u32) -> &[u64] {
        self.wanted.get(&pack).map_or(&[], |offsets| &offsets.all)
    }

    /// Packs that have live records.
    pub fn packs(&self) -> impl Iterator<Item = u32> + '_ {
        self.wanted.keys().copied()
    }

    /// Adds what live records of `shape` are composed of, and returns these with what each refers
    /// to. What they refer to is not composed, and lies before them: one step, through packs in
    /// rising order, is all. Live records that `shape` does not list are asked themselves: those
    /// that it missed because the medium did not give them must not cost what they stand on.
    pub fn close(&mut self, inner: &Inner, shape: &Shape) -> Result<Vec<(PageRef, Vec<PageRef>)>> {
        let live = self.offsets(shape.number);
        let composed = shape.entries.iter().filter(|entry| entry.kind().is_derived());
        let wanted: Vec<PageRef> = composed
            .filter(|entry| live.binary_search(&entry.offset()).is_ok())
            .map(|entry| PageRef::new(shape.number, entry.offset()))
            .collect();
        let is_listed = |at: &&u64| shape.entries.binary_search_by_key(*at, Entry::offset).is_ok();
        let missing: Vec<u64> = live.iter().filter(|at| !is_listed(at)).copied().collect();
        let mut found = inner.parts_of(&wanted)?;
        for place in packs::places(shape.number, &missing) {
            match inner.parts_of(&[place]) {
                // Nobody can tell what it stands on.
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

    /// After [`Self::close`] of all packs.
    pub fn settle(&mut self) {
        self.wanted.values_mut().for_each(Offsets::settle);
    }

    /// Shows every map that is wanted, the newest first, with what of it some checkpoint shows.
    /// Others may be shown, too.
    pub fn each_map(
        &self,
        inner: &Inner,
        is_wanted: &dyn Fn(u64) -> bool,
        visit: &mut dyn FnMut(u64, &Node, &MapRun, &Changes) -> Result<()>,
    ) -> Result<()> {
        // Of maps without a checkpoint, what is visible is what those above leave: they are read
        // for it.
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

impl Inner {
    /// The numbers of the sealed checkpoints, rising. A folder that changes while it is read may
    /// show neither what was there nor what came: two lists that are the same show one instant.
    pub fn settled_checkpoint_ids(&self) -> Result<Vec<CheckpointId>> {
        let mut before = self.checkpoint_ids()?;
        for _ in 0..LISTINGS_MAX {
            let now = self.checkpoint_ids()?;
            if now == before {
                break;
            }
            before = now;
        }
        Ok(before)
    }

    /// What composed records (rising) refer to; those that are not composed are left out.
    pub fn parts_of(&self, wanted: &[PageRef]) -> Result<Vec<(PageRef, Vec<PageRef>)>> {
        let mut found = Vec::with_capacity(wanted.len());
        let mut page = ZERO_PAGE;
        for of_pack in wanted.chunk_by(|a, b| a.pack() == b.pack()) {
            let number = of_pack.first().map_or(0, |of| of.pack());
            let object = self.backend.describe(&layout::pack(number));
            let places: Vec<(PageRef, ())> = of_pack.iter().map(|of| (*of, ())).collect();
            self.pack(number)?.read_records(&places, &mut Vec::new(), &mut |at, (), content| {
                if let Content::Derived(record) = content {
                    let derivation = record.derivation(&mut page).map_err(|problem| {
                        Error::damaged(format!("{object} at offset {}", at.offset()), problem)
                    })?;
                    found.push((at, derivation.records()));
                }
                Ok::<_, Error>(())
            })?;
        }
        Ok(found)
    }
}

/// Whether a page, or a block, is among them.
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
