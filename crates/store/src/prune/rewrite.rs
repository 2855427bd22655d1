//! Moving records from packs that go into new ones, and telling the maps.
//!
//! Invariants: a record is compared with its hash before its copy stands for it. Plain records move
//! before those that are composed of them, and new packs have higher numbers than all others, so
//! that a composed record lies behind what it refers to. A map is replaced as a whole, and never
//! loses what some checkpoint shows.

use super::live::{Live, shows};
use super::moves::{Moves, Place};
use super::packs::{self, Shape, places};
use crate::derived::Derivation;
use crate::dictionary::{Dense, SAMPLES_MAX};
use crate::identity::{PageHash, PageRef};
use crate::map_run::{MapHeader, MapRun};
use crate::pack_file::Content;
use crate::pack_writer::PackWriter;
use crate::record::{Entry, Kind};
use crate::store::Inner;
use crate::writer::Tuning;
use crate::{Error, Result};
use keyframe_locks::IgnorePoison;
use keyframe_store_backend::layout;
use keyframe_units::{CheckpointId, Page, ZERO_PAGE};
use std::collections::BTreeSet;
use std::sync::Arc;

/// A dictionary is at most this part of a full pack.
const DICTIONARY_PART: u64 = 32;

/// Writes what moves into packs of its own.
pub struct Copier {
    inner: Arc<Inner>,
    tuning: Tuning,
    packs: Option<PackWriter>,
    reserved: BTreeSet<u32>,
    pub copied_bytes: u64,
}

impl Copier {
    pub fn new(inner: Arc<Inner>, tuning: Tuning) -> Self {
        Self { inner, tuning, packs: None, reserved: BTreeSet::new(), copied_bytes: 0 }
    }

    fn packs(&mut self) -> Result<&mut PackWriter> {
        let packs = match self.packs.take() {
            Some(packs) => packs,
            None => PackWriter::empty(self.inner.clone(), self.tuning)?,
        };
        Ok(self.packs.insert(packs))
    }

    /// A dictionary for pages like those of the packs that go. What cannot be read is met again
    /// when it is copied.
    pub fn train(&self, victims: &BTreeSet<u32>) -> Result<Dense> {
        let mut places = Vec::new();
        for victim in victims {
            let entries =
                Shape::of(&self.inner, *victim)?.map_or_else(Vec::new, |shape| shape.entries);
            let plain = entries.iter().filter(|entry| !entry.kind().is_derived());
            places.extend(plain.map(|entry| PageRef::new(*victim, entry.offset())));
        }
        let step = places.len().div_ceil(SAMPLES_MAX).max(1);
        let mut samples = Vec::with_capacity(SAMPLES_MAX);
        let mut page = ZERO_PAGE;
        for place in places.into_iter().step_by(step) {
            if self.inner.read_plain(place, &mut page).is_ok() {
                samples.push(page);
            }
        }
        // Each pack has a copy.
        let bytes_max =
            usize::try_from(self.tuning.pack_bytes_max / DICTIONARY_PART).unwrap_or(usize::MAX);
        Ok(Dense::train(&samples, bytes_max))
    }

    /// Pages that are copied from here on are as small as they get, or as a run writes them.
    pub fn set_dense(&mut self, dense: Option<Dense>) -> Result<()> {
        self.packs()?.set_dense(dense)
    }

