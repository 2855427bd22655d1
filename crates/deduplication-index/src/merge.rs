//! Merging several spills into one.
//!
//! Invariant: the new spill has only entries that the index would return: none of packs that have
//! gone, and no derived record if these are not used. So no entry comes back.

use crate::folder::Folder;
use crate::spill::Spill;
use crate::table::Slot;
use crate::value::{UNPROVEN, is_derived, place};
use keyframe_store_format::pack::PackSeal;
use keyframe_store_format::page_hash::PageHash;
use rustc_hash::FxHashSet;
use std::io;
use std::path::PathBuf;

/// A spill that is read for a merge, with the rule which of its entries are still used.
#[derive(Debug)]
pub struct Source {
    pub spill: Spill,
    /// The numbers of its packs that exist and have not changed.
    pub live: FxHashSet<u32>,
    /// True if its derived records are not used.
    pub plain_only: bool,
}

impl Source {
    /// Returns the value of a hash, if its pack is still used. A derived record is marked as
    /// unproven, because its references may be gone. Error: the spill cannot be read.
    pub fn get(&self, hash: PageHash) -> io::Result<Option<u64>> {
        let value = self.spill.get(hash)?.filter(|value| self.is_used(*value));
        Ok(value.map(|value| if is_derived(value) { value | UNPROVEN } else { value }))
    }

    fn is_used(&self, value: u64) -> bool {
        self.live.contains(&place(value).pack()) && !(self.plain_only && is_derived(value))
    }
}

/// The reason why a merge of spills failed.
#[derive(Debug)]
pub enum Failed {
    /// The source with this index cannot be read.
    Source(usize),
    /// The new spill cannot be written.
    Target,
}

/// Writes the entries of `sources` into a new spill in `folder`, in the order of the hashes. For
/// each hash it prefers a plain record to a derived one. Returns the new spill and its path.
/// Errors: a source cannot be read, or the new spill cannot be written; [`Failed`] tells which.
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
        if source.is_used(slot.value) {
            writer.push(slot).map_err(target)?;
        }
    }
    let mut packs: Vec<(u32, PackSeal)> = Vec::new();
    for source in sources {
        packs.extend(source.spill.packs().iter().filter(|(pack, _)| source.live.contains(pack)));
    }
    packs.sort_unstable();
    packs.dedup();
    folder.finish(writer, packs).map_err(target)
}
