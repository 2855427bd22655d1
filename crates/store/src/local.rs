//! The directory on this host for a store that is remote or encrypted. It holds what runs have
//! written to their disks, not encrypted, as the images beneath.
//!
//! ```text
//!   STATE/keyframe/stores/ID/store.url     the place of the store
//!                            disks/...     as in a store's directory
//!                            index/...     spills of the deduplication index
//!   STATE: $XDG_STATE_HOME, else ~/.local/state
//! ```

use crate::{Error, Result};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

const URL: &str = "store.url";

/// Returns the directory of this program's state on this host; `None` if the environment names
/// none.
pub fn state_folder() -> Option<PathBuf> {
    let variable =
        |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state =
        variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")))?;
    Some(state.join("keyframe"))
}

/// Returns the path of the directory for the store `id`; `None` if the environment names none.
pub fn path(id: &str) -> Option<PathBuf> {
    Some(state_folder()?.join("stores").join(id))
}

/// Returns the directory for the store `id` at `url`. Makes it if it does not exist. Error: it
/// cannot be made, or the environment names no place for it.
pub fn folder(id: &str, url: &Path) -> Result<PathBuf> {
    let folder = path(id).ok_or_else(|| Error::Io {
        object: url.display().to_string(),
        operation: "find a directory for what stays on this host",
        source: io::Error::new(io::ErrorKind::NotFound, "neither XDG_STATE_HOME nor HOME is set"),
    })?;
    let failed = |operation| move |source| Error::Io { object: folder_name(id), operation, source };
    std::fs::DirBuilder::new()
        .mode(0o700)
        .recursive(true)
        .create(&folder)
        .map_err(failed("make directory"))?;
    let text = url.to_string_lossy();
    if std::fs::read_to_string(folder.join(URL)).ok().as_deref() != Some(&*text) {
        std::fs::write(folder.join(URL), &*text).map_err(failed("write store.url"))?;
    }
    Ok(folder)
}

fn folder_name(id: &str) -> String {
    format!("keyframe/stores/{id} in the directory for state")
}

/// Returns the store that a local directory belongs to: itself, or the store in its `store.url`.
pub fn store_of(folder: &Path) -> PathBuf {
    std::fs::read_to_string(folder.join(URL)).map_or_else(|_| folder.to_path_buf(), PathBuf::from)
}
