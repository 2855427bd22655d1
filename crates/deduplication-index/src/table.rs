//! The newest entries of the index: a table in memory that is always sorted.
//!
//! ```text
//!   home of a hash = hash * homes / 2^64:  a larger hash has no smaller home
//!
//!   slots  | a . b c d . . e f . g | . . . |      a < b < ... < g; an entry lies in its home, or as close after it as the order allows
//!          |<------- homes ------->|<tail >|
//! ```
//!
//! Hashes are keyed, so a guest cannot choose them, and entries spread evenly. Because the table is
//! sorted, it can be written to a file in order, and can be copied from front to back to grow.
//!
//! Invariants: no slot between the home of an entry and the entry is empty. At most four of five
//! slots are used. The slots take at most the budget; the old ones are added while the table grows.

use keyframe_store_format::page_hash::PageHash;

/// The size of an entry's slot in the table, in bytes.
pub const SLOT_BYTES: usize = size_of::<Slot>();
const HOMES_FIRST: usize = 1 << 10;
/// The slots after the last home, for entries that do not fit into their home.
const TAIL: usize = 1 << 10;

/// An entry of the table: a hash and its value. The slot is empty if the value is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    pub hash: PageHash,
    pub value: u64,
}

const EMPTY: Slot = Slot { hash: PageHash([0; 2]), value: 0 };

/// A hash table in memory, from page hashes to values.
pub struct Table {
    slots: Vec<Slot>,
    homes: usize,
    homes_max: usize,
    len: usize,
}

impl Table {
    /// Creates an empty table of at most `bytes_max` bytes, and half as much more while it grows.
    pub fn new(bytes_max: usize) -> Self {
        let homes_max = (bytes_max / SLOT_BYTES).saturating_sub(TAIL).max(64);
        Self { slots: Vec::new(), homes: 0, homes_max, len: 0 }
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the largest number of entries that it can hold.
    pub fn len_max(&self) -> usize {
        room(self.homes_max)
    }

    /// Returns the size of its memory in bytes.
    pub fn bytes(&self) -> usize {
        self.slots.capacity() * SLOT_BYTES
    }

    /// Returns the value of `hash`. Returns `None` if the table does not have it.
    pub fn get(&self, hash: PageHash) -> Option<u64> {
        self.slots.get(self.find(hash)?).map(|slot| slot.value)
    }

    /// Sets the value of `hash`, which must not be 0. Returns false, without a change, if there is
    /// no room.
    pub fn insert(&mut self, hash: PageHash, value: u64) -> bool {
        debug_assert!(value != 0);
        if let Some(slot) = self.find(hash).and_then(|at| self.slots.get_mut(at)) {
            slot.value = value;
            return true;
        }
        if self.len >= room(self.homes) {
            if self.homes >= self.homes_max {
                return false;
            }
            self.grow();
        }
        self.put(Slot { hash, value })
    }

    /// Removes `hash`. Returns true if it was in the table.
    pub fn remove(&mut self, hash: PageHash) -> bool {
        let Some(mut hole) = self.find(hash) else { return false };
        // The following entries that are not in their home move up.
        while let Some(next) = self.slots.get(hole + 1).copied().filter(|next| next.value != 0) {
            if home(next.hash, self.homes) > hole {
                break;
            }
            self.set(hole, next);
            hole += 1;
        }
        self.set(hole, EMPTY);
        self.len -= 1;
        true
    }

    /// Calls `keep` for every entry in the order of the hashes, and removes those for which it
    /// returns false. It may change the value.
    pub fn retain(&mut self, keep: &mut dyn FnMut(PageHash, &mut u64) -> bool) {
        let (mut next, mut kept) = (0, 0);
        for at in 0..self.slots.len() {
            let Some(mut slot) = self.slots.get(at).copied().filter(|slot| slot.value != 0) else {
                continue;
            };
            self.set(at, EMPTY);
            if keep(slot.hash, &mut slot.value) {
                // No entry moves back, because none before it has.
                let to = home(slot.hash, self.homes).max(next);
                self.set(to, slot);
                (next, kept) = (to + 1, kept + 1);
            }
        }
        self.len = kept;
    }

    /// Returns all entries, in the order of the hashes.
    pub fn iter(&self) -> impl Iterator<Item = Slot> + '_ {
        self.slots.iter().copied().filter(|slot| slot.value != 0)
    }

