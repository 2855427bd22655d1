//! The medium of a [`super::FaultyBackend`]: live and durable bytes and names, and the faults that are
//! due.

use super::process::Process;
use crate::testing::random::SeededRandom;
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

const SECTOR_BYTES: usize = 512;

#[derive(Clone, Debug, Default)]
pub(super) struct Inode {
    pub(super) live: Vec<u8>,
    pub(super) durable: Vec<u8>,
    /// Bytes before this offset that are not durable are lost: a sync of them failed.
    pub(super) lost: usize,
    /// The process whose sync failed last.
    pub(super) failed_by: Option<u64>,
}

#[derive(Clone, Debug)]
pub(super) enum NameChange {
    Link(String, usize),
    Unlink(String),
}

impl NameChange {
    pub(super) fn name(&self) -> &str {
        match self {
            Self::Link(name, _) | Self::Unlink(name) => name,
        }
    }

    pub(super) fn apply(&self, names: &mut BTreeMap<String, usize>) {
        match self {
            Self::Link(name, inode) => names.insert(name.clone(), *inode),
            Self::Unlink(name) => names.remove(name),
        };
    }
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) inodes: Vec<Inode>,
    pub(super) live: BTreeMap<String, usize>,
    pub(super) durable: BTreeMap<String, usize>,
    pub(super) pending: Vec<NameChange>,
    /// The name of each file that was created to grow, in order.
    pub(super) created: Vec<String>,
    pub(super) operations: u64,
    pub(super) crash_at: Option<u64>,
    pub(super) syncs: u64,
    pub(super) fail_sync_at: Option<u64>,
    pub(super) reads: u64,
    pub(super) fail_read_at: Option<u64>,
    pub(super) capacity_bytes: Option<usize>,
    /// The size that the medium tells, if it tells one.
    pub(super) told_bytes: Option<usize>,
    /// The text of the process that has the store alone.
    pub(super) locked: Option<String>,
    pub(super) pruned: bool,
    pub(super) slots: BTreeMap<u32, Slot>,
    /// The process that keeps other writers from starting.
    pub(super) starting: Option<Arc<Process>>,
    /// The number of failed syncs of the whole medium.
    pub(super) failures: u64,
    pub(super) processes: u64,
    /// The process that uses the medium now.
    pub(super) current: Arc<Process>,
}

/// The slot of a writer.
#[derive(Debug, Default)]
pub(super) struct Slot {
    /// `None` if it is free.
    pub(super) process: Option<Arc<Process>>,
    pub(super) holder: String,
    pub(super) state: Vec<u8>,
}

impl Slot {
    pub(super) fn lives(&self) -> bool {
        self.process.as_ref().is_some_and(|process| !process.is_dead())
    }
}

impl Inode {
    /// The bytes that a sync makes durable.
    pub(super) fn synced(&self) -> Vec<u8> {
        let mut bytes = self.live.clone();
        for (at, byte) in bytes.iter_mut().enumerate().take(self.lost) {
            *byte = self.durable.get(at).copied().unwrap_or(0);
        }
        bytes
    }

    pub(super) fn after_power_loss(&self, chance: &mut SeededRandom) -> Self {
        let target = self.synced();
        let (low, high) =
            (self.durable.len().min(target.len()), self.durable.len().max(target.len()));
        let len = match chance.next_u64() % 3 {
            0 => self.durable.len(),
            1 => target.len(),
            _ => low + chance.next_u64() as usize % (high - low + 1),
        };
        let mut bytes = vec![0; len];
        for (at, sector) in bytes.chunks_mut(SECTOR_BYTES).enumerate() {
            let source = if chance.next_u64().is_multiple_of(2) { &self.durable } else { &target };
            let from = at * SECTOR_BYTES;
            let have = source.get(from..).unwrap_or_default();
            let have = &have[..have.len().min(sector.len())];
            sector[..have.len()].copy_from_slice(have);
        }
        Self { durable: bytes.clone(), live: bytes, lost: 0, failed_by: None }
    }
}

impl State {
    pub(super) fn used_bytes(&self) -> usize {
        self.live.values().map(|inode| self.inodes[*inode].live.len()).sum()
    }

    /// Fails if the medium has crashed, or the process was killed.
    pub(super) fn alive(&self, name: &str) -> Result<()> {
        if self.current.is_dead() {
            return Err(failure(name, "do anything with", io::Error::other("killed before")));
        }
        if self.crash_at.is_some_and(|at| self.operations >= at) {
            return Err(failure(
                name,
                "do anything with",
                io::Error::other("the power failed before"),
            ));
        }
        Ok(())
    }

