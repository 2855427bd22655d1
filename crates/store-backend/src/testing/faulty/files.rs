//! The locks and open files of [`FaultyBackend`].

use super::{FaultyBackend, State, failure};
use crate::Result;
use crate::{AppendFile, Error, LockGuard, ReadFile, STATE_BYTES_MAX, WriterSlot};
use keyframe_locks::IgnorePoison;
use std::io;
use std::sync::{Arc, Mutex};

#[derive(Debug)]
pub struct Guard {
    pub state: Arc<Mutex<State>>,
}

impl LockGuard for Guard {}

#[derive(Debug)]
pub struct PruneGuard {
    pub state: Arc<Mutex<State>>,
}

impl LockGuard for PruneGuard {}

impl Drop for PruneGuard {
    fn drop(&mut self) {
        self.state.lock().ignore_poison().pruned = false;
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.state.lock().ignore_poison().locked = None;
    }
}

/// Keeps other writers from starting.
#[derive(Debug)]
pub struct StartGuard {
    pub state: Arc<Mutex<State>>,
    pub process: Arc<super::Process>,
}

impl LockGuard for StartGuard {}

impl Drop for StartGuard {
    fn drop(&mut self) {
        let starting = &mut self.state.lock().ignore_poison().starting;
        if starting.as_ref().is_some_and(|process| Arc::ptr_eq(process, &self.process)) {
            *starting = None;
        }
    }
}

/// The slot of a writer.
#[derive(Debug)]
pub struct SlotGuard {
    pub medium: FaultyBackend,
    pub number: u32,
}

impl LockGuard for SlotGuard {}

impl WriterSlot for SlotGuard {
    fn number(&self) -> Option<u32> {
        Some(self.number)
    }

    fn tell(&self, told: &[u8]) -> Result<()> {
        let mut state = self.medium.state();
        state.alive("a slot")?;
        if told.len() > STATE_BYTES_MAX {
            return Err(Error::damaged("a slot", "too long a state"));
        }
        if let Some(slot) = state.slots.get_mut(&self.number) {
            slot.state = told.to_vec();
        }
        Ok(())
    }
}

impl Drop for SlotGuard {
    fn drop(&mut self) {
        let mut state = self.medium.state();
        let slot = state.slots.get_mut(&self.number);
        let is_own = |of: &Arc<super::Process>| Arc::ptr_eq(of, &self.medium.process);
        // Another process may have taken the slot of a killed one.
        if let Some(slot) = slot.filter(|slot| slot.process.as_ref().is_some_and(is_own)) {
            slot.process = None;
        }
    }
}

#[derive(Debug)]
pub struct File {
    pub medium: FaultyBackend,
    pub name: String,
    pub inode: usize,
    /// It has reported that a sync of another process lost its bytes.
    pub was_told: bool,
}

impl AppendFile for File {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.medium.state().write(&self.name, self.inode, bytes)
    }

    fn sync(&mut self) -> Result<()> {
        let mut state = self.medium.state();
        let inode = &state.inodes[self.inode];
        let has_lost = inode.lost > 0 && inode.synced() != inode.live;
        let by_other = inode.failed_by.is_some_and(|id| id != self.medium.process.id);
        if has_lost && by_other && !std::mem::replace(&mut self.was_told, true) {
            return Err(failure(&self.name, "sync", io::Error::from_raw_os_error(5)));
        }
        state.sync_inode(&self.name, self.inode)
    }

    fn truncate(&mut self, len_bytes: u64) -> Result<()> {
        let mut state = self.medium.state();
        state.step(&self.name, "truncate")?;
        let inode = &mut state.inodes[self.inode];
        inode.live.truncate(len_bytes as usize);
        inode.lost = inode.lost.min(inode.live.len());
        Ok(())
    }
}

impl ReadFile for File {
    fn len_bytes(&self) -> Result<u64> {
        Ok(self.medium.state().inodes[self.inode].live.len() as u64)
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let mut state = self.medium.state();
        state.reads += 1;
        let is_short = state.fail_read_at == Some(state.reads);
        let bytes = &state.inodes[self.inode].live;
        let from =
            bytes.get(offset as usize..).and_then(|b| b.get(..buffer.len())).filter(|_| !is_short);
        let from = from.ok_or_else(|| {
            failure(&self.name, "read", io::Error::from(io::ErrorKind::UnexpectedEof))
        })?;
        buffer.copy_from_slice(from);
        Ok(())
    }
}