    /// Removes all entries, and frees the memory.
    pub fn clear(&mut self) {
        (self.slots, self.homes, self.len) = (Vec::new(), 0, 0);
    }

    fn find(&self, hash: PageHash) -> Option<usize> {
        let from = home(hash, self.homes);
        for (distance, slot) in self.slots.get(from..)?.iter().enumerate() {
            if slot.value == 0 || slot.hash > hash {
                return None;
            }
            if slot.hash == hash {
                return Some(from + distance);
            }
        }
        None
    }

    /// Adds a new entry; false if the tail is full.
    fn put(&mut self, new: Slot) -> bool {
        let from = home(new.hash, self.homes);
        let Some(slots) = self.slots.get_mut(from..) else { return false };
        let Some(end) = slots.iter().position(|slot| slot.value == 0) else { return false };
        let cluster = slots.get_mut(..=end).unwrap_or_default();
        let at =
            cluster.iter().position(|slot| slot.value == 0 || slot.hash > new.hash).unwrap_or(end);
        cluster.copy_within(at..end, at + 1);
        self.set(from + at, new);
        self.len += 1;
        true
    }

    fn grow(&mut self) {
        let homes = (self.homes * 2)
            .clamp(HOMES_FIRST, self.homes_max.max(HOMES_FIRST))
            .min(self.homes_max);
        let old = std::mem::replace(&mut self.slots, vec![EMPTY; homes + TAIL]);
        (self.homes, self.len) = (homes, 0);
        let mut next = 0;
        for slot in old.into_iter().filter(|slot| slot.value != 0) {
            let to = home(slot.hash, homes).max(next);
            // An entry after the tail is very unlikely, and the index may forget.
            if to < self.slots.len() {
                self.set(to, slot);
                (next, self.len) = (to + 1, self.len + 1);
            }
        }
    }

    fn set(&mut self, at: usize, to: Slot) {
        if let Some(slot) = self.slots.get_mut(at) {
            *slot = to;
        }
    }
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Table({} of {})", self.len, self.len_max())
    }
}

/// The most entries of a table with this number of homes.
fn room(homes: usize) -> usize {
    homes / 5 * 4
}

fn home(hash: PageHash, homes: usize) -> usize {
    ((u128::from(hash.0[0]) * homes as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[derive(Clone, Debug)]
    enum Step {
        Insert(u64, u64),
        Remove(u64),
        KeepOdd,
        Clear,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            200 => (0u64..3000, 1u64..9).prop_map(|(hash, value)| Step::Insert(hash, value)),
            60 => (0u64..3000).prop_map(Step::Remove),
            1 => Just(Step::KeepOdd),
            1 => Just(Step::Clear),
        ]
    }

    /// Crowded at both ends, as no real hashes are.
    fn hash(number: u64) -> PageHash {
        match number % 4 {
            0 => PageHash([number, 7]),
            1 => PageHash([u64::MAX - number / 200, number]),
            _ => PageHash([number.wrapping_mul(0x9E37_79B9_7F4A_7C15), number]),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
        #[test]
        fn it_answers_as_a_map_does(steps in prop::collection::vec(step(), 0..4000), homes in 100usize..4000) {
            let mut table = Table::new((homes + TAIL) * SLOT_BYTES);
            let mut model = BTreeMap::new();
            for step in steps {
                match step {
                    Step::Insert(number, value) => {
                        let had = model.contains_key(&hash(number));
                        if table.insert(hash(number), value) {
                            model.insert(hash(number), value);
                        } else {
                            prop_assert!(!had && (model.len() >= table.len_max() || table.len() >= TAIL));
                        }
                    }
                    Step::Remove(number) => {
                        prop_assert_eq!(table.remove(hash(number)), model.remove(&hash(number)).is_some());
                    }
                    Step::KeepOdd => {
                        let mut odd = |_, value: &mut u64| { *value += 1; *value % 2 == 1 };
                        table.retain(&mut odd);
                        model.retain(|hash, value| odd(*hash, value));
                    }
                    Step::Clear => {
                        table.clear();
                        model.clear();
                    }
                }
                prop_assert_eq!(table.len(), model.len());
            }
            prop_assert!(table.iter().map(|slot| (slot.hash, slot.value)).eq(model.clone()));
            for number in 0..3000 {
                prop_assert_eq!(table.get(hash(number)), model.get(&hash(number)).copied());
            }
            prop_assert!(table.bytes() <= (homes + TAIL) * SLOT_BYTES);
        }
    }
}
