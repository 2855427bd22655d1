//! The remote writers: each has a place among the writers of the store, which the server holds
//! for it under a lease.
//!
//! ```text
//!   join ─▶ starting ──place taken, settled──▶ open ──leave, or no request for the lease──▶ ended
//!              └──refused──▶ ended              act 1, act 2, ...: one at a time, each once
//! ```
//!
//! Invariants: an act is carried out while its writer is open, and only then. Ending a writer waits
//! for the act under way, closes its files, and then gives the place back. So others see it as ended
//! after its last act, as they see a process that was killed. An act under way holds up no other
//! writer. What a writer may do is in [`crate::write_rules`].

use crate::files::{Memory, Refusal};
use crate::remote_session::RemoteSession;
use crate::write_rules::NUMBERS_AHEAD_MAX;
use keyframe_locks::IgnorePoison;
use keyframe_store_backend::layout::{self, PACKS};
use keyframe_store_backend::served::GrantedPlace;
use keyframe_store_backend::served::wire::{RefusalCode, WriteAct, WriterId};
use keyframe_store_backend::{Backend, Error, StartingWriter, WriterSlot};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// The most remote writers at a time.
const WRITERS_MAX: usize = 1000;
/// A join waits so long for other writers that start. Then the client asks again.
const JOIN_WAIT: Duration = Duration::from_secs(2);
/// A writer that takes longer to start is ended, because others wait for it.
const START_MAX_MS: u64 = 50_000;

/// Opens the store's files as another process would: with locks and temporary files of its own.
pub type OpenFiles = Box<dyn Fn() -> Result<Arc<dyn Backend>, Refusal> + Send + Sync>;
/// Settles what writers have left that have ended, for the writer in the slot with this number.
/// Returns the checkpoints that it has set aside.
pub type Settle =
    Box<dyn Fn(&Arc<dyn Backend>, u32) -> Result<Vec<(u64, String)>, Refusal> + Send + Sync>;
/// Returns the time in milliseconds since some instant. It never goes back.
pub type Clock = Box<dyn Fn() -> u64 + Send + Sync>;

/// How a server holds places for remote writers.
pub struct RemoteWriterOptions {
    /// The time without a request after which a writer's place is given back.
    pub lease: Duration,
    /// Opens the store's files for one writer.
    pub open: OpenFiles,
    /// Settles what ended writers have left.
    pub settle: Settle,
    /// The clock of the leases.
    pub clock: Clock,
}

/// The writers of one store that run on other hosts.
pub struct RemoteWriters {
    options: RemoteWriterOptions,
    writers: Mutex<HashMap<WriterId, Arc<Entry>>>,
    /// The staged bytes of all writers.
    memory: Arc<Memory>,
    highest: Highest,
}

impl std::fmt::Debug for RemoteWriters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} remote writers", self.writers.lock().ignore_poison().len())
    }
}

/// The highest numbers that were found in the store, or accepted.
#[derive(Debug, Default)]
pub struct Highest {
    pack: AtomicU64,
    map: AtomicU64,
}

impl Highest {
    /// Checks that a writer may take number `number` of a pack, or of a map, or say that it has. The
    /// numbers of a store must not run out because one client is wrong.
    pub fn check(&self, files: &dyn Backend, folder: &str, number: u64) -> Result<(), Refusal> {
        let (known, parse): (_, fn(&str) -> Option<u64>) = match folder {
            PACKS => (&self.pack, |file| layout::parse_pack(file).map(u64::from)),
            _ => (&self.map, layout::parse_map),
        };
        if number > known.load(Ordering::Relaxed).saturating_add(NUMBERS_AHEAD_MAX / 2) {
            let there = files.list(folder)?.iter().filter_map(|file| parse(file)).max();
            known.fetch_max(there.unwrap_or(0), Ordering::Relaxed);
        }
        if number <= known.load(Ordering::Relaxed).saturating_add(NUMBERS_AHEAD_MAX) {
            return Ok(());
        }
        Err(Refusal(RefusalCode::Denied, format!("number {number} is far above those of {folder}")))
    }
}

/// A writer on another host.
#[derive(Debug)]
struct Entry {
    /// The end of its lease; 0 if it has ended.
    until_ms: AtomicU64,
    /// The lock is held while an act is under way.
    state: Mutex<EntryState>,
    settled: Condvar,
}

#[derive(Debug)]
enum EntryState {
    Starting,
    Refused(Refusal),
    Open(Box<RemoteSession>),
    Ended,
}

