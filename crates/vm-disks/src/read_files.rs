//! The files of a command line that a VM only reads: their identity in a checkpoint, and the check
//! that they have not changed.
//!
//! A medium that changed (a disk, a CD) would not fit the guest's RAM. A kernel or a firmware that
//! changed is loaded at the guest's next boot only.
//!
//! Limit: as for images ([`crate::base_image`]), a file of more than 4 MiB that was changed in few
//! places, and whose modification time was set back, passes.

use crate::base_image::{length, sample};
use keyframe_disk::ImageFormat;
use keyframe_disk::chain::image_files;
use keyframe_qemu::{NamedFile, ReadFile, named_files};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The most files that are noted.
const FILES_MAX: usize = 256;
/// The longest file whose sample holds all of its bytes.
const WHOLE_SAMPLE_BYTES: u64 = 64 * (64 << 10);

/// A file that differs from the one at the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedFile {
    /// The file at the checkpoint.
    pub file: ReadFile,
    /// How it differs.
    pub change: FileChange,
}

/// The difference between a file and its state at the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileChange {
    /// There is none of this name, or it cannot be read.
    Missing,
    /// Its length differs.
    Length {
        /// The length at the checkpoint, in bytes.
        then: u64,
        /// The length now, in bytes.
        now: u64,
    },
    /// Other content.
    Content,
    /// Another modification time; the samples of its content are the same.
    Time,
}

impl fmt::Display for ChangedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ReadFile { path, option, .. } = &self.file;
        write!(f, "{path} ({option}) has changed since the checkpoint: ")?;
        match self.change {
            FileChange::Missing => f.write_str("it is missing"),
            FileChange::Length { then, now } => write!(f, "it had {then} bytes, and has {now}"),
            FileChange::Content => f.write_str("its content differs"),
            FileChange::Time => {
                f.write_str("its modification time differs, and perhaps its content")
            }
        }
    }
}

/// Returns the identities of the files that a VM only reads. `words` is its line, the binary first.
/// Relative paths begin in `directory`. Leaves out files that cannot be read, such as those that
/// the VM got as descriptors.
pub fn describe(words: &[String], directory: &Path) -> Vec<ReadFile> {
    let mut files: Vec<ReadFile> = Vec::new();
    for named in named_files(words) {
        let path = directory.join(&named.path);
        let format = named.format.as_deref().and_then(ImageFormat::named);
        let format = format.or_else(|| ImageFormat::probe(&path).ok());
        let all = match format.filter(|_| named.is_medium) {
            Some(format) => image_files(&path, format).unwrap_or_else(|_| vec![path.clone()]),
            None => vec![path],
        };
        for path in all {
            let Ok(file) = identity(&named, &path) else { continue };
            if files.len() < FILES_MAX && !files.contains(&file) {
                files.push(file);
            }
        }
    }
    files
}

/// Returns the identities of the media `files` of a VM, each with the name of its drive. Relative
/// paths begin in `directory`. Error: one of them cannot be read.
pub fn describe_media(files: &[(String, PathBuf)], directory: &Path) -> io::Result<Vec<ReadFile>> {
    let of = |(drive, path): &(String, PathBuf)| {
        let named = NamedFile { option: drive.clone(), is_medium: true, ..NamedFile::default() };
        identity(&named, &directory.join(path))
    };
    files.iter().map(of).collect()
}

/// Returns the identities of the files of the changed line `words`, as [`describe`] does. A file that
/// is in `known` keeps its identity.
pub fn renewed(known: &[ReadFile], words: &[String], directory: &Path) -> Vec<ReadFile> {
    let of_known = |file: &ReadFile| known.iter().find(|known| known.path == file.path).cloned();
    let now = describe(words, directory).into_iter();
    now.map(|file| of_known(&file).unwrap_or(file)).collect()
}

fn identity(named: &NamedFile, path: &Path) -> io::Result<ReadFile> {
    let text = path.to_str().ok_or(io::ErrorKind::InvalidInput)?;
    // Another kind of file may block when it is opened.
    let kind = std::fs::metadata(path)?;
    if !kind.is_file() && kind.mode() & 0o170_000 != 0o060_000 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let file = File::open(path)?;
    let meta = file.metadata()?;
    let len_bytes = length(&file)?;
    Ok(ReadFile {
        path: text.to_owned(),
        option: named.option.clone(),
        is_medium: named.is_medium,
        len_bytes,
        modified: (meta.mtime(), meta.mtime_nsec() as u32),
        changed: (meta.ctime(), meta.ctime_nsec() as u32),
        sample_blake3: sample(&file, len_bytes)?,
    })
}

