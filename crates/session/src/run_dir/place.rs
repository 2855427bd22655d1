//! Where run directories are, so that the path of each of their sockets fits into a socket address
//! (107 bytes).
//!
//! A long name gets a short directory, in which the file `name` holds the name. A runtime directory
//! whose own path is too long is not used; a directory in `/tmp` stands for it.

use super::{io, make_private};
use crate::error::RunDirError;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The longest name of a directory that is the VM's own name, in bytes.
const ENTRY_BYTES_MAX: usize = 32;
/// The longest path of the directory above the run directories, in bytes: `/.restored/`, a
/// directory, and `/0/watchdog.sock` follow it.
const BASE_BYTES_MAX: usize = 107 - 11 - ENTRY_BYTES_MAX - 17;
/// Begins the hash in the name of a directory. No VM's name has this character.
const HASH_MARK: char = '~';
/// The file with the VM's name, in a directory that does not have it.
const NAME: &str = "name";
const NAME_BYTES_MAX: u64 = 256;

/// Returns the name of the directory of VM `name`.
pub(super) fn entry(name: &str) -> String {
    if name.len() <= ENTRY_BYTES_MAX {
        return name.to_owned();
    }
    let mut end = ENTRY_BYTES_MAX - 9;
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{HASH_MARK}{}", name.get(..end).unwrap_or_default(), short_hash(name.as_bytes()))
}

/// Writes `name` into its directory, if the directory's own name is another.
pub(super) fn write_name(directory: &Path, name: &str) -> Result<(), RunDirError> {
    if entry(name) == name {
        return Ok(());
    }
    let path = directory.join(NAME);
    std::fs::write(&path, name).map_err(|source| io("write", &path, source))
}

/// Returns the name of the VM that has this directory.
pub(super) fn name_of(directory: &Path) -> String {
    let own = directory.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
    if !own.contains(HASH_MARK) {
        return own;
    }
    let mut name = String::new();
    let read = File::open(directory.join(NAME))
        .and_then(|file| file.take(NAME_BYTES_MAX).read_to_string(&mut name));
    if read.is_ok() && entry(&name) == own { name } else { own }
}

/// Returns the directory above all run directories, private to this user, and creates it.
pub(super) fn base() -> Result<PathBuf, RunDirError> {
    let uid = rustix::process::getuid();
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    // One that is set and does not exist was made for a login that is over.
    let base = match runtime.filter(|dir| dir.is_dir()) {
        Some(dir) => dir.join("keyframe"),
        None if uid.is_root() && Path::new("/run").is_dir() => PathBuf::from("/run/keyframe"),
        None => std::env::temp_dir().join(format!("keyframe-{}", uid.as_raw())),
    };
    if base.as_os_str().len() <= BASE_BYTES_MAX {
        make_private(&base)?;
        return Ok(base);
    }
    let short = PathBuf::from(format!("/tmp/keyframe-{}", uid.as_raw()));
    make_private(&short)?;
    let stand_in = short.join(format!(".{}", short_hash(base.as_os_str().as_bytes())));
    make_private(&stand_in)?;
    Ok(stand_in)
}

/// Eight hexadecimal digits that tell texts apart.
fn short_hash(text: &[u8]) -> String {
    blake3::hash(text).to_hex().chars().take(8).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_name_has_a_short_directory_and_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let long = "n".repeat(64);
        let others = ["web", "日本", &*"日".repeat(21), &*format!("{}x", "n".repeat(63)), &*long];
        let mut entries = std::collections::BTreeSet::new();
        for name in others {
            let entry = entry(name);
            assert!(entry.len() <= ENTRY_BYTES_MAX, "{entry}");
            let directory = folder.path().join(&entry);
            std::fs::create_dir(&directory).unwrap();
            write_name(&directory, name).unwrap();
            assert_eq!(name_of(&directory), name);
            assert!(entries.insert(entry));
        }
        // A name that is not the directory's is not believed.
        std::fs::write(folder.path().join(entry(&long)).join(NAME), "another").unwrap();
        assert_eq!(name_of(&folder.path().join(entry(&long))), entry(&long));
    }
}
