//! Readers beside a prune: who has loaded a checkpoint keeps what it needs.
//!
//! ```text
//!   packs listed ─▶ maps read ─▶ their packs opened, and all before these ─▶ all there: held, whatever is removed from now on
//!        ▲                           └─ one is gone: a prune has rewritten the maps
//!        └───────────────────────────┘
//! ```
//!
//! Which records those of the maps stand on is not known before they are read: some in any pack before theirs. A file that is
//! open outlives its name. Not here: the disk space of removed packs, which comes back when the last reader has
//! closed its store.

use crate::disk_map::DiskMap;
use crate::identity::PageRef;
use crate::meta::Meta;
use crate::page_map::PageMap;
use crate::prune::packs::numbers;
use crate::store::Inner;
use crate::{Error, Result, names};
use keyframe_units::CheckpointId;
use std::collections::BTreeSet;

/// More prunes than come to an end while a map is read.
const ATTEMPTS: u32 = 4;

impl Inner {
    /// Reads the maps of a checkpoint and opens all packs that they name, and those before them. A pack that is not there, however often one looks,
    /// hurts only who reads its pages.
    pub fn hold_maps(&self, id: CheckpointId, meta: &Meta) -> Result<(PageMap, DiskMap)> {
        for _ in 1..ATTEMPTS {
            let listed = numbers(self)?;
            match self.read_maps(meta) {
                Ok(maps) if self.hold(&maps, &listed) => return Ok(maps),
                Ok(_) => {}
                Err(error) => {
                    // Forgotten meanwhile, rather than damaged?
                    self.read_checkpoint(id)?;
                    return Err(error);
                }
            }
        }
        self.read_maps(meta)
    }

    /// False where a pack that the maps name, or one of `listed` before it, is not there.
    fn hold(&self, (ram, disks): &(PageMap, DiskMap), listed: &[u32]) -> bool {
        let mut packs = BTreeSet::new();
        let mut last = 0;
        for number in ram.iter().map(|(_, to)| to).chain(disks.records()).map(PageRef::pack) {
            if number != last {
                packs.insert(number);
                last = number;
            }
        }
        let newest = packs.last().copied().unwrap_or(0);
        packs.extend(listed.iter().filter(|number| **number < newest));
        // One that cannot be opened for another reason is not gone.
        let is_gone =
            |number| matches!(self.pack(number), Err(Error::Damaged { .. })) && !self.is_there(number);
        !packs.into_iter().any(is_gone)
    }

    fn is_there(&self, pack: u32) -> bool {
        !self.backend.open(&names::pack(pack)).is_err_and(|error| error.is_not_found())
    }
}
