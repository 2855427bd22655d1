//! Helpers for fuzzing the overlay: files in memory, and journals with valid checksums.

use super::DATA;
use super::journal::{HEADER_BYTES, NAME, mend};
use super::medium::{OverlayFile, OverlayFolder};
use crate::Result;
use keyframe_locks::IgnorePoison;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

type Bytes = Arc<Mutex<Vec<u8>>>;

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().ignore_poison()
}

/// An overlay's directory whose files are in memory.
pub struct MemoryFolder(Mutex<BTreeMap<String, Bytes>>);

impl MemoryFolder {
    /// Creates a directory with an overlay's two files: the journal and the data file.
    pub fn folder(journal: Vec<u8>, data: Vec<u8>) -> Arc<Self> {
        let files = [(NAME, journal), (DATA, data)];
        let files = files.map(|(name, bytes)| (name.to_owned(), Arc::new(Mutex::new(bytes))));
        Arc::new(Self(Mutex::new(files.into())))
    }
}

struct File(Bytes);

impl OverlayFolder for MemoryFolder {
    fn name(&self) -> String {
        "memory".into()
    }

    fn open(&self, name: &str) -> Result<Arc<dyn OverlayFile>> {
        Ok(Arc::new(File(held(&self.0).entry(name.into()).or_default().clone())))
    }

    fn replace(&self, from: &str, to: &str) -> Result<()> {
        let mut files = held(&self.0);
        if let Some(file) = files.remove(from) {
            files.insert(to.into(), file);
        }
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn boot_seed(&self) -> Result<u64> {
        Ok(1)
    }
}

impl OverlayFile for File {
    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let bytes = held(&self.0);
        let from = usize::try_from(offset).ok().and_then(|at| bytes.get(at..)).unwrap_or_default();
        let len = from.len().min(buf.len());
        buf.fill(0);
        buf[..len].copy_from_slice(&from[..len]);
        Ok(())
    }

    fn write(&self, offset: u64, buf: &[u8]) -> Result<()> {
        let mut bytes = held(&self.0);
        let end = offset as usize + buf.len();
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        bytes[offset as usize..end].copy_from_slice(buf);
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn len_bytes(&self) -> Result<u64> {
        Ok(held(&self.0).len() as u64)
    }

    fn set_len(&self, len_bytes: u64) -> Result<()> {
        held(&self.0).resize(len_bytes as usize, 0);
        Ok(())
    }
}

/// Returns a copy of `journal` with its checksums made valid.
pub fn mended(journal: &[u8]) -> Vec<u8> {
    let mut bytes = journal.to_vec();
    if bytes.len() >= HEADER_BYTES {
        mend(&mut bytes);
    }
    bytes
}
