//! Numbers for things that translation meets again and again: the same key has the same slot for
//! ever.
//!
//! Slots follow the order of translation, which differs between runs; so they never get into
//! results, only what they stand for.

use std::collections::HashMap;

/// Keys, each with its slot.
pub struct Slots<K> {
    slots: HashMap<K, u32>,
}

/// Most slots: what a guest executes is finite, but nothing else bounds it. Some 2 GiB of tables.
pub const SLOTS_MAX: u32 = 1 << 24;

/// The guest has executed more different code than [`SLOTS_MAX`] instructions.
#[derive(Debug, PartialEq, Eq)]
pub struct Full;

impl<K: Eq + std::hash::Hash + Copy> Slots<K> {
    /// None yet.
    pub fn new() -> Self {
        Self { slots: HashMap::new() }
    }

    /// The slot of `key`, and whether it is new.
    pub fn of(&mut self, key: K) -> Result<(u32, bool), Full> {
        if let Some(&slot) = self.slots.get(&key) {
            return Ok((slot, false));
        }
        let slot = self.slots.len() as u32;
        if slot >= SLOTS_MAX {
            return Err(Full);
        }
        self.slots.insert(key, slot);
        Ok((slot, true))
    }

    /// All keys with their slots, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (K, u32)> {
        self.slots.iter().map(|(&key, &slot)| (key, slot))
    }
}
