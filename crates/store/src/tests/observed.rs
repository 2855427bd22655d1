//! A medium that tells an observer how it is used.

use super::*;
use keyframe_store_backend::{
    AppendFile, Backend, LockGuard, ReadFile, Result, Space, StartingWriter, WriterEntry,
};
use std::fmt::Debug;
use std::ops::Range;

/// What a test does beside the one that uses a medium. Each method does nothing by itself.
pub trait Observer: Debug + Send + Sync + 'static {
    /// Called before a read of `bytes` of the file `name`. No bytes are read when a file is opened
    /// or measured, or when the folder `name` is listed. Error: the read fails with it.
    fn before_read(&self, _name: &str, _bytes: Range<u64>) -> Result<()> {
        Ok(())
    }

    /// Called after each step that another process could notice, or that could notice another.
    fn after_step(&self) {}

    /// Called after each step of a file that grows.
    fn after_append(&self) {}

    /// Returns true if the lock of the writer cannot be seen.
    fn hides_lock(&self) -> bool {
        false
    }
}

/// A medium with its observer.
#[derive(Debug)]
pub struct ObservedMedium<O> {
    medium: FaultyBackend,
    observer: Arc<O>,
}

impl<O: Observer> ObservedMedium<O> {
    pub fn new(medium: &FaultyBackend, observer: &Arc<O>) -> Arc<Self> {
        Arc::new(Self { medium: medium.clone(), observer: Arc::clone(observer) })
    }

    fn step<T>(&self, outcome: T) -> T {
        self.observer.after_step();
        outcome
    }
}

impl<O: Observer> Backend for ObservedMedium<O> {
    fn describe(&self, name: &str) -> String {
        self.medium.describe(name)
    }

    fn lock(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        self.medium.lock(holder)
    }

    fn join(&self, holder: &str) -> Result<StartingWriter> {
        self.step(self.medium.join(holder))
    }

    fn writers(&self) -> Result<Vec<WriterEntry>> {
        self.step(if self.observer.hides_lock() { Ok(Vec::new()) } else { self.medium.writers() })
    }

    fn lock_prune(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        self.medium.lock_prune(holder)
    }

    fn lock_holder(&self) -> Result<Option<String>> {
        self.step(if self.observer.hides_lock() { Ok(None) } else { self.medium.lock_holder() })
    }

    fn is_pruning(&self) -> Result<bool> {
        self.medium.is_pruning()
    }

    fn without_syncs(&self) -> Option<Arc<dyn Backend>> {
        let (medium, observer) = (self.medium.relaxed(), Arc::clone(&self.observer));
        Some(Arc::new(Self { medium, observer }))
    }

    fn sync_all(&self) -> Result<()> {
        self.medium.sync_all()
    }

    fn space(&self) -> Option<Space> {
        self.medium.space()
    }

    fn boot_id(&self) -> Result<String> {
        self.medium.boot_id()
    }

    fn create(&self, name: &str) -> Result<Box<dyn AppendFile>> {
        let file = self.step(self.medium.create(name))?;
        Ok(Box::new(ObservedAppend { file, observer: Arc::clone(&self.observer) }))
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.step(self.medium.put(name, bytes))
    }

    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.step(self.medium.put_new(name, bytes))
    }

    fn open(&self, name: &str) -> Result<Arc<dyn ReadFile>> {
        self.observer.before_read(name, 0..0)?;
        let file = self.step(self.medium.open(name))?;
        Ok(Arc::new(ObservedFile { file, name: name.into(), observer: Arc::clone(&self.observer) }))
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        self.observer.before_read(folder, 0..0)?;
        self.step(self.medium.list(folder))
    }

    fn remove(&self, name: &str) -> Result<()> {
        self.step(self.medium.remove(name))
    }

    fn remove_all(&self, folder: &str, names: &[String]) -> Result<()> {
        self.step(self.medium.remove_all(folder, names))
    }

    fn sync(&self, name: &str) -> Result<()> {
        self.medium.sync(name)
    }
}

#[derive(Debug)]
struct ObservedAppend<O> {
    file: Box<dyn AppendFile>,
    observer: Arc<O>,
}

impl<O: Observer> ObservedAppend<O> {
    fn step<T>(&self, outcome: T) -> T {
        self.observer.after_append();
        outcome
    }
}

impl<O: Observer> AppendFile for ObservedAppend<O> {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let appended = self.file.append(bytes);
        self.step(appended)
    }

    fn sync(&mut self) -> Result<()> {
        let synced = self.file.sync();
        self.step(synced)
    }

    fn truncate(&mut self, len_bytes: u64) -> Result<()> {
        let cut = self.file.truncate(len_bytes);
        self.step(cut)
    }
}

#[derive(Debug)]
struct ObservedFile<O> {
    file: Arc<dyn ReadFile>,
    name: String,
    observer: Arc<O>,
}

impl<O: Observer> ReadFile for ObservedFile<O> {
    fn len_bytes(&self) -> Result<u64> {
        self.observer.before_read(&self.name, 0..0)?;
        self.file.len_bytes()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        self.observer.before_read(&self.name, offset..offset + buffer.len() as u64)?;
        self.file.read_at(offset, buffer)
    }
}
