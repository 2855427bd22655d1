//! Numbers for keys that translation meets repeatedly: a key keeps its slot for ever.
//!
//! Slots follow the order of translation, which differs between runs. They therefore never get into
//! results; only the keys do.

use std::collections::HashMap;

/// Keys with their slots.
pub struct Slots<K> {
    slots: HashMap<K, u32>,
}

/// The most slots: about 2 GiB of tables. Nothing else limits the amount of code in a guest.
pub const SLOTS_MAX: u32 = 1 << 24;

/// The guest has executed more than [`SLOTS_MAX`] different instructions.
#[derive(Debug, PartialEq, Eq)]
pub struct SlotsFull;

impl<K: Eq + std::hash::Hash + Copy> Slots<K> {
    /// Makes an empty set.
    pub fn new() -> Self {
        Self { slots: HashMap::new() }
    }

    /// The slot of `key`, and whether it is new.
    pub fn of(&mut self, key: K) -> Result<(u32, bool), SlotsFull> {
        if let Some(&slot) = self.slots.get(&key) {
            return Ok((slot, false));
        }
        let slot = self.slots.len() as u32;
        if slot >= SLOTS_MAX {
            return Err(SlotsFull);
        }
        self.slots.insert(key, slot);
        Ok((slot, true))
    }

    /// All keys with their slots, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (K, u32)> {
        self.slots.iter().map(|(&key, &slot)| (key, slot))
    }
}
