//! The files that make up an image: itself, its external data file, its backing files, and theirs.

mod reference;

use crate::overlay::medium::read_or_zero;
use crate::{Error, ImageFormat, Result};
pub use reference::BackingReference;
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The largest number of files of one image, its backing files and data files included.
pub const FILES_MAX: usize = 64;
/// The longest name of a backing file or a data file that an image may have.
const NAME_BYTES_MAX: u64 = 1023;
/// The length of the header of qcow2 version 3, and of version 2.
const HEADER_BYTES: usize = 104;
const HEADER_2_BYTES: u64 = 72;
const MAGIC: &[u8] = b"QFI\xfb";
/// The header extensions that name a data file, and the format of the backing file.
const DATA_FILE: u32 = 0x4441_5441;
const BACKING_FORMAT: u32 = 0xe279_2aca;
/// The most header extensions that are read.
const EXTENSIONS_MAX: usize = 64;

/// Returns the files of the image at `path`: the image first, then, from the topmost image down,
/// the data file and the backing file of each image that has one. Returns `path` alone for a raw
/// image, and does not read it.
///
/// Errors: [`Error::Io`] if an image of the chain cannot be read; [`Error::Refused`] for more than
/// [`FILES_MAX`] files, and for a backing image that Keyframe cannot read ([`backing`]).
pub fn image_files(path: &Path, format: ImageFormat) -> Result<Vec<PathBuf>> {
    let mut files = vec![path.to_owned()];
    for below in chain(path, format)? {
        files.extend(below.data_file);
        files.extend(below.backing);
    }
    Ok(files)
}

/// Returns the backing files of the image at `path`, the topmost first. Returns none for a raw
/// image.
///
/// Errors: those of [`image_files`].
pub fn backing_files(path: &Path, format: ImageFormat) -> Result<Vec<PathBuf>> {
    Ok(chain(path, format)?.into_iter().filter_map(|below| below.backing).collect())
}

/// What each image of the chain names, from the image at `path` on. Errors: those of
/// [`image_files`].
fn chain(path: &Path, format: ImageFormat) -> Result<Vec<Below>> {
    let mut chain: Vec<Below> = Vec::new();
    let mut seen = BTreeSet::new();
    let mut next = (format != ImageFormat::Raw).then(|| path.to_owned());
    while let Some(image) = next.take().filter(|image| seen.insert(image.clone())) {
        let name = image.display().to_string();
        let named = named_in(&image).map_err(Error::io(&name, "read"))?;
        let backing = backing_of(&image, &named)?;
        let below = Below {
            is_raw: backing.as_ref().is_some_and(|b| b.format == Some(ImageFormat::Raw)),
            backing: backing.map(|backing| backing.path),
            data_file: named.data_file,
        };
        next = below.backing.clone().filter(|_| !below.is_raw);
        chain.push(below);
        let files = chain.iter().map(Below::files).sum::<usize>() + 1;
        if files > FILES_MAX {
            return Err(Error::refused(
                path.display().to_string(),
                format!("it has more than {FILES_MAX} backing files"),
                "shorten the chain: qemu-img rebase, or qemu-img convert",
            ));
        }
    }
    Ok(chain)
}

/// Returns the image that the qcow2 image at `path` names as its backing image, with its format if
/// the reference or another field of the header tells it. Returns `None` if the image has no
/// backing image, or is not a qcow2 image.
///
/// Errors: [`Error::Io`] if the image at `path` cannot be read; [`Error::Refused`] if the backing
/// image is not a local file, is described in a way that Keyframe does not support, or has another
/// format than raw and qcow2.
pub fn backing(path: &Path) -> Result<Option<BackingReference>> {
    let name = path.display().to_string();
    backing_of(path, &named_in(path).map_err(Error::io(&name, "read"))?)
}

fn backing_of(path: &Path, named: &Named) -> Result<Option<BackingReference>> {
    let Some(name) = &named.backing else { return Ok(None) };
    let folder = path.parent().unwrap_or(Path::new("/"));
    let refused = |reason: String| {
        let image = path.display();
        Error::refused(
            image.to_string(),
            format!("its backing image {name} {reason}"),
            format!(
                "let QEMU open the disk (--disk bitmap), or make one image of it: qemu-img convert \
                 -O qcow2 {image} NEW.qcow2"
            ),
        )
    };
    let found = BackingReference::parse(name, folder).map_err(refused)?;
    // The header names the format, so it is not guessed: the image's first bytes may be those of
    // another format.
    let of_header = match named.backing_format.as_deref() {
        None => None,
        Some(format) => Some(
            ImageFormat::named(format)
                .ok_or_else(|| refused(format!("has the format {format}")))?,
        ),
    };
    Ok(Some(BackingReference { format: found.format.or(of_header), ..found }))
}

/// What the header of an image names.
#[derive(Default)]
struct Named {
    data_file: Option<PathBuf>,
    backing: Option<String>,
    backing_format: Option<String>,
}

