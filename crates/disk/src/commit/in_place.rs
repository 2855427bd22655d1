//! Writes the blocks written since a checkpoint into the base image.

use super::{Amount, CHUNK_BYTES, Watch};
use crate::base::{Base, Gate, Lock};
use crate::{BLOCK, BLOCK_BYTES, Content, DiskBlock, Error, ImageFormat, Layer, Result};
use imago::file::File as ImageFile;
use imago::qcow2::Qcow2;
use imago::{FormatAccess, FormatDriverBuilder};
use rustix::fs::FallocateFlags;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A commit into an image: the image is locked, and marked as under way.
///
/// ```text
///   begin() ──▶ marked ──write()──▶ ... ──finish()──▶ synced, the caller empties what it wrote ──unmark()──▶ done
/// ```
pub struct InPlace {
    image: Image,
    path: PathBuf,
    disk_bytes: u64,
    _lock: Lock,
}

enum Image {
    Raw(File),
    Qcow2(Box<FormatAccess<ImageFile>>),
}

impl InPlace {
    /// Begins to write to the image at `path`, of a disk of `disk_bytes`, or goes on after a kill.
    /// `source` names what is written, without line ends.
    ///
    /// Errors, which leave no mark: somebody uses the image; it is of another size; a commit of
    /// something else was interrupted.
    pub fn begin(path: &Path, format: ImageFormat, disk_bytes: u64, source: &str) -> Result<Self> {
        let name = path.display().to_string();
        let path = path.canonicalize().map_err(Error::io(&name, "find"))?;
        // The lock comes last: closing a file lets go of what this process has locked of it.
        of_size(&name, Base::open_marked(&path, format)?.disk_bytes(), disk_bytes)?;
        let file = File::options().read(true).write(true).open(&path);
        let file = file.map_err(Error::io(&name, "open for writing"))?;
        let image = match format {
            ImageFormat::Raw => Image::Raw(file.try_clone().map_err(Error::io(&name, "open"))?),
            ImageFormat::Qcow2 => {
                let builder = Qcow2::<ImageFile>::builder_path(&path).write(true);
                let image = builder
                    .open(Gate::for_writing())
                    .map_err(Error::io(&name, "open for writing"))?;
                Image::Qcow2(Box::new(FormatAccess::new(image)))
            }
        };
        let lock = Lock::alone(file, &name)?;
        marked_for(&path, source)?;
        mark(&path, source)?;
        Ok(Self { image, path, disk_bytes, _lock: lock })
    }

    /// Bytes of the disk.
    pub fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    /// Writes what `layer`, of a disk of `disk_bytes`, holds; `watch` hears how many bytes were
    /// written. Of several layers the lowest goes first.
    pub fn write(&self, layer: &dyn Layer, disk_bytes: u64, watch: Watch<'_>) -> Result<Amount> {
        of_size(&self.name(), self.disk_bytes, disk_bytes)?;
        let mut amount = Amount::default();
        let mut run = Run { data: Vec::with_capacity(CHUNK_BYTES as usize), start: 0 };
        let mut block = [0; BLOCK_BYTES];
        let mut from = DiskBlock(0);
        while let Some(at) = layer.next_block(from)? {
            let offset = at.0 * BLOCK;
            let len = BLOCK.min(disk_bytes.saturating_sub(offset));
            if len == 0 {
                return Err(Error::damaged(
                    self.name(),
                    format!("block {at} lies behind the disk's end"),
                ));
            }
            match layer.read_block(at, &mut block)? {
                Content::Data => {
                    if !run.takes(offset) {
                        self.put(&mut run)?;
                        watch(amount.data_bytes + amount.zero_bytes)?;
                        run.start = offset;
                    }
                    run.data.extend(&block[..len as usize]);
                    amount.data_bytes += len;
                }
                Content::Zero => {
                    self.zero(offset, len)?;
                    amount.zero_bytes += len;
                }
                Content::Absent => {}
            }
            from = DiskBlock(at.0 + 1);
        }
        self.put(&mut run)?;
        watch(amount.data_bytes + amount.zero_bytes)?;
        Ok(amount)
    }

    /// Makes what was written durable. Then what it came from can be emptied, and not before.
    pub fn finish(&self) -> Result<()> {
        let synced = match &self.image {
            Image::Raw(file) => file.sync_all(),
            Image::Qcow2(image) => image.sync(),
        };
        synced.map_err(Error::io(self.name(), "sync"))
    }

    /// The image can be used again.
    pub fn unmark(self) -> Result<()> {
        let marker = marker(&self.path);
        std::fs::remove_file(&marker)
            .and_then(|()| sync_folder(&marker))
            .map_err(Error::io(marker.display().to_string(), "remove"))
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn put(&self, run: &mut Run) -> Result<()> {
        if run.data.is_empty() {
            return Ok(());
        }
        let written = match &self.image {
            Image::Raw(file) => file.write_all_at(&run.data, run.start),
            Image::Qcow2(image) => image.write(&run.data[..], run.start),
        };
        written.map_err(|e| Error::io(format!("{} at {}", self.name(), run.start), "write")(e))?;
        run.data.clear();
        Ok(())
    }

    fn zero(&self, at: u64, len: u64) -> Result<()> {
        let done = match &self.image {
            Image::Raw(file) => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                // Not every file system, and not every device, has holes.
                rustix::fs::fallocate(file, flags, at, len)
                    .or_else(|_| file.write_all_at(&[0; BLOCK_BYTES][..len as usize], at))
            }
            Image::Qcow2(image) => image.write_zeroes(at, len),
        };
        done.map_err(|e| Error::io(format!("{} at {at}", self.name()), "write zeros to")(e))
    }
}

fn of_size(name: &str, image_bytes: u64, disk_bytes: u64) -> Result<()> {
    if image_bytes == disk_bytes {
        return Ok(());
    }
    let problem = format!("its disk has {image_bytes} bytes, what is to be written {disk_bytes}");
    Err(Error::refused(name, problem, "use the image that the VM ran on"))
}

/// Neighbouring blocks that are written at once.
struct Run {
    data: Vec<u8>,
    start: u64,
}

impl Run {
    fn takes(&self, offset: u64) -> bool {
        offset == self.start + self.data.len() as u64
            && !self.data.is_empty()
            && self.data.len() as u64 + BLOCK <= CHUNK_BYTES
    }
}

/// Where a commit into the image at `path` leaves its mark.
pub(crate) fn marker(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".keyframe-commit");
    name.into()
}

/// What is being written to the image at `path`, if a commit was interrupted.
pub fn interrupted(path: &Path) -> Option<String> {
    let path = path.canonicalize().ok()?;
    std::fs::read_to_string(marker(&path)).ok().map(|source| source.trim_end().to_owned())
}

fn marked_for(path: &Path, source: &str) -> Result<()> {
    match interrupted(path) {
        // Of a mark that was just being made nothing was written yet.
        Some(other) if !other.is_empty() && other != source => {
            let problem = format!("a commit of {other} into it was interrupted");
            Err(Error::refused(
                path.display().to_string(),
                problem,
                "finish that one first: run it again",
            ))
        }
        _ => Ok(()),
    }
}

fn mark(path: &Path, source: &str) -> Result<()> {
    let marker = marker(path);
    let made = File::create(&marker).and_then(|mut file| {
        writeln!(file, "{source}")?;
        file.sync_all()?;
        sync_folder(&marker)
    });
    made.map_err(Error::io(marker.display().to_string(), "make"))
}

fn sync_folder(file: &Path) -> io::Result<()> {
    let folder =
        file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}
