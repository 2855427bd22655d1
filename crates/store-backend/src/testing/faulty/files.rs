//! The locks and open files of [`FaultyBackend`].

use super::{FaultyBackend, State, failure};
use crate::Result;
use crate::{AppendFile, LockGuard, ReadFile};
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

#[derive(Debug)]
pub struct File {
    pub medium: FaultyBackend,
    pub name: String,
    pub inode: usize,
}

impl AppendFile for File {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.medium.state().write(&self.name, self.inode, bytes)
    }

    fn sync(&mut self) -> Result<()> {
        self.medium.state().sync_inode(&self.name, self.inode)
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
