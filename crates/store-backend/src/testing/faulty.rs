//! A backend in memory whose medium fails on command: crashes, torn writes, a full disk, failing
//! syncs.
//!
//! ```text
//!   append ──▶ live bytes ──sync──▶ durable bytes
//!                 └──crash: any mix of their sectors──▶ what the next process finds
//!   create, rename ──▶ live names ──directory sync──▶ durable names
//!                 └──crash: any of the changes────────▶ what the next process finds
//! ```
//!
//! Each step that may be the last before a crash counts as one operation: first its volatile effect
//! happens, then the crash, then its durable effect. A failed sync loses its bytes for good, even
//! if a later sync succeeds, as on Linux. It is reported once to each process that had the file, or
//! the medium, open before.
//!
//! Clones are the same process. [`FaultyBackend::process`] makes another one, which can be killed
//! alone.

mod files;
mod medium;
mod process;

pub use super::random::SeededRandom;
use crate::{AppendFile, Backend, LockGuard, ReadFile, Space, StartingWriter, WriterEntry};
use crate::{Error, Result};
use files::{File, Guard, PruneGuard, SlotGuard, StartGuard};
use keyframe_locks::IgnorePoison;
use medium::{Inode, NameChange, Slot, State, failure};
use process::Process;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

/// More writers at a time than any test has.
const SLOTS_MAX: u32 = 1000;

/// A backend in memory whose medium fails on command. Clones share the medium.
#[derive(Clone, Debug, Default)]
pub struct FaultyBackend {
    state: Arc<Mutex<State>>,
    /// Names and whole files are not synced one by one ([`Backend::without_syncs`]).
    relaxed: bool,
    /// The number of power failures, which makes the boot id.
    lives: u64,
    process: Arc<Process>,
}

impl FaultyBackend {
    fn state(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().ignore_poison();
        state.current = Arc::clone(&self.process);
        state
    }

    /// Returns the medium as another process uses it.
    #[must_use]
    pub fn process(&self) -> Self {
        let mut state = self.state();
        state.processes += 1;
        let process = Arc::new(Process::new(state.processes, state.failures));
        drop(state);
        Self { process, ..self.clone() }
    }

    /// Returns the medium as this process uses it without a sync of each file
    /// ([`Backend::without_syncs`]).
    #[must_use]
    pub fn relaxed(&self) -> Self {
        Self { relaxed: true, ..self.clone() }
    }

    /// Kills this process at its next operation but `operations`. Its locks are free from then on.
    pub fn kill_in(&self, operations: u64) {
        self.process.kill_in(operations);
    }

    /// Makes a planned kill of this process not happen. A kill that has happened stays.
    pub fn spare(&self) {
        self.process.spare();
    }

    /// Returns true if this process was killed.
    pub fn is_dead(&self) -> bool {
        self.process.is_dead()
    }

    /// Returns the number of syncs so far, of files and of directories.
    pub fn syncs(&self) -> u64 {
        self.state().syncs
    }

    /// Makes operation number `operation` and all after it fail.
    pub fn crash_at(&self, operation: u64) {
        self.state().crash_at = Some(operation);
    }

    /// Returns true after a planned crash has happened.
    pub fn has_crashed(&self) -> bool {
        let state = self.state();
        state.crash_at.is_some_and(|at| state.operations >= at)
    }

    /// Makes sync number `sync` fail.
    pub fn fail_sync_at(&self, sync: u64) {
        self.state().fail_sync_at = Some(sync);
    }

    /// Makes the read after the next `reads` reads return too few bytes. The same read succeeds
    /// when repeated.
    pub fn fail_read_in(&self, reads: u64) {
        let mut state = self.state();
        state.fail_read_at = Some(state.reads + reads);
    }

    /// Returns the number of reads so far.
    pub fn reads(&self) -> u64 {
        self.state().reads
    }

    /// Returns the number of operations so far.
    pub fn operations(&self) -> u64 {
        self.state().operations
    }

    /// Ends all planned faults. A crash that has happened stays.
    pub fn calm(&self) {
        let mut state = self.state();
        (state.fail_sync_at, state.fail_read_at) = (None, None);
        (state.capacity_bytes, state.told_bytes) = (None, None);
        state.crash_at = state.crash_at.filter(|at| state.operations >= *at);
    }

    /// Limits the medium to `capacity_bytes` bytes; `None` for no limit.
    pub fn limit(&self, capacity_bytes: Option<usize>) {
        let mut state = self.state();
        (state.capacity_bytes, state.told_bytes) = (capacity_bytes, None);
    }

