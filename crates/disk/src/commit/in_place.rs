//! Writes the blocks that were written since a checkpoint into the base image.

use super::{Amount, CHUNK_BYTES, ProgressCallback};
use crate::base::{BackingFileGate, Base, Lock, open_qcow2};
use crate::{BLOCK, BLOCK_BYTES, Content, DiskBlock, Error, ImageFormat, Layer, Result};
use imago::FormatAccess;
use imago::file::File as ImageFile;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A commit into an image. The image is locked, and a mark beside it tells that a commit is under
/// way.
///
/// ```text
///   begin() ──▶ marked ──write()──▶ ... ──finish()──▶ synced
///                              the caller empties the overlay ──unmark()──▶ done
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
    /// Begins a commit into the image at `path`, whose disk has `disk_bytes` bytes, or continues
    /// one that was interrupted. Locks the image until the result is dropped, and creates the mark
    /// beside it. `source` is a text of one line that names the overlay or checkpoint to write.
    ///
    /// Errors: [`Error::Locked`] if another process uses the image; [`Error::Refused`] if the image
    /// has another size or cannot be read in this format, or if a commit from another source into
    /// it was interrupted; [`Error::Io`] if the image or the mark cannot be opened or written. A
    /// new mark can be left only if its directory could not be synced.
    pub fn begin(path: &Path, format: ImageFormat, disk_bytes: u64, source: &str) -> Result<Self> {
        let name = path.display().to_string();
        let path = path.canonicalize().map_err(Error::io(&name, "find"))?;
        // The lock is taken last: closing any descriptor of a file releases this process's locks on
        // it.
        require_size(&name, Base::open_marked(&path, format)?.disk_bytes(), disk_bytes)?;
        let file = File::options().read(true).write(true).open(&path);
        let file = file.map_err(Error::io(&name, "open for writing"))?;
        let image = match format {
            ImageFormat::Raw => Image::Raw(file.try_clone().map_err(Error::io(&name, "open"))?),
            ImageFormat::Qcow2 => {
                let image = open_qcow2(&path, BackingFileGate::for_writing())?;
                Image::Qcow2(Box::new(FormatAccess::new(image)))
            }
        };
        let lock = Lock::alone(file, &name)?;
        mark(&path, source)?;
        Ok(Self { image, path, disk_bytes, _lock: lock })
    }

    /// Returns the size of the disk in bytes.
    pub fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    /// Writes the blocks of `layer`, whose disk has `disk_bytes` bytes, into the image. Calls
    /// `watch` with the number of bytes written so far, and returns the amount written. The caller
    /// writes several layers from the lowest to the highest.
    ///
    /// Errors, after which the mark stays: [`Error::Refused`] if `disk_bytes` is not the size of
    /// the image's disk; [`Error::Damaged`] if the layer has blocks past the end of the disk;
    /// [`Error::Io`] if the image cannot be written; errors of `layer` and of `watch`.
    pub fn write(
        &self,
        layer: &dyn Layer,
        disk_bytes: u64,
        watch: ProgressCallback<'_>,
    ) -> Result<Amount> {
        require_size(&self.name(), self.disk_bytes, disk_bytes)?;
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
                    format!("block {at} lies past the end of the disk"),
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

    /// Makes the written blocks durable. Only after this may the caller empty the overlay. Error:
    /// [`Error::Io`] if the sync failed. The mark stays in either case.
    pub fn finish(&self) -> Result<()> {
        let synced = match &self.image {
            Image::Raw(file) => file.sync_all(),
            Image::Qcow2(image) => image.sync(),
        };
        synced.map_err(Error::io(self.name(), "sync"))
    }

    /// Removes the mark, so that the image can be served again, and unlocks the image. Error:
    /// [`Error::Io`] if the mark cannot be removed, or its removal cannot be made durable.
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
                // Some file systems and devices have no holes.
                rustix::fs::fallocate(file, flags, at, len)
                    .or_else(|_| file.write_all_at(&[0; BLOCK_BYTES][..len as usize], at))
            }
            Image::Qcow2(image) => image.write_zeroes(at, len),
        };
        done.map_err(|e| Error::io(format!("{} at {at}", self.name()), "write zeros to")(e))
    }
}

fn require_size(name: &str, image_bytes: u64, disk_bytes: u64) -> Result<()> {
    if image_bytes == disk_bytes {
        return Ok(());
    }
    let problem = format!("its disk has {image_bytes} bytes, the disk to write has {disk_bytes}");
    Err(Error::refused(name, problem, "use the image that the VM ran on"))
}

/// Neighbouring blocks that one call writes.
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

/// The path of the mark beside the image at `path`.
pub(crate) fn marker(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".keyframe-commit");
    name.into()
}

/// Returns the source (see [`InPlace::begin`]) of the commit into the image at `path` that was
/// interrupted or is under way. Returns `None` if there is no mark beside the image, and also if
/// the mark cannot be read: then the image can be neither opened nor committed into.
pub fn interrupted(path: &Path) -> Option<String> {
    marked_source(path).ok().flatten()
}

/// Returns what [`interrupted`] does. Error: [`Error::Io`] if the mark cannot be read.
pub(crate) fn marked_source(path: &Path) -> Result<Option<String>> {
    let path = path.canonicalize().map_err(Error::io(path.display().to_string(), "find"))?;
    let marker = marker(&path);
    match std::fs::read_to_string(&marker) {
        // Another process than Keyframe has written it.
        Ok(text) if text.is_empty() => Ok(Some("an unknown source".into())),
        Ok(text) => Ok(Some(text.strip_suffix('\n').unwrap_or(&text).to_owned())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        // A commit into an image with such a long name cannot make a mark, and writes nothing.
        Err(e) if Errno::from_io_error(&e) == Some(Errno::NAMETOOLONG) => Ok(None),
        Err(e) => Err(Error::io(marker.display().to_string(), "read")(e)),
    }
}

/// Makes the mark, unless the same commit has left it. The mark appears with all of its text: a
/// part of it could not be told from the mark of another commit. Errors: [`Error::Refused`] if a
/// commit from another source was interrupted; [`Error::Io`] if the mark cannot be read or written.
fn mark(path: &Path, source: &str) -> Result<()> {
    let marker = marker(path);
    let made = match marked_source(path)? {
        Some(known) if known == source => sync_mark(&marker),
        Some(other) => {
            let problem = format!("a commit of {other} into it was interrupted");
            let fix = "run the interrupted commit again first";
            return Err(Error::refused(path.display().to_string(), problem, fix));
        }
        None => write_mark(&marker, source),
    };
    made.map_err(Error::io(marker.display().to_string(), "make"))
}

/// Makes the mark durable that an earlier process has left.
fn sync_mark(marker: &Path) -> io::Result<()> {
    File::open(marker)?.sync_all()?;
    sync_folder(marker)
}

fn write_mark(marker: &Path, source: &str) -> io::Result<()> {
    let mut aside = marker.as_os_str().to_owned();
    aside.push(".new");
    let aside = PathBuf::from(aside);
    let mut file = File::create(&aside)?;
    let written = writeln!(file, "{source}")
        .and_then(|()| file.sync_all())
        .and_then(|()| std::fs::rename(&aside, marker));
    if let Err(error) = written {
        let _ = std::fs::remove_file(&aside);
        return Err(error);
    }
    sync_folder(marker)
}

fn sync_folder(file: &Path) -> io::Result<()> {
    let folder =
        file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}
