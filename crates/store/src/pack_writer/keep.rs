//! Taking over records of packs that go, and leaving such packs: the two ends of a prune.

use super::{OpenPack, PackWriter};
use crate::codec::PageCompressor;
use crate::composed::Composition;
use crate::identity::{PageHash, PageRef};
use crate::prune::moves::{Moves, Place};
use crate::record::{Kind, verify};
use crate::store::Inner;
use crate::writer::Tuning;
use crate::{Error, Result, names};
use keyframe_units::Page;
use rustc_hash::{FxHashMap, FxHashSet};
use std::sync::Arc;

impl PackWriter {
    /// Of packs that are above all there are. It knows no record, whoever else writes.
    pub fn empty(inner: Arc<Inner>, tuning: Tuning) -> Result<Self> {
        let next_pack = newest(&inner)? + 1;
        Ok(Self {
            inner,
            index: FxHashMap::default(),
            of_disks: FxHashMap::default(),
            learnt: FxHashSet::default(),
            unproven: FxHashSet::default(),
            with_disks: false,
            finder: None,
            learnt_from: next_pack,
            next_pack,
            open: None,
            compressor: PageCompressor::new(),
            composed: Vec::new(),
            tuning,
        })
    }

    /// Writes a page that has `hash`; where it is, and how many bytes it took. [`Error::Damaged`] where it has another one.
    pub fn keep(&mut self, page: &Page, hash: PageHash, kind: Kind) -> Result<(PageRef, u64)> {
        verify(hash, &self.inner.config.key, page).map_err(|problem| Error::damaged("a page", problem))?;
        match self.index.get(&hash) {
            // Not a composed one: others may be composed of this.
            Some(known) if self.kind(*known) != Kind::Composed => return Ok((*known, 0)),
            _ => {}
        }
        self.with_disks |= kind != Kind::Page;
        let mut pack = self.take_pack()?;
        let place = PageRef::new(pack.number, pack.end());
        let len_bytes = pack.append(hash, kind, self.compressor.compress(page));
        self.took(pack, hash, place, kind)?;
        Ok((place, len_bytes))
    }

    /// The same for a block, which is written as `composition` says.
    pub fn keep_composed(&mut self, composition: &Composition, page: &Page) -> Result<(PageRef, u64)> {
        let hash = PageHash::of(&self.inner.config.key, page);
        if let Some(known) = self.index.get(&hash) {
            return Ok((*known, 0));
        }
        self.with_disks = true;
        let mut pack = self.take_pack()?;
        let place = PageRef::new(pack.number, pack.end());
        self.composed.clear();
        let codec = composition.encode(page, &mut self.compressor, &mut self.composed);
        let len_bytes = pack.append(hash, Kind::Composed, (codec, &self.composed));
        self.took(pack, hash, place, Kind::Composed)?;
        Ok((place, len_bytes))
    }

    fn took(&mut self, pack: OpenPack, hash: PageHash, place: PageRef, kind: Kind) -> Result<()> {
        self.index.insert(hash, place);
        if kind != Kind::Page {
            self.of_disks.insert(place, kind);
        }
        self.give_back(pack)
    }

    /// The next pack is above all there are now. No composed record is relied on again.
    pub fn raise(&mut self) -> Result<()> {
        self.close()?;
        self.next_pack = self.next_pack.max(newest(&self.inner)? + 1);
        // What a composed one refers to may go by now.
        let of_disks = &self.of_disks;
        self.index.retain(|_, place| of_disks.get(place) != Some(&Kind::Composed));
        Ok(())
    }

    /// Makes a pack without records, with a number above all there are, which is returned.
    pub fn reserve(&mut self) -> Result<u32> {
        self.raise()?;
        let pack = self.create()?;
        let number = pack.number;
        self.open = Some(pack);
        self.close().map(|()| number)
    }

    /// Learns of packs that others, prunes, have begun meanwhile what their records are.
    pub fn learn_others(&mut self, moves: &Moves) -> Result<()> {
        let own = self.open.as_ref().map(|pack| pack.number);
        let listed = self.inner.backend.list(names::PACKS)?;
        let is_new = |number: &u32| {
            !self.learnt.contains(number) && Some(*number) != own && !moves.victims.contains(number)
        };
        let new: Vec<u32> = listed.iter().filter_map(|file| names::parse_pack(file)).filter(is_new).collect();
        new.into_iter().try_for_each(|number| self.learn(number, true, true))
    }

    /// Whether this is a composed record.
    pub fn is_composed(&self, place: PageRef) -> bool {
        self.kind(place) == Kind::Composed
    }

    /// Knows nothing any more in the packs that go, but where their records are now; and of composed records only those that
    /// have moved.
    pub fn follow(&mut self, moves: &Moves) -> Result<()> {
        // A composed record lies behind what it refers to: what comes from here on lies behind what has moved.
        self.close()?;
        self.learn_others(moves)?;
        let newest = moves.to.values().map(|to| to.pack()).max().unwrap_or(0);
        self.next_pack = self.next_pack.max(newest + 1);
        let of_disks = &self.of_disks;
        self.index.retain(|_, place| match moves.place(*place) {
            // What a composed one refers to may go.
            Place::Same => of_disks.get(place) != Some(&Kind::Composed),
            Place::Moved(to) => {
                *place = to;
                true
            }
            Place::Gone => false,
        });
        let moved = |(of, kind): (PageRef, Kind)| match moves.place(of) {
            Place::Same => Some((of, kind)),
            Place::Moved(to) => Some((to, kind)),
            Place::Gone => None,
        };
        self.of_disks = std::mem::take(&mut self.of_disks).into_iter().filter_map(moved).collect();
        self.unproven.clear();
        if let Some(finder) = &mut self.finder {
            finder.clear();
        }
        // The sectors of what is known already are learnt anew, as it is met.
        self.learnt_from = self.next_pack;
        Ok(())
    }
}

/// The highest number of a pack; 0 where there is none.
fn newest(inner: &Inner) -> Result<u32> {
    let listed = inner.backend.list(names::PACKS)?;
    Ok(listed.iter().filter_map(|file| names::parse_pack(file)).max().unwrap_or(0))
}
