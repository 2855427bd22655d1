//! Learning what packs of other writers and of prunes hold.
//!
//! ```text
//!   closed, and its writer cannot remove it ──▶ its index
//!   open, its writer lives ───────────────────▶ its records up to where the writer says that they are durable and stay
//!   unfinished, its writer has ended ─────────▶ read whole and synced by a writer that starts
//!   unfinished, of a prune at work ───────────▶ nothing
//! ```
//!
//! Invariant: this writer refers to no record that another process may still lose, cut or remove,
//! except a prune, which asks first.

use crate::open_store::OpenStore;
use crate::pack_file::PackEnding;
use crate::pack_writer::writer::PackWriter;
use crate::tuning::Tuning;
use crate::{Error, Result};
use keyframe_deduplication_index::Index;
use keyframe_store_backend::layout;
use keyframe_store_format::moves::Moves;
use keyframe_store_format::pack::{PackEntry, PackSeal};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a writer looks at what others have sealed.
const FOLLOW_EVERY: Duration = if cfg!(test) { Duration::ZERO } else { Duration::from_secs(1) };
/// The most records of open packs that one look reads. Others are learnt when their pack is closed.
const OPEN_RECORDS_MAX: usize = 1 << 14;
/// The same when a writer starts.
const OPEN_RECORDS_AT_START: usize = 1 << 20;
/// A look reads no further index of a closed pack after so many records.
const CLOSED_RECORDS_MAX: usize = 1 << 19;

/// Records of a pack of another writer.
struct PackPart {
    number: u32,
    entries: Vec<PackEntry>,
    /// The offset up to which an open pack is known then; `None` for a closed pack.
    end: Option<u64>,
    seal: Option<PackSeal>,
}

impl PackWriter {
    /// Creates a writer with the index that an earlier writer saved. Reads the indexes of packs
    /// that are not in it, the newest first, as long as there is room. Reads unfinished packs of
    /// writers that have ended whole and syncs them, because their records may be in the page cache
    /// only.
    ///
    /// Leaves out the victims of `moves`, if a prune is at work, and unfinished packs while a prune
    /// is at work or after a sync of them has failed. Error: a pack cannot be read or synced.
    pub fn new(inner: Arc<OpenStore>, tuning: Tuning, moves: Option<&Moves>) -> Result<Self> {
        let mut this = Self::empty(inner, tuning)?;
        this.index = Index::new(tuning.index_bytes, this.inner.index_folder());
        let is_going = |number: &u32| moves.is_some_and(|moves| moves.victims.contains(number));
        let mut numbers = this.inner.pack_numbers()?;
        // After the list: a writer says which pack is its own before it creates the pack.
        let writers = this.inner.other_writers()?;
        numbers.retain(|number| !is_going(number) && !writers.have_open(*number));
        // A prune removes records that it could not make durable.
        let is_pruned = this.inner.backend.is_pruning()?;
        let doubted = this.inner.doubted_packs()?;
        let inner = &this.inner;
        this.index.load(moves.is_some(), &mut |number| {
            numbers.binary_search(&number).ok()?;
            // The loop below looks at packs that cannot be read.
            inner.open_pack(number).and_then(|pack| pack.seal()).ok()?
        });
        for number in numbers.into_iter().rev() {
            if this.index.covers(number) || this.index.is_at_end() {
                this.learnt.insert(number);
            } else {
                this.learn(number, is_pruned || number <= doubted, moves.is_some())?;
            }
        }
        if this.inner.is_shared() {
            // A writer that does not sync each checkpoint does not sync the entries of its packs.
            this.inner.backend.remove_all(layout::PACKS, &[])?;
            this.follow_now(moves, OPEN_RECORDS_AT_START)?;
        }
        Ok(this)
    }

