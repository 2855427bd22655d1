//! What this host keeps for a store that is elsewhere, or encrypted: what runs have written to
//! their disks, which is in plain as the images beneath are.
//!
//! ```text
//!   STATE/keyframe/stores/ID/store.url     where the store is
//!                            disks/...     as in a store's directory
//!                            index/...     what the index of deduplication spills
//!   STATE: $XDG_STATE_HOME, else ~/.local/state
//! ```

use crate::{Error, Result};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

const URL: &str = "store.url";

/// Where this host keeps what belongs to this program; none where there is no place for it.
pub fn state_folder() -> Option<PathBuf> {
    let variable =
        |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state =
        variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")))?;
    Some(state.join("keyframe"))
}

/// Where the directory for the store `id` is, or would be; none where there is no place for it.
pub fn path(id: &str) -> Option<PathBuf> {
    Some(state_folder()?.join("stores").join(id))
}

/// The directory for the store `id` at `url`; made where it is not there.
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

/// The store that a local folder is of: itself, or the one that it says.
pub fn store_of(folder: &Path) -> PathBuf {
    std::fs::read_to_string(folder.join(URL)).map_or_else(|_| folder.to_path_buf(), PathBuf::from)
}
