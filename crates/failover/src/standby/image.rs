//! The VM as of the epoch that a standby applied last.
//!
//! ```text
//!   pages of main RAM       the memory of the QEMU that waits
//!   pages of small blocks   here
//!   pages of disk 0, ...    DIR/disks/0-NAME.raw, ...
//! ```
//!
//! Invariant: an epoch is applied as a whole or not at all. If a page cannot be written, the pages
//! before it get their old content back.

use super::super::frames::MachineFrame;
use crate::directory_lock::lock_directory;
use crate::error::{Error, Result};
use keyframe_locks::IgnorePoison;
use keyframe_qemu::restore::{PreparedRam, RamSource};
use keyframe_session::run_dir::name_from;
use keyframe_transfer::{EpochBuffer, EpochImage};
use keyframe_units::{PAGE_BYTES, Page, PageIndex, PageRange, ZERO_PAGE};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::RwLock;

/// A disk's copy.
struct DiskFile {
    pages: PageRange,
    file: File,
    disk_bytes: u64,
}

/// The pages of the VM that a standby holds: RAM in the memory of the QEMU that waits, disks in
/// files.
pub struct StandbyImage {
    ram: PreparedRam,
    ram_pages: u64,
    small: RwLock<HashMap<PageIndex, Box<Page>>>,
    disks: Vec<DiskFile>,
}

/// Locks the directory `folder` of a standby, which it creates if it does not exist. Returns the
/// lock file: the lock lasts until it is closed. Errors: [`Error::DirectoryInUse`] if another
/// standby uses the directory; [`Error::Io`] if the lock file cannot be created or locked.
pub fn own(folder: &Path) -> Result<File> {
    lock_directory(folder)?.ok_or_else(|| Error::DirectoryInUse(folder.to_owned()))
}

/// Returns the paths of the files for the machine's disks in `folder`, in the order of the disks.
pub fn disk_paths(folder: &Path, machine: &MachineFrame) -> Vec<PathBuf> {
    let path = |(number, name): (usize, &str)| {
        folder.join("disks").join(format!("{number}-{}.raw", name_from(name)))
    };
    machine.disks.iter().map(|disk| disk.name.as_str()).enumerate().map(path).collect()
}

/// Creates the files for the machine's disks in `folder`, each as long as its disk, and returns
/// their paths. Existing files keep their content up to that length. Error: [`Error::Io`] if a file
/// cannot be created, or its length cannot be set.
pub fn make_disks(folder: &Path, machine: &MachineFrame) -> Result<Vec<PathBuf>> {
    let failed = |path: &Path, e: io::Error| Error::file("make", path, e);
    let paths = disk_paths(folder, machine);
    std::fs::create_dir_all(folder.join("disks")).map_err(|e| failed(folder, e))?;
    for (path, disk) in paths.iter().zip(&machine.disks) {
        let file = File::options().create(true).truncate(false).read(true).write(true).open(path);
        file.and_then(|file| file.set_len(disk.disk_bytes)).map_err(|e| failed(path, e))?;
    }
    Ok(paths)
}

impl StandbyImage {
    /// Creates the image of the RAM `ram` of a QEMU that waits, and of the existing disk files
    /// `paths`, in the order of the disks of `machine`. Error: [`Error::Io`] if a file cannot be
    /// opened.
    pub fn new(ram: PreparedRam, machine: &MachineFrame, paths: &[PathBuf]) -> Result<Self> {
        let ram_pages = machine.ram.len_pages();
        let (mut at, mut disks) = (ram_pages, Vec::new());
        for (path, disk) in paths.iter().zip(&machine.disks) {
            let file = File::options().read(true).write(true).open(path);
            let file = file.map_err(|e| Error::file("open", path, e))?;
            let pages = PageRange::new(PageIndex(at), disk.disk_bytes.div_ceil(PAGE_BYTES as u64));
            at = pages.end().0;
            disks.push(DiskFile { pages, file, disk_bytes: disk.disk_bytes });
        }
        Ok(Self { ram, ram_pages, small: RwLock::default(), disks })
    }

