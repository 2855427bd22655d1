//! The image below a disk, and the check that it has not changed since a checkpoint.
//!
//! A checkpoint holds the blocks that the guest wrote over an image. Over any other image these
//! blocks form a disk that never existed, so a changed image is refused. The check compares the
//! length and the modification time of the image and of each of its backing files.

use crate::error::{Error, ImageChange, Result};
use keyframe_disk::{ImageFormat, commit};
use keyframe_qemu::{Backing, BackingImage};
use keyframe_store::{BaseFile, BaseMeta};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Number of parts in the sample of a file, and the length of each.
const SAMPLE_PARTS: u64 = 64;
const SAMPLE_BYTES: u64 = 64 << 10;
/// The longest chain of an image and its backing files.
const CHAIN_MAX: usize = 64;
/// The longest name of a backing file that a qcow2 image may have.
const NAME_BYTES_MAX: u32 = 1023;

/// Describes the image at `path` and its backing files: paths, lengths in bytes, modification times
/// and a hash of a sample of each.
///
/// Errors: a file cannot be read, its path is not UTF-8, or the chain of backing files is too long.
pub fn describe(path: &Path, format: ImageFormat) -> Result<BaseMeta> {
    let path = std::path::absolute(path).map_err(|e| Error::io("resolve", path, e))?;
    let mut files = Vec::new();
    for file in chain(&path, format)? {
        let open = File::open(&file).map_err(|e| Error::io("open", &file, e))?;
        let meta = open.metadata().map_err(|e| Error::io("look at", &file, e))?;
        let len_bytes = length(&open).map_err(|e| Error::io("measure", &file, e))?;
        files.push(BaseFile {
            path: text(&file)?,
            len_bytes,
            modified_s: meta.mtime(),
            modified_ns: meta.mtime_nsec() as u32,
            sample_blake3: sample(&open, len_bytes).map_err(|e| Error::io("read", &file, e))?,
        });
    }
    Ok(BaseMeta { path: text(&path)?, format: format.to_string(), files })
}

