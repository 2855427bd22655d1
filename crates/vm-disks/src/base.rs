//! The image beneath a disk: what it is, and whether it is still that.
//!
//! A checkpoint holds what was written above an image. Over another image it would give a disk that
//! never was, so an image that has changed since is refused: by the length and the time of change
//! of it and of each image that it stands on.

use keyframe_disk::{ImageFormat, commit};
use keyframe_failure::Failure;
use keyframe_store::{BaseFile, BaseMeta};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// How many parts of a file its sample has, and how long each is.
const SAMPLE_PARTS: u64 = 64;
const SAMPLE_BYTES: u64 = 64 << 10;
/// As many images may stand on each other.
const CHAIN_MAX: usize = 64;
/// The longest name of a backing file that a qcow2 image may have.
const NAME_BYTES_MAX: u32 = 1023;

/// What the image at `path` is now.
pub fn describe(path: &Path, format: ImageFormat) -> Result<BaseMeta, Failure> {
    let path = std::path::absolute(path).map_err(|e| failed("resolve", path, &e))?;
    let mut files = Vec::new();
    for file in chain(&path, format)? {
        let open = File::open(&file).map_err(|e| failed("open", &file, &e))?;
        let meta = open.metadata().map_err(|e| failed("look at", &file, &e))?;
        let len_bytes = length(&open).map_err(|e| failed("measure", &file, &e))?;
        files.push(BaseFile {
            path: text(&file)?,
            len_bytes,
            modified_s: meta.mtime(),
            modified_ns: meta.mtime_nsec() as u32,
            sample_blake3: sample(&open, len_bytes).map_err(|e| failed("read", &file, &e))?,
        });
    }
    Ok(BaseMeta { path: text(&path)?, format: format.to_string(), files })
}

/// Refuses an image that is not what `base` describes any more.
pub fn require_unchanged(base: &BaseMeta) -> Result<(), Failure> {
    for known in &base.files {
        let path = Path::new(&known.path);
        let put_back = |e: std::io::Error| {
            failed("open", path, &e)
                .fix("the checkpoint stands on this image: put it back where it was")
        };
        let open = File::open(path).map_err(put_back)?;
        let meta = open.metadata().map_err(|e| failed("look at", path, &e))?;
        let len_bytes = length(&open).map_err(|e| failed("measure", path, &e))?;
        let changed = |how: String| {
            Failure::new(format!(
                "{} has changed since the checkpoint, which stands on it: {how}",
                path.display()
            ))
        };
        let same_time =
            (meta.mtime(), meta.mtime_nsec()) == (known.modified_s, i64::from(known.modified_ns));
        if len_bytes == known.len_bytes && same_time {
            continue;
        }
        if let Some(source) = commit::interrupted(path) {
            let problem =
                format!("{}: a commit of {source} into it was interrupted", path.display());
            return Err(
                Failure::new(problem).fix("finish it first: run keyframe commit --in-place again")
            );
        }
        if len_bytes != known.len_bytes {
            let how = format!("it had {} bytes and has {len_bytes}", known.len_bytes);
            return Err(changed(how).fix("put the image back as it was"));
        }
        let same =
            sample(&open, len_bytes).map_err(|e| failed("read", path, &e))? == known.sample_blake3;
        return Err(if same {
            changed("its time of change is another, though the parts of it that were compared are the same".into()).fix(
                format!(
                    "put the image back as it was; where you are sure that it is the same, say so by: touch -d @{}.{:09} {}",
                    known.modified_s,
                    known.modified_ns,
                    path.display()
                ),
            )
        } else {
            changed("it holds something else".into()).fix("put the image back as it was")
        });
    }
    Ok(())
}

fn failed(operation: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(format!("{operation} {}: {error}", path.display()))
}

fn text(path: &Path) -> Result<String, Failure> {
    path.to_str().map(str::to_owned).ok_or_else(|| {
        Failure::new(format!("{}: its path is not UTF-8", path.display())).fix("name it by a link")
    })
}

/// A block device has no length of its own.
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

/// The image and those that it stands on.
fn chain(path: &Path, format: ImageFormat) -> Result<Vec<PathBuf>, Failure> {
    let mut files = vec![path.to_owned()];
    if format == ImageFormat::Raw {
        return Ok(files);
    }
    while let Some(last) = files.last() {
        let Some(next) = backing(last).map_err(|e| failed("read", last, &e))? else {
            return Ok(files);
        };
        if files.len() >= CHAIN_MAX {
            return Err(Failure::new(format!(
                "{}: more than {CHAIN_MAX} images stand on each other",
                path.display()
            ))
            .fix("convert it to one: qemu-img convert -O qcow2"));
        }
        files.push(next);
    }
    Ok(files)
}

/// The backing file that a qcow2 image names. Whether it can be read is for whoever opens it.
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
        assert!(refusal.fix.unwrap().contains("touch -d"), "{}", refusal.message);
        file.write_all_at(b"other", 0).unwrap();
        assert!(require_unchanged(&base).unwrap_err().message.contains("something else"));
        file.set_len(5000).unwrap();
        assert!(require_unchanged(&base).unwrap_err().message.contains("5000"));
        std::fs::remove_file(&path).unwrap();
        assert!(require_unchanged(&base).unwrap_err().message.contains("a.img"));
    }

    #[test]
    fn what_an_image_stands_on_counts_too() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("below.raw"), [1u8; 4096]).unwrap();
        let mut header = vec![0u8; 4096];
        header[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
        header[8..16].copy_from_slice(&1000u64.to_be_bytes());
        header[16..20].copy_from_slice(&9u32.to_be_bytes());
        header[1000..1009].copy_from_slice(b"below.raw");
        std::fs::write(dir.path().join("a.qcow2"), header).unwrap();
        let base = describe(&dir.path().join("a.qcow2"), ImageFormat::Qcow2).unwrap();
        assert_eq!(base.files.len(), 2);
        std::fs::write(dir.path().join("below.raw"), [1u8; 8192]).unwrap();
        assert!(require_unchanged(&base).unwrap_err().message.contains("below.raw"));
    }
}
