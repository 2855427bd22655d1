//! A writer of a store behind a checkpoint server.
//!
//! ```text
//!   join ─▶ the server takes a place among the store's writers, and holds it under a lease
//!     write act 1, 2, 3 ... ─▶ carried out in this order, each once ─▶ the lease begins anew
//!     no act for a while    ─▶ a thread renews the lease, each quarter of it
//!   leave, or the lease ends ─▶ the server gives the place back, and refuses every later act
//! ```
//!
//! Invariants: one act is under way at a time. An act whose answer did not come is sent again with
//! the number that it had, so the server carries it out once. Nothing is written through the place
//! of another writer of this process: [`ServedWriter`] belongs to one place for good.

use super::wire::{
    Answer, HOLDER_BYTES_MAX, NAMES_PER_ACT_MAX, RefusalCode, Request, WRITE_BYTES_MAX, WriteAct,
    WriterId,
};
use super::{ServedBackend, Shared, io_error};
use crate::layout::{READ_FOLDERS, WRITERS};
use crate::{
    AppendFile, Backend, Error, LockGuard, ReadFile, RemoteFailure, Result, Space, StartingWriter,
    WriterEntry, WriterSlot, random_bytes,
};
use keyframe_locks::IgnorePoison;
use serde::{Deserialize, Serialize};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// How long a client waits for other writers that start, and how often it asks.
const JOIN_MAX: Duration = Duration::from_secs(90);
const JOIN_PAUSE: Duration = Duration::from_millis(100);
/// A writer keeps so much of what it reads in memory: it has a budget of its own for what it puts.
const WRITER_CACHE_BYTES: usize = 16 << 20;
/// The lease is renewed so often in its time.
const RENEWALS: u32 = 4;

/// The place that a server has given to a writer, in its answer.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct GrantedPlace {
    /// The number of the slot among the writers of the store.
    pub slot: u32,
    /// The time without any request of the writer after which its place is lost, in milliseconds.
    pub lease_ms: u64,
    /// The checkpoints that power loss had damaged, and that the server has set aside for this
    /// writer: the number and the problem of each.
    pub torn: Vec<(u64, String)>,
}

/// What a writer says about itself, in the answer of a server: see [`WriterEntry`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ToldWriter {
    slot: Option<u32>,
    lives: bool,
    holder: String,
    /// Writers say a text; other bytes are a state that cannot be known.
    state: Option<String>,
}

impl From<WriterEntry> for ToldWriter {
    fn from(entry: WriterEntry) -> Self {
        let WriterEntry { slot, lives, holder, state } = entry;
        Self { slot, lives, holder, state: state.and_then(|state| String::from_utf8(state).ok()) }
    }
}

impl From<ToldWriter> for WriterEntry {
    fn from(told: ToldWriter) -> Self {
        let ToldWriter { slot, lives, holder, state } = told;
        Self { slot, lives, holder, state: state.map(String::into_bytes) }
    }
}

/// The place of this process among the writers of a served store.
#[derive(Debug)]
struct Place {
    shared: Arc<Shared>,
    id: WriterId,
    slot: u32,
    /// The number of the last act. The lock is held while an act is under way.
    sequence: Mutex<u64>,
    has_started: AtomicBool,
    is_lost: AtomicBool,
}

impl Place {
    /// Carries out an act. Errors: the server refuses it, or does not answer.
    fn act(&self, operation: &'static str, name: &str, act: WriteAct) -> Result<()> {
        let mut sequence = self.sequence.lock().ignore_poison();
        if self.is_lost() {
            return Err(self.lost(operation, name, "its lease has ended"));
        }
        *sequence += 1;
        let request = Request::Write { writer: self.id, sequence: *sequence, act };
        let answer = self.shared.client.ask_answer(operation, name, request)?;
        self.take(operation, name, answer)
    }

    /// Renews the lease. Errors: the server refuses, or does not answer.
    fn renew(&self) -> Result<()> {
        let has_started = self.has_started.load(Ordering::Acquire);
        let request = Request::Renew { writer: self.id, has_started };
        let answer = self.shared.client.ask_answer("renew the lease of", "", request)?;
        self.take("renew the lease of", "", answer)
    }

    fn take(&self, operation: &'static str, name: &str, answer: Answer) -> Result<()> {
        match answer {
            Answer::Data(_) => Ok(()),
            Answer::Refused(RefusalCode::Ended, said) => {
                self.is_lost.store(true, Ordering::Release);
                Err(self.lost(operation, name, &said))
            }
            Answer::Refused(code, said) => {
                Err(self.shared.client.refused(operation, name, code, &said))
            }
            Answer::Same => Err(self.shared.client.strange(operation, name, "no answer to an act")),
        }
    }

    fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }

    fn lost(&self, operation: &'static str, name: &str, why: &str) -> Error {
        let problem = format!("this writer has no place in the store any more: {why}");
        let fix = "a run begins anew by itself, with a complete checkpoint, when the server \
                   answers; run any other command again";
        io_error(
            self.shared.client.describe(name),
            operation,
            io::ErrorKind::StaleNetworkFileHandle,
            RemoteFailure { problem, fix: Some(fix.into()) },
        )
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Otherwise the lease ends by itself.
        let _ = self.act("leave", "", WriteAct::Leave);
    }
}

