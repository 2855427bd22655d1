//! Asks QEMU for the guest's physical memory ([`keyframe_qemu_memory_map`]).

use crate::{Error, Result, Vm};
use keyframe_qemu_memory_map::{MapError, regions, reset_files};
use keyframe_units::{GuestRegion, PageIndex, RamLayout};
use serde_json::Value;

impl From<MapError> for Error {
    fn from(MapError(problem): MapError) -> Self {
        Self::GuestMap { problem }
    }
}

impl Vm {
    /// Returns where main RAM and firmware lie in the guest's physical address space, in rising
    /// order.
    ///
    /// Errors: [`Error::GuestMap`] if QEMU's list contradicts itself or does not hold all of main
    /// RAM.
    pub fn guest_map(&mut self) -> Result<Vec<GuestRegion>> {
        let layout = self.ram_layout()?;
        let text = self.qmp().hmp("info mtree -f")?;
        Ok(regions::complete_regions(&text, &layout)?)
    }

    /// Returns the pages of the RAM blocks `layout` that a reset of the machine overwrites, in
    /// ascending order. QEMU is asked once. Errors: it does not answer; its lists are not understood.
    pub fn reset_pages(&mut self, layout: &RamLayout) -> Result<Vec<PageIndex>> {
        if self.reset_parts.is_none() {
            let text = self.qmp().hmp("info roms")?;
            let Some(files) = reset_files::files(&text) else {
                return Err(self.qmp().unexpected("info roms", &Value::String(text)));
            };
            let parts = if files.is_empty() {
                Vec::new()
            } else {
                let here = self.ram_layout()?;
                let map = self.qmp().hmp("info mtree -f")?;
                reset_files::parts(&files, &regions::regions(&map, &here)?)
            };
            self.reset_parts = Some(parts);
        }
        Ok(reset_files::pages(self.reset_parts.as_deref().unwrap_or_default(), layout))
    }
}
