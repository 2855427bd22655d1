//! The files that the VM of a checkpoint only reads, and how a bundle holds each.
//!
//! A read-only qcow2 image with images beneath it becomes one qcow2 image, since its header names
//! the others by paths of this machine.

use crate::error::{Error, Result};
use keyframe_disk::chain::image_files;
use keyframe_disk::{Base, Below, ImageFormat, commit};
use keyframe_qemu::named_files;
use keyframe_store::MachineMeta;
use keyframe_vm_disks::read_files;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// A file that a bundle is to hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NeededFile {
    /// The absolute path that the command line means.
    pub path: String,
    /// The format of the image, if other images lie beneath it.
    pub chained: Option<ImageFormat>,
}

/// Returns the files that `machines` only read, each path once, in the order of their
/// paths. Leaves out what a command line names and the checkpoint does not know as a file, such as
/// the firmware that QEMU looks for in its own directory.
///
/// Errors: [`Error::NotRegular`] for a device; an image beneath another one cannot be read.
pub fn needed<'a>(machines: impl Iterator<Item = &'a MachineMeta>) -> Result<Vec<NeededFile>> {
    let mut files = BTreeMap::new();
    for machine in machines {
        let directory = machine.directory();
        let known = machine.read_files.clone();
        let known =
            known.unwrap_or_else(|| read_files::describe(&machine.user_command, &directory));
        for named in named_files(&machine.user_command) {
            let path = directory.join(&named.path);
            let Some(file) = known.iter().find(|file| Path::new(&file.path) == path) else {
                continue;
            };
            let is_file = std::fs::metadata(&path).map_err(Error::io("look at", &path))?.is_file();
            if !is_file {
                let (path, option) = (file.path.clone(), named.option);
                return Err(Error::NotRegular { path, option });
            }
            let chained =
                if named.is_medium { chained(&path, named.format.as_deref())? } else { None };
            files.insert(file.path.clone(), NeededFile { path: file.path.clone(), chained });
        }
    }
    Ok(files.into_values().collect())
}

/// The format of the image at `path` if other images lie beneath it.
fn chained(path: &Path, format: Option<&str>) -> Result<Option<ImageFormat>> {
    let format = match format.and_then(ImageFormat::named) {
        Some(format) => format,
        None => match ImageFormat::probe(path) {
            Ok(format) => format,
            // Of another format: QEMU reads it as it is.
            Err(_) => return Ok(None),
        },
    };
    Ok(Some(format).filter(|_| image_files(path, format).is_ok_and(|files| files.len() > 1)))
}

impl NeededFile {
    /// Returns the path of a file with the content for the bundle: the file itself, or one that is
    /// made in the directory `scratch`. Error: an image cannot be read, or the file not be made.
    pub fn content(&self, scratch: &Path) -> Result<PathBuf> {
        let path = PathBuf::from(&self.path);
        let Some(format) = self.chained else { return Ok(path) };
        let whole = scratch.join("medium.qcow2");
        let image = Below::new(Base::open(&path, format)?, None);
        commit::to_file(&image, &whole, ImageFormat::Qcow2, true, &mut |_| Ok(()))?;
        Ok(whole)
    }
}

/// Returns the length and the hash of the file at `path`. Error: it cannot be read.
pub fn hash(path: &Path) -> io::Result<(u64, blake3::Hash)> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(File::open(path)?)?;
    Ok((hasher.count(), hasher.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_that_the_machine_reads_are_found_each_once() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).display().to_string();
        for name in ["kernel", "cd.iso", "disk.raw"] {
            std::fs::write(at(name), name).unwrap();
        }
        let line = format!(
            "q -kernel {} -bios bios.bin -cdrom cd.iso -drive file={},readonly=on -drive file=w.img",
            at("kernel"),
            at("cd.iso")
        );
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let mut machine = MachineMeta {
            read_files: Some(read_files::describe(&words, dir.path())),
            working_directory: dir.path().display().to_string(),
            user_command: words,
            ..MachineMeta::default()
        };
        let needed = |machine: &MachineMeta| needed([machine, machine].into_iter());
        let paths: Vec<_> = needed(&machine).unwrap().into_iter().map(|file| file.path).collect();
        assert_eq!(paths, [at("cd.iso"), at("kernel")]);
        std::fs::remove_file(at("kernel")).unwrap();
        assert!(matches!(needed(&machine), Err(Error::Io { operation: "look at", .. })));
        machine.read_files = None;
        assert_eq!(needed(&machine).unwrap().len(), 1);
    }
}
