//! Writes a disk to a new image.

use super::{CHUNK_BYTES, ProgressCallback};
use crate::{BLOCK_BYTES, Error, ImageFormat, Readable, Result};
use imago::file::File as ImageFile;
use imago::format::gate::DenyImplicitOpenGate;
use imago::qcow2::{Qcow2, Qcow2CreateBuilder};
use imago::{FormatAccess, FormatCreateBuilder};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The number of ranges that one query returns.
const RANGES_MAX: usize = 1024;

/// Writes the content of `disk` to a new raw image at `path`, with holes for zeros. After success
/// the image is complete and durable. After an error there is no file at `path`, unless only the
/// sync of its directory failed.
///
/// Errors: [`Error::Refused`] if a file exists at `path` already; [`Error::Io`] if the image cannot
/// be written; those of `disk` if it cannot be read.
pub fn to_new_raw(disk: &dyn Readable, path: &Path) -> Result<()> {
    to_new(disk, path, ImageFormat::Raw, &mut |_| Ok(()))
}

/// Writes a new image in the given format, as [`to_new_raw`] does. Calls `watch` with the number of
/// bytes of the disk processed so far. Errors: those of [`to_new_raw`]; an error of `watch`.
pub fn to_new(
    disk: &dyn Readable,
    path: &Path,
    format: ImageFormat,
    watch: ProgressCallback<'_>,
) -> Result<()> {
    to_file(disk, path, format, false, watch)
}

/// Writes an image as [`to_new`] does. If `replace` is true, an existing file at `path` is no
/// error: a rename replaces it once the new image is complete. After an error before the rename it
/// is unchanged. Errors: those of [`to_new`].
pub fn to_file(
    disk: &dyn Readable,
    path: &Path,
    format: ImageFormat,
    replace: bool,
    watch: ProgressCallback<'_>,
) -> Result<()> {
    let name = path.display().to_string();
    if !replace && path.symlink_metadata().is_ok() {
        return Err(Error::refused(name, "it exists already", "name another file"));
    }
    let folder =
        path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = tempfile::Builder::new().prefix(".keyframe-commit-").tempfile_in(folder);
    let file = file.map_err(Error::io(&name, "create a temporary file for"))?;
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

/// Writes all bytes of `disk` to `out`, from the first to the last, zeros included, and flushes
/// `out`. Calls `watch` with the number of bytes written so far. Errors: [`Error::Io`] if `out`
/// cannot be written; those of `disk` if it cannot be read; an error of `watch`.
pub fn to_stream(
    disk: &dyn Readable,
    out: &mut dyn Write,
    watch: ProgressCallback<'_>,
) -> Result<()> {
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

/// Creates an empty qcow2 image at `path`, for a disk of `disk_bytes` bytes. The image has no
/// backing file; the caller sets one.
///
/// Error: [`Error::Io`] if a file exists at `path`, or if the image cannot be written. An
/// incomplete file may then be left at `path`.
pub fn empty_qcow2(path: &Path, disk_bytes: u64) -> Result<()> {
    let name = path.display().to_string();
    let file = File::options().read(true).write(true).create_new(true).open(path);
    let file = file.map_err(Error::io(&name, "create"))?;
    let made = Target::new(&file, ImageFormat::Qcow2, disk_bytes).and_then(Target::finish);
    made.map_err(Error::io(name, "create the qcow2 image"))
}

fn copy(
    disk: &dyn Readable,
    target: &Target<'_>,
    name: &str,
    watch: ProgressCallback<'_>,
) -> Result<()> {
    let mut at = 0;
    let mut chunk = vec![0; CHUNK_BYTES as usize];
    while at < disk.disk_bytes() {
        for range in disk.ranges(at, disk.disk_bytes() - at, RANGES_MAX)? {
            at = range.offset + range.len_bytes;
            let mut from = if range.is_zero { at } else { range.offset };
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

/// The new image. Before the copy all its bytes are zero.
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

    /// Writes the blocks of `data` that are not zero, neighbouring blocks with one call. Error: the
    /// image cannot be written.
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