/// Returns those of `files` that differ from their noted state, in the same order.
pub fn changed(files: &[ReadFile]) -> Vec<ChangedFile> {
    let change = |file: &ReadFile| Some(ChangedFile { file: file.clone(), change: change(file)? });
    files.iter().filter_map(change).collect()
}

/// True if nothing has changed the file or its inode since its state was noted. Then it need not be
/// read: a program can set a file's modification time back, and that changes the inode's time.
fn is_untouched(then: &ReadFile) -> bool {
    std::fs::metadata(&then.path).is_ok_and(|now| {
        now.is_file()
            && now.len() == then.len_bytes
            && (now.mtime(), now.mtime_nsec() as u32) == then.modified
            && (now.ctime(), now.ctime_nsec() as u32) == then.changed
    })
}

fn change(then: &ReadFile) -> Option<FileChange> {
    if is_untouched(then) {
        return None;
    }
    let named = NamedFile::default();
    let Ok(now) = identity(&named, Path::new(&then.path)) else { return Some(FileChange::Missing) };
    if now.len_bytes != then.len_bytes {
        return Some(FileChange::Length { then: then.len_bytes, now: now.len_bytes });
    }
    if now.sample_blake3 != then.sample_blake3 {
        return Some(FileChange::Content);
    }
    let is_sampled_in_part = then.len_bytes > WHOLE_SAMPLE_BYTES;
    (is_sampled_in_part && now.modified != then.modified).then_some(FileChange::Time)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_medium_that_was_inserted_is_described_and_the_others_stay_as_they_were() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["kernel", "one", "two"] {
            std::fs::write(dir.path().join(name), name).unwrap();
        }
        let words = |cd: &str| ["q", "-kernel", "kernel", "-cdrom", cd].map(str::to_owned);
        let first = describe(&words("one"), dir.path());
        std::fs::write(dir.path().join("kernel"), "another").unwrap();
        let now = renewed(&first, &words("two"), dir.path());
        let names = |files: &[ReadFile]| {
            files
                .iter()
                .map(|file| file.path.rsplit('/').next().unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(
            (names(&first), names(&now)),
            (vec!["kernel".into(), "one".into()], vec!["kernel".into(), "two".into()])
        );
        assert_eq!(changed(&now).len(), 1, "the kernel has changed since the VM's start");
    }

    #[test]
    fn changed_files_are_found_with_how() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["kernel", "cd", "gone", "same", "fw"] {
            std::fs::write(at(name), vec![5u8; 10_000]).unwrap();
        }
        let line = "q -kernel kernel -cdrom cd -initrd gone -bios same -fw_cfg name=opt/x,file=fw \
                    -drive file=none,readonly=on -dtb /dev/zero";
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let files = describe(&words, dir.path());
        assert_eq!(files.len(), 5, "{files:?}");
        assert_eq!(changed(&files), []);
        // Older kernels count the times of files in ticks.
        std::thread::sleep(std::time::Duration::from_millis(20));
        std::fs::write(at("kernel"), [5u8; 3]).unwrap();
        std::fs::write(at("cd"), vec![6u8; 10_000]).unwrap();
        std::fs::remove_file(at("gone")).unwrap();
        // A copy is the same file.
        std::fs::copy(at("same"), at("copy")).unwrap();
        std::fs::rename(at("copy"), at("same")).unwrap();
        let found = changed(&files);
        let how: Vec<_> =
            found.iter().map(|c| (c.file.option.as_str(), c.file.is_medium, c.change)).collect();
        assert_eq!(
            how,
            [
                ("-kernel", false, FileChange::Length { then: 10_000, now: 3 }),
                ("-cdrom", true, FileChange::Content),
                ("-initrd", false, FileChange::Missing),
            ]
        );
        assert!(found[1].to_string().contains("has changed since the checkpoint"));
    }
}