    /// Limits the medium to `capacity_bytes` bytes, and makes it tell its size and free space.
    pub fn limit_and_tell(&self, capacity_bytes: usize) {
        self.limit(Some(capacity_bytes));
        self.state().told_bytes = Some(capacity_bytes);
    }

    /// Returns the number of bytes that the files on the medium take.
    pub fn used_bytes(&self) -> usize {
        self.state().used_bytes()
    }

    /// Returns the medium as the machine finds it after a power failure now. `seed` decides which
    /// of the bytes and names that are not durable survive.
    #[must_use]
    pub fn after_power_loss(&self, seed: u64) -> Self {
        let state = self.state();
        let mut chance = SeededRandom(seed);
        let mut names = state.durable.clone();
        for change in &state.pending {
            if chance.next_u64().is_multiple_of(2) {
                change.apply(&mut names);
            }
        }
        let inodes = state.inodes.iter().map(|inode| inode.after_power_loss(&mut chance)).collect();
        let fresh = State { inodes, live: names.clone(), durable: names, ..State::default() };
        Self::of(fresh, self.lives + 1)
    }

    /// Creates a copy of the live files, all of them durable.
    #[must_use]
    pub fn copy(&self) -> Self {
        let mut fresh = State::default();
        for (name, bytes) in self.files() {
            fresh.live.insert(name, fresh.inodes.len());
            fresh.inodes.push(Inode {
                durable: bytes.clone(),
                live: bytes,
                lost: 0,
                failed_by: None,
            });
        }
        fresh.durable = fresh.live.clone();
        Self::of(fresh, self.lives)
    }

    /// Returns the medium as the next process finds it after this process died: live and durable
    /// state are kept.
    #[must_use]
    pub fn copy_with_same_durability(&self) -> Self {
        let state = self.state();
        let fresh = State {
            inodes: state.inodes.clone(),
            live: state.live.clone(),
            durable: state.durable.clone(),
            pending: state.pending.clone(),
            ..State::default()
        };
        Self::of(fresh, self.lives)
    }

    fn of(state: State, lives: u64) -> Self {
        Self { state: Arc::new(Mutex::new(state)), relaxed: false, lives, process: Arc::default() }
    }

    /// Returns the names of all files that [`Backend::create`] has made, in order.
    pub fn created(&self) -> Vec<String> {
        self.state().created.clone()
    }

    /// Returns all files and their bytes.
    pub fn files(&self) -> BTreeMap<String, Vec<u8>> {
        let state = self.state();
        state
            .live
            .iter()
            .map(|(name, inode)| (name.clone(), state.inodes[*inode].live.clone()))
            .collect()
    }

    /// Replaces the file `name`, or removes it if `bytes` is `None`, without the store's knowledge.
    pub fn overwrite(&self, name: &str, bytes: Option<Vec<u8>>) {
        let mut state = self.state();
        match bytes {
            None => {
                state.live.remove(name);
            }
            Some(live) => {
                let inode = state.inodes.len();
                state.inodes.push(Inode { live, ..Inode::default() });
                state.live.insert(name.into(), inode);
            }
        }
    }
}

impl Backend for FaultyBackend {
    fn describe(&self, name: &str) -> String {
        name.into()
    }

    fn lock(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        if let Some(holder) = self.lock_holder()? {
            return Err(Error::Locked { holder });
        }
        let mut state = self.state();
        state.locked = Some(holder.into());
        let guard = Box::new(Guard { state: self.state.clone() });
        state.clear_temporaries();
        drop(state);
        Ok(guard)
    }

    fn join(&self, holder: &str) -> Result<StartingWriter> {
        let mut state = self.state();
        if let Some(holder) = state.locked.clone() {
            return Err(Error::Locked { holder });
        }
        if state.starting.as_ref().is_some_and(|process| !process.is_dead()) {
            return Err(Error::Locked { holder: "a writer that starts".into() });
        }
        state.starting = Some(Arc::clone(&self.process));
        let is_free = |number: &u32| !state.slots.get(number).is_some_and(Slot::lives);
        let number = (0..SLOTS_MAX).find(is_free).unwrap_or_default();
        let slot = state.slots.entry(number).or_default();
        (slot.process, slot.holder) = (Some(Arc::clone(&self.process)), holder.into());
        let slot = Box::new(SlotGuard { medium: self.clone(), number });
        // Each file is put in one step, so no living process has one.
        state.clear_temporaries();
        drop(state);
        let start = StartGuard { state: self.state.clone(), process: Arc::clone(&self.process) };
        Ok(StartingWriter::new(slot, Box::new(start)))
    }

