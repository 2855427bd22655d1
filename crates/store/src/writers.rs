//! The writers of a store, as each sees the others: what each has open, and what others may use.
//!
//! ```text
//!   says what it has open ─▶ creates it ─▶ says that it has ended              (in its slot, WriterState)
//!   lists files ─▶ reads what all say ─▶ reads checkpoints                     (in this order: what a file
//!                                                                               belongs to was said before)
//! ```
//!
//! Invariant: a file that is listed, and that no writer says it has open afterwards, changes no more,
//! except by a prune. What a writer says need not survive power loss, because no writer does.

use crate::lock_holder::describe_holder;
use crate::open_store::OpenStore;
use crate::{Error, Result, Store};
use keyframe_bytes::hex::to_hex;
use keyframe_locks::IgnorePoison;
use keyframe_store_backend::{WriterEntry, WriterSlot};
use keyframe_store_format::moves::Generation;
use keyframe_store_format::page_ref::PageRef;
use keyframe_units::CheckpointId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Mutex;

/// The most packs that a writer lists in [`WriterState::unsealed`]; their numbers fit into a slot.
const UNSEALED_MAX: usize = 1000;

/// What a writer says about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WriterState {
    /// The pack that it appends to or is about to create; 0 for none.
    pub pack: u32,
    /// Its closed packs that it may still remove, because no sealed checkpoint needs them.
    pub unsealed: Vec<u32>,
    /// All packs from this number on may be such ones, too. `None` if `unsealed` lists all.
    pub unsealed_from: Option<u32>,
    /// Its records before this place, in the pack of this place, are durable and stay.
    pub shared: u64,
    /// The highest number of a checkpoint that it has taken or is about to take.
    pub number: u64,
    /// True while it seals checkpoint `number`.
    pub sealing: bool,
    /// The newest sealed checkpoint of its open run. The next one builds on it.
    pub newest: Option<CheckpointId>,
    /// The generation of the moves that it has followed, in hexadecimal.
    pub seen: Option<String>,
}

impl WriterState {
    /// Sets the closed packs that the writer may still remove, in rising order.
    pub fn set_unsealed(&mut self, packs: impl Iterator<Item = u32>) {
        let mut packs = packs;
        self.unsealed = packs.by_ref().take(UNSEALED_MAX).collect();
        self.unsealed_from = packs.next();
    }

    fn may_remove(&self, pack: u32) -> bool {
        self.unsealed.contains(&pack) || self.unsealed_from.is_some_and(|from| pack >= from)
    }
}

/// The place of this process among the writers of a store, until it is dropped.
#[derive(Debug)]
pub struct OwnSlot {
    slot: Box<dyn WriterSlot>,
    /// `None` before the first time; others still see what the writer before in this slot said.
    said: Mutex<Option<WriterState>>,
}

impl OwnSlot {
    /// Creates the place of a writer that has said nothing yet.
    pub fn new(slot: Box<dyn WriterSlot>) -> Self {
        Self { slot, said: Mutex::default() }
    }

    /// Returns the number of the slot; `None` if this is the only writer.
    pub fn number(&self) -> Option<u32> {
        self.slot.number()
    }

    /// Returns true if the place is lost: its lease has ended.
    pub fn is_lost(&self) -> bool {
        self.slot.is_lost()
    }

    /// Changes what the writer says. Error: others cannot be told.
    pub fn tell(&self, change: impl FnOnce(&mut WriterState)) -> Result<()> {
        let mut said = self.said.lock().ignore_poison();
        let mut next = said.clone().unwrap_or_default();
        change(&mut next);
        if said.as_ref() != Some(&next) {
            self.slot.tell(serde_json::to_string(&next).unwrap_or_default().as_bytes())?;
            *said = Some(next);
        }
        Ok(())
    }
}

/// A writer, or one that has ended.
#[derive(Debug)]
struct Other {
    slot: Option<u32>,
    lives: bool,
    holder: String,
    /// `None` if it cannot be known.
    state: Option<WriterState>,
}

impl From<WriterEntry> for Other {
    fn from(entry: WriterEntry) -> Self {
        let WriterEntry { slot, lives, holder, state } = entry;
        let decode = |bytes: Vec<u8>| match bytes.as_slice() {
            // It has just begun.
            [] => Some(WriterState::default()),
            bytes => serde_json::from_slice(bytes).ok(),
        };
        Self { slot, lives, holder, state: state.and_then(decode) }
    }
}

