//! Whether this host finds under the path of a drive the file that Firecracker has open.
//!
//! | the path | then |
//! |---|---|
//! | leads to the open file | the drive can be captured, and found by a restore |
//! | leads to it only below Firecracker's own root (`jailer`) | refused: a restored VM would not find it |
//! | leads to another file, or to none | refused: the file was replaced since Firecracker opened it |

use crate::config::Drive;
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

    /// Checks that the file of `drive` is open. Its relative path begins in `directory`. Error:
    /// [`Error::Drive`].
    pub fn require(&self, drive: &Drive, directory: &Path) -> Result<()> {
        let Some(path) = &drive.path_on_host else { return Ok(()) };
        let is_open =
            |path: &Path| identity(path).is_some_and(|file| self.open.contains_key(&file));
        let ours = directory.join(path);
        if is_open(&ours) {
            return Ok(());
        }
        let theirs = match path.strip_prefix("/") {
            Ok(below) => PathBuf::from(format!("/proc/{}/root", self.pid)).join(below),
            Err(_) => PathBuf::from(format!("/proc/{}/cwd", self.pid)).join(path),
        };
        let (problem, fix) = if is_open(&theirs) {
            (
                "Firecracker has another root directory than Keyframe, and a restored VM would not \
                 find the file",
                "start Firecracker outside of a jail, or where the file has the same path",
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
}

/// Device and inode of the file at `path`.
fn identity(path: &Path) -> Option<(u64, u64)> {
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
        let checked =
            || OpenFiles::of(std::process::id()).unwrap().require(&config.drives[0], place.path());
        checked().unwrap();
        std::fs::rename(&path, place.path().join("other")).unwrap();
        assert!(checked().unwrap_err().to_string().contains("replaced or removed"));
        std::fs::write(&path, "another one").unwrap();
        let error = checked().unwrap_err();
        assert!(error.to_string().contains("drive data") && error.fix().is_some(), "{error}");
        drop(open);
    }
}