    /// Copies the plain records among `live` of pack `victim`. The inner error: what is damaged, so
    /// that the pack must stay.
    pub fn plain(
        &mut self,
        victim: u32,
        live: &[u64],
        moves: &mut Moves,
    ) -> Result<Result<(), String>> {
        let is_missing = |place: &PageRef| !moves.to.contains_key(place);
        let missing: Vec<PageRef> = places(victim, live).filter(is_missing).collect();
        if missing.is_empty() {
            return Ok(Ok(()));
        }
        let Some(shape) = Shape::of(&self.inner, victim)? else {
            return Ok(Err(format!("{}: cannot be read any more", layout::pack(victim))));
        };
        let mut wanted = Vec::with_capacity(missing.len());
        for place in missing {
            match shape.entries.binary_search_by_key(&place.offset(), Entry::offset) {
                Ok(at) => wanted.push((place, at)),
                Err(_) => {
                    return Ok(Err(format!(
                        "{}: no record at {}",
                        layout::pack(victim),
                        place.offset()
                    )));
                }
            }
        }
        let pack = self.inner.pack(victim)?;
        let packs = self.packs()?;
        let mut copied_bytes = 0;
        let copied = pack.read_records(&wanted, &mut Vec::new(), &mut |place, at, content| {
            if let (Content::Plain(page, _), Some(entry)) = (content, shape.entries.get(at)) {
                let (to, bytes) =
                    packs.keep(page, entry.hash, entry.kind()).map_err(|error| match error {
                        Error::Damaged { problem, .. } => Error::damaged(
                            format!("{} at offset {}", layout::pack(victim), place.offset()),
                            problem,
                        ),
                        other => other,
                    })?;
                copied_bytes += bytes;
                moves.to.insert(place, to);
            }
            Ok::<_, Error>(())
        });
        self.copied_bytes += copied_bytes;
        match copied {
            Err(error @ Error::Damaged { .. }) => Ok(Err(error.to_string())),
            other => other.map(Ok),
        }
    }

