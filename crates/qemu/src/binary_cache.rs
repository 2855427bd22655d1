//! Facts about QEMU binaries, which are found out once: a file for each binary in the cache.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The longest file that is read.
const FILE_BYTES_MAX: u64 = 4096;

/// Returns what the cache `cache` holds in its directory `directory` about the binary with the hash
/// `binary`; `None` if that is nothing, or no `T`.
pub fn load<T: DeserializeOwned>(cache: &Path, directory: &str, binary: &str) -> Option<T> {
    let path = path(cache, directory, binary);
    let bytes = std::fs::metadata(&path).ok()?.len();
    let text = (bytes <= FILE_BYTES_MAX).then(|| std::fs::read(&path).ok()).flatten()?;
    serde_json::from_slice(&text).ok()
}

/// Writes `fact` to where [`load`] finds it. If the cache cannot be written, the fact has to be
/// found out again.
pub fn store<T: Serialize>(cache: &Path, directory: &str, binary: &str, fact: &T) {
    let path = path(cache, directory, binary);
    let temporary = path.with_extension(std::process::id().to_string());
    let written = serde_json::to_vec(fact).map_err(std::io::Error::from).and_then(|text| {
        DirBuilder::new().mode(0o700).recursive(true).create(cache.join(directory))?;
        std::fs::write(&temporary, text)?;
        std::fs::rename(&temporary, &path)
    });
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
}

fn path(cache: &Path, directory: &str, binary: &str) -> PathBuf {
    cache.join(directory).join(format!("{binary}.json"))
}
