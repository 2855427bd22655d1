//! A backend in memory that never fails and whose locks are always free.

use crate::{AppendFile, Backend, LockGuard, ReadFile};
use crate::{Error, Result};
use keyframe_locks::IgnorePoison;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

type Bytes = Arc<Mutex<Vec<u8>>>;

/// A backend whose files are in memory.
#[derive(Debug, Default)]
pub struct MemoryBackend(Mutex<BTreeMap<String, Bytes>>);

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().ignore_poison()
}

impl MemoryBackend {
    /// Creates the file `name` with these bytes, or replaces it.
    pub fn overwrite(&self, name: &str, bytes: Vec<u8>) {
        held(&self.0).insert(name.into(), Arc::new(Mutex::new(bytes)));
    }
}

#[derive(Debug)]
struct File(String, Bytes);

#[derive(Debug)]
struct Free;

impl LockGuard for Free {}

fn failure(name: &str, kind: io::ErrorKind) -> Error {
    Error::Io { object: name.into(), operation: "open", source: kind.into() }
}

impl Backend for MemoryBackend {
    fn describe(&self, name: &str) -> String {
        name.into()
    }

    fn lock(&self, _: &str) -> Result<Box<dyn LockGuard>> {
        Ok(Box::new(Free))
    }

    fn lock_prune(&self, _: &str) -> Result<Box<dyn LockGuard>> {
        Ok(Box::new(Free))
    }

    fn lock_holder(&self) -> Result<Option<String>> {
        Ok(None)
    }

    fn is_pruning(&self) -> Result<bool> {
        Ok(false)
    }

    fn create(&self, name: &str) -> Result<Box<dyn AppendFile>> {
        let mut files = held(&self.0);
        if files.contains_key(name) {
            return Err(failure(name, io::ErrorKind::AlreadyExists));
        }
        let bytes = Bytes::default();
        files.insert(name.into(), bytes.clone());
        Ok(Box::new(File(name.into(), bytes)))
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.overwrite(name, bytes.to_vec());
        Ok(())
    }

    fn open(&self, name: &str) -> Result<Arc<dyn ReadFile>> {
        let file = held(&self.0).get(name).cloned();
        let file = file.ok_or_else(|| failure(name, io::ErrorKind::NotFound))?;
        Ok(Arc::new(File(name.into(), file)))
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        let files = held(&self.0);
        let inside = files.keys().filter_map(|name| name.strip_prefix(folder)?.strip_prefix('/'));
        Ok(inside.map(String::from).collect())
    }

    fn remove(&self, name: &str) -> Result<()> {
        held(&self.0).remove(name);
        Ok(())
    }

    fn sync(&self, _: &str) -> Result<()> {
        Ok(())
    }
}

impl AppendFile for File {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        held(&self.1).extend_from_slice(bytes);
        Ok(())
    }

    fn sync(&mut self) -> Result<()> {
        Ok(())
    }

    fn truncate(&mut self, len_bytes: u64) -> Result<()> {
        held(&self.1).truncate(len_bytes as usize);
        Ok(())
    }
}

impl ReadFile for File {
    fn len_bytes(&self) -> Result<u64> {
        Ok(held(&self.1).len() as u64)
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let bytes = held(&self.1);
        let from = usize::try_from(offset).ok().and_then(|at| bytes.get(at..)?.get(..buffer.len()));
        buffer.copy_from_slice(from.ok_or_else(|| failure(&self.0, io::ErrorKind::UnexpectedEof))?);
        Ok(())
    }
}
