//! The image below an overlay, opened read-only.
//!
//! A raw image is read directly. The library `imago` reads qcow2 (with backing files, compressed
//! clusters, an external data file). Encrypted images, other formats and unknown features are
//! refused with the cause.

use crate::chain::{self, BackingReference};
use crate::disk::ReadNow;
use crate::overlay::medium::{flock, read_now, read_or_zero};
use crate::{Error, Result, commit};
use imago::file::File as ImageFile;
use imago::format::Format;
use imago::format::gate::ImplicitOpenGate;
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{FormatAccess, FormatDriverBuilder, Mapping, StorageOpenOptions};
use rustix::fs::{FlockOperation, SeekFrom};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::io;
use std::path::Path;

/// The format of a disk image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImageFormat {
    /// The disk's bytes, without a header.
    Raw,
    /// QEMU's format, version 2 or 3.
    Qcow2,
}

impl fmt::Display for ImageFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        })
    }
}

/// The first bytes of formats that are not supported, at offset 0.
const UNSUPPORTED: [(&[u8], &str); 6] = [
    (b"KDMV", "VMDK"),
    (b"vhdxfile", "VHDX"),
    (b"QED\0", "QED"),
    (b"LUKS\xba\xbe", "LUKS"),
    (b"<<< Oracle VM VirtualBox", "VDI"),
    (b"conectix", "VPC"),
];

impl ImageFormat {
    /// Detects the format of the file at `path` from its first bytes, for a drive whose format was
    /// not given. Bytes of no known format mean [`Self::Raw`]. A raw disk may begin with the bytes
    /// of another format because its guest wrote them, so a format that was given takes precedence.
    ///
    /// Errors: [`Error::Refused`] if it looks like an unsupported format; [`Error::Io`] if the file
    /// cannot be read.
    pub fn probe(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let file = File::open(path).map_err(Error::io(&name, "open"))?;
        let mut start = [0u8; 64];
        read_or_zero(&file, 0, &mut start).map_err(Error::io(&name, "read"))?;
        if start.starts_with(b"QFI\xfb") {
            return Ok(Self::Qcow2);
        }
        match UNSUPPORTED.iter().find(|(magic, _)| start.starts_with(magic)) {
            Some((_, format)) => {
                Err(convert(&name, &format!("it looks like {format}, which is not supported")))
            }
            None => Ok(Self::Raw),
        }
    }

    /// Returns the format of this name, as QEMU spells it. `None` if the name is neither `raw` nor
    /// `qcow2`.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "raw" => Some(Self::Raw),
            "qcow2" => Some(Self::Qcow2),
            _ => None,
        }
    }
}

fn convert(name: &str, problem: &str) -> Error {
    Error::refused(name, problem, format!("convert it: qemu-img convert -O qcow2 {name} NEW.qcow2"))
}

/// The image below an overlay. Read-only.
#[derive(Debug)]
pub struct Base {
    image: Image,
    /// Held while the image is served.
    _lock: Option<Lock>,
    name: String,
    disk_bytes: u64,
}

#[derive(Debug)]
enum Image {
    Raw(File),
    Qcow2(Box<FormatAccess<ImageFile>>),
    /// No file; all bytes are zero.
    Blank,
}

impl Base {
    /// Creates a base without a file: a disk of `bytes` zero bytes, rounded up to a multiple of
    /// 512. Error: [`Error::Refused`] if the size exceeds the largest offset in a file (8 EiB).
    pub fn blank(bytes: u64) -> Result<Self> {
        let name = String::from("a blank disk");
        let disk_bytes = whole_sectors(bytes, &name)?;
        Ok(Self { image: Image::Blank, _lock: None, name, disk_bytes })
    }

