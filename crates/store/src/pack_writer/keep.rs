//! Taking over records of packs that go, and leaving such packs: the two ends of a prune.

use super::pages::compress_patch;
use super::{OpenPack, PackWriter};
use crate::bases::Bases;
use crate::codec::{Codec, PageCompressor, SAVING_BYTES_MIN};
use crate::derived::Derivation;
use crate::dictionary::Dense;
use crate::identity::{PageHash, PageRef};
use crate::index::Index;
use crate::prune::moves::Moves;
use crate::prune::packs;
use crate::record::{Kind, verify};
use crate::store::Inner;
use crate::writer::Tuning;
use crate::{Error, Result};
use keyframe_units::{PAGE_BYTES, Page};
use rustc_hash::FxHashSet;
use std::sync::Arc;

/// What the words of a page may take more than zstd: they are read several times as fast.
const WORDS_MORE_BYTES_MAX: usize = PAGE_BYTES / 12;

impl PackWriter {
    /// Of packs that are above all there are. It knows no record, whoever else writes.
    pub fn empty(inner: Arc<Inner>, tuning: Tuning) -> Result<Self> {
        let next_pack = packs::newest(&inner)? + 1;
        Ok(Self {
            inner,
            index: Index::new(tuning.index_bytes, None),
            learnt: FxHashSet::default(),
            finder: None,
            learnt_from: next_pack,
            next_pack,
            open: None,
            bases: Bases::new(tuning.base_bytes),
            given_up: FxHashSet::default(),
            compressors: (0..tuning.encode_threads.max(1)).map(|_| PageCompressor::new()).collect(),
            scratch: Vec::new(),
            composed: Vec::new(),
            dense: None,
            tuning,
        })
    }

    /// Writes a page that has `hash`; where it is, and how many bytes it took. [`Error::Damaged`]
    /// where it has another one.
    pub fn keep(&mut self, page: &Page, hash: PageHash, kind: Kind) -> Result<(PageRef, u64)> {
        verify(hash, &self.inner.config.key, page)
            .map_err(|problem| Error::damaged("a page", problem))?;
        match self.index.get(hash) {
            // Not a derived one: others may stand on this.
            Some(known) if !known.kind.is_derived() => return Ok((known.place, 0)),
            _ => {}
        }
        let mut pack = self.take_pack()?;
        let place = PageRef::new(pack.number, pack.end());
        let payload = match self.dense.as_mut().and_then(|dense| dense.compress(page)) {
            None => self.compressors[0].compress(page),
            Some(dense) => {
                let words = self.compressors[0].compress_words(page);
                match words.filter(|words| words.len() <= dense.len() + WORDS_MORE_BYTES_MAX) {
                    Some(words) => (Codec::Words, words),
                    None if dense.len() + SAVING_BYTES_MIN <= page.len() => (Codec::Dense, dense),
                    None => (Codec::Raw, page.as_slice()),
                }
            }
        };
        let len_bytes = pack.append(hash, kind, payload);
        self.took(pack, hash, place, kind)?;
        Ok((place, len_bytes))
    }

    /// The same for what is written as `derivation` says.
    pub fn keep_derived(&mut self, derivation: &Derivation, page: &Page) -> Result<(PageRef, u64)> {
        let hash = PageHash::of(&self.inner.config.key, page);
        if let Some(known) = self.index.get(hash) {
            return Ok((known.place, 0));
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
                (Kind::Delta, compress_patch(&mut self.composed, &mut self.compressors[0]))
            }
        };
        let len_bytes = pack.append(hash, kind, (codec, &self.composed));
        self.took(pack, hash, place, kind)?;
        Ok((place, len_bytes))
    }

    /// From here on pages are compressed as small as they get, in packs that begin with its
    /// dictionary; or as ever.
    pub fn set_dense(&mut self, dense: Option<Dense>) -> Result<()> {
        self.close()?;
        self.dense = dense;
        Ok(())
    }

    fn took(&mut self, pack: OpenPack, hash: PageHash, place: PageRef, kind: Kind) -> Result<()> {
        self.index.insert(hash, place, kind);
        self.give_back(pack)
    }

    /// The next pack is above all there are now. No derived record is relied on again.
    pub fn raise(&mut self) -> Result<()> {
        self.close()?;
        self.next_pack = self.next_pack.max(packs::newest(&self.inner)? + 1);
        // What a derived one stands on may go by now.
        self.index.forget_derived();
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

    /// Learns what is in packs that others, prunes, have written meanwhile.
    fn learn_others(&mut self, moves: &Moves) -> Result<()> {
        let own = self.open.as_ref().map(|pack| pack.number);
        let is_new = |number: &u32| {
            !self.learnt.contains(number) && Some(*number) != own && !moves.victims.contains(number)
        };
        let new: Vec<u32> = packs::numbers(&self.inner)?.into_iter().filter(is_new).collect();
        new.into_iter().try_for_each(|number| self.learn(number, true, true))
    }

    /// Knows nothing any more in the packs that go, but where their records are now; and of derived
    /// records only those that have moved.
    pub fn follow(&mut self, moves: &Moves) -> Result<()> {
        // A derived record lies behind what it stands on: what comes from here on lies behind what
        // has moved.
        self.close()?;
        self.learn_others(moves)?;
        let newest = moves.to.values().map(|to| to.pack()).max().unwrap_or(0);
        self.next_pack = self.next_pack.max(newest + 1);
        // What a derived one stands on may go.
        self.index.follow(moves);
        self.bases.clear();
        if let Some(finder) = &mut self.finder {
            finder.clear();
        }
        // The sectors of what is known already are learnt anew, as it is met.
        self.learnt_from = self.next_pack;
        Ok(())
    }
}
