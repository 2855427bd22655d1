//! Several spills made one.
//!
//! Invariant: of what the sources hold, only what would be given out gets into the new one: nothing
//! of packs that have gone, and no derived record where those are not relied on. So nothing that is
//! hidden comes back.

use super::spill::{Seal, Spill};
use super::table::Slot;
use super::{Folder, UNPROVEN, is_derived, place};
use crate::identity::PageHash;
use rustc_hash::FxHashSet;
use std::io;
use std::path::PathBuf;

/// A spill, and what of it is believed.
#[derive(Debug)]
pub struct Source {
    pub spill: Spill,
    /// Its packs that are there, as they were.
    pub live: FxHashSet<u32>,
    /// Its derived records are not relied on.
    pub plain_only: bool,
}

impl Source {
    /// What a hash stands for; a derived record is unproven.
    pub fn get(&self, hash: PageHash) -> io::Result<Option<u64>> {
        let value = self.spill.get(hash)?.filter(|value| self.is_believed(*value));
        Ok(value.map(|value| if is_derived(value) { value | UNPROVEN } else { value }))
    }

    fn is_believed(&self, value: u64) -> bool {
        self.live.contains(&place(value).pack()) && !(self.plain_only && is_derived(value))
    }
}

/// Why there is no merged one.
#[derive(Debug)]
pub enum Failed {
    /// This source cannot be read.
    Source(usize),
    /// It cannot be written.
    Target,
}

/// Writes what `sources` hold into a new one. The hashes come in order; of one hash a plain record
/// is taken rather than a derived one.
pub fn merge(sources: &[&Source], folder: &Folder) -> Result<(PathBuf, Spill), Failed> {
    let target = |_| Failed::Target;
    let entries = sources.iter().map(|source| source.spill.entries()).sum();
    let mut writer = folder.begin(entries).map_err(target)?;
    let mut readers = Vec::new();
    for (at, source) in sources.iter().enumerate() {
        readers.push((source, source.spill.read().map_err(|_| Failed::Source(at))?));
    }
    loop {
        let mut least: Option<(Slot, usize)> = None;
        for (at, (_, reader)) in readers.iter_mut().enumerate() {
            let Some(slot) = reader.peek().map_err(|_| Failed::Source(at))? else { continue };
            let key = |slot: &Slot| (slot.hash, is_derived(slot.value), slot.value);
            if least.is_none_or(|(other, _)| key(&slot) < key(&other)) {
                least = Some((slot, at));
            }
        }
        let Some((slot, at)) = least else { break };
        let Some((source, reader)) = readers.get_mut(at) else { break };
        reader.pop();
        if source.is_believed(slot.value) {
            writer.push(slot).map_err(target)?;
        }
    }
    let mut packs: Vec<(u32, Seal)> = Vec::new();
    for source in sources {
        packs.extend(source.spill.packs().iter().filter(|(pack, _)| source.live.contains(pack)));
    }
    packs.sort_unstable();
    packs.dedup();
    folder.finish(writer, packs).map_err(target)
}
