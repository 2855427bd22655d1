//! What was read of packs, kept near: in memory, and in files of this user.
//!
//! ```text
//!   part wanted ─▶ in memory? ─▶ in CACHE/objects/NAME, and its hash holds? ─▶ from the bucket
//!
//!   NAME: BLAKE3 of endpoint, bucket, key, tag and length, as hexadecimal digits     CACHE: $XDG_CACHE_HOME/keyframe,
//!   file: the part, then 32 bytes BLAKE3 of it                                              ~/.cache/keyframe
//! ```
//!
//! Invariants: it holds at most [`DISK_BYTES_MAX`] and [`MEMORY_BYTES_MAX`], but for what several processes add at once; a file
//! that does not hold is taken for none; nothing depends on it, so that its errors are no errors. The bytes are those
//! of the bucket: where the store is encrypted, so are they.

use super::client::Listed;
use std::collections::VecDeque;
use std::fs::{DirBuilder, File};
use std::io::Read;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

const DISK_BYTES_MAX: u64 = 1 << 30;
const MEMORY_BYTES_MAX: usize = 64 << 20;
const HASH_BYTES: usize = 32;
/// What files are read at all.
const FILE_BYTES_MAX: u64 = 256 << 20;
/// A look at the whole directory for every so many bytes added.
const LOOK_EVERY_BYTES: u64 = DISK_BYTES_MAX / 16;

/// Parts of packs.
#[derive(Debug)]
pub struct Cache {
    /// None where there is no place for one.
    folder: Option<PathBuf>,
    /// Before the keys: other places have other parts.
    place: String,
    memory: Mutex<VecDeque<(String, Arc<Vec<u8>>)>>,
    added_bytes: AtomicU64,
}

impl Cache {
    /// For the place of that name, which is one and the same on all machines.
    pub fn new(folder: Option<PathBuf>, place: &str) -> Self {
        let folder = folder
            .map(|folder| folder.join("objects"))
            .filter(|folder| DirBuilder::new().mode(0o700).recursive(true).create(folder).is_ok());
        let place = place.to_owned();
        Self { folder, place, memory: Mutex::default(), added_bytes: AtomicU64::new(LOOK_EVERY_BYTES) }
    }

    fn name(&self, part: &Listed) -> String {
        let Listed { name, len_bytes, tag } = part;
        blake3::hash(format!("{}\0{name}\0{tag}\0{len_bytes}", self.place).as_bytes()).to_hex().to_string()
    }

    /// A part, if it is here.
    pub fn get(&self, part: &Listed) -> Option<Arc<Vec<u8>>> {
        let name = self.name(part);
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = memory.iter().position(|(known, _)| *known == name) {
            let found = memory.remove(at)?;
            memory.push_back(found.clone());
            return Some(found.1);
        }
        drop(memory);
        let bytes = Arc::new(self.read(&name).filter(|bytes| bytes.len() as u64 == part.len_bytes)?);
        self.remember(name, &bytes);
        Some(bytes)
    }

    /// Keeps a part. One without a tag could be mistaken for another.
    pub fn put(&self, part: &Listed, bytes: &Arc<Vec<u8>>) {
        if part.tag.is_empty() || bytes.len() as u64 != part.len_bytes {
            return;
        }
        let name = self.name(part);
        self.write(&name, bytes);
        self.remember(name, bytes);
    }

    fn remember(&self, name: String, bytes: &Arc<Vec<u8>>) {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        memory.retain(|(known, _)| *known != name);
        memory.push_back((name, bytes.clone()));
        let mut held: usize = memory.iter().map(|(_, bytes)| bytes.len()).sum();
        while held > MEMORY_BYTES_MAX && memory.len() > 1 {
            held -= memory.pop_front().map_or(0, |(_, bytes)| bytes.len());
        }
    }

    fn read(&self, name: &str) -> Option<Vec<u8>> {
        let path = self.folder.as_ref()?.join(name);
        let mut file = File::open(&path).ok()?;
        let len = file.metadata().ok()?.len();
        if len > FILE_BYTES_MAX || len < HASH_BYTES as u64 {
            return None;
        }
        let mut bytes = Vec::with_capacity(len as usize);
        file.by_ref().take(FILE_BYTES_MAX).read_to_end(&mut bytes).ok()?;
        let hash = bytes.split_off(bytes.len().checked_sub(HASH_BYTES)?);
        if *blake3::hash(&bytes).as_bytes() != *hash {
            let _ = std::fs::remove_file(&path);
            return None;
        }
        // Read last: removed last.
        let _ = file.set_modified(SystemTime::now());
        Some(bytes)
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        let Some(folder) = &self.folder else { return };
        let before = self.added_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        if before + bytes.len() as u64 > LOOK_EVERY_BYTES {
            self.added_bytes.store(0, Ordering::Relaxed);
            make_room(folder);
        }
        let written = tempfile::Builder::new().prefix(".").tempfile_in(folder).and_then(|mut file| {
            std::io::Write::write_all(&mut file, bytes)?;
            std::io::Write::write_all(&mut file, blake3::hash(bytes).as_bytes())?;
            file.persist(folder.join(name)).map_err(std::io::Error::from)
        });
        drop(written);
    }
}

/// Removes what was read longest ago, and what a killed process left.
fn make_room(folder: &std::path::Path) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    let mut files: Vec<(SystemTime, u64, PathBuf)> = entries
        .flatten()
        .filter_map(|entry| {
            let about = entry.metadata().ok()?;
            Some((about.modified().ok()?, about.len(), entry.path()))
        })
        .collect();
    files.sort_unstable();
    let mut held: u64 = files.iter().map(|(_, len, _)| len).sum();
    for (_, len, path) in files {
        if held + LOOK_EVERY_BYTES <= DISK_BYTES_MAX {
            break;
        }
        if std::fs::remove_file(path).is_ok() {
            held -= len;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(tag: &str, len_bytes: u64) -> Listed {
        Listed { name: "packs/00000001.pack/000000000000".into(), len_bytes, tag: tag.into() }
    }

    #[test]
    fn a_part_is_found_by_tag_and_only_while_its_bytes_hold() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = Arc::new(vec![7; 1000]);
        let at = || Cache::new(Some(dir.path().to_path_buf()), "here");
        at().put(&part("a", 1000), &bytes);
        assert_eq!(at().get(&part("a", 1000)), Some(bytes.clone()));
        assert_eq!(at().get(&part("b", 1000)), None);
        assert_eq!(at().get(&part("a", 999)), None);
        assert_eq!(Cache::new(Some(dir.path().to_path_buf()), "there").get(&part("a", 1000)), None);
        let file = std::fs::read_dir(dir.path().join("objects")).unwrap().next().unwrap().unwrap().path();
        let mut flipped = std::fs::read(&file).unwrap();
        flipped[500] ^= 1;
        std::fs::write(&file, flipped).unwrap();
        assert_eq!(at().get(&part("a", 1000)), None);
        assert!(!file.exists());
        let none = Cache::new(None, "here");
        none.put(&part("a", 1000), &bytes);
        assert_eq!(none.get(&part("a", 1000)), Some(bytes));
    }

    #[test]
    fn memory_is_bounded() {
        let cache = Cache::new(None, "here");
        let bytes = Arc::new(vec![0; 20 << 20]);
        for tag in ["a", "b", "c", "d", "e"] {
            cache.put(&part(tag, 20 << 20), &bytes);
        }
        assert_eq!(cache.get(&part("a", 20 << 20)), None);
        assert!(cache.get(&part("e", 20 << 20)).is_some());
        assert_eq!(cache.memory.lock().unwrap().len(), 3);
    }
}
