//! The directory of the stores: in memory, so that the medium is no part of the comparison.
//!
//! The directory is in `/dev/shm` if that has enough space and `TMPDIR` is not set, otherwise among the
//! temporary files.

use crate::{Error, Options};
use keyframe_scratch_directory::ScratchDirectory;
use rustix::fs::statvfs;
use std::path::Path;

const MEMORY: &str = "/dev/shm";

/// Makes a directory with at least `bytes` of free space.
pub fn make(options: &Options, bytes: u64) -> Result<ScratchDirectory, Error> {
    let in_memory = std::env::var_os("TMPDIR").is_none() && free_bytes(Path::new(MEMORY)) > bytes;
    let parent = if in_memory { Path::new(MEMORY).to_path_buf() } else { std::env::temp_dir() };
    let made = ScratchDirectory::new_in(&parent, "bench-store");
    let directory = made.map_err(Error::io(format!("make a directory in {}", parent.display())))?;
    let free = free_bytes(&parent);
    if free < bytes {
        let problem = format!(
            "{} has {} MiB free, and {} are needed",
            parent.display(),
            free >> 20,
            bytes >> 20
        );
        return Err(Error::failed("find space for the stores", problem));
    }
    options.say(format!("the stores are in {}", parent.display()));
    Ok(directory)
}

fn free_bytes(dir: &Path) -> u64 {
    statvfs(dir).map_or(0, |stat| stat.f_bavail.saturating_mul(stat.f_frsize))
}
