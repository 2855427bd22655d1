//! A disk as a new image.

use super::{CHUNK_BYTES, Watch};
use crate::{Disk, Error, ImageFormat, Result};
use imago::file::File as ImageFile;
use imago::format::gate::DenyImplicitOpenGate;
use imago::qcow2::{Qcow2, Qcow2CreateBuilder};
use imago::{FormatAccess, FormatCreateBuilder};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// How many ranges are looked at in one go.
const RANGES_MAX: usize = 1024;

/// Writes `disk` to a new raw image at `path`, sparse where it is zero. It is there whole and durable, or not at all.
///
/// Error: also where something is at `path` already.
pub fn to_new_raw(disk: &Disk, path: &Path) -> Result<()> {
    to_new(disk, path, ImageFormat::Raw, &mut |_| Ok(()))
}

/// The same in either format; `watch` hears how far it has got, of the disk's bytes.
pub fn to_new(disk: &Disk, path: &Path, format: ImageFormat, watch: Watch<'_>) -> Result<()> {
    let name = path.display().to_string();
    if path.symlink_metadata().is_ok() {
        return Err(Error::refused(name, "it exists", "name another file"));
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = tempfile::Builder::new().prefix(".keyframe-commit-").tempfile_in(folder);
    let file = file.map_err(Error::io(&name, "make a file beside"))?;
    let target = Target::new(file.as_file(), format, disk.disk_bytes());
    let target = target.map_err(Error::io(&name, "prepare"))?;
    copy(disk, &target, &name, watch)?;
    target.finish().map_err(Error::io(&name, "finish"))?;
    file.as_file().sync_all().map_err(Error::io(&name, "sync"))?;
    file.persist_noclobber(path).map_err(|e| Error::io(&name, "put in place")(e.error))?;
    let folder = File::open(folder).and_then(|folder| folder.sync_all());
    folder.map_err(Error::io(name, "sync the directory of"))
}

/// Makes an empty qcow2 image of a disk of `disk_bytes` at `path`, for whoever puts another beneath it.
///
/// Error: also where something is at `path` already.
pub fn empty_qcow2(path: &Path, disk_bytes: u64) -> Result<()> {
    let name = path.display().to_string();
    let file = File::options().read(true).write(true).create_new(true).open(path);
    let file = file.map_err(Error::io(&name, "make"))?;
    let made = Target::new(&file, ImageFormat::Qcow2, disk_bytes).and_then(Target::finish);
    made.map_err(Error::io(name, "make a qcow2 image of"))
}

fn copy(disk: &Disk, target: &Target<'_>, name: &str, watch: Watch<'_>) -> Result<()> {
    let mut at = 0;
    let mut chunk = vec![0; CHUNK_BYTES as usize];
    while at < disk.disk_bytes() {
        for (start, bytes, zero) in disk.status(at, disk.disk_bytes() - at, RANGES_MAX)? {
            at = start + bytes;
            let mut from = if zero { at } else { start };
            while from < at {
                let part = &mut chunk[..(at - from).min(CHUNK_BYTES) as usize];
                disk.read(from, part)?;
                target.write(part, from).map_err(Error::io(name, "write"))?;
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