/// Checks that the line's `stated` images beneath the image at `path` are those that the image
/// names, which are the ones that are served.
///
/// Errors: [`Error::BackingDiffers`]; a file cannot be read.
pub fn require_chain(path: &Path, format: ImageFormat, stated: &Backing) -> Result<()> {
    if *stated == Backing::default() {
        return Ok(());
    }
    let found = chain(path, format)?.split_off(1);
    let is_named = |(below, file): (&BackingImage, &PathBuf)| {
        let same = match (std::fs::metadata(&below.image), std::fs::metadata(file)) {
            (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
            _ => false,
        };
        // A raw image whose first bytes are those of qcow2 would be served as qcow2.
        let served = ImageFormat::probe(file).map(|format| format.to_string());
        let is_stated =
            |served: String| below.format.as_ref().is_none_or(|stated| *stated == served);
        same && served.is_ok_and(is_stated)
    };
    let same_length = if stated.complete {
        stated.images.len() == found.len()
    } else {
        stated.images.len() <= found.len()
    };
    if same_length && stated.images.iter().zip(&found).all(is_named) {
        return Ok(());
    }
    Err(Error::BackingDiffers {
        path: path.to_owned(),
        stated: stated.images.iter().map(|below| below.image.clone()).collect(),
        found,
    })
}

/// Checks that the image and its backing files are those that `base` describes.
///
/// Errors: [`Error::ImageMissing`], [`Error::ImageChanged`], [`Error::CommitInterrupted`].
pub fn require_unchanged(base: &BaseMeta) -> Result<()> {
    for known in &base.files {
        let path = Path::new(&known.path);
        let open = File::open(path)
            .map_err(|source| Error::ImageMissing { path: path.to_owned(), source })?;
        let meta = open.metadata().map_err(|e| Error::io("look at", path, e))?;
        let len_bytes = length(&open).map_err(|e| Error::io("measure", path, e))?;
        let changed = |change| Error::ImageChanged { path: path.to_owned(), change };
        let same_time =
            (meta.mtime(), meta.mtime_nsec()) == (known.modified_s, i64::from(known.modified_ns));
        if len_bytes == known.len_bytes && same_time {
            continue;
        }
        if let Some(source) = commit::interrupted(path) {
            return Err(Error::CommitInterrupted { path: path.to_owned(), commit: source.clone() });
        }
        if len_bytes != known.len_bytes {
            return Err(changed(ImageChange::Length { then: known.len_bytes, now: len_bytes }));
        }
        let same = sample(&open, len_bytes).map_err(|e| Error::io("read", path, e))?
            == known.sample_blake3;
        return Err(changed(if same {
            ImageChange::Time { modified_s: known.modified_s, modified_ns: known.modified_ns }
        } else {
            ImageChange::Content
        }));
    }
    Ok(())
}

fn text(path: &Path) -> Result<String> {
    path.to_str().map(str::to_owned).ok_or_else(|| Error::PathNotUtf8(path.to_owned()))
}

/// The length in bytes, also of a block device, whose metadata has none.
fn length(mut file: &File) -> std::io::Result<u64> {
    file.seek(SeekFrom::End(0))
}

fn sample(file: &File, len_bytes: u64) -> std::io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    let last = len_bytes.saturating_sub(SAMPLE_BYTES);
    let mut buffer = Vec::with_capacity(SAMPLE_BYTES as usize);
    for part in 0..SAMPLE_PARTS {
        let at = (u128::from(last) * u128::from(part) / u128::from(SAMPLE_PARTS - 1)) as u64;
        let mut from = file;
        from.seek(SeekFrom::Start(at))?;
        buffer.clear();
        from.take(SAMPLE_BYTES).read_to_end(&mut buffer)?;
        hasher.update(&buffer);
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// The image and its backing files, the image first.
fn chain(path: &Path, format: ImageFormat) -> Result<Vec<PathBuf>> {
    let mut files = vec![path.to_owned()];
    if format == ImageFormat::Raw {
        return Ok(files);
    }
    while let Some(last) = files.last() {
        let Some(next) = backing(last).map_err(|e| Error::io("read", last, e))? else {
            return Ok(files);
        };
        if files.len() >= CHAIN_MAX {
            return Err(Error::BackingChainTooLong { path: path.to_owned(), max: CHAIN_MAX });
        }
        files.push(next);
    }
    Ok(files)
}

/// The backing file that a qcow2 image names; the caller finds out whether it can be read.
fn backing(path: &Path) -> std::io::Result<Option<PathBuf>> {
    let file = File::open(path)?;
    let mut header = [0u8; 20];
    if file.read_exact_at(&mut header, 0).is_err() || !header.starts_with(b"QFI\xfb") {
        return Ok(None);
    }
    let number = |at: usize, len: usize| {
        header[at..at + len].iter().fold(0u64, |n, b| n << 8 | u64::from(*b))
    };
    let (offset, len) = (number(8, 8), number(16, 4));
    if offset == 0 || len == 0 || len > u64::from(NAME_BYTES_MAX) {
        return Ok(None);
    }
    let mut name = vec![0u8; len as usize];
    file.read_exact_at(&mut name, offset)?;
    let name = String::from_utf8_lossy(&name).into_owned();
    let name = name.strip_prefix("file:").unwrap_or(&name);
    let folder = path.parent().unwrap_or(Path::new("/"));
    Ok(Some(folder.join(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_changed_is_refused_with_how() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.img");
        std::fs::write(&path, vec![7u8; 1 << 20]).unwrap();
        let base = describe(&path, ImageFormat::Raw).unwrap();
        require_unchanged(&base).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        let modified = file.metadata().unwrap().modified().unwrap();
        file.set_modified(modified + std::time::Duration::from_secs(5)).unwrap();
        let refusal = require_unchanged(&base).unwrap_err();
        assert!(refusal.fix().unwrap().contains("touch -d"), "{refusal}");
        file.write_all_at(b"other", 0).unwrap();
        assert!(require_unchanged(&base).unwrap_err().to_string().contains("content differs"));
        file.set_len(5000).unwrap();
        assert!(require_unchanged(&base).unwrap_err().to_string().contains("5000"));
        std::fs::remove_file(&path).unwrap();
        assert!(require_unchanged(&base).unwrap_err().to_string().contains("a.img"));
    }

    fn qcow2_over(dir: &Path, below: &str) -> PathBuf {
        let mut header = vec![0u8; 4096];
        header[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
        header[8..16].copy_from_slice(&1000u64.to_be_bytes());
        header[16..20].copy_from_slice(&(below.len() as u32).to_be_bytes());
        header[1000..1000 + below.len()].copy_from_slice(below.as_bytes());
        let path = dir.join("a.qcow2");
        std::fs::write(&path, header).unwrap();
        path
    }

    #[test]
    fn the_line_must_name_the_images_that_the_image_names() {
        let dir = tempfile::tempdir().unwrap();
        let (below, other) = (dir.path().join("below.raw"), dir.path().join("other.raw"));
        std::fs::write(&below, [1u8; 4096]).unwrap();
        std::fs::write(&other, [2u8; 4096]).unwrap();
        let path = qcow2_over(dir.path(), "below.raw");
        let check = |images: &[(&Path, &str)], complete| {
            let image = |(path, format): &(&Path, &str)| BackingImage {
                image: path.to_path_buf(),
                format: Some((*format).into()),
            };
            let stated = Backing { images: images.iter().map(image).collect(), complete };
            require_chain(&path, ImageFormat::Qcow2, &stated)
        };
        for complete in [false, true] {
            check(&[(&below, "raw")], complete).unwrap();
            for wrong in
                [&[(&*other, "raw")][..], &[(&below, "qcow2")], &[(&below, "raw"), (&other, "raw")]]
            {
                assert!(
                    matches!(check(wrong, complete), Err(Error::BackingDiffers { .. })),
                    "{wrong:?}"
                );
            }
        }
        check(&[], false).unwrap();
        let hidden = check(&[], true).unwrap_err();
        assert!(hidden.to_string().contains("below.raw"), "{hidden}");
        assert!(hidden.fix().unwrap().contains("qemu-img rebase"), "{hidden}");
    }

    #[test]
    fn a_changed_backing_file_is_refused_too() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("below.raw"), [1u8; 4096]).unwrap();
        qcow2_over(dir.path(), "below.raw");
        let base = describe(&dir.path().join("a.qcow2"), ImageFormat::Qcow2).unwrap();
        assert_eq!(base.files.len(), 2);
        std::fs::write(dir.path().join("below.raw"), [1u8; 8192]).unwrap();
        assert!(require_unchanged(&base).unwrap_err().to_string().contains("below.raw"));
    }
}
