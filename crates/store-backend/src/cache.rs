//! Pieces of remote stores, cached in memory and in files that all processes of a user on this host
//! share.
//!
//! ```text
//!   get(key) ─▶ in memory? ─▶ in ROOT/FOLDER/KEY with the right hash? ─▶ none: read the store
//!
//!   ROOT   $KEYFRAME_CACHE, else $XDG_CACHE_HOME/keyframe, else ~/.cache/keyframe
//!   KEY    the key of the piece, in hexadecimal digits
//!   file   the piece, then its BLAKE3 hash (32 bytes)
//! ```
//!
//! Invariants:
//! - The cache holds at most [`CacheLimits`], plus the pieces that several processes add at the
//!   same time.
//! - A file appears whole. A file whose hash does not match (the machine lost power) is ignored.
//! - Errors of the cache are ignored: the store has the same bytes. Bytes of an encrypted store are
//!   cached encrypted.

use keyframe_locks::IgnorePoison;
use std::collections::VecDeque;
use std::fs::{DirBuilder, File};
use std::io::{Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

const HASH_BYTES: usize = 32;
/// Longer files are not read.
const FILE_BYTES_MAX: u64 = 256 << 20;
/// The cache lists its directory each time that this fraction of the limit was added.
const LOOKS: u64 = 16;
/// A smaller cache is not worth its files.
const DISK_BYTES_MIN: u64 = 1 << 20;
const FOLDER_VARIABLE: &str = "KEYFRAME_CACHE";
const BYTES_VARIABLE: &str = "KEYFRAME_CACHE_BYTES";

/// The size limits of a cache of pieces.
#[derive(Clone, Copy, Debug)]
pub struct CacheLimits {
    /// The largest number of bytes in files.
    pub disk_bytes_max: u64,
    /// The largest number of bytes in the memory of this process.
    pub memory_bytes_max: usize,
}

impl CacheLimits {
    /// Makes limits of `disk_bytes_max` bytes in files and `memory_bytes_max` bytes in memory. The
    /// environment variable `KEYFRAME_CACHE_BYTES` replaces `disk_bytes_max`, which is raised to at
    /// least 1 MiB.
    pub fn of_environment(disk_bytes_max: u64, memory_bytes_max: usize) -> Self {
        let asked = std::env::var(BYTES_VARIABLE).ok().and_then(|text| text.parse::<u64>().ok());
        let disk_bytes_max = asked.unwrap_or(disk_bytes_max).max(DISK_BYTES_MIN);
        Self { disk_bytes_max, memory_bytes_max }
    }
}

/// Returns the root directory of all caches: `$KEYFRAME_CACHE`, else `$XDG_CACHE_HOME/keyframe`,
/// else `$HOME/.cache/keyframe`. `environment` returns the value of a variable. Ignores relative
/// paths. Returns `None` if no variable gives a directory.
pub fn cache_root(environment: &dyn Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let variable = |name| environment(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let own = variable(FOLDER_VARIABLE);
    let home = || variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    own.or_else(|| Some(home()?.join("keyframe")))
}

/// The key of a piece: a hash of what identifies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PieceKey([u8; 32]);

impl PieceKey {
    /// Returns the key of the piece that the byte strings `words` identify together. The same bytes
    /// divided into other words give another key.
    pub fn of(words: &[&[u8]]) -> Self {
        let mut hasher = blake3::Hasher::new();
        for word in words {
            hasher.update(&(word.len() as u64).to_le_bytes()).update(word);
        }
        Self(*hasher.finalize().as_bytes())
    }
}

/// A cache of pieces of packs, in files and in memory.
#[derive(Debug)]
pub struct PieceCache {
    /// None if there is no directory for the cache.
    folder: Option<PathBuf>,
    limits: CacheLimits,
    /// The least recently used piece comes first.
    memory: Mutex<MemoryCache>,
    added_bytes: AtomicU64,
}

#[derive(Debug)]
struct MemoryCache {
    pieces: VecDeque<(PieceKey, Arc<Vec<u8>>)>,
    held_bytes: usize,
    bytes_max: usize,
}

impl MemoryCache {
    fn take(&mut self, key: PieceKey) -> Option<Arc<Vec<u8>>> {
        let at = self.pieces.iter().rposition(|(known, _)| *known == key)?;
        let (_, bytes) = self.pieces.remove(at)?;
        self.held_bytes -= bytes.len();
        Some(bytes)
    }

    fn add(&mut self, key: PieceKey, bytes: Arc<Vec<u8>>) {
        self.held_bytes += bytes.len();
        self.pieces.push_back((key, bytes));
    }

    /// Drops what was used longest ago, until the limit is kept.
    fn drop_oldest(&mut self) {
        while self.held_bytes > self.bytes_max && self.pieces.len() > 1 {
            let Some((_, oldest)) = self.pieces.pop_front() else { break };
            self.held_bytes -= oldest.len();
        }
    }
}

impl PieceCache {
    /// Creates a cache in the directory `folder` below `place`, and the directory if it is missing.
    /// If `place` is `None` or the directory cannot be created, the cache is in memory alone.
    pub fn new(place: Option<PathBuf>, folder: &str, limits: CacheLimits) -> Self {
        let folder = place
            .map(|place| place.join(folder))
            .filter(|folder| DirBuilder::new().mode(0o700).recursive(true).create(folder).is_ok());
        // Earlier processes may have left too many files, so the first piece counts as a reason to
        // list them.
        let added_bytes = AtomicU64::new(limits.disk_bytes_max);
        let bytes_max = limits.memory_bytes_max;
        let memory = MemoryCache { pieces: VecDeque::new(), held_bytes: 0, bytes_max };
        Self { folder, limits, memory: Mutex::new(memory), added_bytes }
    }

    /// Keeps at most `bytes_max` bytes in memory from now on, if that is less than before.
    pub fn limit_memory(&self, bytes_max: usize) {
        let mut memory = self.memory.lock().ignore_poison();
        memory.bytes_max = memory.bytes_max.min(bytes_max);
        memory.drop_oldest();
    }

    /// Returns the piece with this key; `None` if the cache does not hold it.
    pub fn get(&self, key: PieceKey) -> Option<Arc<Vec<u8>>> {
        let mut memory = self.memory.lock().ignore_poison();
        if let Some(bytes) = memory.take(key) {
            memory.add(key, bytes.clone());
            return Some(bytes);
        }
        drop(memory);
        let bytes = Arc::new(self.read(key)?);
        self.remember(key, &bytes);
        Some(bytes)
    }

    /// Caches a piece, and replaces the piece with the same key.
    pub fn put(&self, key: PieceKey, bytes: &Arc<Vec<u8>>) {
        self.write(key, bytes);
        self.remember(key, bytes);
    }

    fn remember(&self, key: PieceKey, bytes: &Arc<Vec<u8>>) {
        let mut memory = self.memory.lock().ignore_poison();
        memory.take(key);
        memory.add(key, bytes.clone());
        memory.drop_oldest();
    }

    fn path(&self, key: PieceKey) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(keyframe_bytes::hex::to_hex(&key.0)))
    }

    fn read(&self, key: PieceKey) -> Option<Vec<u8>> {
        let path = self.path(key)?;
        let file = File::open(&path).ok()?;
        let len = file.metadata().ok()?.len();
        if len > FILE_BYTES_MAX || len < HASH_BYTES as u64 {
            return None;
        }
        let mut bytes = Vec::with_capacity(len as usize);
        (&file).take(FILE_BYTES_MAX).read_to_end(&mut bytes).ok()?;
        let hash = bytes.split_off(bytes.len().checked_sub(HASH_BYTES)?);
        if *blake3::hash(&bytes).as_bytes() != *hash {
            let _ = std::fs::remove_file(&path);
            return None;
        }
        // The file that was read last is removed last.
        let _ = file.set_modified(SystemTime::now());
        Some(bytes)
    }

    fn write(&self, key: PieceKey, bytes: &[u8]) {
        let (Some(folder), Some(path)) = (&self.folder, self.path(key)) else { return };
        let every = self.limits.disk_bytes_max / LOOKS;
        let before = self.added_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        if before + bytes.len() as u64 > every {
            self.added_bytes.store(0, Ordering::Relaxed);
            make_room(folder, self.limits.disk_bytes_max - every);
        }
        let written =
            tempfile::Builder::new().prefix(".").tempfile_in(folder).and_then(|mut file| {
                file.write_all(bytes)?;
                file.write_all(blake3::hash(bytes).as_bytes())?;
                file.persist(path).map_err(std::io::Error::from)
            });
        drop(written);
    }
}