    /// Adds the records of a pack to the index. With `closed_only`, adds none of an unfinished
    /// pack. With `plain_only`, adds no derived ones.
    pub(super) fn learn(&mut self, number: u32, closed_only: bool, plain_only: bool) -> Result<()> {
        let pack = match self.inner.open_pack(number) {
            Ok(pack) => pack,
            // No record of it is used. `check` reports the damage.
            Err(Error::Damaged { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        let len_bytes = pack.file.len_bytes()?;
        let ending = pack.ending(len_bytes)?;
        let is_closed = matches!(ending, PackEnding::Closed { .. });
        let entries = match ending {
            PackEnding::Closed { entries, .. } => entries,
            PackEnding::Unfinished | PackEnding::Damaged(_) if closed_only => Vec::new(),
            PackEnding::Unfinished | PackEnding::Damaged(_) => {
                let walked = pack.walk_records(&self.inner, pack.first, len_bytes)?;
                let mut entries = walked.entries;
                if !entries.is_empty() {
                    self.inner.rely_on_packs(|| self.inner.backend.sync(&layout::pack(number)))?;
                }
                // After the sync: the failed sync of another writer, which this one does not tell,
                // was marked before.
                if self.inner.has_tried_mark()? {
                    entries.clear();
                }
                entries
            }
        };
        if is_closed || !closed_only {
            self.learnt.insert(number);
        }
        let seal = if is_closed { pack.seal()? } else { None };
        let usable = entries.iter().filter(|entry| !(plain_only && entry.kind().is_derived()));
        self.index.learn(number, seal, usable);
        Ok(())
    }

    /// Adds the records that other writers have sealed since the last call, and those of packs that
    /// prunes have written. Does so at most every second, and reads a bounded number of records.
    /// `moves` are those that this writer followed last. Error: a new pack cannot be read.
    pub fn follow_writers(&mut self, moves: Option<&Moves>) -> Result<()> {
        let is_due = self.followed_at.is_none_or(|at| at.elapsed() >= FOLLOW_EVERY);
        if !self.inner.is_shared() || !is_due {
            return Ok(());
        }
        // The records that a derived one refers to may be about to go.
        let moves = if self.inner.has_moves()? { moves } else { None };
        self.follow_now(moves, OPEN_RECORDS_MAX)
    }

    /// Does it now, and reads at most `records_max` records of open packs. `moves` are those of a
    /// prune at work.
    fn follow_now(&mut self, moves: Option<&Moves>, records_max: usize) -> Result<()> {
        self.followed_at = Some(Instant::now());
        let own = self.open.as_ref().map(|pack| pack.number);
        let is_new = |number: &u32| {
            !self.learnt.contains(number)
                && Some(*number) != own
                && !self.given_up.contains(number)
                && !moves.is_some_and(|moves| moves.victims.contains(number))
        };
        let mut new = self.inner.pack_numbers()?;
        new.retain(is_new);
        if new.is_empty() {
            return Ok(());
        }
        // After the list: a writer says which packs it may still remove before it creates them.
        let writers = self.inner.other_writers()?;
        let (mut found, mut open_records, mut closed_records) = (Vec::new(), records_max, 0);
        for number in new.into_iter().rev() {
            if writers.may_remove(number) {
                continue;
            }
            if let Some(end) = writers.shared_end(number) {
                if let Some(part) = self.shared_records(number, end, &mut open_records)? {
                    found.push(part);
                }
            } else if !writers.have_open(number) && closed_records < CLOSED_RECORDS_MAX {
                let closed = self.closed_records(number)?;
                closed_records += closed.as_ref().map_or(0, |part| part.entries.len());
                found.extend(closed);
            }
        }
        if found.iter().any(|part| !self.followed.contains_key(&part.number)) {
            // A writer that does not sync each checkpoint does not sync the entries of its packs.
            self.inner.backend.remove_all(layout::PACKS, &[])?;
        }
        for part in found {
            self.add_part(part, moves.is_some());
        }
        Ok(())
    }

    /// The records of an open pack up to `end` that are not known yet, at most `records_left`.
    fn shared_records(
        &self,
        number: u32,
        end: u64,
        records_left: &mut usize,
    ) -> Result<Option<PackPart>> {
        let pack = match self.inner.open_pack(number) {
            Ok(pack) => pack,
            Err(Error::Damaged { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let from = self.followed.get(&number).copied().unwrap_or(pack.first);
        let (entries, end) = pack.entries_between(from, end, *records_left)?;
        *records_left -= entries.len();
        Ok((!entries.is_empty()).then_some(PackPart {
            number,
            entries,
            end: Some(end),
            seal: None,
        }))
    }

    /// The records of a closed pack; `None` if it is not closed.
    fn closed_records(&self, number: u32) -> Result<Option<PackPart>> {
        let pack = match self.inner.open_pack(number) {
            Ok(pack) => pack,
            // No record of it is used. `check` reports the damage.
            Err(Error::Damaged { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        // Most packs that are not closed are told by their footer.
        let Some(seal) = pack.seal()? else { return Ok(None) };
        Ok(match pack.ending(pack.file.len_bytes()?)? {
            PackEnding::Closed { entries, .. } => {
                Some(PackPart { number, entries, end: None, seal: Some(seal) })
            }
            PackEnding::Unfinished | PackEnding::Damaged(_) => None,
        })
    }

    /// Adds records to the index. If it has no room, and this writer's open pack must keep its
    /// entries, leaves them out: this writer then stores their content again.
    fn add_part(&mut self, part: PackPart, plain_only: bool) {
        let PackPart { number, entries, end, seal } = part;
        if self.open.is_none() || self.index.has_room_for(entries.len()) {
            let usable = entries.iter().filter(|entry| !(plain_only && entry.kind().is_derived()));
            self.index.learn(number, seal, usable);
        }
        if let Some(end) = end {
            self.followed.insert(number, end);
        } else {
            self.learnt.insert(number);
            self.followed.remove(&number);
        }
    }

    /// Follows the moves of a prune: forgets the packs that go, and learns the new places of their
    /// records. Of the derived records, keeps only those that have moved. Error: a new pack cannot
    /// be read.
    pub fn follow(&mut self, moves: &Moves) -> Result<()> {
        // A derived record lies after the records that it refers to. So the following records must
        // lie after those that have moved.
        match self.close() {
            // The pack ends without an index. Its records are durable.
            Err(error) if error.is_disk_full() && self.open.is_none() => {}
            other => other?,
        }
        self.follow_now(Some(moves), OPEN_RECORDS_MAX)?;
        // The packs that go exist until this writer has confirmed. So no number of theirs, and of
        // no other pack that the prune has written, is used again.
        self.next_pack = self.next_pack.max(self.inner.newest_pack()? + 1);
        // The records that a derived one refers to may go.
        self.index.follow(moves);
        self.unsealed.retain(|pack| !moves.victims.contains(pack));
        self.forget_relations();
        // The finder learns the sectors of known records again as they occur.
        self.learnt_from = self.next_pack;
        Ok(())
    }
}
