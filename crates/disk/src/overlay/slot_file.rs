//! Reads an overlay's data file from another process than the one that serves it.

use super::DATA;
use super::medium::read_or_zero;
use crate::{BLOCK, Error, Result, Slot};
use std::fs::File;
use std::path::Path;

/// The data file of an overlay that another process serves, for reading the slots of epochs in
/// flight.
#[derive(Debug)]
pub struct SlotFile {
    file: File,
    name: String,
}

impl SlotFile {
    /// Opens the data file of the overlay in the directory `dir`, without a lock. Error:
    /// [`Error::Io`] if the file cannot be opened.
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join(DATA);
        let name = path.display().to_string();
        Ok(Self { file: File::open(path).map_err(Error::io(&name, "open"))?, name })
    }

    /// Fills `buf` with the content of consecutive slots from `slot` on. The length of `buf` is a
    /// multiple of 4096 bytes. Bytes past the end of the file are zero. Error: [`Error::Io`] if the
    /// file cannot be read.
    pub fn read(&self, slot: Slot, buf: &mut [u8]) -> Result<()> {
        let at = u64::from(slot.0) * BLOCK;
        read_or_zero(&self.file, at, buf)
            .map_err(Error::io(format!("{} at {at}", self.name), "read"))
    }
}