/// Removes files, the ones read longest ago first, until at most `keep_bytes` are left. These
/// include temporary files of killed processes.
fn make_room(folder: &Path, keep_bytes: u64) {
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
        if held <= keep_bytes {
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

    const LIMITS: CacheLimits = CacheLimits { disk_bytes_max: 1 << 20, memory_bytes_max: 64 << 10 };

    fn key(name: &str) -> PieceKey {
        PieceKey::of(&[b"here", name.as_bytes()])
    }

    fn at(dir: &Path) -> PieceCache {
        PieceCache::new(Some(dir.to_path_buf()), "objects", LIMITS)
    }

    #[test]
    fn a_piece_is_found_by_its_key_and_only_while_its_bytes_hold() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = Arc::new(vec![7; 1000]);
        at(dir.path()).put(key("a"), &bytes);
        assert_eq!(at(dir.path()).get(key("a")), Some(bytes.clone()));
        assert_eq!(at(dir.path()).get(key("b")), None);
        assert_eq!(at(dir.path()).get(PieceKey::of(&[b"her", b"ea"])), None);
        let file =
            std::fs::read_dir(dir.path().join("objects")).unwrap().next().unwrap().unwrap().path();
        let whole = std::fs::read(&file).unwrap();
        // A power failure leaves other bytes, fewer bytes, or none.
        for torn in
            [[&whole[..500], &[1], &whole[501..]].concat(), whole[..700].to_vec(), Vec::new()]
        {
            std::fs::write(&file, torn).unwrap();
            assert_eq!(at(dir.path()).get(key("a")), None);
            at(dir.path()).put(key("a"), &bytes);
            assert_eq!(at(dir.path()).get(key("a")), Some(bytes.clone()));
        }
        let none = PieceCache::new(None, "objects", LIMITS);
        none.put(key("a"), &bytes);
        assert_eq!(none.get(key("a")), Some(bytes));
    }

    #[test]
    fn memory_is_bounded_and_what_was_used_last_stays() {
        let cache = PieceCache::new(None, "objects", LIMITS);
        let bytes = Arc::new(vec![0; 20 << 10]);
        for name in ["a", "b", "c"] {
            cache.put(key(name), &bytes);
        }
        assert!(cache.get(key("a")).is_some());
        cache.put(key("d"), &bytes);
        assert_eq!(cache.get(key("b")), None);
        for name in ["a", "c", "d"] {
            assert!(cache.get(key(name)).is_some(), "{name}");
        }
        cache.put(key("a"), &Arc::new(vec![1; 30 << 10]));
        assert!(cache.memory.lock().unwrap().held_bytes <= LIMITS.memory_bytes_max);
        cache.limit_memory(31 << 10);
        cache.limit_memory(1 << 20);
        assert!(cache.memory.lock().unwrap().held_bytes <= 31 << 10);
    }

    #[test]
    fn files_are_bounded_whatever_was_there_before() {
        let dir = tempfile::tempdir().unwrap();
        let held = || -> u64 {
            let entries = std::fs::read_dir(dir.path().join("objects")).unwrap();
            entries.map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
        };
        for round in 0..3 {
            let cache = at(dir.path());
            for piece in 0..100 {
                cache.put(key(&format!("{round} {piece}")), &Arc::new(vec![round; 30_000]));
                assert!(held() <= LIMITS.disk_bytes_max + 200_000, "{} bytes", held());
            }
            assert!(held() > LIMITS.disk_bytes_max / 2, "{} bytes", held());
        }
        assert!(at(dir.path()).get(key("2 99")).is_some());
        assert!(at(dir.path()).get(key("0 0")).is_none());
    }

    /// Processes that share a folder see each piece whole or not at all.
    #[test]
    fn several_use_one_folder_at_once() {
        let dir = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for seed in 0..4_usize {
                let cache = at(dir.path());
                scope.spawn(move || {
                    for step in 0..200 {
                        let name = (seed * 7 + step * 13) % 50;
                        let expected = Arc::new(vec![name as u8; 20_000 + name]);
                        match cache.get(key(&name.to_string())) {
                            Some(found) => assert_eq!(found, expected),
                            None => cache.put(key(&name.to_string()), &expected),
                        }
                    }
                });
            }
        });
    }
}
