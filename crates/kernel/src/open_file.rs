//! The read position of another process in a file.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The most open files of a process that are looked at.
const FILES_MAX: usize = 1 << 16;

/// A file that another process has open.
#[derive(Clone, Copy, Debug)]
pub struct OpenFile {
    pid: u32,
    number: u32,
}

impl OpenFile {
    /// Finds the file at `path`, under whatever name process `pid` opened it. Returns `None` if the
    /// process has not opened it, or if we may not inspect the process.
    pub fn of(pid: u32, path: &Path) -> Option<Self> {
        let same =
            |one: &Metadata, other: &Metadata| (one.dev(), one.ino()) == (other.dev(), other.ino());
        let wanted = std::fs::metadata(path).ok()?;
        let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?.take(FILES_MAX).flatten();
        let mut found = entries
            .filter(|entry| std::fs::metadata(entry.path()).is_ok_and(|is| same(&is, &wanted)))
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        found.next().map(|number| Self { pid, number })
    }

    /// Returns the offset of the next read, in bytes. A reader with a buffer has read ahead of what
    /// it uses. Returns `None` if the kernel does not tell.
    pub fn offset(self) -> Option<u64> {
        let text =
            std::fs::read_to_string(format!("/proc/{}/fdinfo/{}", self.pid, self.number)).ok()?;
        text.lines().find_map(|line| line.strip_prefix("pos:")?.trim().parse().ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn a_reader_is_followed() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[1; 100]).unwrap();
        let own = std::process::id();
        // The writer's own hold is another: only the reader's is left open.
        let path = file.into_temp_path();
        assert!(OpenFile::of(own, &path).is_none());
        let mut reader = std::fs::File::open(&path).unwrap();
        let seen = OpenFile::of(own, &path).unwrap();
        assert_eq!(seen.offset(), Some(0));
        reader.read_exact(&mut [0; 40]).unwrap();
        assert_eq!(seen.offset(), Some(40));
        assert!(OpenFile::of(own, &path.with_extension("none")).is_none());
        assert!(OpenFile::of(u32::MAX, &path).is_none());
    }
}
