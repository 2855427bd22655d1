//! The disks of a run, for a later run of the same VM.

use keyframe_store_format::disk_map::DiskMap;

/// The known content of the disks of a run, for [`crate::Writer::begin_run_with`] of another run.
#[derive(Clone, Debug, Default)]
pub struct DiskState {
    map: DiskMap,
    /// The pages of RAM before the blocks of the disks.
    ram_pages: u64,
}

impl DiskState {
    /// Creates the state of disks whose blocks follow `ram_pages` pages of RAM.
    pub(super) fn new(map: DiskMap, ram_pages: u64) -> Self {
        Self { map, ram_pages }
    }

    /// Returns the disks behind `ram_pages` pages of RAM: some may have been plugged in or out since.
    pub(super) fn behind(&self, ram_pages: u64) -> DiskMap {
        self.map.behind(self.ram_pages, ram_pages)
    }
}
