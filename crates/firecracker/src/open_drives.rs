//! Whether this host finds under the path of a drive the file that Firecracker has open.
//!
//! | the path | then |
//! |---|---|
//! | leads to the open file | the drive has this path |
//! | leads to it only in Firecracker's own root and mounts (`jailer`) | the drive has the path that leads to it here; refused if there is none |
//! | leads to another file, or to none | refused: the file was replaced since Firecracker opened it |

use crate::config::Drive;
use crate::outside_path::candidates;
use crate::{Error, Result};
use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The files that a process has open.
pub(crate) struct OpenFiles {
    pid: u32,
    /// The numbers under which it has each file open, by device and inode.
    open: HashMap<(u64, u64), Vec<u32>>,
}

impl OpenFiles {
    /// Looks at the files of process `pid`. Error: it has ended, or may not be inspected.
    pub fn of(pid: u32) -> Result<Self> {
        let folder = PathBuf::from(format!("/proc/{pid}/fd"));
        let entries = std::fs::read_dir(&folder)
            .map_err(Error::io(format!("look at the open files of process {pid}")))?;
        let mut open: HashMap<_, Vec<u32>> = HashMap::new();
        for entry in entries.flatten() {
            let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
            // A descriptor that was closed meanwhile is none of a drive.
            if let Some((file, number)) = identity(&entry.path()).zip(number) {
                open.entry(file).or_default().push(number);
            }
        }
        Ok(Self { pid, open })
    }

    /// Returns the numbers under which the process has the file of `identity` open.
    pub fn numbers(&self, identity: (u64, u64)) -> &[u32] {
        self.open.get(&identity).map_or(&[], Vec::as_slice)
    }

    /// Finds the file of `drive`, whose relative path begins in `directory`. Returns its path on this
    /// host if that is another one than the drive's, and `None` otherwise. Error: [`Error::Drive`].
    pub fn path_outside(&self, drive: &Drive, directory: &Path) -> Result<Option<PathBuf>> {
        let Some(path) = &drive.path_on_host else { return Ok(None) };
        let is_open =
            |path: &Path| identity(path).is_some_and(|file| self.open.contains_key(&file));
        let ours = directory.join(path);
        if is_open(&ours) {
            return Ok(None);
        }
        let theirs = self.absolute(path);
        let mut candidates = candidates(self.pid, &theirs).into_iter();
        if let Some(outside) = candidates.find(|path| path.is_absolute() && is_open(path)) {
            return Ok(Some(outside));
        }
        let below = theirs.strip_prefix("/").unwrap_or(&theirs);
        let (problem, fix) = if is_open(
            &Path::new("/proc").join(self.pid.to_string()).join("root").join(below),
        ) {
            (
                "the file is in a mount that Firecracker has and Keyframe has not",
                "start Firecracker outside of a jail, or with the drive's file on a file system of \
                 the host",
            )
        } else {
            (
                "the file under its path is not the one that Firecracker has open: it was replaced \
                 or removed",
                "give the drive its file anew: PATCH /drives/ID",
            )
        };
        Err(Error::Drive {
            name: drive.drive_id.clone(),
            path: ours,
            problem: problem.into(),
            fix: fix.into(),
        })
    }

    /// Returns `path`, which the process names, from its root directory on.
    fn absolute(&self, path: &Path) -> PathBuf {
        if path.is_absolute() {
            return path.to_owned();
        }
        let directory = std::fs::read_link(format!("/proc/{}/cwd", self.pid)).unwrap_or_default();
        let root = std::fs::read_link(format!("/proc/{}/root", self.pid)).unwrap_or_default();
        Path::new("/").join(directory.strip_prefix(&root).unwrap_or(&directory)).join(path)
    }
}

/// Device and inode of the file at `path`.
pub(crate) fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::VmConfig;
    use serde_json::json;

    #[test]
    fn a_file_that_was_replaced_or_removed_is_found() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("disk");
        let open = std::fs::File::create(&path).unwrap();
        let drives = json!([{ "drive_id": "data", "path_on_host": "disk" }]);
        let config = VmConfig::of(&json!({ "drives": drives })).unwrap();
        let checked = || {
            let open = OpenFiles::of(std::process::id()).unwrap();
            open.path_outside(&config.drives[0], place.path())
        };
        assert_eq!(checked().unwrap(), None);
        std::fs::rename(&path, place.path().join("other")).unwrap();
        assert!(checked().unwrap_err().to_string().contains("replaced or removed"));
        std::fs::write(&path, "another one").unwrap();
        let error = checked().unwrap_err();
        assert!(error.to_string().contains("drive data") && error.fix().is_some(), "{error}");
        drop(open);
    }
}
