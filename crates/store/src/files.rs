//! The files of one store: a backend whose errors are those of this crate.

use crate::Result;
use keyframe_store_backend::{
    AppendFile, Backend, LockGuard, ReadFile, Space, StartingWriter, UnlockOutcome, WriterEntry,
};
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

impl From<Arc<dyn ReadFile>> for StoreFile {
    fn from(file: Arc<dyn ReadFile>) -> Self {
        Self(file)
    }
}

impl StoreFile {
    /// Creates a file in memory.
    pub fn of_bytes(bytes: Vec<u8>) -> Self {
        Self(Arc::new(BytesFile(bytes)))
    }

    /// Returns the length of the file in bytes. Error: the backend fails.
    pub fn len_bytes(&self) -> Result<u64> {
        Ok(self.0.len_bytes()?)
    }

    /// Fills `buffer` from byte `offset` of the file on. Errors: the file ends before; the backend
    /// fails.
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        Ok(self.0.read_at(offset, buffer)?)
    }

    /// Returns true if [`Self::prefetch`] makes later reads faster.
    pub fn wants_prefetch(&self) -> bool {
        self.0.wants_prefetch()
    }

    /// Begins to fetch the byte ranges `ranges`, which will be read soon.
    pub fn prefetch(&self, ranges: &[Range<u64>]) {
        self.0.prefetch(ranges);
    }
}

impl NewFile {
    /// Appends `bytes` to the file. Error: the backend fails.
    pub fn append(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.0.append(bytes)?)
    }

    /// Makes the appended bytes durable. Error: the backend fails.
    pub fn sync(&mut self) -> Result<()> {
        Ok(self.0.sync()?)
    }

    /// Truncates the file to `len_bytes` bytes. Error: the backend fails.
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

    /// Takes the writers' lock of the store for this process alone, and returns a guard that holds
    /// it. `holder` describes this process to others. Errors: there is a writer; the backend fails.
    pub fn lock(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        Ok(self.0.lock(holder)?)
    }

    /// Makes this process one of the store's writers. `holder` describes it to others. Errors: a
    /// process has the store alone; the backend fails.
    pub fn join(&self, holder: &str) -> Result<StartingWriter> {
        Ok(self.0.join(holder)?)
    }

    /// Returns the processes that write to the store, and those that have ended. Error: the backend
    /// fails.
    pub fn writers(&self) -> Result<Vec<WriterEntry>> {
        Ok(self.0.writers()?)
    }

    /// Takes the prunes' lock of the store, and returns a guard that holds it. `holder` describes
    /// this process to others. Errors: another prune holds the lock; the backend fails.
    pub fn lock_prune(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        Ok(self.0.lock_prune(holder)?)
    }

    /// Returns the descriptions of the processes that write, one a line. Returns `None` if none
    /// does. Error: the backend fails.
    pub fn lock_holder(&self) -> Result<Option<String>> {
        Ok(self.0.lock_holder()?)
    }

    /// Removes locks whose holders have ended, and returns what it did. Also removes a lock whose
    /// holder cannot be checked, if `may_break` returns true for the holder's text. Error: the
    /// backend fails.
    pub fn unlock(&self, may_break: &dyn Fn(&str) -> bool) -> Result<UnlockOutcome> {
        Ok(self.0.unlock(may_break)?)
    }

    /// Returns true if a prune is in progress. Error: the backend fails.
    pub fn is_pruning(&self) -> Result<bool> {
        Ok(self.0.is_pruning()?)
    }

    /// Returns the same files in a mode in which writes become durable only by [`Self::sync_all`].
    /// Returns `None` if the backend has no such mode.
    pub fn without_syncs(&self) -> Option<Self> {
        self.0.without_syncs().map(Self)
    }

    /// Makes everything durable that any process has written to the store so far. Error: the
    /// backend fails.
    pub fn sync_all(&self) -> Result<()> {
        Ok(self.0.sync_all()?)
    }

    /// Returns true if later processes find the same files here; false for files in memory.
    pub fn is_persistent(&self) -> bool {
        self.0.is_persistent()
    }

    /// Returns the size and the free space of the medium. Returns `None` if the medium does not
    /// tell them.
    pub fn space(&self) -> Option<Space> {
        self.0.space()
    }

    /// Returns the id of the current boot of the machine that holds the files. Error: the backend
    /// fails.
    pub fn boot_id(&self) -> Result<String> {
        Ok(self.0.boot_id()?)
    }

    /// Returns the files as they are on the medium, encrypted. Returns `None` if the store is not
    /// encrypted.
    pub fn ciphertext(&self) -> Option<Self> {
        self.0.ciphertext().map(Self)
    }

    /// Creates the file `name`, to which the caller appends. Errors: it exists already; the backend
    /// fails.
    pub fn create(&self, name: &str) -> Result<NewFile> {
        Ok(NewFile(self.0.create(name)?))
    }

    /// Writes the file `name` as a whole, atomically and durably. Replaces an existing file. Error:
    /// the backend fails.
    pub fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        Ok(self.0.put(name, bytes)?)
    }

    /// Writes the file `name` as a whole, atomically and durably, if it does not exist. Errors: it
    /// exists; the backend fails.
    pub fn put_new(&self, name: &str, bytes: &[u8]) -> Result<()> {
        Ok(self.0.put_new(name, bytes)?)
    }

    /// Opens the file `name` for reading. Errors: it does not exist; the backend fails.
    pub fn open(&self, name: &str) -> Result<StoreFile> {
        Ok(StoreFile(self.0.open(name)?))
    }

    /// Returns the names of the files in the folder `folder`. Error: the backend fails.
    pub fn list(&self, folder: &str) -> Result<Vec<String>> {
        Ok(self.0.list(folder)?)
    }

    /// Removes the file `name`. Error: the backend fails.
    pub fn remove(&self, name: &str) -> Result<()> {
        Ok(self.0.remove(name)?)
    }

    /// Removes the files `names` of the folder `folder`. Error: the backend fails.
    pub fn remove_all(&self, folder: &str, names: &[String]) -> Result<()> {
        Ok(self.0.remove_all(folder, names)?)
    }

    /// Makes the file `name` durable. Error: the backend fails.
    pub fn sync(&self, name: &str) -> Result<()> {
        Ok(self.0.sync(name)?)
    }

    /// Reads a whole file. Errors: it does not exist, or has more than `len_bytes_max` bytes; the
    /// backend fails.
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
