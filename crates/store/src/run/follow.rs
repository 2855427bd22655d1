//! A run that goes on while a prune gives packs up: it follows the records that have moved, and brings what was not moved into
//! the pack at hand.
//!
//! Invariant: once it has said so, neither the run nor its writer refers to anything in those packs, so that no checkpoint
//! sealed from then on does.

use super::Run;
use crate::identity::PageRef;
use crate::pack_writer::Placed;
use crate::prune::moves::{Moves, Place};
use crate::{Error, Result};
use keyframe_units::{Page, ZERO_PAGE};
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
        let mut going = Vec::new();
        self.repoint(&mut |to| going.extend((moves.place(*to) != Place::Same).then_some(*to)));
        let places = self.places(going, &moves)?;
        self.repoint(&mut |to| *to = places.get(to).copied().unwrap_or(*to));
        self.session()?.packs.sync()?;
        self.inner.put_seen(moves.generation)?;
        self.session()?.moves = Some(moves);
        Ok(())
    }

    /// Where records are now that a prune which was followed has moved: those of a map read from the store, which may be of
    /// before.
    pub(super) fn places_now(&mut self, records: Vec<PageRef>) -> Result<FxHashMap<PageRef, PageRef>> {
        let Some(moves) = self.session()?.moves.take() else { return Ok(FxHashMap::default()) };
        let going = records.into_iter().filter(|to| moves.place(*to) != Place::Same).collect();
        let places = self.places(going, &moves);
        self.session()?.moves = Some(moves);
        places
    }

    /// Where each of `going` is now; what was not moved is put anew.
    fn places(&mut self, mut going: Vec<PageRef>, moves: &Moves) -> Result<FxHashMap<PageRef, PageRef>> {
        going.sort_unstable();
        going.dedup();
        let mut places = FxHashMap::default();
        for of in going {
            let now = match moves.place(of) {
                Place::Same => of,
                Place::Moved(to) => to,
                Place::Gone => self.put_anew(of)?,
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
        Ok(match self.session()?.packs.put(&page)? {
            Placed::Known(to, _) | Placed::New(to, _) => to,
        })
    }

    /// Shows every record that the run refers to.
    fn repoint(&mut self, place: &mut dyn FnMut(&mut PageRef)) {
        self.map.repoint(place);
        self.disk_map.repoint(place);
        self.undo.iter_mut().map(|(_, to)| to).filter(|to| **to != PageRef::ZERO).for_each(&mut *place);
        self.undo_blocks.iter_mut().for_each(|former| former.repoint(place));
    }
}