    /// Writes composed records anew (rising), referring to where their parts are now. Where one is
    /// damaged, it stays, and so do all packs that it needs.
    pub fn composed(
        &mut self,
        wanted: &[PageRef],
        moves: &mut Moves,
        damaged: &mut Vec<String>,
    ) -> Result<()> {
        for place in wanted {
            if moves.to.contains_key(place) {
                continue;
            }
            match self.compose_anew(*place, moves) {
                Ok(to) => {
                    moves.to.insert(*place, to);
                }
                Err(error @ Error::Damaged { .. }) => {
                    damaged.push(error.to_string());
                    moves.victims.remove(&place.pack());
                    let records = self.derivation(*place).map(|derivation| derivation.records());
                    for to in records.unwrap_or_default() {
                        moves.victims.remove(&to.pack());
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn compose_anew(&mut self, place: PageRef, moves: &Moves) -> Result<PageRef> {
        let mut derivation = self.derivation(place)?;
        derivation.repoint(&mut |record| {
            if let Place::Moved(to) = moves.place(*record) {
                *record = to;
            }
        });
        let mut page = ZERO_PAGE;
        // Compared with its hash.
        self.inner.read_pages(&[(place, ())], &mut |(), content| {
            page = *content;
            Ok::<_, Error>(())
        })?;
        let (to, bytes) = self.packs()?.keep_derived(&derivation, &page)?;
        self.copied_bytes += bytes;
        Ok(to)
    }

    fn derivation(&self, place: PageRef) -> Result<Derivation> {
        let (mut found, mut scratch) = (None, ZERO_PAGE);
        let object = || format!("{} at offset {}", layout::pack(place.pack()), place.offset());
        self.inner.pack(place.pack())?.read_records(
            &[(place, ())],
            &mut Vec::new(),
            &mut |_, (), content| {
                if let Content::Derived(record) = content {
                    let derivation = record.derivation(&mut scratch);
                    found = Some(derivation.map_err(|problem| Error::damaged(object(), problem))?);
                }
                Ok::<_, Error>(())
            },
        )?;
        found.ok_or_else(|| Error::damaged(object(), "it stands on no other record"))
    }

    /// Writes a page that has `hash`; where it is then.
    pub fn keep(&mut self, page: &Page, hash: PageHash, kind: Kind) -> Result<PageRef> {
        Ok(self.packs()?.keep(page, hash, kind)?.0)
    }

    /// What is copied from here on lies behind everything that there is.
    pub fn raise(&mut self) -> Result<()> {
        self.packs.as_mut().map_or(Ok(()), PackWriter::raise)
    }

    /// Makes all copies durable.
    pub fn close(&mut self) -> Result<()> {
        self.packs.as_mut().map_or(Ok(()), PackWriter::close)
    }

    /// Makes a pack without records, so that no number below its own is used again.
    pub fn reserve(&mut self) -> Result<()> {
        let number = self.packs()?.reserve()?;
        self.reserved.insert(number);
        Ok(())
    }

    /// Removes those of [`Self::reserve`] that others lie above by now.
    pub fn tidy(&mut self) -> Result<()> {
        let newest = packs::numbers(&self.inner)?.last().copied();
        self.reserved.retain(|number| Some(*number) != newest);
        self.inner.remove_packs(&std::mem::take(&mut self.reserved))
    }
}

/// Rewrites the maps that name records which have moved, or go, among those that are `wanted`;
/// returns which.
pub fn maps(
    inner: &Inner,
    live: &Live,
    moves: &Moves,
    is_wanted: &dyn Fn(u64) -> bool,
) -> Result<BTreeSet<u64>> {
    let mut rewritten = BTreeSet::new();
    live.each_map(inner, is_wanted, &mut |id, _, run, visible| {
        if run.refs().iter().all(|to| moves.place(*to) == Place::Same) {
            return Ok(());
        }
        let mut lost = None;
        let moved = run.moved(&mut |page, to| match moves.place(to) {
            Place::Same => Some(to),
            Place::Moved(now) => Some(now),
            Place::Gone => {
                if shows(visible, page) {
                    lost = Some(to);
                }
                None
            }
        });
        if let Some(to) = lost {
            let object = inner.backend.describe(&layout::map(id));
            return Err(Error::damaged(
                object,
                format!("prune: it needs record {to:?}, which was not moved"),
            ));
        }
        rewritten.insert(id);
        inner.put_again(&layout::map(id), &moved.encode(inner.config.id))
    })?;
    Ok(rewritten)
}

impl Inner {
    /// A writer that begins clears what it takes for left over; then once more.
    fn put_again(&self, name: &str, bytes: &[u8]) -> Result<()> {
        match self.backend.put(name, bytes) {
            Err(error) if error.is_not_found() => self.backend.put(name, bytes),
            other => other,
        }
    }

    /// Numbers of all maps, rising.
    pub fn map_ids(&self) -> Result<Vec<u64>> {
        let listed = self.backend.list(layout::MAPS)?;
        let mut ids: Vec<u64> = listed.iter().filter_map(|file| layout::parse_map(file)).collect();
        ids.sort_unstable();
        Ok(ids)
    }

    /// Checkpoints that have working sets.
    pub fn workset_ids(&self) -> Result<Vec<CheckpointId>> {
        let listed = self.backend.list(layout::WORKSETS)?;
        Ok(listed.iter().filter_map(|file| layout::parse_workset(file)).collect())
    }

    /// The length of a file; 0 where it has gone.
    pub fn len_of(&self, name: &str) -> u64 {
        self.backend.open(name).and_then(|file| file.len_bytes()).unwrap_or(0)
    }

    /// Puts a map without pages in place of one that no checkpoint needs, so that its number is not
    /// used again.
    pub fn empty_map(&self, id: u64) -> Result<()> {
        let header = MapHeader { id, parent: None, run: [0; 16], space_pages: 0 };
        self.put_again(
            &layout::map(id),
            &MapRun::new(header, std::iter::empty()).encode(self.config.id),
        )
    }

    /// True of what [`Self::empty_map`] put.
    pub fn is_empty_map(&self, id: u64) -> bool {
        self.read_map(id).is_ok_and(|run| run.header.space_pages == 0)
    }

    /// Removes packs that nothing needs, and closes those that have gone, now or before, and that
    /// no reader in this process holds.
    pub fn remove_packs(&self, numbers: &BTreeSet<u32>) -> Result<()> {
        let names: Vec<String> = numbers.iter().map(|number| layout::pack(*number)).collect();
        self.backend.remove_all(layout::PACKS, &names)?;
        let there: BTreeSet<u32> = packs::numbers(self)?.into_iter().collect();
        let mut packs = self.packs.lock().ignore_poison();
        packs.retain(|number, pack| there.contains(number) || Arc::strong_count(pack) > 1);
        Ok(())
    }
}
