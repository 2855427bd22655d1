//! Writes a disk to a new image.

use super::{CHUNK_BYTES, Watch};
use crate::{BLOCK_BYTES, Error, ImageFormat, Readable, Result};
use imago::file::File as ImageFile;
use imago::format::gate::DenyImplicitOpenGate;
use imago::qcow2::{Qcow2, Qcow2CreateBuilder};
use imago::{FormatAccess, FormatCreateBuilder};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// How many ranges are looked at in one go.
const RANGES_MAX: usize = 1024;

/// Writes `disk` to a new raw image at `path`, sparse where it is zero. It is there whole and
/// durable, or not at all.
///
/// Error: also where something is at `path` already.
pub fn to_new_raw(disk: &dyn Readable, path: &Path) -> Result<()> {
    to_new(disk, path, ImageFormat::Raw, &mut |_| Ok(()))
}

/// The same in either format; `watch` hears how far it has got, of the disk's bytes.
pub fn to_new(
    disk: &dyn Readable,
    path: &Path,
    format: ImageFormat,
    watch: Watch<'_>,
) -> Result<()> {
    to_file(disk, path, format, false, watch)
}

/// The same; with `replace` a file that is there is replaced, by all of the new one at once.
pub fn to_file(
    disk: &dyn Readable,
    path: &Path,
    format: ImageFormat,
    replace: bool,
    watch: Watch<'_>,
) -> Result<()> {
    let name = path.display().to_string();
    if !replace && path.symlink_metadata().is_ok() {
        return Err(Error::refused(name, "it exists", "name another file"));
    }
    let folder =
        path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = tempfile::Builder::new().prefix(".keyframe-commit-").tempfile_in(folder);
    let file = file.map_err(Error::io(&name, "make a file beside"))?;
    let target = Target::new(file.as_file(), format, disk.disk_bytes());
    let target = target.map_err(Error::io(&name, "prepare"))?;
    copy(disk, &target, &name, watch)?;
    target.finish().map_err(Error::io(&name, "finish"))?;
    file.as_file().sync_all().map_err(Error::io(&name, "sync"))?;
    let placed = if replace { file.persist(path) } else { file.persist_noclobber(path) };
    placed.map_err(|e| Error::io(&name, "put in place")(e.error))?;
    let folder = File::open(folder).and_then(|folder| folder.sync_all());
    folder.map_err(Error::io(name, "sync the directory of"))
}

/// Writes `disk` as raw bytes, from the first to the last, to where there are no holes.
pub fn to_stream(disk: &dyn Readable, out: &mut dyn Write, watch: Watch<'_>) -> Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES as usize];
    let mut at = 0;
    while at < disk.disk_bytes() {
        let part = &mut chunk[..(disk.disk_bytes() - at).min(CHUNK_BYTES) as usize];
        disk.read(at, part)?;
        out.write_all(part).map_err(Error::io("the new image", "write"))?;
        at += part.len() as u64;
        watch(at)?;
    }
    out.flush().map_err(Error::io("the new image", "write"))
}

/// Makes an empty qcow2 image of a disk of `disk_bytes` at `path`, for whoever puts another beneath
/// it.
///
/// Error: also where something is at `path` already.
pub fn empty_qcow2(path: &Path, disk_bytes: u64) -> Result<()> {
    let name = path.display().to_string();
    let file = File::options().read(true).write(true).create_new(true).open(path);
    let file = file.map_err(Error::io(&name, "make"))?;
    let made = Target::new(&file, ImageFormat::Qcow2, disk_bytes).and_then(Target::finish);
    made.map_err(Error::io(name, "make a qcow2 image of"))
}

fn copy(disk: &dyn Readable, target: &Target<'_>, name: &str, watch: Watch<'_>) -> Result<()> {
    let mut at = 0;
    let mut chunk = vec![0; CHUNK_BYTES as usize];
    while at < disk.disk_bytes() {
        for (start, bytes, zero) in disk.ranges(at, disk.disk_bytes() - at, RANGES_MAX)? {
            at = start + bytes;
            let mut from = if zero { at } else { start };
            while from < at {
                let part = &mut chunk[..(at - from).min(CHUNK_BYTES) as usize];
                disk.read(from, part)?;
                target.write_nonzero(part, from).map_err(Error::io(name, "write"))?;
                from += part.len() as u64;
                watch(from)?;
            }
            watch(at)?;
        }
    }
    Ok(())
}

/// The image that is being made: all zero.
enum Target<'a> {
    Raw(&'a File),
    Qcow2(Box<FormatAccess<ImageFile>>),
}

impl<'a> Target<'a> {
    fn new(file: &'a File, format: ImageFormat, disk_bytes: u64) -> io::Result<Self> {
        match format {
            ImageFormat::Raw => {
                file.set_len(disk_bytes)?;
                Ok(Self::Raw(file))
            }
            ImageFormat::Qcow2 => {
                let storage = ImageFile::try_from(file.try_clone()?)?;
                let image = Qcow2CreateBuilder::<ImageFile>::new(storage)
                    .size(disk_bytes)
                    .create_open(DenyImplicitOpenGate::default(), |storage| {
                        Ok(Qcow2::builder(storage).backing(None))
                    })?;
                Ok(Self::Qcow2(Box::new(FormatAccess::new(image))))
            }
        }
    }

    /// Writes the blocks of `data` that are not zero, those side by side at once.
    fn write_nonzero(&self, data: &[u8], at: u64) -> io::Result<()> {
        let end_of = |from: usize| (from + BLOCK_BYTES).min(data.len());
        let is_zero = |from: usize| data[from..end_of(from)].iter().all(|byte| *byte == 0);
        let mut from = 0;
        while from < data.len() {
            let zero = is_zero(from);
            let mut end = end_of(from);
            while end < data.len() && is_zero(end) == zero {
                end = end_of(end);
            }
            if !zero {
                self.write(&data[from..end], at + from as u64)?;
            }
            from = end;
        }
        Ok(())
    }

    fn write(&self, data: &[u8], at: u64) -> io::Result<()> {
        match self {
            Self::Raw(file) => file.write_all_at(data, at),
            Self::Qcow2(image) => image.write(data, at),
        }
    }

    fn finish(self) -> io::Result<()> {
        match self {
            Self::Raw(_) => Ok(()),
            Self::Qcow2(image) => image.sync(),
        }
    }
}