    /// Counts an operation. Fails if it is the one that crashes.
    pub(super) fn step(&mut self, name: &str, operation: &'static str) -> Result<()> {
        self.operations += 1;
        if self.current.step() {
            return Err(failure(name, operation, io::Error::other("killed")));
        }
        if self.crash_at.is_some_and(|at| self.operations >= at) {
            return Err(failure(name, operation, io::Error::other("the power failed")));
        }
        Ok(())
    }

    pub(super) fn clear_temporaries(&mut self) {
        let leftovers: Vec<_> =
            self.live.keys().filter(|name| name.starts_with("tmp/")).cloned().collect();
        for name in leftovers {
            self.change_name(NameChange::Unlink(name));
        }
    }

    pub(super) fn change_name(&mut self, change: NameChange) {
        change.apply(&mut self.live);
        self.pending.push(change);
    }

    pub(super) fn sync_folder(&mut self, name: &str) -> Result<()> {
        self.step(name, "sync directory")?;
        self.count_sync(name)?;
        let folder =
            |name: &str| name.split_once('/').map_or(String::new(), |(folder, _)| folder.into());
        let (now, later): (Vec<_>, Vec<_>) = std::mem::take(&mut self.pending)
            .into_iter()
            .partition(|c| folder(c.name()) == folder(name));
        self.pending = later;
        for change in now {
            change.apply(&mut self.durable);
        }
        Ok(())
    }

    /// Counts a sync. Fails if it is the one that fails.
    pub(super) fn count_sync(&mut self, name: &str) -> Result<()> {
        self.syncs += 1;
        if self.fail_sync_at == Some(self.syncs) {
            return Err(failure(name, "sync", io::Error::from_raw_os_error(5)));
        }
        Ok(())
    }

    pub(super) fn sync_inode(&mut self, name: &str, inode: usize) -> Result<()> {
        self.step(name, "sync")?;
        let counted = self.count_sync(name);
        let id = self.current.id;
        let inode = &mut self.inodes[inode];
        if counted.is_err() {
            (inode.lost, inode.failed_by) = (inode.live.len(), Some(id));
            return counted;
        }
        inode.durable = inode.synced();
        Ok(())
    }

    pub(super) fn write(&mut self, name: &str, inode: usize, bytes: &[u8]) -> Result<()> {
        self.alive(name)?;
        let room =
            self.capacity_bytes.map_or(usize::MAX, |max| max.saturating_sub(self.used_bytes()));
        let fits = bytes.len().min(room);
        self.inodes[inode].live.extend_from_slice(&bytes[..fits]);
        self.step(name, "append")?;
        if fits < bytes.len() {
            return Err(failure(name, "append", io::Error::from(io::ErrorKind::StorageFull)));
        }
        Ok(())
    }

    pub(super) fn create(&mut self, name: &str) -> Result<usize> {
        self.alive(name)?;
        if self.live.contains_key(name) {
            return Err(failure(name, "create", io::Error::from(io::ErrorKind::AlreadyExists)));
        }
        let inode = self.inodes.len();
        self.inodes.push(Inode::default());
        self.change_name(NameChange::Link(name.into(), inode));
        self.step(name, "create")?;
        Ok(inode)
    }

    pub(super) fn put_new(&mut self, name: &str, bytes: &[u8], durably: bool) -> Result<()> {
        self.alive(name)?;
        if self.live.contains_key(name) {
            self.step(name, "find")?;
            return Err(failure(name, "put", io::Error::from(io::ErrorKind::AlreadyExists)));
        }
        self.put(name, bytes, durably).inspect_err(|_| {
            if self.alive(name).is_ok() && self.live.contains_key(name) {
                self.change_name(NameChange::Unlink(name.into()));
            }
        })
    }

    pub(super) fn put(&mut self, name: &str, bytes: &[u8], durably: bool) -> Result<()> {
        self.alive(name)?;
        let temporary = format!("tmp/{}", name.replace('/', "-"));
        self.live.remove(&temporary);
        let inode = self.create(&temporary)?;
        let written = self
            .write(&temporary, inode, bytes)
            .and_then(|()| if durably { self.sync_inode(&temporary, inode) } else { Ok(()) });
        if let Err(error) = written {
            self.alive(name)?;
            self.change_name(NameChange::Unlink(temporary));
            return Err(error);
        }
        self.change_name(NameChange::Link(name.into(), inode));
        self.change_name(NameChange::Unlink(temporary));
        self.step(name, "rename into place")?;
        if durably { self.sync_folder(name) } else { Ok(()) }
    }
}

pub(super) fn failure(name: &str, operation: &'static str, source: io::Error) -> Error {
    Error::Io { object: name.into(), operation, source }
}
