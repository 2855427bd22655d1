//! The files that make up an image: itself, its external data file, its backing files, and theirs.

use crate::overlay::medium::read_or_zero;
use crate::{Error, ImageFormat, Result};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The largest number of files of one image, backing files included. The limit ends the search in a
/// chain of backing files that contains itself.
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

/// Returns the files of the image at `path`: the image first, then its backing files and data
/// files.
///
/// Errors: a file of the chain cannot be read; [`Error::Refused`] for more than [`FILES_MAX`]
/// files.
pub fn image_files(path: &Path, format: ImageFormat) -> Result<Vec<PathBuf>> {
    let mut files = vec![path.to_owned()];
    for below in chain(path, format)? {
        files.extend(below.data_file);
        files.extend(below.backing);
    }
    Ok(files)
}

/// Returns the backing files of the image at `path`, the topmost first.
///
/// Errors: those of [`image_files`].
pub fn backing_files(path: &Path, format: ImageFormat) -> Result<Vec<PathBuf>> {
    Ok(chain(path, format)?.into_iter().filter_map(|below| below.backing).collect())
}

/// What each image of the chain names, from the image at `path` on.
fn chain(path: &Path, format: ImageFormat) -> Result<Vec<Below>> {
    let mut chain: Vec<Below> = Vec::new();
    let mut seen = BTreeSet::new();
    let mut next = (format != ImageFormat::Raw).then(|| path.to_owned());
    while let Some(image) = next.take().filter(|image| seen.insert(image.clone())) {
        let name = image.display().to_string();
        let below = below(&image).map_err(Error::io(&name, "read"))?;
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

/// The files that an image names.
#[derive(Default)]
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

/// The files that the qcow2 image at `path` names. None for another file.
fn below(path: &Path) -> io::Result<Below> {
    let file = File::open(path)?;
    let mut header = [0u8; HEADER_BYTES];
    read_or_zero(&file, 0, &mut header)?;
    if !header.starts_with(MAGIC) {
        return Ok(Below::default());
    }
    let folder = path.parent().unwrap_or(Path::new("/"));
    let number = |at: usize, len: usize| {
        header[at..at + len].iter().fold(0u64, |n, b| n << 8 | u64::from(*b))
    };
    let mut below = Below::default();
    let (offset, len) = (number(8, 8), number(16, 4));
    if offset != 0 && len != 0 && len <= NAME_BYTES_MAX {
        below.backing = Some(folder.join(path_in(&text_at(&file, offset, len)?)));
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
                    below.data_file = Some(folder.join(path_in(&name)));
                }
                BACKING_FORMAT => {
                    below.is_raw = text_at(&file, at + 8, len.into())? == "raw";
                }
                _ => {}
            }
        }
        at = at.saturating_add(8 + u64::from(len).next_multiple_of(8));
    }
    Ok(below)
}

fn text_at(file: &File, offset: u64, len: u64) -> io::Result<String> {
    let mut text = vec![0; len as usize];
    file.read_exact_at(&mut text, offset)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// The path in the name of a backing file, which may be a `json:` description of local files.
fn path_in(name: &str) -> String {
    let plain = |name: &str| name.strip_prefix("file:").unwrap_or(name).to_owned();
    let Some(json) = name.strip_prefix("json:") else { return plain(name) };
    let Ok(mut node) = serde_json::from_str::<Value>(json) else { return plain(name) };
    // serde_json bounds the depth.
    loop {
        for key in ["filename", "file.filename"] {
            if let Some(path) = node.get(key).and_then(Value::as_str) {
                return plain(path);
            }
        }
        match node.get_mut("file").map(Value::take) {
            Some(inner) if inner.is_object() => node = inner,
            _ => return plain(name),
        }
    }
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
    fn all_files_of_a_chain_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        image(&at("top"), "middle", &[(DATA_FILE, "top.data"), (BACKING_FORMAT, "qcow2")]);
        let json = r#"json:{"driver":"raw","file":{"driver":"file","filename":"base"}}"#;
        image(&at("middle"), json, &[(BACKING_FORMAT, "raw"), (DATA_FILE, "/abs.data")]);
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