/// Asks the server for a place, and becomes a writer. Errors: [`Error::Locked`]; the server accepts
/// no checkpoints, or does not answer.
pub(super) fn join(reader: &ServedBackend, holder: &str) -> Result<StartingWriter> {
    let shared = &reader.shared;
    let client = &shared.client;
    let id: WriterId = random_bytes()?;
    let end = holder.floor_char_boundary(HOLDER_BYTES_MAX);
    let holder = holder.get(..end).unwrap_or_default();
    let deadline = Instant::now() + JOIN_MAX;
    let granted = loop {
        let request = Request::Join { writer: id, holder: holder.to_owned() };
        match client.ask_answer("write to", "", request)? {
            Answer::Data(bytes) => {
                let granted = serde_json::from_slice::<GrantedPlace>(&bytes);
                break granted.map_err(|e| client.strange("write to", "", &e.to_string()))?;
            }
            Answer::Refused(RefusalCode::Busy, _) if Instant::now() < deadline => {
                std::thread::sleep(JOIN_PAUSE);
            }
            Answer::Refused(RefusalCode::Busy | RefusalCode::Locked, holder) => {
                return Err(Error::Locked { holder });
            }
            Answer::Refused(code, said) => return Err(client.refused("write to", "", code, &said)),
            Answer::Same => return Err(client.strange("write to", "", "no place")),
        }
    };
    // What was known of the packs is from before.
    shared.bump_generation();
    shared.cache.limit_memory(WRITER_CACHE_BYTES);
    let place = Arc::new(Place {
        shared: Arc::clone(shared),
        id,
        slot: granted.slot,
        sequence: Mutex::new(0),
        has_started: AtomicBool::new(false),
        is_lost: AtomicBool::new(false),
    });
    let lease = Duration::from_millis(granted.lease_ms);
    let renewal = client.renews_leases.then(|| renew_from_now_on(&place, lease)).transpose()?;
    let files = ServedWriter { reader: reader.clone(), place: Arc::clone(&place) };
    Ok(StartingWriter {
        slot: Box::new(ServedSlot { place: Arc::clone(&place), _renewal: renewal }),
        start: Box::new(ServedStart { place }),
        files: Some(Arc::new(files)),
        settled: Some(granted.torn),
    })
}

/// Renews the lease of `place` on a thread, until the returned end of the channel is dropped.
fn renew_from_now_on(place: &Arc<Place>, lease: Duration) -> Result<Sender<()>> {
    let (stop, stopped) = channel();
    let place = Arc::downgrade(place);
    let every = (lease / RENEWALS).max(Duration::from_millis(10));
    let thread = std::thread::Builder::new().name("lease".into());
    let spawned = thread.spawn(move || until_stopped(&place, &stopped, every));
    spawned.map_err(|source| Error::Io {
        object: "the thread of the lease".into(),
        operation: "start",
        source,
    })?;
    Ok(stop)
}

fn until_stopped(place: &Weak<Place>, stopped: &Receiver<()>, every: Duration) {
    while matches!(stopped.recv_timeout(every), Err(RecvTimeoutError::Timeout)) {
        let Some(place) = place.upgrade() else { return };
        // Without an answer it is tried again. The next act tells the error.
        let _ = place.renew();
        if place.is_lost() {
            return;
        }
    }
}

/// The slot that the server holds for this process.
#[derive(Debug)]
struct ServedSlot {
    place: Arc<Place>,
    /// Ends the thread that renews the lease.
    _renewal: Option<Sender<()>>,
}

impl LockGuard for ServedSlot {}

impl WriterSlot for ServedSlot {
    fn number(&self) -> Option<u32> {
        Some(self.place.slot)
    }

    fn tell(&self, state: &[u8]) -> Result<()> {
        self.place.act("write to", "", WriteAct::Tell { state: state.to_vec() })
    }

    fn is_lost(&self) -> bool {
        self.place.is_lost()
    }
}

/// Keeps other writers from starting.
#[derive(Debug)]
struct ServedStart {
    place: Arc<Place>,
}

impl LockGuard for ServedStart {}

impl Drop for ServedStart {
    fn drop(&mut self) {
        self.place.has_started.store(true, Ordering::Release);
        // Otherwise the next renewal says so, or the server ends a start that takes too long.
        let _ = self.place.act("write to", "", WriteAct::Started);
    }
}

/// The files of a served store, as the writer in one place writes them.
#[derive(Debug)]
struct ServedWriter {
    reader: ServedBackend,
    place: Arc<Place>,
}

