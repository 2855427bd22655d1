//! The files of one store: a backend whose errors are those of this crate.

use crate::Result;
use keyframe_store_backend::{AppendFile, Backend, LockGuard, ReadFile, Space, UnlockOutcome};
use std::ops::Range;
use std::sync::Arc;

/// The files of one store. Cloning it is cheap. Each method does what [`Backend`] says of the
/// method of the same name.
#[derive(Clone, Debug)]
pub struct StoreFiles(Arc<dyn Backend>);

/// An open file: a [`ReadFile`] whose errors are those of this crate.
#[derive(Clone, Debug)]
pub struct StoreFile(Arc<dyn ReadFile>);

/// A file that grows at its end: an [`AppendFile`] whose errors are those of this crate.
#[derive(Debug)]
pub struct NewFile(Box<dyn AppendFile>);

impl StoreFile {
    /// Creates a file in memory.
    pub fn of_bytes(bytes: Vec<u8>) -> Self {
        Self(Arc::new(BytesFile(bytes)))
    }

    /// Returns the length in bytes.
    pub fn len_bytes(&self) -> Result<u64> {
        Ok(self.0.len_bytes()?)
    }

    /// Fills `buffer` from `offset` on. Fails if the file ends before.
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        Ok(self.0.read_at(offset, buffer)?)
    }

    /// Returns true if [`Self::prefetch`] makes later reads faster.
    pub fn wants_prefetch(&self) -> bool {
        self.0.wants_prefetch()
    }

    /// Begins to fetch byte ranges that will be read soon.
    pub fn prefetch(&self, ranges: &[Range<u64>]) {
        self.0.prefetch(ranges);
    }
}

impl NewFile {
    /// Appends bytes.
    pub fn append(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.0.append(bytes)?)
    }

    pub fn sync(&mut self) -> Result<()> {
        Ok(self.0.sync()?)
    }

    /// Cuts the file to `len_bytes` bytes.
    pub fn truncate(&mut self, len_bytes: u64) -> Result<()> {
        Ok(self.0.truncate(len_bytes)?)
    }
}

impl From<Arc<dyn Backend>> for StoreFiles {
    fn from(backend: Arc<dyn Backend>) -> Self {
        Self(backend)
    }
}

impl StoreFiles {
    /// Returns the name of a file for errors: its path or address.
    pub fn describe(&self, name: &str) -> String {
        self.0.describe(name)
    }

    /// Locks the store for a writer. `holder` describes this process to others.
    pub fn lock(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        Ok(self.0.lock(holder)?)
    }

    /// Locks the store for a prune. `holder` describes this process to others.
    pub fn lock_prune(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        Ok(self.0.lock_prune(holder)?)
    }

    /// Returns the description of the process that holds the writer's lock, if there is one.
    pub fn lock_holder(&self) -> Result<Option<String>> {
        Ok(self.0.lock_holder()?)
    }

    /// Removes locks of dead processes; with `force` also locks whose holder cannot be checked.
    pub fn unlock(&self, force: bool) -> Result<UnlockOutcome> {
        Ok(self.0.unlock(force)?)
    }

    /// Returns true if a prune is in progress.
    pub fn is_pruning(&self) -> Result<bool> {
        Ok(self.0.is_pruning()?)
    }

    /// Returns the same files, whose writes become durable by [`Self::sync_all`] only; `None` if
    /// the backend has no such mode.
    pub fn without_syncs(&self) -> Option<Self> {
        self.0.without_syncs().map(Self)
    }

    /// Makes everything durable that any process has written so far.
    pub fn sync_all(&self) -> Result<()> {
        Ok(self.0.sync_all()?)
    }

    /// Returns true if later processes find the same files here.
    pub fn is_persistent(&self) -> bool {
        self.0.is_persistent()
    }

    /// Returns the size and the free space of the medium, if it tells them.
    pub fn space(&self) -> Option<Space> {
        self.0.space()
    }

    /// Returns the id of the current boot of the machine that holds the files.
    pub fn boot_id(&self) -> Result<String> {
        Ok(self.0.boot_id()?)
    }

    /// Returns the encrypted files beneath; `None` if the store is not encrypted.
    pub fn ciphertext(&self) -> Option<Self> {
        self.0.ciphertext().map(Self)
    }

    /// Creates a file that grows at its end.
    pub fn create(&self, name: &str) -> Result<NewFile> {
        Ok(NewFile(self.0.create(name)?))
    }

    /// Writes a whole file, atomically and durably. Replaces an existing one.
    pub fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        Ok(self.0.put(name, bytes)?)
    }

    /// Opens a file for reading.
    pub fn open(&self, name: &str) -> Result<StoreFile> {
        Ok(StoreFile(self.0.open(name)?))
    }

    /// Returns the names of the files in a folder.
    pub fn list(&self, folder: &str) -> Result<Vec<String>> {
        Ok(self.0.list(folder)?)
    }

    /// Removes a file.
    pub fn remove(&self, name: &str) -> Result<()> {
        Ok(self.0.remove(name)?)
    }

    /// Removes files of a folder.
    pub fn remove_all(&self, folder: &str, names: &[String]) -> Result<()> {
        Ok(self.0.remove_all(folder, names)?)
    }

    pub fn sync(&self, name: &str) -> Result<()> {
        Ok(self.0.sync(name)?)
    }

    /// Reads a whole file. Fails if it has more than `len_bytes_max` bytes.
    pub fn read(&self, name: &str, len_bytes_max: u64) -> Result<Vec<u8>> {
        Ok(self.0.read(name, len_bytes_max)?)
    }
}

/// A file in memory.
#[derive(Debug)]
struct BytesFile(Vec<u8>);

impl ReadFile for BytesFile {
    fn len_bytes(&self) -> keyframe_store_backend::Result<u64> {
        Ok(self.0.len() as u64)
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> keyframe_store_backend::Result<()> {
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let held = self.0.get(from..).and_then(|rest| rest.get(..buffer.len()));
        let held = held.ok_or_else(|| {
            keyframe_store_backend::Error::damaged("a file in memory", "it is too short")
        })?;
        buffer.copy_from_slice(held);
        Ok(())
    }
}
