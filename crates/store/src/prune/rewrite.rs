//! Copying records of packs that go into new ones, and rewriting the maps.
//!
//! Invariants: a record is compared with its hash before its copy replaces it. Plain records move
//! before the derived ones that refer to them, and new packs have higher numbers than all others.
//! So a derived record lies after its references. A map is replaced as a whole, and loses no record
//! that a checkpoint shows.

use super::live::{Live, shows};
use crate::open_store::OpenStore;
use crate::pack_file::PageContent;
use crate::pack_shape::{PackShape, places};
use crate::pack_writer::PackWriter;
use crate::tuning::Tuning;
use crate::{Error, Result};
use keyframe_store_backend::layout;
use keyframe_store_format::derived::Derivation;
use keyframe_store_format::dictionary::{DenseCompressor, SAMPLES_MAX};
use keyframe_store_format::moves::{MovedPlace, Moves};
use keyframe_store_format::pack::PackEntry;
use keyframe_store_format::page_hash::PageHash;
use keyframe_store_format::page_ref::PageRef;
use keyframe_store_format::record::RecordKind;
use keyframe_units::{Page, ZERO_PAGE};
use std::collections::BTreeSet;
use std::sync::Arc;

/// A dictionary is at most this fraction of a full pack.
const DICTIONARY_PART: u64 = 32;

/// Copies the live records of a prune's victims into new packs.
pub struct Copier {
    inner: Arc<OpenStore>,
    tuning: Tuning,
    packs: Option<PackWriter>,
    reserved: BTreeSet<u32>,
    /// The number of bytes of the records that were copied so far.
    pub copied_bytes: u64,
}

impl Copier {
    /// Creates a copier that has written no pack yet.
    pub fn new(inner: Arc<OpenStore>, tuning: Tuning) -> Self {
        Self { inner, tuning, packs: None, reserved: BTreeSet::new(), copied_bytes: 0 }
    }

    fn packs(&mut self) -> Result<&mut PackWriter> {
        let packs = match self.packs.take() {
            Some(packs) => packs,
            None => PackWriter::empty(self.inner.clone(), self.tuning)?,
        };
        Ok(self.packs.insert(packs))
    }

    /// Trains a dictionary with pages of the packs `victims`, and returns a compressor with it.
    /// Leaves out unreadable pages, which the copying reports later. Error: the backend fails.
    pub fn train(&self, victims: &BTreeSet<u32>) -> Result<DenseCompressor> {
        let mut places = Vec::new();
        for victim in victims {
            let entries =
                PackShape::of(&self.inner, *victim)?.map_or_else(Vec::new, |shape| shape.entries);
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
        // Each new pack holds the dictionary.
        let bytes_max =
            usize::try_from(self.tuning.pack_bytes_max / DICTIONARY_PART).unwrap_or(usize::MAX);
        Ok(DenseCompressor::train(&samples, bytes_max))
    }

    /// Compresses the following copies with `dense`, or as a run does if it is `None`. Error: the
    /// pack at work cannot be closed.
    pub fn set_dense(&mut self, dense: Option<DenseCompressor>) -> Result<()> {
        self.packs()?.set_dense(dense)
    }

    /// Copies the plain records of pack `victim` at the offsets `live`, and adds their new places
    /// to `moves`. The inner error is damage, because of which the pack must stay. Error: the
    /// backend fails.
    pub fn copy_plain(
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
        let Some(shape) = PackShape::of(&self.inner, victim)? else {
            return Ok(Err(format!("{}: cannot be read any more", layout::pack(victim))));
        };
        let mut wanted = Vec::with_capacity(missing.len());
        for place in missing {
            match shape.entries.binary_search_by_key(&place.offset(), PackEntry::offset) {
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
            if let (PageContent::Plain(page, _), Some(entry)) = (content, shape.entries.get(at)) {
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

    /// Copies the derived records at `wanted`, which are in rising order, and gives their
    /// references the new places of `moves`. If a record is damaged, its pack and the packs that it
    /// refers to stay, and `damaged` gets the reason. Error: the backend fails.
    pub fn copy_derived(
        &mut self,
        wanted: &[PageRef],
        moves: &mut Moves,
        damaged: &mut Vec<String>,
    ) -> Result<()> {
        for place in wanted {
            if moves.to.contains_key(place) {
                continue;
            }
            match self.copy_one_derived(*place, moves) {
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

    fn copy_one_derived(&mut self, place: PageRef, moves: &Moves) -> Result<PageRef> {
        let mut derivation = self.derivation(place)?;
        derivation.repoint(&mut |record| {
            if let MovedPlace::Moved(to) = moves.place(*record) {
                *record = to;
            }
        });
        let mut page = ZERO_PAGE;
        // Reading compares the page with its hash.
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
                if let PageContent::Derived(record) = content {
                    let derivation = record.derivation(&mut scratch);
                    found = Some(derivation.map_err(|problem| Error::damaged(object(), problem))?);
                }
                Ok::<_, Error>(())
            },
        )?;
        found.ok_or_else(|| Error::damaged(object(), "it refers to no other record"))
    }

    /// Writes a page with its `hash`, and returns the place of its record. Error: the backend
    /// fails.
    pub fn keep(&mut self, page: &Page, hash: PageHash, kind: RecordKind) -> Result<PageRef> {
        Ok(self.packs()?.keep(page, hash, kind)?.0)
    }

    /// Makes all following copies lie after all existing records. Error: the backend fails.
    pub fn raise(&mut self) -> Result<()> {
        self.packs.as_mut().map_or(Ok(()), PackWriter::raise)
    }

    /// Makes all copies durable. Error: the backend fails.
    pub fn close(&mut self) -> Result<()> {
        self.packs.as_mut().map_or(Ok(()), PackWriter::close)
    }

    /// Creates a pack without records, so that no lower number is used again. Error: the backend
    /// fails.
    pub fn reserve(&mut self) -> Result<()> {
        let number = self.packs()?.reserve()?;
        self.reserved.insert(number);
        Ok(())
    }

    /// Removes the packs that [`Self::reserve`] created, except the newest pack of the store. If a
    /// writer is at work, leaves them to the next prune, because the writer's next pack could get
    /// one of their numbers. Error: the backend fails.
    pub fn tidy(&mut self) -> Result<()> {
        if self.inner.other_writers()?.are_at_work() {
            return Ok(());
        }
        let newest = self.inner.pack_numbers()?.last().copied();
        self.reserved.retain(|number| Some(*number) != newest);
        self.inner.remove_packs(&std::mem::take(&mut self.reserved))
    }
}

/// Rewrites the maps for which `is_wanted` returns true and that refer to records which `moves`
/// moves or removes. Returns the numbers of these maps. Errors: a map is damaged, or needs a record
/// that was not moved; the backend fails.
pub fn maps(
    inner: &OpenStore,
    live: &Live,
    moves: &Moves,
    is_wanted: &dyn Fn(u64) -> bool,
) -> Result<BTreeSet<u64>> {
    let mut rewritten = BTreeSet::new();
    live.each_map(inner, is_wanted, &mut |id, _, run, visible| {
        if run.refs().iter().all(|to| moves.place(*to) == MovedPlace::Same) {
            return Ok(());
        }
        let mut lost = None;
        let moved = run.moved(&mut |page, to| match moves.place(to) {
            MovedPlace::Same => Some(to),
            MovedPlace::Moved(now) => Some(now),
            MovedPlace::Gone => {
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
        inner.replace(&layout::map(id), &moved.encode(inner.config.id))
    })?;
    Ok(rewritten)
}