/// The answer to a writer that has no place.
fn ended() -> Refusal {
    let said = "its lease has ended, or the server has been restarted";
    Refusal(RefusalCode::Ended, said.into())
}

impl RemoteWriters {
    /// Creates the writers of one store, none at first.
    pub fn new(options: RemoteWriterOptions) -> Self {
        let (writers, memory, highest) = (Mutex::default(), Arc::default(), Highest::default());
        Self { options, writers, memory, highest }
    }

    fn entry(&self, id: &WriterId) -> Option<Arc<Entry>> {
        self.writers.lock().ignore_poison().get(id).cloned()
    }

    fn lease_ms(&self) -> u64 {
        u64::try_from(self.options.lease.as_millis()).unwrap_or(u64::MAX)
    }

    fn next_end(&self) -> u64 {
        (self.options.clock)().saturating_add(self.lease_ms()).max(1)
    }

    /// Gives a place to the writer `id`, or tells the place that it has. Refuses with
    /// [`RefusalCode::Busy`] while other writers start.
    pub fn join(this: &Arc<Self>, id: WriterId, holder: &str) -> Result<GrantedPlace, Refusal> {
        let (entry, is_new) = this.admit(id, holder)?;
        if is_new {
            // On a thread, because it waits for other writers that start, for a minute at most.
            let (writers, begun, text) = (Arc::clone(this), Arc::clone(&entry), holder.to_owned());
            let thread = std::thread::Builder::new().name("join".into());
            if thread.spawn(move || writers.start(id, &begun, &text)).is_err() {
                this.writers.lock().ignore_poison().remove(&id);
                return Err(Refusal(RefusalCode::Failed, "the server has no thread for it".into()));
            }
        }
        let is_starting = |state: &mut EntryState| matches!(state, EntryState::Starting);
        let state = entry.state.lock().ignore_poison();
        let waited = entry.settled.wait_timeout_while(state, JOIN_WAIT, is_starting);
        this.granted(&waited.ignore_poison().0)
    }

    /// Gives a place to the writer `id` in the calling thread.
    pub fn join_at_once(&self, id: WriterId, holder: &str) -> Result<GrantedPlace, Refusal> {
        let (entry, is_new) = self.admit(id, holder)?;
        if is_new {
            self.start(id, &entry, holder);
        }
        let state = entry.state.lock().ignore_poison();
        self.granted(&state)
    }

    fn granted(&self, state: &EntryState) -> Result<GrantedPlace, Refusal> {
        match state {
            EntryState::Starting => Err(Refusal(RefusalCode::Busy, "another writer starts".into())),
            EntryState::Refused(refusal) => Err(refusal.clone()),
            EntryState::Open(session) => Ok(GrantedPlace {
                slot: session.slot_number(),
                lease_ms: self.lease_ms(),
                torn: session.torn().to_vec(),
            }),
            EntryState::Ended => Err(ended()),
        }
    }

    /// The entry of `id`, and true if it was made now.
    fn admit(&self, id: WriterId, holder: &str) -> Result<(Arc<Entry>, bool), Refusal> {
        if holder.chars().any(char::is_control) {
            let said = "control characters in the description";
            return Err(Refusal(RefusalCode::Strange, said.into()));
        }
        self.expire();
        let mut writers = self.writers.lock().ignore_poison();
        if let Some(entry) = writers.get(&id) {
            return Ok((Arc::clone(entry), false));
        }
        if writers.len() >= WRITERS_MAX {
            let said = format!("{WRITERS_MAX} remote writers have a place already");
            return Err(Refusal(RefusalCode::Failed, said));
        }
        let entry = Arc::new(Entry {
            until_ms: AtomicU64::new(self.next_end()),
            state: Mutex::new(EntryState::Starting),
            settled: Condvar::new(),
        });
        writers.insert(id, Arc::clone(&entry));
        Ok((entry, true))
    }

    fn start(&self, id: WriterId, entry: &Entry, holder: &str) {
        let begun = self.begin(holder);
        let mut state = entry.state.lock().ignore_poison();
        *state = match begun {
            Ok(session) => {
                entry.until_ms.store(self.next_end(), Ordering::Release);
                EntryState::Open(Box::new(session))
            }
            Err(refusal) => {
                // The writer gets this answer once; the sweep removes the entry.
                entry.until_ms.store(self.next_end(), Ordering::Release);
                EntryState::Refused(refusal)
            }
        };
        drop(state);
        entry.settled.notify_all();
        // The server may have ended meanwhile.
        if self.entry(&id).is_none() {
            Self::end(entry);
        }
    }