/// The files that an image names.
struct Below {
    data_file: Option<PathBuf>,
    backing: Option<PathBuf>,
    /// True if the backing file has no header.
    is_raw: bool,
}

impl Below {
    fn files(&self) -> usize {
        usize::from(self.data_file.is_some()) + usize::from(self.backing.is_some())
    }
}

/// What the header of the qcow2 image at `path` names. Nothing for another file. Error: the file
/// cannot be read, or ends before a name that its header announces.
fn named_in(path: &Path) -> io::Result<Named> {
    let file = File::open(path)?;
    let mut header = [0u8; HEADER_BYTES];
    read_or_zero(&file, 0, &mut header)?;
    if !header.starts_with(MAGIC) {
        return Ok(Named::default());
    }
    let folder = path.parent().unwrap_or(Path::new("/"));
    let number = |at: usize, len: usize| {
        header[at..at + len].iter().fold(0u64, |n, b| n << 8 | u64::from(*b))
    };
    let mut named = Named::default();
    let (offset, len) = (number(8, 8), number(16, 4));
    if offset != 0 && len != 0 && len <= NAME_BYTES_MAX {
        named.backing = Some(text_at(&file, offset, len)?);
    }
    let mut at = if number(4, 4) >= 3 { number(100, 4) } else { HEADER_2_BYTES };
    for _ in 0..EXTENSIONS_MAX {
        let mut head = [0u8; 8];
        read_or_zero(&file, at, &mut head)?;
        let [kind, len] = [&head[..4], &head[4..]]
            .map(|part| part.iter().fold(0u32, |n, b| n << 8 | u32::from(*b)));
        if kind == 0 {
            break;
        }
        if u64::from(len) <= NAME_BYTES_MAX {
            match kind {
                DATA_FILE => {
                    let name = text_at(&file, at + 8, len.into())?;
                    named.data_file = Some(folder.join(name));
                }
                BACKING_FORMAT => {
                    named.backing_format = Some(text_at(&file, at + 8, len.into())?);
                }
                _ => {}
            }
        }
        at = at.saturating_add(8 + u64::from(len).next_multiple_of(8));
    }
    Ok(named)
}

fn text_at(file: &File, offset: u64, len: u64) -> io::Result<String> {
    let mut text = vec![0; len as usize];
    file.read_exact_at(&mut text, offset)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A qcow2 header with a backing file and the extensions `extensions`.
    fn image(path: &Path, backing: &str, extensions: &[(u32, &str)]) {
        let mut bytes = vec![0u8; HEADER_BYTES];
        bytes[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
        bytes[100..104].copy_from_slice(&104u32.to_be_bytes());
        for (kind, text) in extensions {
            bytes.extend(kind.to_be_bytes());
            bytes.extend((text.len() as u32).to_be_bytes());
            bytes.extend(text.bytes());
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        }
        bytes.extend([0; 8]);
        if !backing.is_empty() {
            let at = bytes.len() as u64;
            bytes[8..16].copy_from_slice(&at.to_be_bytes());
            bytes[16..20].copy_from_slice(&(backing.len() as u32).to_be_bytes());
            bytes.extend(backing.bytes());
        }
        std::fs::write(path, bytes).unwrap();
    }

    #[test]
    fn a_backing_image_in_another_format_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        std::fs::write(dir.path().join("base"), [0; 512]).unwrap();
        for format in ["vpc", "parallels"] {
            image(&top, "base", &[(BACKING_FORMAT, format)]);
            let told = backing(&top).unwrap_err().to_string();
            assert!(told.contains(&format!("base has the format {format}")), "{told}");
            assert!(image_files(&top, ImageFormat::Qcow2).is_err());
        }
        image(&top, "base", &[]);
        assert_eq!(backing(&top).unwrap().unwrap().format, None);
    }

    #[test]
    fn all_files_of_a_chain_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        image(&at("top"), "middle", &[(DATA_FILE, "top.data"), (BACKING_FORMAT, "qcow2")]);
        let json = format!(
            r#"json:{{"driver":"raw","file":{{"driver":"file","filename":"{}"}}}}"#,
            at("base").display()
        );
        image(&at("middle"), &json, &[(DATA_FILE, "/abs.data")]);
        image(&at("base"), "not-read", &[]);
        let files = image_files(&at("top"), ImageFormat::Qcow2).unwrap();
        let expected = [at("top"), at("top.data"), at("middle"), "/abs.data".into(), at("base")];
        assert_eq!(files, expected);
        assert_eq!(image_files(&at("top"), ImageFormat::Raw).unwrap(), [at("top")]);
        // A chain that contains itself ends.
        image(&at("loop"), "loop", &[]);
        assert_eq!(image_files(&at("loop"), ImageFormat::Qcow2).unwrap().len(), 2);
        std::fs::write(at("short"), MAGIC).unwrap();
        assert_eq!(image_files(&at("short"), ImageFormat::Qcow2).unwrap(), [at("short")]);
    }
}
