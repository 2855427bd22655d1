//! Paths as processes in other directories, and on other hosts, need them.

use super::Failure;
use keyframe_store::backend::is_remote;
use std::path::{Path, PathBuf};

/// Returns the absolute form of a path.
pub fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(path).map_err(|e| Failure::new(format!("resolve {}: {e}", path.display())))
}

/// The same of a store, which need not be a path.
pub fn absolute_store(place: &Path) -> Result<PathBuf, Failure> {
    if is_remote(place) { Ok(place.to_owned()) } else { absolute(place) }
}
