//! The files of one store: a backend whose errors are those of this crate.

use crate::Result;
use keyframe_store_backend::{AppendFile, Backend, LockGuard, ReadFile, UnlockOutcome};
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
    /// A file in memory.
    pub fn of_bytes(bytes: Vec<u8>) -> Self {
        Self(Arc::new(BytesFile(bytes)))
    }

    pub fn len_bytes(&self) -> Result<u64> {
        Ok(self.0.len_bytes()?)
    }

    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        Ok(self.0.read_at(offset, buffer)?)
    }

    pub fn wants_prefetch(&self) -> bool {
        self.0.wants_prefetch()
    }

    pub fn prefetch(&self, ranges: &[Range<u64>]) {
        self.0.prefetch(ranges);
    }
}

impl NewFile {
    pub fn append(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.0.append(bytes)?)
    }

    pub fn sync(&mut self) -> Result<()> {
        Ok(self.0.sync()?)
    }

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
    pub fn describe(&self, name: &str) -> String {
        self.0.describe(name)
    }

    pub fn lock(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        Ok(self.0.lock(holder)?)
    }

    pub fn lock_prune(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        Ok(self.0.lock_prune(holder)?)
    }

    pub fn lock_holder(&self) -> Result<Option<String>> {
        Ok(self.0.lock_holder()?)
    }

    pub fn unlock(&self, force: bool) -> Result<UnlockOutcome> {
        Ok(self.0.unlock(force)?)
    }

    pub fn is_pruning(&self) -> Result<bool> {
        Ok(self.0.is_pruning()?)
    }

    pub fn without_syncs(&self) -> Option<Self> {
        self.0.without_syncs().map(Self)
    }

    pub fn sync_all(&self) -> Result<()> {
        Ok(self.0.sync_all()?)
    }

    pub fn is_persistent(&self) -> bool {
        self.0.is_persistent()
    }

    pub fn boot_id(&self) -> Result<String> {
        Ok(self.0.boot_id()?)
    }

    pub fn ciphertext(&self) -> Option<Self> {
        self.0.ciphertext().map(Self)
    }

    pub fn create(&self, name: &str) -> Result<NewFile> {
        Ok(NewFile(self.0.create(name)?))
    }

    pub fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        Ok(self.0.put(name, bytes)?)
    }

    pub fn open(&self, name: &str) -> Result<StoreFile> {
        Ok(StoreFile(self.0.open(name)?))
    }

    pub fn list(&self, folder: &str) -> Result<Vec<String>> {
        Ok(self.0.list(folder)?)
    }

    pub fn remove(&self, name: &str) -> Result<()> {
        Ok(self.0.remove(name)?)
    }

    pub fn remove_all(&self, folder: &str, names: &[String]) -> Result<()> {
        Ok(self.0.remove_all(folder, names)?)
    }

    pub fn sync(&self, name: &str) -> Result<()> {
        Ok(self.0.sync(name)?)
    }

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