/// A writer that builds on a checkpoint.
#[derive(Debug)]
pub struct CheckpointUser {
    /// The process, for messages.
    pub description: String,
    /// True while it seals a checkpoint.
    pub is_sealing: bool,
}

/// What the writers of a store say at one instant.
#[derive(Debug)]
pub struct Writers(Vec<Other>);

impl Writers {
    fn living(&self) -> impl Iterator<Item = &Other> {
        self.0.iter().filter(|other| other.lives)
    }

    /// True if one of the living writers says so. One whose state is unknown counts as `unknown`.
    fn any(&self, unknown: bool, says: impl Fn(&WriterState) -> bool) -> bool {
        self.living().any(|other| other.state.as_ref().map_or(unknown, &says))
    }

    /// Returns true if a writer is at work.
    pub fn are_at_work(&self) -> bool {
        self.living().next().is_some()
    }

    /// Returns true if pack `number`, which is unfinished, may be that of a living writer.
    pub fn have_open(&self, number: u32) -> bool {
        self.any(true, |said| said.pack == number || said.may_remove(number))
    }

    /// Returns true if a living writer may still remove pack `number`.
    pub fn may_remove(&self, number: u32) -> bool {
        self.any(true, |said| said.may_remove(number))
    }

    /// Returns the offset up to which the records of pack `number` are durable and stay, as the
    /// writer says that has it open. Returns `None` if no living writer says so.
    pub fn shared_end(&self, number: u32) -> Option<u64> {
        let of = |other: &Other| other.state.as_ref().map(|said| PageRef(said.shared));
        let ends = self.living().filter_map(of).filter(|end| end.pack() == number);
        ends.map(PageRef::offset).max()
    }

    /// Returns true if a living writer may be sealing checkpoint `id`. `newest` is the newest sealed
    /// checkpoint of the store.
    pub fn may_seal(&self, id: u64, newest: u64) -> bool {
        let unknown = self.living().any(|other| other.state.is_none());
        self.any(false, |said| said.sealing && said.number == id) || unknown && id >= newest
    }

    /// Returns the living writer that builds on checkpoint `id`. `newest` is the newest sealed
    /// checkpoint of the store. Returns `None` if there is none.
    pub fn user_of(&self, id: CheckpointId, newest: CheckpointId) -> Option<CheckpointUser> {
        let uses = |other: &&Other| match &other.state {
            None => id == newest,
            Some(said) => said.newest == Some(id) || said.sealing && said.number == id.0,
        };
        self.living().find(uses).map(|other| CheckpointUser {
            description: describe_holder(&other.holder),
            is_sealing: other.state.as_ref().is_some_and(|said| said.sealing),
        })
    }

    /// Returns the highest number of a checkpoint that a writer has said.
    pub fn highest_number(&self) -> u64 {
        let said = |other: &Other| other.state.as_ref().map_or(0, |state| state.number);
        self.0.iter().map(said).max().unwrap_or(0)
    }

    /// Returns true if slot `number` has a living writer.
    pub fn lives(&self, number: u32) -> bool {
        self.living().any(|other| other.slot == Some(number))
    }

    /// Returns true if every living writer has followed the moves of `generation`. `is_seen` is true
    /// if the only writer has.
    pub fn have_seen(&self, generation: Generation, is_seen: bool) -> bool {
        let generation = to_hex(&generation);
        self.living().all(|other| match &other.state {
            Some(said) => said.seen.as_ref() == Some(&generation),
            None => other.slot.is_none() && is_seen,
        })
    }
}

/// The runs that go on while this is asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunsAtWork {
    /// The newest checkpoints of runs at work, and the numbers of those that are being sealed.
    pub built_upon: BTreeSet<CheckpointId>,
    /// The number of writers that do not say which run they write.
    pub unknown: usize,
}