    fn writers(&self) -> Result<Vec<WriterEntry>> {
        let state = self.state();
        let alone = state.locked.clone();
        let alone =
            alone.map(|holder| WriterEntry { slot: None, lives: true, holder, state: None });
        let of_slot = |(number, slot): (&u32, &Slot)| WriterEntry {
            slot: Some(*number),
            lives: slot.lives(),
            holder: slot.holder.clone(),
            state: Some(slot.state.clone()),
        };
        Ok(alone.into_iter().chain(state.slots.iter().map(of_slot)).collect())
    }

    fn lock_prune(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        if std::mem::replace(&mut self.state().pruned, true) {
            return Err(Error::Locked { holder: holder.into() });
        }
        Ok(Box::new(PruneGuard { state: self.state.clone() }))
    }

    fn is_pruning(&self) -> Result<bool> {
        Ok(self.state().pruned)
    }

    fn lock_holder(&self) -> Result<Option<String>> {
        let living = self.writers()?.into_iter().filter(|writer| writer.lives);
        let texts: Vec<String> = living.map(|writer| writer.holder).collect();
        Ok((!texts.is_empty()).then(|| texts.join("\n")))
    }

    fn without_syncs(&self) -> Option<Arc<dyn Backend>> {
        Some(Arc::new(self.relaxed()))
    }

    fn sync_all(&self) -> Result<()> {
        let mut state = self.state();
        state.step("", "sync the file system")?;
        let failures = state.failures;
        let counted = state.count_sync("");
        // Another process may have heard of a failure first.
        let was_told = self.process.hears(failures);
        if counted.is_err() {
            let id = self.process.id;
            for inode in &mut state.inodes {
                (inode.lost, inode.failed_by) = (inode.live.len(), Some(id));
            }
            state.failures += 1;
            self.process.hears(state.failures);
            return counted;
        }
        for inode in &mut state.inodes {
            inode.durable = inode.synced();
        }
        for change in std::mem::take(&mut state.pending) {
            change.apply(&mut state.durable);
        }
        if was_told { Ok(()) } else { Err(failure("", "sync", io::Error::from_raw_os_error(5))) }
    }

    fn space(&self) -> Option<Space> {
        let state = self.state();
        let total_bytes = state.told_bytes?;
        let free_bytes = total_bytes.saturating_sub(state.used_bytes());
        Some(Space { total_bytes: total_bytes as u64, free_bytes: free_bytes as u64 })
    }

    fn boot_id(&self) -> Result<String> {
        Ok(self.lives.to_string())
    }

    fn create(&self, name: &str) -> Result<Box<dyn AppendFile>> {
        let mut state = self.state();
        let inode = state.create(name)?;
        state.created.push(name.into());
        if !self.relaxed {
            state.sync_folder(name)?;
        }
        Ok(Box::new(File { medium: self.clone(), name: name.into(), inode, was_told: false }))
    }

    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.state().put_new(name, bytes, !self.relaxed)
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.state().put(name, bytes, !self.relaxed)
    }

    fn open(&self, name: &str) -> Result<Arc<dyn ReadFile>> {
        let inode = self.state().live.get(name).copied();
        let inode =
            inode.ok_or_else(|| failure(name, "open", io::Error::from(io::ErrorKind::NotFound)))?;
        Ok(Arc::new(File { medium: self.clone(), name: name.into(), inode, was_told: false }))
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        let state = self.state();
        let inside =
            state.live.keys().filter_map(|name| name.strip_prefix(folder)?.strip_prefix('/'));
        Ok(inside.map(String::from).collect())
    }

    fn remove(&self, name: &str) -> Result<()> {
        let mut state = self.state();
        state.alive(name)?;
        // As a directory does: nothing is synced if the file did not exist.
        if !state.live.contains_key(name) {
            return Ok(());
        }
        state.change_name(NameChange::Unlink(name.into()));
        state.step(name, "remove")?;
        if self.relaxed { Ok(()) } else { state.sync_folder(name) }
    }

    fn remove_all(&self, folder: &str, names: &[String]) -> Result<()> {
        let mut state = self.state();
        state.alive(folder)?;
        for name in names {
            if state.live.contains_key(name) {
                state.change_name(NameChange::Unlink(name.clone()));
                state.step(name, "remove")?;
            }
        }
        if self.relaxed { Ok(()) } else { state.sync_folder(&format!("{folder}/")) }
    }

    fn sync(&self, name: &str) -> Result<()> {
        let mut state = self.state();
        if let Some(inode) = state.live.get(name).copied() {
            state.sync_inode(name, inode)?;
        }
        state.sync_folder(name)
    }
}