    fn begin(&self, holder: &str) -> Result<RemoteSession, Refusal> {
        let files = (self.options.open)()?;
        let StartingWriter { slot, start, .. } = files.join(holder).map_err(|e| match e {
            Error::Locked { holder } => Refusal(RefusalCode::Locked, holder),
            other => other.into(),
        })?;
        let Some(number) = WriterSlot::number(&*slot) else {
            let said = "the served store has one writer at a time";
            return Err(Refusal(RefusalCode::Denied, said.into()));
        };
        let torn = (self.options.settle)(&files, number)?;
        let since_ms = (self.options.clock)();
        Ok(RemoteSession::new(files, (slot, number), (start, since_ms), torn))
    }

    /// Carries out act number `sequence` of the writer `id`, or tells the outcome if it was carried
    /// out before.
    pub fn write(&self, id: &WriterId, sequence: u64, act: &WriteAct) -> Result<(), Refusal> {
        let entry = self.entry(id).ok_or_else(ended)?;
        let mut state = entry.state.lock().ignore_poison();
        if !self.extend(&entry) {
            close(&mut state, &entry);
            return Err(ended());
        }
        let EntryState::Open(session) = &mut *state else { return Err(ended()) };
        if matches!(act, WriteAct::Leave) {
            close(&mut state, &entry);
            drop(state);
            self.writers.lock().ignore_poison().remove(id);
            return Ok(());
        }
        let outcome = session.carry_out(sequence, act, &self.memory, &self.highest);
        // The act may have taken longer than the lease: a slow medium is not the writer's fault.
        entry.until_ms.store(self.next_end(), Ordering::Release);
        outcome
    }

    /// Renews the lease of the writer `id`.
    pub fn renew(&self, id: &WriterId, has_started: bool) -> Result<(), Refusal> {
        let entry = self.entry(id).ok_or_else(ended)?;
        if !self.extend(&entry) {
            return Err(ended());
        }
        // An act under way renews the lease, too, and may take long.
        if has_started
            && let Ok(mut state) = entry.state.try_lock()
            && let EntryState::Open(session) = &mut *state
        {
            session.started();
        }
        Ok(())
    }

    /// Lets the lease of a writer begin anew. False if it is over.
    fn extend(&self, entry: &Entry) -> bool {
        let (now, next) = ((self.options.clock)(), self.next_end());
        let extended = entry.until_ms.fetch_update(Ordering::AcqRel, Ordering::Acquire, |until| {
            (until > 0 && now <= until).then_some(next)
        });
        extended.is_ok()
    }

    /// Ends the writers whose lease is over. To be called now and then.
    pub fn expire(&self) {
        let all: Vec<(WriterId, Arc<Entry>)> = {
            let writers = self.writers.lock().ignore_poison();
            writers.iter().map(|(id, entry)| (*id, Arc::clone(entry))).collect()
        };
        let now = (self.options.clock)();
        for (id, entry) in all {
            // One with an act under way lives.
            let Ok(mut state) = entry.state.try_lock() else { continue };
            if matches!(*state, EntryState::Starting) {
                continue;
            }
            let starts_long = match &*state {
                EntryState::Open(session) => session
                    .starting_since_ms()
                    .is_some_and(|since| now.saturating_sub(since) > START_MAX_MS),
                _ => false,
            };
            let until = entry.until_ms.load(Ordering::Acquire);
            // If it is renewed at this moment, it lives.
            let over = starts_long
                || until < now
                    && entry
                        .until_ms
                        .compare_exchange(until, 0, Ordering::AcqRel, Ordering::Acquire)
                        .is_ok();
            if over {
                close(&mut state, &entry);
                drop(state);
                self.writers.lock().ignore_poison().remove(&id);
            }
        }
    }

    fn end(entry: &Entry) {
        close(&mut entry.state.lock().ignore_poison(), entry);
    }

    /// Ends all writers, as the end of the server's process would.
    pub fn end_all(&self) {
        let all: Vec<Arc<Entry>> =
            self.writers.lock().ignore_poison().drain().map(|(_, entry)| entry).collect();
        for entry in &all {
            Self::end(entry);
        }
    }
}

/// Ends a writer: closes its files, then gives its place back.
fn close(state: &mut EntryState, entry: &Entry) {
    entry.until_ms.store(0, Ordering::Release);
    *state = EntryState::Ended;
}

#[cfg(test)]
mod tests;