    /// Returns the number of pages of RAM and disks.
    pub fn len_pages(&self) -> u64 {
        self.disks.last().map_or(self.ram_pages, |disk| disk.pages.end().0)
    }

    /// Returns true if the files of the disks have no data. RAM is zeros at first.
    pub fn disks_are_blank(&self) -> bool {
        self.disks.iter().all(|disk| disk.file.metadata().is_ok_and(|known| known.blocks() == 0))
    }

    /// Writes the pages of `epochs` to RAM and disks: all of them, or none. Errors: a page cannot
    /// be read or written; a page lies outside RAM and disks. If the old pages cannot be written
    /// back after an error, the error says so.
    pub fn apply(&self, epochs: &[EpochBuffer]) -> io::Result<()> {
        let mut undo = Vec::new();
        for (page, content) in epochs.iter().flat_map(EpochBuffer::pages) {
            let mut old = ZERO_PAGE;
            let written = EpochImage::read(self, page, &mut old).and_then(|()| {
                undo.push((page, Box::new(old)));
                self.write(page, content)
            });
            if let Err(error) = written {
                return Err(match self.undo(&undo) {
                    Ok(()) => error,
                    Err(again) => {
                        io::Error::new(again.kind(), format!("{error}; and back: {again}"))
                    }
                });
            }
        }
        Ok(())
    }

    /// Writes all old pages back, even after one of them fails. Error: a page has another content
    /// than the old one afterwards.
    fn undo(&self, undo: &[(PageIndex, Box<Page>)]) -> io::Result<()> {
        let mut result = Ok(());
        for (page, old) in undo.iter().rev() {
            if let Err(error) = self.write(*page, old) {
                // A page that did not fit on the disk was not changed. Its old content does not fit
                // either.
                let mut now = ZERO_PAGE;
                if EpochImage::read(self, *page, &mut now).is_err() || now != **old {
                    result = Err(error);
                }
            }
        }
        result
    }

    fn disk(&self, page: PageIndex) -> Option<(&DiskFile, u64, usize)> {
        let disk =
            self.disks.iter().find(|disk| (disk.pages.first..disk.pages.end()).contains(&page))?;
        let offset = (page.0 - disk.pages.first.0) * PAGE_BYTES as u64;
        Some((disk, offset, (disk.disk_bytes - offset).min(PAGE_BYTES as u64) as usize))
    }

    fn write(&self, page: PageIndex, content: &Page) -> io::Result<()> {
        if self.ram.write_page(page, content)? {
            return Ok(());
        }
        if let Some((disk, offset, len)) = self.disk(page) {
            return disk.file.write_all_at(content.get(..len).unwrap_or_default(), offset);
        }
        if page.0 >= self.ram_pages {
            return Err(io::Error::other(format!("page {} is none of the VM's", page.0)));
        }
        self.small.write().ignore_poison().insert(page, Box::new(*content));
        Ok(())
    }
}

impl EpochImage for StandbyImage {
    fn read(&self, page: PageIndex, into: &mut Page) -> io::Result<()> {
        *into = ZERO_PAGE;
        if self.ram.read_page(page, into)? {
            return Ok(());
        }
        if let Some((disk, offset, len)) = self.disk(page) {
            return disk.file.read_exact_at(into.get_mut(..len).unwrap_or_default(), offset);
        }
        if let Some(content) = self.small.read().ignore_poison().get(&page) {
            *into = **content;
        }
        Ok(())
    }
}

/// The small blocks, for QEMU's stream.
impl RamSource for StandbyImage {
    fn read(
        &self,
        range: PageRange,
        sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut page = ZERO_PAGE;
        for index in range.iter() {
            EpochImage::read(self, index, &mut page)?;
            if page != ZERO_PAGE {
                sink(index, &page)?;
            }
        }
        Ok(())
    }
}