    /// Opens the image at `path` and its backing files for reading. Locks the image against commits
    /// until the base is dropped.
    ///
    /// Errors: [`Error::Refused`] if an image cannot be read in its format, or if a commit into the
    /// image at `path` is under way or was interrupted; [`Error::Io`] if a file cannot be opened or
    /// locked, or if the mark of a commit cannot be read.
    pub fn open(path: &Path, format: ImageFormat) -> Result<Self> {
        let name = path.display().to_string();
        let lock = Lock::shared(path, &name)?;
        // Checked after the lock is held, because a running commit holds it.
        if let Some(source) = commit::marked_source(path)? {
            let problem = format!(
                "a commit of {source} into it was interrupted, and it is neither old nor new"
            );
            let fix = "finish it first: run keyframe commit --in-place again";
            return Err(Error::refused(name, problem, fix));
        }
        Ok(Self { _lock: Some(lock), ..Self::open_marked(path, format)? })
    }

    /// Opens an image as [`Self::open`] does, also if a commit into it was interrupted. Takes no
    /// lock: the caller holds one, or takes it afterwards. Errors: [`Error::Refused`] if an image
    /// cannot be read in its format; [`Error::Io`] if a file cannot be opened.
    pub(crate) fn open_marked(path: &Path, format: ImageFormat) -> Result<Self> {
        let name = path.display().to_string();
        let (image, bytes) = match format {
            ImageFormat::Raw => {
                let file = File::open(path).map_err(Error::io(&name, "open"))?;
                // A block device has no length in its metadata.
                let bytes = io::Seek::seek(&mut &file, io::SeekFrom::End(0))
                    .map_err(Error::io(&name, "measure"))?;
                (Image::Raw(file), bytes)
            }
            ImageFormat::Qcow2 => {
                let image = open_qcow2(path, BackingFileGate::default())?;
                let image = FormatAccess::new(image);
                let bytes = image.size();
                (Image::Qcow2(Box::new(image)), bytes)
            }
        };
        let disk_bytes = whole_sectors(bytes, &name)?;
        Ok(Self { image, _lock: None, name, disk_bytes })
    }

    /// Returns the size of the disk in bytes, a multiple of 512.
    pub fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    /// Fills `buf` from byte `offset` of the disk on. Bytes past the end of the disk are zero.
    /// Error: [`Error::Io`] if the image cannot be read.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let read = match &self.image {
            Image::Raw(file) => read_or_zero(file, offset, buf),
            Image::Qcow2(image) => image.read(buf, offset),
            Image::Blank => {
                buf.fill(0);
                Ok(())
            }
        };
        read.map_err(|e| Error::io(format!("{} at {offset}", self.name), "read")(e))
    }

    /// Reads as [`Self::read`] does, but without waiting for a device. If the result is not
    /// `ReadNow::Done`, the content of `buf` is undefined. For a qcow2 image the result is always
    /// `ReadNow::Unknown`. Errors: those of [`Self::read`].
    pub fn read_now(&self, offset: u64, buf: &mut [u8]) -> Result<ReadNow> {
        match &self.image {
            Image::Raw(file) => read_now(file, offset, buf)
                .map(|read| if read { ReadNow::Done } else { ReadNow::WouldWait })
                .map_err(|e| Error::io(format!("{} at {offset}", self.name), "read")(e)),
            Image::Qcow2(_) => Ok(ReadNow::Unknown),
            Image::Blank => {
                buf.fill(0);
                Ok(ReadNow::Done)
            }
        }
    }

    /// Tells whether the bytes from byte `offset` of the disk on are known to be zero. Looks at no
    /// more than `len` bytes. Returns the number of bytes that the answer holds for (1 to `len`),
    /// and true if these bytes are known to be zero. False means that they may have content. Error:
    /// [`Error::Io`] if the image cannot be queried.
    pub fn status(&self, offset: u64, len: u64) -> Result<(u64, bool)> {
        let status = match &self.image {
            Image::Raw(file) => raw_status(file, offset, len),
            Image::Qcow2(image) => {
                image.get_mapping(offset, len).map(|(mapping, bytes)| match mapping {
                    Mapping::Zero { .. } => (bytes, true),
                    Mapping::Eof { .. } => (len, true),
                    _ => (bytes, false),
                })
            }
            Image::Blank => Ok((len, true)),
        };
        let (bytes, zero) =
            status.map_err(|e| Error::io(format!("{} at {offset}", self.name), "look at")(e))?;
        Ok((bytes.clamp(1, len.max(1)), zero))
    }
}

