//! A medium whose reads fail as those of a network or of an old disk do.

use super::*;
use keyframe_store_backend::{self as backend, AppendFile, Backend, LockGuard, ReadFile, Space};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// The reads that fail.
#[derive(Clone, Debug)]
pub enum BadReads {
    /// The read of this number, from 1, times out. The same read succeeds when it is repeated.
    TimedOut(u64),
    /// Each read of this byte of this file meets a bad sector.
    Sector(String, u64),
}

/// A medium whose reads fail as [`BadReads`] says. Clones share the medium and the count of reads.
#[derive(Clone, Debug)]
pub struct Unreliable {
    medium: FaultyBackend,
    bad: BadReads,
    reads: Arc<AtomicU64>,
}

impl Unreliable {
    pub fn new(medium: &FaultyBackend, bad: BadReads) -> Self {
        Self { medium: medium.clone(), bad, reads: Arc::default() }
    }

    /// Opens the store on the medium.
    pub fn open_store(&self) -> Result<Store> {
        on_backend(Arc::new(self.clone()))
    }

    /// True after the read that times out.
    pub fn has_failed(&self) -> bool {
        matches!(self.bad, BadReads::TimedOut(at) if at <= self.reads.load(Ordering::Relaxed))
    }

    /// Counts a read of all of `name`, or of `bytes` of it.
    fn check_read(&self, name: &str, bytes: &Range<u64>) -> backend::Result<()> {
        let number = self.reads.fetch_add(1, Ordering::Relaxed) + 1;
        let source = match &self.bad {
            BadReads::TimedOut(at) if *at == number => io::Error::from(io::ErrorKind::TimedOut),
            BadReads::Sector(of, at) if of == name && bytes.contains(at) => {
                io::Error::from_raw_os_error(5)
            }
            _ => return Ok(()),
        };
        Err(backend::Error::Io { object: name.into(), operation: "read", source })
    }
}

impl Backend for Unreliable {
    fn describe(&self, name: &str) -> String {
        self.medium.describe(name)
    }

    fn lock(&self, holder: &str) -> backend::Result<Box<dyn LockGuard>> {
        self.medium.lock(holder)
    }

    fn lock_prune(&self, holder: &str) -> backend::Result<Box<dyn LockGuard>> {
        self.medium.lock_prune(holder)
    }

    fn lock_holder(&self) -> backend::Result<Option<String>> {
        self.medium.lock_holder()
    }

    fn is_pruning(&self) -> backend::Result<bool> {
        self.medium.is_pruning()
    }

    fn sync_all(&self) -> backend::Result<()> {
        self.medium.sync_all()
    }

    fn space(&self) -> Option<Space> {
        self.medium.space()
    }

    fn boot_id(&self) -> backend::Result<String> {
        self.medium.boot_id()
    }

    fn create(&self, name: &str) -> backend::Result<Box<dyn AppendFile>> {
        self.medium.create(name)
    }

    fn put(&self, name: &str, bytes: &[u8]) -> backend::Result<()> {
        self.medium.put(name, bytes)
    }

    fn open(&self, name: &str) -> backend::Result<Arc<dyn ReadFile>> {
        self.check_read(name, &(0..0))?;
        let file = self.medium.open(name)?;
        Ok(Arc::new(UnreliableFile { file, name: name.into(), medium: self.clone() }))
    }

    fn list(&self, folder: &str) -> backend::Result<Vec<String>> {
        self.check_read(folder, &(0..0))?;
        self.medium.list(folder)
    }

    fn remove(&self, name: &str) -> backend::Result<()> {
        self.medium.remove(name)
    }

    fn remove_all(&self, folder: &str, names: &[String]) -> backend::Result<()> {
        self.medium.remove_all(folder, names)
    }

    fn sync(&self, name: &str) -> backend::Result<()> {
        self.medium.sync(name)
    }
}

#[derive(Debug)]
struct UnreliableFile {
    file: Arc<dyn ReadFile>,
    name: String,
    medium: Unreliable,
}

impl ReadFile for UnreliableFile {
    fn len_bytes(&self) -> backend::Result<u64> {
        self.medium.check_read(&self.name, &(0..0))?;
        self.file.len_bytes()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> backend::Result<()> {
        self.medium.check_read(&self.name, &(offset..offset + buffer.len() as u64))?;
        self.file.read_at(offset, buffer)
    }
}
