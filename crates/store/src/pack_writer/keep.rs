//! Taking over records of packs that go, and leaving such packs: the two ends of a prune.

use super::{OpenPack, PackWriter};
use crate::bases::Bases;
use crate::codec::{Codec, PageCompressor};
use crate::derived::Derivation;
use crate::identity::{PageHash, PageRef};
use crate::prune::moves::{Moves, Place};
use crate::prune::packs;
use crate::record::{Kind, verify};
use crate::store::Inner;
use crate::writer::Tuning;
use crate::{Error, Result};
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
            kinds: FxHashMap::default(),
            learnt: FxHashSet::default(),
            unproven: FxHashSet::default(),
            finder: None,
            learnt_from: next_pack,
            next_pack,
            open: None,
            bases: Bases::new(tuning.base_bytes),
            compressors: (0..tuning.encode_threads.max(1)).map(|_| PageCompressor::new()).collect(),
            scratch: Vec::new(),
            composed: Vec::new(),
            tuning,
        })
    }

    /// Writes a page that has `hash`; where it is, and how many bytes it took. [`Error::Damaged`] where it has another one.
    pub fn keep(&mut self, page: &Page, hash: PageHash, kind: Kind) -> Result<(PageRef, u64)> {
        verify(hash, &self.inner.config.key, page).map_err(|problem| Error::damaged("a page", problem))?;
        match self.index.get(&hash) {
            // Not a derived one: others may stand on this.
            Some(known) if !self.kind(*known).is_derived() => return Ok((*known, 0)),
            _ => {}
        }
        let mut pack = self.take_pack()?;
        let place = PageRef::new(pack.number, pack.end());
        let len_bytes = pack.append(hash, kind, self.compressors[0].compress(page));
        self.took(pack, hash, place, kind)?;
        Ok((place, len_bytes))
    }

    /// The same for what is written as `derivation` says.
    pub fn keep_derived(&mut self, derivation: &Derivation, page: &Page) -> Result<(PageRef, u64)> {
        let hash = PageHash::of(&self.inner.config.key, page);
        if let Some(known) = self.index.get(&hash) {
            return Ok((*known, 0));
        }
        let mut pack = self.take_pack()?;
        let place = PageRef::new(pack.number, pack.end());
        self.composed.clear();
        let (kind, codec) = match derivation {
            Derivation::Parts(composition) => {
                let codec = composition.encode(page, &mut self.compressors[0], &mut self.composed);
                (Kind::Composed, codec)
            }
            Derivation::Delta(delta) => {
                delta.encode(&mut self.composed);
                (Kind::Delta, Codec::Raw)
            }
        };
        let len_bytes = pack.append(hash, kind, (codec, &self.composed));
        self.took(pack, hash, place, kind)?;
        Ok((place, len_bytes))
    }

    fn took(&mut self, pack: OpenPack, hash: PageHash, place: PageRef, kind: Kind) -> Result<()> {
        self.index.insert(hash, place);
        if kind != Kind::Page {
            self.kinds.insert(place, kind);
        }
        self.give_back(pack)
    }

    /// The next pack is above all there are now. No derived record is relied on again.
    pub fn raise(&mut self) -> Result<()> {
        self.close()?;
        self.next_pack = self.next_pack.max(newest(&self.inner)? + 1);
        // What a derived one stands on may go by now.
        let kinds = &self.kinds;
        self.index.retain(|_, place| !kinds.get(place).is_some_and(|kind| kind.is_derived()));
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
        let is_new = |number: &u32| {
            !self.learnt.contains(number) && Some(*number) != own && !moves.victims.contains(number)
        };
        let new: Vec<u32> = packs::numbers(&self.inner)?.into_iter().filter(is_new).collect();
        new.into_iter().try_for_each(|number| self.learn(number, true, true))
    }

    /// Whether this is a record that stands on others.
    pub fn is_derived(&self, place: PageRef) -> bool {
        self.kind(place).is_derived()
    }

    /// Knows nothing any more in the packs that go, but where their records are now; and of derived records only those that
    /// have moved.
    pub fn follow(&mut self, moves: &Moves) -> Result<()> {
        // A derived record lies behind what it stands on: what comes from here on lies behind what has moved.
        self.close()?;
        self.learn_others(moves)?;
        let newest = moves.to.values().map(|to| to.pack()).max().unwrap_or(0);
        self.next_pack = self.next_pack.max(newest + 1);
        let kinds = &self.kinds;
        self.index.retain(|_, place| match moves.place(*place) {
            // What a derived one stands on may go.
            Place::Same => !kinds.get(place).is_some_and(|kind| kind.is_derived()),
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
        self.kinds = std::mem::take(&mut self.kinds).into_iter().filter_map(moved).collect();
        self.unproven.clear();
        self.bases.clear();
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
    Ok(packs::numbers(inner)?.last().copied().unwrap_or(0))
}
