//! Following a prune that removes packs while the run goes on.
//!
//! The run replaces its references to moved records. It puts again what was not moved into the open
//! pack.
//!
//! Invariant: after the confirmation, neither the run nor its writer refers to anything in the
//! packs that go. So no later checkpoint does.

use crate::open_store::OpenStore;
use crate::pack_writer::{PageInput, Placed};
use crate::run::progress::RunProgress;
use crate::session::Session;
use crate::{Error, Result};
use keyframe_store_format::moves::{MovedPlace, Moves};
use keyframe_store_format::page_ref::PageRef;
use keyframe_units::{Page, ZERO_PAGE};
use rustc_hash::FxHashMap;

/// Follows the moves of the prune at work: gives the references of the run their new places. Does
/// nothing if there is no prune, or if the run has followed it already. Errors: records cannot be
/// copied or synced; the backend fails.
pub fn follow_prune(
    store: &OpenStore,
    session: &mut Session,
    progress: &mut RunProgress,
) -> Result<()> {
    let seen = session.moves.as_ref().map(|moves| moves.generation);
    let moves = match store.moves(seen) {
        Ok(Some(moves)) => moves,
        // Without a confirmation of damaged moves, the prune removes nothing.
        Ok(None) | Err(Error::Damaged { .. }) => return Ok(()),
        Err(error) => return Err(error),
    };
    session.packs.follow(&moves)?;
    let mut all = Vec::new();
    progress.repoint(&mut |to| all.push(*to));
    let places = new_places(store, session, all, &moves)?;
    // A failed sync cuts the pack, and the new places with it.
    session.packs.sync()?;
    progress.repoint(&mut |to| *to = places.get(to).copied().unwrap_or(*to));
    store.put_seen(moves.generation)?;
    // An open file would keep the space of a removed pack.
    store.close_unheld(&moves.victims);
    session.moves = Some(moves);
    Ok(())
}

/// Returns the new places of those of `records` that the prune followed last has moved. `records`
/// come from a map of the store that may be older than the prune. Errors: records cannot be copied;
/// the backend fails.
pub fn places_after_prune(
    store: &OpenStore,
    session: &mut Session,
    records: Vec<PageRef>,
) -> Result<FxHashMap<PageRef, PageRef>> {
    let Some(moves) = session.moves.take() else { return Ok(FxHashMap::default()) };
    let places = new_places(store, session, records, &moves);
    session.moves = Some(moves);
    places
}

/// The new places of those of `all` that are not where they were. Puts again the records that were
/// not moved. Also puts again derived records that refer to a record which moves or goes, if no
/// checkpoint had them when the prune looked.
fn new_places(
    store: &OpenStore,
    session: &mut Session,
    mut all: Vec<PageRef>,
    moves: &Moves,
) -> Result<FxHashMap<PageRef, PageRef>> {
    all.sort_unstable();
    all.dedup();
    let mut places = FxHashMap::default();
    let (mut still, going): (Vec<PageRef>, Vec<PageRef>) =
        all.into_iter().partition(|of| moves.place(*of) == MovedPlace::Same);
    session.packs.keep_derived_of(&mut still)?;
    let is_broken =
        |references: &[PageRef]| references.iter().any(|to| moves.place(*to) != MovedPlace::Same);
    let derived = store.references_of(&still)?.into_iter();
    let broken = derived.filter(|(_, references)| is_broken(references)).map(|(of, _)| of);
    for of in going.into_iter().chain(broken) {
        let now = match moves.place(of) {
            MovedPlace::Moved(to) => to,
            MovedPlace::Same | MovedPlace::Gone => put_again(store, session, of)?,
        };
        places.insert(of, now);
    }
    Ok(places)
}

fn put_again(store: &OpenStore, session: &mut Session, of: PageRef) -> Result<PageRef> {
    let mut page: Page = ZERO_PAGE;
    store.read_pages(&[(of, ())], &mut |(), content| {
        page = *content;
        Ok::<_, Error>(())
    })?;
    Ok(match session.packs.put(PageInput { content: &page, home: None })? {
        None => PageRef::ZERO,
        Some(Placed::Known(to, _) | Placed::New(to, _)) => to,
    })
}
