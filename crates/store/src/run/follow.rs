//! A run that goes on while a prune gives packs up: it follows the records that have moved, and
//! brings what was not moved into the pack at hand.
//!
//! Invariant: once it has said so, neither the run nor its writer refers to anything in those
//! packs, so that no checkpoint sealed from then on does.

use super::Run;
use crate::disk_map::{DiskMap, Former};
use crate::identity::PageRef;
use crate::pack_writer::{Input, Placed};
use crate::page_map::PageMap;
use crate::prune::moves::{Moves, Place};
use crate::{Error, Result};
use keyframe_units::{Page, PageIndex, ZERO_PAGE};
use rustc_hash::FxHashMap;

impl Run {
    /// Follows a prune at work, if there is one that it has not followed.
    pub(super) fn follow_prune(&mut self) -> Result<()> {
        let seen = self.session()?.moves.as_ref().map(|moves| moves.generation);
        let moves = match self.inner.moves(seen) {
            Ok(Some(moves)) => moves,
            // One that cannot be read is not answered, so that nothing is removed.
            Ok(None) | Err(Error::Damaged { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        self.session()?.packs.follow(&moves)?;
        let mut all = Vec::new();
        Self::each(
            &mut self.map,
            &mut self.disk_map,
            (&mut self.undo, &mut self.undo_blocks),
            &mut |to| {
                all.push(*to);
            },
        );
        let places = self.places(all, &moves)?;
        Self::each(
            &mut self.map,
            &mut self.disk_map,
            (&mut self.undo, &mut self.undo_blocks),
            &mut |to| {
                *to = places.get(to).copied().unwrap_or(*to);
            },
        );
        self.session()?.packs.sync()?;
        self.inner.put_seen(moves.generation)?;
        self.session()?.moves = Some(moves);
        Ok(())
    }

    /// Where records are now that a prune which was followed has moved: those of a map read from
    /// the store, which may be of before.
    pub(super) fn places_now(
        &mut self,
        records: Vec<PageRef>,
    ) -> Result<FxHashMap<PageRef, PageRef>> {
        let Some(moves) = self.session()?.moves.take() else { return Ok(FxHashMap::default()) };
        let places = self.places(records, &moves);
        self.session()?.moves = Some(moves);
        places
    }

    /// Where those of `all` are now that are not where they were. What was not moved is put anew;
    /// so is what is composed of something that moves or goes, and was in no checkpoint yet when
    /// that was moved.
    fn places(
        &mut self,
        mut all: Vec<PageRef>,
        moves: &Moves,
    ) -> Result<FxHashMap<PageRef, PageRef>> {
        all.sort_unstable();
        all.dedup();
        let mut places = FxHashMap::default();
        let (mut still, going): (Vec<PageRef>, Vec<PageRef>) =
            all.into_iter().partition(|of| moves.place(*of) == Place::Same);
        self.session()?.packs.keep_derived_of(&mut still)?;
        let broken = |parts: &[PageRef]| parts.iter().any(|to| moves.place(*to) != Place::Same);
        let composed = self.inner.parts_of(&still)?.into_iter();
        let broken: Vec<PageRef> =
            composed.filter(|(_, parts)| broken(parts)).map(|(of, _)| of).collect();
        for of in going.into_iter().chain(broken) {
            let now = match moves.place(of) {
                Place::Moved(to) => to,
                Place::Same | Place::Gone => self.put_anew(of)?,
            };
            places.insert(of, now);
        }
        Ok(places)
    }

    fn put_anew(&mut self, of: PageRef) -> Result<PageRef> {
        let mut page: Page = ZERO_PAGE;
        self.inner.read_pages(&[(of, ())], &mut |(), content| {
            page = *content;
            Ok::<_, Error>(())
        })?;
        Ok(match self.session()?.packs.put(Input { content: &page, home: None })? {
            None => PageRef::ZERO,
            Some(Placed::Known(to, _) | Placed::New(to, _)) => to,
        })
    }

    /// Shows every record that the run refers to.
    fn each(
        map: &mut PageMap,
        disk_map: &mut DiskMap,
        (undo, undo_blocks): (&mut [(PageIndex, PageRef)], &mut [Former]),
        show: &mut dyn FnMut(&mut PageRef),
    ) {
        map.repoint(show);
        disk_map.repoint(show);
        undo.iter_mut().map(|(_, to)| to).filter(|to| **to != PageRef::ZERO).for_each(&mut *show);
        for former in undo_blocks {
            former.repoint(show);
        }
    }
}