/// A lock on an image among Keyframe's processes: shared by the processes that serve it, exclusive
/// for one that writes it.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    fn shared(path: &Path, name: &str) -> Result<Self> {
        let file = File::open(path).map_err(Error::io(name, "open"))?;
        match flock(&file, FlockOperation::NonBlockingLockShared) {
            Ok(()) => Ok(Self { _file: file }),
            Err(Errno::WOULDBLOCK) => Err(Error::refused(
                name,
                "a commit into it is under way",
                "wait until that one ends",
            )),
            Err(e) => Err(Error::io(name, "lock")(e)),
        }
    }

    /// Locks `file`, which is open for writing, exclusively: by `flock` against other processes of
    /// Keyframe, and by `fcntl` against QEMU. Errors: [`Error::Locked`] if another process holds a
    /// lock; [`Error::Io`] if the file cannot be locked.
    pub(crate) fn alone(file: File, name: &str) -> Result<Self> {
        let kinds = [
            flock(&file, FlockOperation::NonBlockingLockExclusive),
            rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive),
        ];
        for locked in kinds {
            match locked {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK | Errno::ACCESS) => {
                    return Err(Error::Locked { object: name.into() });
                }
                Err(e) => return Err(Error::io(name, "lock")(e)),
            }
        }
        Ok(Self { _file: file })
    }
}

/// Rounds up to whole sectors of 512 bytes, as QEMU does. Error: [`Error::Refused`] if the size
/// exceeds [`DISK_BYTES_MAX`].
fn whole_sectors(bytes: u64, name: &str) -> Result<u64> {
    let disk_bytes = bytes.checked_next_multiple_of(512).filter(|bytes| *bytes <= DISK_BYTES_MAX);
    disk_bytes.ok_or_else(|| {
        Error::refused(name, format!("a disk of {bytes} bytes"), "its size must be at most 8 EiB")
    })
}

/// The largest possible offset in a file.
const DISK_BYTES_MAX: u64 = i64::MAX as u64 / 4096 * 4096;

fn raw_status(file: &File, offset: u64, len: u64) -> io::Result<(u64, bool)> {
    match rustix::fs::seek(file, SeekFrom::Data(offset)) {
        Ok(data) if data > offset => Ok((len.min(data - offset), true)),
        Ok(_) => match rustix::fs::seek(file, SeekFrom::Hole(offset)) {
            Ok(hole) if hole > offset => Ok((len.min(hole - offset), false)),
            Ok(_) => Ok((len, false)),
            Err(e) => Err(e.into()),
        },
        // From `offset` on, the file has only a hole, or ends.
        Err(Errno::NXIO) => Ok((len, true)),
        // The file system or device cannot tell.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok((len, false)),
        Err(e) => Err(e.into()),
    }
}

/// The largest depth of backing files. A chain that contains itself must end.
const BACKING_MAX: u32 = 64;

/// Opens backing files: read-only, and only qcow2 and raw.
#[derive(Clone, Copy, Default)]
pub(crate) struct BackingFileGate {
    depth: u32,
    /// True if the image itself may be written. Its backing files never are.
    writes: bool,
}

impl BackingFileGate {
    pub(crate) fn for_writing() -> Self {
        Self { writes: true, ..Self::default() }
    }

    fn below(self) -> Self {
        Self { depth: self.depth + 1, writes: false }
    }
}