impl Store {
    /// Returns the runs that go on. A checkpoint that one of them seals later is not listed here.
    /// Error: the writers cannot be looked at.
    pub fn runs_at_work(&self) -> Result<RunsAtWork> {
        let mut runs = RunsAtWork::default();
        for other in self.inner().other_writers()?.living() {
            match &other.state {
                // A checkpoint server tells no more than the texts.
                None => runs.unknown += other.holder.lines().count().max(1),
                Some(said) => {
                    let sealing = said.sealing.then_some(CheckpointId(said.number));
                    runs.built_upon.extend(said.newest.into_iter().chain(sealing));
                }
            }
        }
        Ok(runs)
    }
}

impl OpenStore {
    /// Returns what all writers of the store say, without the one that uses this store. Error: the
    /// backend fails.
    pub fn other_writers(&self) -> Result<Writers> {
        let own = self.own_slot.as_ref().map(|own| own.number());
        let mut entries = self.backend.writers()?;
        match own {
            // It is the only one.
            Some(None) => entries.clear(),
            Some(own) => entries.retain(|entry| entry.slot != own),
            None => {}
        }
        Ok(Writers(entries.into_iter().map(Other::from).collect()))
    }

    /// Says to other processes what this writer has open. Does nothing if this process is no
    /// writer. Error: others cannot be told.
    pub fn tell(&self, change: impl FnOnce(&mut WriterState)) -> Result<()> {
        self.own_slot.as_ref().map_or(Ok(()), |own| own.tell(change))
    }

    /// Returns true if other processes may write to the store at the same time.
    pub fn is_shared(&self) -> bool {
        self.own_slot.as_ref().is_some_and(|own| own.number().is_some())
    }

    /// Returns a number for the next checkpoint that no writer has taken, `next` or a higher one.
    /// Error: the writers cannot be looked at.
    pub fn free_number(&self, next: u64) -> Result<u64> {
        if !self.is_shared() {
            return Ok(next);
        }
        Ok(next.max(self.other_writers()?.highest_number() + 1))
    }

    /// Puts a new file. Returns false if another process has taken its name. Error: the backend
    /// fails.
    pub fn put_new(&self, name: &str, bytes: &[u8]) -> Result<bool> {
        match self.backend.put_new(name, bytes) {
            Err(error) if error.is_already_exists() => Ok(false),
            other => other.map(|()| true),
        }
    }
}

/// The most numbers of checkpoints that other writers may take while this one takes one.
pub const NUMBERS_TAKEN_MAX: u32 = 1 << 16;

/// Returns the error of a writer for which other writers leave no number.
pub fn no_number(store: &OpenStore) -> Error {
    let object = store.backend.describe(keyframe_store_backend::layout::MAPS);
    Error::damaged(object, format!("{NUMBERS_TAKEN_MAX} numbers were taken by other writers"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writers(states: &[Option<WriterState>]) -> Writers {
        let other = |state: &Option<WriterState>| Other {
            slot: Some(0),
            lives: true,
            holder: String::new(),
            state: state.clone(),
        };
        Writers(states.iter().map(other).collect())
    }

    #[test]
    fn a_writer_with_very_many_packs_in_progress_fits_into_its_slot_and_keeps_all_of_them() {
        let mut state = WriterState { seen: Some("0".repeat(32)), ..WriterState::default() };
        state.set_unsealed(16_000_000..16_002_000);
        let text = serde_json::to_string(&state).unwrap();
        assert!(text.len() < keyframe_store_backend::STATE_BYTES_MAX, "{}", text.len());
        let back = Other::from(WriterEntry {
            slot: Some(1),
            lives: true,
            holder: String::new(),
            state: Some(text.into_bytes()),
        });
        let writers = Writers(vec![back]);
        assert!((16_000_000..16_002_000).all(|pack| writers.may_remove(pack)));
        assert!(!writers.may_remove(15_999_999));
    }

    #[test]
    fn a_writer_that_cannot_be_understood_may_do_anything() {
        let all = writers(&[Some(WriterState::default()), None]);
        assert!(all.have_open(7) && all.may_remove(7));
        assert!(all.may_seal(9, 9) && !all.may_seal(8, 9));
        let (newest, older) = (CheckpointId(9), CheckpointId(8));
        assert!(all.user_of(newest, newest).is_some() && all.user_of(older, newest).is_none());
        assert!(!all.have_seen([1; 16], false) && !all.have_seen([1; 16], true));
        let known = writers(&[Some(WriterState::default())]);
        assert!(!known.have_open(7) && !known.may_remove(7) && !known.may_seal(9, 9));
    }
}
