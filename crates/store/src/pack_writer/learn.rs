//! Learning what packs of earlier writers and of prunes hold.

use crate::index::Index;
use crate::open_store::OpenStore;
use crate::pack_file::PackEnding;
use crate::pack_writer::writer::PackWriter;
use crate::tuning::Tuning;
use crate::{Error, Result};
use keyframe_store_backend::layout;
use keyframe_store_format::moves::Moves;
use std::sync::Arc;

impl PackWriter {
    /// Creates a writer with the index that an earlier writer saved. Reads the indexes of packs
    /// that are not in it, the newest first, as long as there is room. Reads unfinished packs whole
    /// and syncs them, because their records may be in the page cache only.
    ///
    /// Leaves out the victims of `moves`, if a prune is at work, and unfinished packs while a prune
    /// is at work or after a sync of them has failed. Error: a pack cannot be read or synced.
    pub fn new(inner: Arc<OpenStore>, tuning: Tuning, moves: Option<&Moves>) -> Result<Self> {
        let mut this = Self::empty(inner, tuning)?;
        this.index = Index::new(tuning.index_bytes, this.inner.index_folder());
        let is_going = |number: &u32| moves.is_some_and(|moves| moves.victims.contains(number));
        let mut numbers = this.inner.pack_numbers()?;
        numbers.retain(|number| !is_going(number));
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
                let entries = walked.entries;
                if !entries.is_empty() {
                    self.inner.rely_on_packs(|| self.inner.backend.sync(&layout::pack(number)))?;
                }
                entries
            }
        };
        self.learnt.insert(number);
        let seal = if is_closed { pack.seal()? } else { None };
        let usable = entries.iter().filter(|entry| !(plain_only && entry.kind().is_derived()));
        self.index.learn(number, seal, usable);
        Ok(())
    }

    /// Adds the records of packs that prunes have written meanwhile.
    fn learn_others(&mut self, moves: &Moves) -> Result<()> {
        let own = self.open.as_ref().map(|pack| pack.number);
        let is_new = |number: &u32| {
            !self.learnt.contains(number) && Some(*number) != own && !moves.victims.contains(number)
        };
        let new: Vec<u32> = self.inner.pack_numbers()?.into_iter().filter(is_new).collect();
        new.into_iter().try_for_each(|number| self.learn(number, true, true))
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
        self.learn_others(moves)?;
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
