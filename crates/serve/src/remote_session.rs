//! One remote writer that has a place: its open files, the bytes that it has staged, and its acts.

use crate::files::{Memory, MemoryShare, Refusal};
use crate::remote_writers::Highest;
use crate::write_rules::{WriteRules, denied};
use keyframe_store_backend::layout::{MAPS, PACKS};
use keyframe_store_backend::served::wire::{RefusalCode, WriteAct};
use keyframe_store_backend::{AppendFile, Backend, LockGuard, WriterSlot};
use serde::Deserialize;
use std::collections::HashMap;
use std::sync::Arc;

/// The most growing files that a writer has open.
const OPEN_MAX: usize = 64;
/// The longest file that a writer puts as a whole.
const FILE_BYTES_MAX: u64 = 1 << 30;
/// The longest pack.
const PACK_BYTES_MAX: u64 = 1 << 40;

/// A remote writer that has a place. The fields are dropped in this order: the place is given
/// back when nothing of the writer is open any more.
#[derive(Debug)]
pub struct RemoteSession {
    /// The files that grow, with their lengths.
    open: HashMap<String, (Box<dyn AppendFile>, u64)>,
    staged: Vec<u8>,
    /// The memory of the staged bytes.
    shares: Vec<MemoryShare>,
    /// Keeps other writers from starting, since this time.
    start: Option<(Box<dyn LockGuard>, u64)>,
    files: Arc<dyn Backend>,
    rules: WriteRules,
    torn: Vec<(u64, String)>,
    /// The number of the last act, and its outcome.
    last: (u64, Result<(), Refusal>),
    number: u32,
    slot: Box<dyn WriterSlot>,
}

/// The numbers in what a writer says about itself.
#[derive(Deserialize)]
#[serde(default)]
#[derive(Default)]
struct SaidNumbers {
    pack: u64,
    number: u64,
}

impl RemoteSession {
    /// Creates the session of a writer in the slot `slot` of this number. `start` keeps others from
    /// starting.
    pub fn new(
        files: Arc<dyn Backend>,
        (slot, number): (Box<dyn WriterSlot>, u32),
        start: (Box<dyn LockGuard>, u64),
        torn: Vec<(u64, String)>,
    ) -> Self {
        Self {
            open: HashMap::new(),
            staged: Vec::new(),
            shares: Vec::new(),
            start: Some(start),
            files,
            rules: WriteRules::new(number),
            torn,
            last: (0, Ok(())),
            number,
            slot,
        }
    }

    /// Returns the number of its slot.
    pub fn slot_number(&self) -> u32 {
        self.number
    }

    /// Returns the checkpoints that were set aside when it started.
    pub fn torn(&self) -> &[(u64, String)] {
        &self.torn
    }

    /// Lets other writers start.
    pub fn started(&mut self) {
        self.start = None;
    }

    /// Returns the time since when it keeps other writers from starting; `None` if it does not.
    pub fn starting_since_ms(&self) -> Option<u64> {
        self.start.as_ref().map(|(_, since)| *since)
    }

    /// Carries out act number `sequence`. If it was the last one, only returns its outcome again.
    /// Refuses an act that came late: a later one was carried out already.
    pub fn carry_out(
        &mut self,
        sequence: u64,
        act: &WriteAct,
        memory: &Arc<Memory>,
        highest: &Highest,
    ) -> Result<(), Refusal> {
        if sequence == self.last.0 {
            return self.last.1.clone();
        }
        if sequence < self.last.0 {
            let said = format!("act {sequence} came after act {}", self.last.0);
            return Err(Refusal(RefusalCode::Strange, said));
        }
        // Before, so that an act which panics is not carried out twice.
        let unknown = Refusal(RefusalCode::Failed, "the outcome is not known".into());
        self.last = (sequence, Err(unknown));
        let outcome = self.act(act, memory, highest);
        self.last.1.clone_from(&outcome);
        outcome
    }