/// Opens the qcow2 image at `path`, with the images beneath it. Errors: [`Error::Refused`] if one
/// of them is encrypted or cannot be read in its format, or if there are too many; [`Error::Io`] if
/// a file cannot be opened.
pub(crate) fn open_qcow2(path: &Path, gate: BackingFileGate) -> Result<Qcow2<ImageFile>> {
    let name = path.display().to_string();
    not_encrypted(path).map_err(|e| refusal(&name, &e))?;
    let builder = Qcow2::<ImageFile>::builder_path(path).write(gate.writes);
    // `imago` takes any other reference for the name of a file.
    let described = chain::backing(path)?.filter(|backing| !backing.is_plain);
    let builder = match described {
        Some(_) if gate.depth >= BACKING_MAX => {
            let problem = format!("it has more than {BACKING_MAX} backing files above it");
            return Err(convert(&name, &problem));
        }
        Some(BackingReference { path, format, .. }) => {
            let format = format.map_or_else(|| ImageFormat::probe(&path), Ok)?;
            builder.backing(Some(open_backing(&path, format, gate.below())?))
        }
        None => builder,
    };
    builder.open(gate).map_err(|e| unreadable_qcow2(&name, &e))
}

fn open_backing(
    path: &Path,
    format: ImageFormat,
    gate: BackingFileGate,
) -> Result<FormatAccess<ImageFile>> {
    match format {
        ImageFormat::Qcow2 => open_qcow2(path, gate).map(FormatAccess::new),
        ImageFormat::Raw => {
            let name = path.display().to_string();
            let raw = Raw::<ImageFile>::builder_path(path).write(false).open(gate);
            raw.map(FormatAccess::new).map_err(|e| refusal(&name, &e))
        }
    }
}

impl ImplicitOpenGate<ImageFile> for BackingFileGate {
    fn open_format<F: FormatDriverBuilder<ImageFile>>(
        &mut self,
        builder: F,
    ) -> io::Result<FormatAccess<ImageFile>> {
        let unsupported =
            |problem: String| Err(io::Error::new(io::ErrorKind::Unsupported, problem));
        let path = builder.get_image_path();
        let name = path
            .as_ref()
            .map_or_else(|| "a backing file".into(), |path| path.display().to_string());
        if self.depth >= BACKING_MAX {
            return unsupported(format!(
                "{name} has more than {BACKING_MAX} backing files above it"
            ));
        }
        match F::FORMAT {
            Format::Raw => {}
            Format::Qcow2 => {
                if let Some(path) = path {
                    let image = open_qcow2(&path, self.below()).map_err(as_io)?;
                    return Ok(FormatAccess::new(image));
                }
            }
            _ => return unsupported(format!("its backing file {name} is neither raw nor qcow2")),
        }
        let driver = builder.write(false).open(self.below())?;
        Ok(FormatAccess::new(driver))
    }

    fn open_storage(&mut self, builder: StorageOpenOptions) -> io::Result<ImageFile> {
        imago::Storage::open(if self.writes { builder } else { builder.write(false) })
    }
}

/// Checks that the image is not encrypted: `imago` ignores encryption and would return the
/// encrypted bytes. Errors: it is encrypted; it cannot be read.
fn not_encrypted(path: &Path) -> io::Result<()> {
    let mut header = [0u8; 36];
    read_or_zero(&File::open(path)?, 0, &mut header)?;
    if header.starts_with(b"QFI\xfb") && header[32..36] != [0; 4] {
        let problem = format!("{} is encrypted, which is not supported", path.display());
        return Err(io::Error::new(io::ErrorKind::Unsupported, problem));
    }
    Ok(())
}

fn as_io(error: Error) -> io::Error {
    let kind = match &error {
        Error::Io { source, .. } => source.kind(),
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}

/// The error of an image that `imago` does not open, although QEMU may do so.
fn unreadable_qcow2(name: &str, error: &io::Error) -> Error {
    match refusal(name, error) {
        Error::Refused { object, problem, fix } => Error::Refused {
            object,
            problem,
            fix: format!("let QEMU open the disk (--disk bitmap), or {fix}"),
        },
        other => other,
    }
}

fn refusal(name: &str, error: &io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => Error::Io {
            object: name.into(),
            operation: "open",
            source: io::Error::new(error.kind(), error.to_string()),
        },
        _ => convert(name, &format!("it cannot be read as qcow2: {error}")),
    }
}
