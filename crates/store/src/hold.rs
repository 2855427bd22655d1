//! Readers while a prune is at work: a process that has loaded a checkpoint keeps the packs that it
//! needs.
//!
//! ```text
//!   packs listed ─▶ maps read ─▶ their packs opened, and all before these ─▶ all exist: held, even if a prune removes them
//!        ▲                           └─ one is missing: a prune has rewritten the maps
//!        └───────────────────────────┘
//! ```
//!
//! The references of derived records are not known before these are read. They may lie in any
//! earlier pack. An open file outlives its name. A prune in the same process closes the packs that
//! it has removed and that no loaded checkpoint holds.
//!
//! Invariant: the checkpoint still exists after its maps were read. A prune drops records of
//! forgotten checkpoints from the maps that others need, so the maps of a forgotten one may give
//! older pages.
//!
//! Not here: the disk space of packs that another process
//! removed. It becomes free when the last reader has closed its store.

use crate::open_store::OpenStore;
use crate::pack_file::PackFile;
use crate::{Error, Result};
use keyframe_store_backend::layout;
use keyframe_store_format::disk_map::DiskMap;
use keyframe_store_format::meta::Meta;
use keyframe_store_format::page_map::PageMap;
use keyframe_store_format::page_ref::PageRef;
use keyframe_units::CheckpointId;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The most attempts, if prunes end meanwhile.
const ATTEMPTS: u32 = 32;

/// The open packs that a loaded checkpoint needs.
pub type Held = Vec<Arc<PackFile>>;

impl OpenStore {
    /// Reads the maps of a checkpoint. Opens all packs that they refer to, and all earlier ones. A
    /// pack that stays missing is no error here: reading its pages is. Error: the checkpoint does
    /// not exist any more, or a map cannot be read.
    pub fn hold_maps(&self, id: CheckpointId, meta: &Meta) -> Result<(PageMap, DiskMap, Held)> {
        for _ in 1..ATTEMPTS {
            let listed = self.pack_numbers()?;
            match self.read_maps(meta) {
                Ok(maps) => {
                    let (held, is_all) = self.hold(&maps, &listed);
                    self.check_exists(id)?;
                    if is_all {
                        return Ok((maps.0, maps.1, held));
                    }
                    if self.pack_numbers()? == listed {
                        // No prune was at work, so the pack is lost.
                        return Ok((maps.0, maps.1, held));
                    }
                }
                Err(error) => {
                    self.check_exists(id)?;
                    return Err(error);
                }
            }
        }
        let maps = self.read_maps(meta)?;
        let held = self.hold(&maps, &self.pack_numbers()?).0;
        self.check_exists(id)?;
        Ok((maps.0, maps.1, held))
    }

    /// Opens the packs that the maps refer to, and those of `listed` before them. False if one is
    /// missing.
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
        // A pack that cannot be opened for another reason still exists.
        let (mut held, mut is_all) = (Vec::with_capacity(packs.len()), true);
        for number in packs {
            let opened = self.pack(number);
            is_all &= !matches!(opened, Err(Error::Damaged { .. })) || self.has_pack(number);
            held.extend(opened);
        }
        (held, is_all)
    }

    fn has_pack(&self, pack: u32) -> bool {
        !self.backend.open(&layout::pack(pack)).is_err_and(|error| error.is_not_found())
    }
}