impl ServedWriter {
    fn put_as(&self, name: &str, bytes: &[u8], is_new: bool) -> Result<()> {
        let last_at = bytes.len().saturating_sub(1) / WRITE_BYTES_MAX * WRITE_BYTES_MAX;
        let (first, last) = bytes.split_at_checked(last_at).unwrap_or((bytes, &[]));
        let mut offset = 0;
        for chunk in first.chunks(WRITE_BYTES_MAX) {
            let act = WriteAct::Stage { offset, bytes: chunk.to_vec() };
            self.place.act("write", name, act)?;
            offset += chunk.len() as u64;
        }
        let (name_of, last) = (name.to_owned(), last.to_vec());
        let act = WriteAct::Put { name: name_of, is_new, staged: offset, bytes: last };
        self.changed(self.place.act("write", name, act))
    }

    /// Marks that files of this store have changed, whether the act is known to have succeeded or
    /// not.
    fn changed<T>(&self, outcome: T) -> T {
        self.reader.shared.bump_generation();
        outcome
    }
}

impl Backend for ServedWriter {
    fn describe(&self, name: &str) -> String {
        self.reader.describe(name)
    }

    fn lock(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        self.reader.lock(holder)
    }

    fn join(&self, holder: &str) -> Result<StartingWriter> {
        self.reader.join(holder)
    }

    fn writers(&self) -> Result<Vec<WriterEntry>> {
        self.reader.writers()
    }

    fn lock_prune(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        self.reader.lock_prune(holder)
    }

    fn lock_holder(&self) -> Result<Option<String>> {
        self.reader.lock_holder()
    }

    fn is_pruning(&self) -> Result<bool> {
        self.reader.is_pruning()
    }

    fn space(&self) -> Option<Space> {
        self.reader.space()
    }

    fn boot_id(&self) -> Result<String> {
        self.reader.boot_id()
    }

    fn create(&self, name: &str) -> Result<Box<dyn AppendFile>> {
        let created = self.place.act("create", name, WriteAct::Create { name: name.into() });
        if let Err(error) = self.changed(created) {
            // It may have been created, and be open there.
            let _ = self.place.act("close", name, WriteAct::Close { name: name.into() });
            return Err(error);
        }
        let (reader, place) = (self.reader.clone(), Arc::clone(&self.place));
        Ok(Box::new(ServedAppend { reader, place, name: name.into(), len_bytes: 0 }))
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.put_as(name, bytes, false)
    }

    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.put_as(name, bytes, true)
    }

    fn open(&self, name: &str) -> Result<Arc<dyn ReadFile>> {
        self.reader.open(name)
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        if !READ_FOLDERS.contains(&folder) && folder != WRITERS {
            return Ok(Vec::new());
        }
        self.reader.list_any(folder)
    }

    fn remove(&self, name: &str) -> Result<()> {
        self.changed(self.place.act("remove", name, WriteAct::Remove { name: name.into() }))
    }

    fn remove_all(&self, folder: &str, names: &[String]) -> Result<()> {
        let inside = |name: &String| {
            name.strip_prefix(folder).and_then(|rest| rest.strip_prefix('/')).map(str::to_owned)
        };
        let mut names: Vec<String> = names.iter().filter_map(inside).collect();
        loop {
            // Also without names: this makes earlier changes of the folder durable.
            let rest = names.split_off(names.len().min(NAMES_PER_ACT_MAX));
            let act = WriteAct::RemoveAll { folder: folder.into(), names };
            self.changed(self.place.act("remove", folder, act))?;
            if rest.is_empty() {
                return Ok(());
            }
            names = rest;
        }
    }

    fn sync(&self, name: &str) -> Result<()> {
        self.place.act("sync", name, WriteAct::Sync { name: name.into() })
    }

    fn read(&self, name: &str, len_bytes_max: u64) -> Result<Vec<u8>> {
        self.reader.read(name, len_bytes_max)
    }
}

/// A file that this writer appends to.
#[derive(Debug)]
struct ServedAppend {
    reader: ServedBackend,
    place: Arc<Place>,
    name: String,
    len_bytes: u64,
}

impl AppendFile for ServedAppend {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        for chunk in bytes.chunks(WRITE_BYTES_MAX) {
            let (name, offset) = (self.name.clone(), self.len_bytes);
            let act = WriteAct::Append { name, offset, bytes: chunk.to_vec() };
            self.place.act("append", &self.name, act)?;
            self.len_bytes += chunk.len() as u64;
        }
        Ok(())
    }

    fn sync(&mut self) -> Result<()> {
        self.place.act("sync", &self.name, WriteAct::SyncOpen { name: self.name.clone() })
    }

    fn truncate(&mut self, len_bytes: u64) -> Result<()> {
        let act = WriteAct::Truncate { name: self.name.clone(), len_bytes };
        let cut = self.place.act("truncate", &self.name, act);
        // A cached piece may hold what was cut.
        self.reader.shared.bump_generation();
        cut?;
        self.len_bytes = len_bytes;
        Ok(())
    }
}

impl Drop for ServedAppend {
    fn drop(&mut self) {
        // Otherwise the server closes it with the writer's place.
        let _ = self.place.act("close", &self.name, WriteAct::Close { name: self.name.clone() });
    }
}