    fn act(
        &mut self,
        act: &WriteAct,
        memory: &Arc<Memory>,
        highest: &Highest,
    ) -> Result<(), Refusal> {
        match act {
            WriteAct::Started => self.started(),
            WriteAct::Tell { state } => self.tell(state, highest)?,
            WriteAct::Create { name } => self.create(name, highest)?,
            WriteAct::Append { name, offset, bytes } => self.append(name, *offset, bytes)?,
            WriteAct::SyncOpen { name } => self.file(name)?.0.sync()?,
            WriteAct::Truncate { name, len_bytes } => {
                let (file, len) = self.file(name)?;
                if *len_bytes > *len {
                    return Err(Refusal(RefusalCode::Ends, "the file ends before".into()));
                }
                file.truncate(*len_bytes)?;
                *len = *len_bytes;
            }
            WriteAct::Close { name } => drop(self.open.remove(name)),
            WriteAct::Stage { offset, bytes } => self.stage(*offset, bytes, memory)?,
            WriteAct::Put { name, is_new, staged, bytes } => {
                let put = self.put(name, *is_new, *staged, bytes, highest);
                self.unstage();
                put?;
            }
            WriteAct::Remove { name } => {
                self.rules.remove(name)?;
                self.files.remove(name)?;
            }
            WriteAct::RemoveAll { folder, names } => {
                let names = self.rules.remove_all(folder, names)?;
                self.files.remove_all(folder, &names)?;
            }
            WriteAct::Sync { name } => {
                WriteRules::sync(name)?;
                self.files.sync(name)?;
            }
            // Its entry is closed instead.
            WriteAct::Leave => {}
        }
        Ok(())
    }

    fn tell(&self, state: &[u8], highest: &Highest) -> Result<(), Refusal> {
        let strange = |e: serde_json::Error| Refusal(RefusalCode::Strange, e.to_string());
        let said: SaidNumbers = serde_json::from_slice(state).map_err(strange)?;
        // Others take numbers above all that a writer says.
        highest.check(&*self.files, PACKS, said.pack)?;
        highest.check(&*self.files, MAPS, said.number)?;
        Ok(self.slot.tell(state)?)
    }

    fn create(&mut self, name: &str, highest: &Highest) -> Result<(), Refusal> {
        let number = WriteRules::pack(name)?;
        highest.check(&*self.files, PACKS, number)?;
        if self.open.len() >= OPEN_MAX {
            return Err(Refusal(RefusalCode::Denied, format!("{OPEN_MAX} files are open")));
        }
        let file = self.files.create(name)?;
        self.rules.made(name);
        self.open.insert(name.to_owned(), (file, 0));
        Ok(())
    }

    fn file(&mut self, name: &str) -> Result<&mut (Box<dyn AppendFile>, u64), Refusal> {
        self.open.get_mut(name).ok_or_else(|| denied(name))
    }

    fn append(&mut self, name: &str, offset: u64, bytes: &[u8]) -> Result<(), Refusal> {
        let (file, len) = self.file(name)?;
        if offset != *len {
            let said = format!("the file has {len} bytes, not {offset}");
            return Err(Refusal(RefusalCode::Strange, said));
        }
        let longer = len.saturating_add(bytes.len() as u64);
        if longer > PACK_BYTES_MAX {
            return Err(Refusal(RefusalCode::Denied, "the pack is too long".into()));
        }
        // If this fails, the length is not known until the file is truncated.
        let before = std::mem::replace(len, u64::MAX);
        if let Err(error) = file.append(bytes) {
            return Err(error.into());
        }
        *len = before.saturating_add(bytes.len() as u64);
        Ok(())
    }

    fn stage(&mut self, offset: u64, bytes: &[u8], memory: &Arc<Memory>) -> Result<(), Refusal> {
        if offset == 0 {
            self.unstage();
        }
        let len = self.staged.len() as u64;
        if offset != len {
            return Err(Refusal(RefusalCode::Strange, format!("{len} bytes are staged")));
        }
        if len.saturating_add(bytes.len() as u64) > FILE_BYTES_MAX {
            let said = format!("a remote writer puts files of {FILE_BYTES_MAX} bytes at most");
            return Err(Refusal(RefusalCode::Denied, said));
        }
        self.shares.push(memory.take_now(bytes.len() as u64)?);
        self.staged.extend_from_slice(bytes);
        Ok(())
    }

    fn unstage(&mut self) {
        (self.staged, self.shares) = (Vec::new(), Vec::new());
    }

    fn put(
        &mut self,
        name: &str,
        is_new: bool,
        staged: u64,
        bytes: &[u8],
        highest: &Highest,
    ) -> Result<(), Refusal> {
        let number = self.rules.put(name, is_new)?;
        if let Some(number) = number {
            highest.check(&*self.files, MAPS, number)?;
        }
        if staged != self.staged.len() as u64 {
            let said = format!("{} bytes are staged, not {staged}", self.staged.len());
            return Err(Refusal(RefusalCode::Strange, said));
        }
        let mut whole = std::mem::take(&mut self.staged);
        whole.extend_from_slice(bytes);
        let put =
            if is_new { self.files.put_new(name, &whole) } else { self.files.put(name, &whole) };
        // A put that failed may have left the file. One of a new file leaves none, and the name may
        // be another writer's.
        if put.is_ok() || !is_new {
            self.rules.made(name);
        }
        Ok(put?)
    }
}
