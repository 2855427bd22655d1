//! Readers beside a prune: who has loaded a checkpoint keeps what it needs.
//!
//! ```text
//!   packs listed ─▶ maps read ─▶ their packs opened, and all before these ─▶ all there: held, whatever is removed from now on
//!        ▲                           └─ one is gone: a prune has rewritten the maps
//!        └───────────────────────────┘
//! ```
//!
//! Which records those of the maps stand on is not known before they are read: some in any pack
//! before theirs. A file that is open outlives its name. A prune in the same process closes those
//! that it has removed and that no loaded checkpoint holds. Not here: the disk space of packs
//! removed by another process, which comes back when the last reader has closed its store.

use crate::disk_map::DiskMap;
use crate::identity::PageRef;
use crate::meta::Meta;
use crate::pack_file::PackFile;
use crate::page_map::PageMap;
use crate::prune::packs::numbers;
use crate::store::Inner;
use crate::{Error, Result};
use keyframe_store_backend::layout;
use keyframe_units::CheckpointId;
use std::collections::BTreeSet;
use std::sync::Arc;

/// More prunes than come to an end while a map is read.
const ATTEMPTS: u32 = 32;

/// The packs that a loaded checkpoint needs, open.
pub type Held = Vec<Arc<PackFile>>;

impl Inner {
    /// Reads the maps of a checkpoint and opens all packs that they name, and those before them. A
    /// pack that is not there, however often one looks, hurts only who reads its pages.
    pub fn hold_maps(&self, id: CheckpointId, meta: &Meta) -> Result<(PageMap, DiskMap, Held)> {
        for _ in 1..ATTEMPTS {
            let listed = numbers(self)?;
            match self.read_maps(meta) {
                Ok(maps) => {
                    let (held, is_all) = self.hold(&maps, &listed);
                    if is_all {
                        return Ok((maps.0, maps.1, held));
                    }
                    // Forgotten meanwhile: its maps may not have been rewritten then.
                    self.read_checkpoint(id)?;
                    if numbers(self)? == listed {
                        // No prune was at work: it is lost.
                        return Ok((maps.0, maps.1, held));
                    }
                }
                Err(error) => {
                    // Forgotten meanwhile, rather than damaged?
                    self.read_checkpoint(id)?;
                    return Err(error);
                }
            }
        }
        let maps = self.read_maps(meta)?;
        let held = self.hold(&maps, &numbers(self)?).0;
        Ok((maps.0, maps.1, held))
    }

    /// The packs that the maps name, and those of `listed` before them; and false where one is not
    /// there.
    fn hold(&self, (ram, disks): &(PageMap, DiskMap), listed: &[u32]) -> (Held, bool) {
        let mut packs = BTreeSet::new();
        let mut last = 0;
        let mut add = |to: PageRef| {
            if to.pack() != last {
                last = to.pack();
                packs.insert(last);
            }
        };
        ram.for_each_ref(&mut add);
        disks.records().for_each(add);
        let newest = packs.last().copied().unwrap_or(0);
        packs.extend(listed.iter().filter(|number| **number < newest));
        // One that cannot be opened for another reason is not gone.
        let (mut held, mut is_all) = (Vec::with_capacity(packs.len()), true);
        for number in packs {
            let opened = self.pack(number);
            is_all &= !matches!(opened, Err(Error::Damaged { .. })) || self.is_there(number);
            held.extend(opened);
        }
        (held, is_all)
    }

    fn is_there(&self, pack: u32) -> bool {
        !self.backend.open(&layout::pack(pack)).is_err_and(|error| error.is_not_found())
    }
}
