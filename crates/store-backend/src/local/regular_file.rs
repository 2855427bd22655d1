//! Opens files of a store without leaving its directory. No symbolic link is followed, and no FIFO
//! makes the caller wait.
//!
//! A store may come from another user. A link in it could make Keyframe read, empty or remove files
//! that are not of the store. Only the directory of the store itself may be a link, because the
//! user names that one.
//!
//! This does not protect a directory in which another user changes names at the same time.

use super::io_error;
use crate::error::FileRefusal;
use crate::{Error, Result};
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Opens the file at `path` as `options` say. Errors: `path` is a symbolic link, or another thing
/// than a regular file; the file cannot be opened.
pub fn open_regular(options: &mut OpenOptions, path: &Path) -> Result<File> {
    let mut open = |flags: OFlags| options.custom_flags(flags.bits() as i32).open(path);
    let opened = match open(OFlags::NOFOLLOW | OFlags::NONBLOCK) {
        // Another host or program has a lease on the file, which it gives back when asked to wait.
        Err(e) if e.kind() == io::ErrorKind::WouldBlock && is_regular(path) => {
            open(OFlags::NOFOLLOW)
        }
        other => other,
    };
    let file = match opened {
        Err(_) if path.symlink_metadata().is_ok_and(|about| !about.is_file()) => {
            return Err(refused(path, "regular file"));
        }
        other => other.map_err(|e| io_error(path, "open", e))?,
    };
    let about = file.metadata().map_err(|e| io_error(path, "look at", e))?;
    if about.is_file() { Ok(file) } else { Err(refused(path, "regular file")) }
}

fn is_regular(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|about| about.is_file())
}

/// Returns the path of the file `name` in the store at `root`. Errors: a folder on the way is a
/// symbolic link, or another thing than a directory; it cannot be examined.
pub fn path_in(root: &Path, name: &str) -> Result<PathBuf> {
    if let Some((folder, _)) = name.rsplit_once('/') {
        require_folder(root, folder)?;
    }
    Ok(root.join(name))
}

/// Checks that `folder` and the folders around it, in the store at `root`, are directories or
/// missing. Errors: one is a symbolic link, or another thing; it cannot be examined.
pub fn require_folder(root: &Path, folder: &str) -> Result<()> {
    let mut path = root.to_path_buf();
    for part in folder.split('/') {
        path.push(part);
        match path.symlink_metadata() {
            Ok(about) if about.is_dir() => {}
            Ok(_) => return Err(refused(&path, "directory")),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(io_error(&path, "look at", e)),
        }
    }
    Ok(())
}

fn refused(path: &Path, expected: &str) -> Error {
    let problem = format!(
        "this is no {expected}; Keyframe follows no symbolic link inside a store and opens no \
         special file"
    );
    let fix = "find out who put it there, and remove it; to keep a folder of the store elsewhere, \
               mount that directory in its place (mount --bind)"
        .into();
    let source = io::Error::new(io::ErrorKind::InvalidData, FileRefusal { problem, fix });
    io_error(path, "open", source)
}
