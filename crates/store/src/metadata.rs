//! Reading and replacing checkpoint files and maps.

use crate::open_store::OpenStore;
use crate::{Error, Result};
use keyframe_bytes::hex::to_hex;
use keyframe_store_backend::layout;
use keyframe_store_format::checkpoint::{self, CHECKPOINT_BYTES_MAX, CheckpointFile};
use keyframe_store_format::disk_map::DiskMap;
use keyframe_store_format::map_run::{MAP_BYTES_MAX, MapHeader, MapRun};
use keyframe_store_format::meta::Meta;
use keyframe_store_format::page_map::PageMap;
use keyframe_units::CheckpointId;
use std::num::NonZero;

/// The most threads that read checkpoints for a listing.
const LISTING_THREADS_MAX: usize = 8;
/// The fewest checkpoints that are worth a thread.
const LISTED_PER_THREAD_MIN: usize = 64;

impl OpenStore {
    /// Reads the file of checkpoint `id`. Errors: no such checkpoint; the file is damaged; the
    /// backend fails.
    pub fn read_checkpoint(&self, id: CheckpointId) -> Result<CheckpointFile> {
        let (bytes, object) = self.checkpoint_bytes(id)?;
        Ok(checkpoint::decode(&bytes, id.0, self.config.id, &object)?)
    }

    /// Checks that checkpoint `id` still exists. Error: [`Error::UnknownCheckpoint`].
    pub fn check_exists(&self, id: CheckpointId) -> Result<()> {
        match self.backend.open(&layout::checkpoint(id)) {
            Err(e) if e.is_not_found() => Err(self.unknown(id)?),
            other => other.map(drop),
        }
    }

    fn unknown(&self, id: CheckpointId) -> Result<Error> {
        let newest = self.checkpoint_ids()?.last().copied();
        Ok(Error::UnknownCheckpoint { name: id.to_string(), newest })
    }

    /// Reads the description of checkpoint `id`. Errors: those of [`Self::read_checkpoint`].
    pub fn read_meta(&self, id: CheckpointId) -> Result<Meta> {
        let (bytes, object) = self.checkpoint_bytes(id)?;
        Ok(checkpoint::decode_meta(&bytes, id.0, self.config.id, &object)?)
    }

    /// The bytes of a checkpoint file, and its name in errors.
    fn checkpoint_bytes(&self, id: CheckpointId) -> Result<(Vec<u8>, String)> {
        let name = layout::checkpoint(id);
        match self.backend.read(&name, CHECKPOINT_BYTES_MAX) {
            Err(e) if e.is_not_found() => Err(self.unknown(id)?),
            other => Ok((other?, self.backend.describe(&name))),
        }
    }

    /// Reads the descriptions of the checkpoints `ids`, in this order, on several threads if there
    /// are many. Each result has the errors of [`Self::read_meta`].
    pub fn read_metas(&self, ids: &[CheckpointId]) -> Vec<(CheckpointId, Result<Meta>)> {
        let read = |id: &CheckpointId| (*id, self.read_meta(*id));
        let threads =
            std::thread::available_parallelism().map_or(1, NonZero::get).min(LISTING_THREADS_MAX);
        let share = ids.len().div_ceil(threads).max(LISTED_PER_THREAD_MIN);
        let mut shares = ids.chunks(share);
        let first = shares.next().unwrap_or_default();
        std::thread::scope(|scope| {
            let others: Vec<_> = shares
                .map(|share| scope.spawn(move || share.iter().map(read).collect::<Vec<_>>()))
                .collect();
            let mut metas: Vec<_> = first.iter().map(read).collect();
            for other in others {
                match other.join() {
                    Ok(read) => metas.extend(read),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            metas
        })
    }

    /// Reads the map with number `id`. Errors: [`Error::Damaged`] if it is missing or damaged; the
    /// backend fails.
    pub fn read_map(&self, id: u64) -> Result<MapRun> {
        let name = layout::map(id);
        let object = self.backend.describe(&name);
        let bytes = self.backend.read(&name, MAP_BYTES_MAX).map_err(|e| {
            if e.is_not_found() { Error::damaged(&object, "the map is missing") } else { e }
        })?;
        Ok(MapRun::decode(&bytes, self.config.id, id, &object)?)
    }

    /// Reads the maps of a checkpoint's chain and applies them, the oldest first. Returns the map
    /// of RAM and that of the disks. Errors: a map is damaged or does not belong to the chain; the
    /// backend fails.
    pub fn read_maps(&self, meta: &Meta) -> Result<(PageMap, DiskMap)> {
        let (mut map, mut disks) = (PageMap::default(), DiskMap::default());
        for (at, id) in meta.map_chain.iter().enumerate().rev() {
            let run = self.read_map(*id)?;
            let below = meta.map_chain.get(at + 1).copied();
            let fits = run.header.parent == below
                && to_hex(&run.header.run) == meta.run
                && Some(run.header.space_pages) == meta.space_pages();
            if !fits {
                let object = self.backend.describe(&layout::map(*id));
                return Err(Error::damaged(
                    object,
                    "it does not belong where a checkpoint's chain has it",
                ));
            }
            run.apply(meta.ram.len_pages(), &mut map, &mut disks);
        }
        Ok((map, disks))
    }

    /// Replaces the file `name`. Tries twice, because a writer that starts may remove the temporary
    /// file of the first attempt as a leftover. Error: the backend fails.
    pub fn replace(&self, name: &str, bytes: &[u8]) -> Result<()> {
        match self.backend.put(name, bytes) {
            Err(error) if error.is_not_found() => self.backend.put(name, bytes),
            other => other,
        }
    }

    /// Replaces the map with number `id`, which no checkpoint needs, with one without pages. The
    /// file keeps the number from being used again. Error: the backend fails.
    pub fn empty_map(&self, id: u64) -> Result<()> {
        let header = MapHeader { id, parent: None, run: [0; 16], space_pages: 0 };
        self.replace(
            &layout::map(id),
            &MapRun::new(header, std::iter::empty()).encode(self.config.id),
        )
    }

    /// Returns true if the map with number `id` is one that [`Self::empty_map`] wrote.
    pub fn is_empty_map(&self, id: u64) -> bool {
        self.read_map(id).is_ok_and(|run| run.header.space_pages == 0)
    }
}
