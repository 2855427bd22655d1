//! The image below a disk, and the check that it has not changed since a checkpoint.
//!
//! A checkpoint holds the blocks that the guest wrote over an image. Over any other image these
//! blocks form a disk that never existed, so a changed image is refused. The check compares the
//! length and the modification time of the image, of its data file and of each of its backing
//! files. If the inode has changed although the modification time has not, it compares samples of
//! the content: a program can set the modification time back.
//!
//! Limit: a file of more than 4 MiB that was changed in few places, and whose modification time was
//! set back, passes.

use crate::error::{Error, ImageChange, Result};
use keyframe_disk::chain::{backing_files, image_files};
use keyframe_disk::{ImageFormat, commit};
use keyframe_qemu::{Backing, BackingImage};
use keyframe_store::{BaseFile, BaseMeta};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Number of parts in the sample of a file, and the length of each.
const SAMPLE_PARTS: u64 = 64;
const SAMPLE_BYTES: u64 = 64 << 10;

/// Returns the description of the image at `path` and its backing files: paths, lengths in bytes,
/// modification times and a hash of a sample of each.
///
/// Errors: a file cannot be read, its path is not UTF-8, or the chain of backing files is too long.
pub fn describe(path: &Path, format: ImageFormat) -> Result<BaseMeta> {
    let path = std::path::absolute(path).map_err(|e| Error::io("resolve", path, e))?;
    let mut files = Vec::new();
    for file in image_files(&path, format)? {
        let open = File::open(&file).map_err(|e| Error::io("open", &file, e))?;
        let meta = open.metadata().map_err(|e| Error::io("look at", &file, e))?;
        let len_bytes = length(&open).map_err(|e| Error::io("measure", &file, e))?;
        files.push(BaseFile {
            path: text(&file)?,
            len_bytes,
            modified_s: meta.mtime(),
            modified_ns: meta.mtime_nsec() as u32,
            sample_blake3: sample(&open, len_bytes).map_err(|e| Error::io("read", &file, e))?,
            changed: Some((meta.ctime(), meta.ctime_nsec() as u32)),
        });
    }
    Ok(BaseMeta { path: text(&path)?, format: format.to_string(), files })
}

/// Checks that the images that the command line states beneath the image at `path` (`stated`) are
/// those that the image itself names, which are the ones that are served.
///
/// Errors: [`Error::BackingDiffers`] if they are others; a file cannot be read.
pub fn require_chain(path: &Path, format: ImageFormat, stated: &Backing) -> Result<()> {
    if *stated == Backing::default() {
        return Ok(());
    }
    let found = backing_files(path, format)?;
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
/// Errors: [`Error::ImageMissing`] if a file cannot be opened, [`Error::CommitInterrupted`] if a
/// commit into it did not complete, [`Error::ImageChanged`] if its length, time or content differs,
/// [`Error::Io`] if it cannot be read.
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
        let changed_at = (meta.ctime(), meta.ctime_nsec() as u32);
        if len_bytes == known.len_bytes && same_time {
            let is_untouched = known.changed.is_none_or(|then| then == changed_at);
            let is_same = || sample(&open, len_bytes).map(|now| now == known.sample_blake3);
            if is_untouched || is_same().map_err(|e| Error::io("read", path, e))? {
                continue;
            }
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
pub(crate) fn length(mut file: &File) -> std::io::Result<u64> {
    file.seek(SeekFrom::End(0))
}

pub(crate) fn sample(file: &File, len_bytes: u64) -> std::io::Result<String> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

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
    fn a_changed_image_with_its_old_time_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.img");
        std::fs::write(&path, vec![7u8; 1 << 20]).unwrap();
        let base = describe(&path, ImageFormat::Raw).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        let modified = file.metadata().unwrap().modified().unwrap();
        file.set_modified(modified).unwrap();
        require_unchanged(&base).unwrap();
        file.write_all_at(b"other", 1000).unwrap();
        file.set_modified(modified).unwrap();
        assert!(require_unchanged(&base).unwrap_err().to_string().contains("content differs"));
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
