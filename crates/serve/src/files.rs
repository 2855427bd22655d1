//! Answers requests from the files of one store. No other file can be read.
//!
//! A pack stays open for a while after a read, so that a client can read it to the end although a
//! prune removes it. Invariants: at most [`OPEN_MAX`] packs are open. Whole files that are being
//! read or sent take at most [`MEMORY_BYTES_MAX`] of memory, except that one larger file may be in
//! progress alone. Files up to the length of a range do not count: a connection has one at a time.

use crate::remote_writers::RemoteWriters;
use keyframe_locks::IgnorePoison;
use keyframe_store_backend::Error;
use keyframe_store_backend::layout::{PACKS, READ_FOLDERS, WRITERS, is_between_writers, is_file};
use keyframe_store_backend::served::wire::{
    self, FileStat, HEAD_BYTES, KnownHash, LIST_BYTES_MAX, RANGE_BYTES_MAX, RefusalCode, Request,
};
use keyframe_store_backend::served::{StoreState, ToldWriter};
use keyframe_store_backend::{Backend, FileStamp, ReadFile};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// The largest number of files that are kept open.
const OPEN_MAX: usize = 1024;
/// How long a pack stays open after its last read.
const OPEN_FOR: Duration = Duration::from_secs(300);
/// The most bytes of whole files, and of their compressed copies, that are in memory at the same
/// time.
const MEMORY_BYTES_MAX: u64 = 1 << 30;
/// The longest time for which a request waits for memory.
const WAIT_MAX: Duration = Duration::from_secs(15);

/// The answer to a request that the server does not refuse.
#[derive(Debug)]
pub enum Reply {
    /// The requested bytes.
    Data {
        /// The bytes.
        bytes: Vec<u8>,
        /// They are part of a pack, which is compressed already, so the server sends them without
        /// compression.
        is_packed: bool,
        /// The memory that they take, to be kept until they are sent; `None` for a short answer.
        share: Option<MemoryShare>,
    },
    /// The client holds these bytes already: their hash is the one that it sent.
    Same,
}

/// The refusal of a request: a code for the client's program, and a text for its user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal(pub RefusalCode, pub String);

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        // Where the store lies on this machine is none of the client's business.
        match (&error, error.io_kind()) {
            (_, Some(ErrorKind::NotFound)) => {
                Self(RefusalCode::NotFound, "there is no such file".into())
            }
            (_, Some(ErrorKind::UnexpectedEof)) => {
                Self(RefusalCode::Ends, "the file ends before".into())
            }
            (_, Some(ErrorKind::AlreadyExists)) => {
                Self(RefusalCode::Exists, "the name is taken already".into())
            }
            (
                Error::Io { source, .. },
                Some(ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge),
            ) => Self(RefusalCode::Full, format!("the served store is full: {source}")),
            (Error::Damaged { problem, .. }, _) => Self(RefusalCode::TooLong, problem.clone()),
            (Error::Io { operation, source, .. }, _) => {
                Self(RefusalCode::Failed, format!("the server could not {operation} it: {source}"))
            }
            _ => Self(RefusalCode::Failed, "the server could not read it".into()),
        }
    }
}

/// The files of one store, from which the server answers its clients' requests.
#[derive(Debug)]
pub struct ServedFiles {
    backend: Arc<dyn Backend>,
    store: [u8; 16],
    open: Mutex<HashMap<String, Open>>,
    memory: Arc<Memory>,
    /// The remote writers; `None` if the server accepts no checkpoints.
    writers: Option<Arc<RemoteWriters>>,
}

#[derive(Debug)]
struct Open {
    identity: u64,
    file: Arc<dyn ReadFile>,
    used: Instant,
}

impl ServedFiles {
    /// Creates the files of the store with the id `store`, whose storage is `backend`.
    pub fn new(backend: Arc<dyn Backend>, store: [u8; 16]) -> Self {
        let (open, memory) = (Mutex::default(), Arc::default());
        Self { backend, store, open, memory, writers: None }
    }

    /// Accepts checkpoints of `writers`.
    #[must_use]
    pub fn with_writers(self, writers: Arc<RemoteWriters>) -> Self {
        Self { writers: Some(writers), ..self }
    }

    /// Returns the remote writers. Refuses if the server accepts no checkpoints.
    pub fn writers(&self) -> Result<&Arc<RemoteWriters>, Refusal> {
        let said = "this server accepts no checkpoints";
        self.writers.as_ref().ok_or_else(|| Refusal(RefusalCode::Denied, said.into()))
    }

    fn require_file(&self, name: &str) -> Result<(), Refusal> {
        let is_between = self.writers.is_some() && is_between_writers(name);
        if is_file(name) || is_between { Ok(()) } else { Err(strange()) }
    }

    /// Returns the answer to a request of a client whose token was checked. Refuses a request for a
    /// name that no file of a store has, for a file that is missing, was replaced or is too long,
    /// and for one that the backend cannot read.
    pub fn answer(&self, request: &Request) -> Result<Reply, Refusal> {
        let plain = |bytes| Ok(Reply::Data { bytes, is_packed: false, share: None });
        match request {
            Request::Hello { .. } => plain(wire::encode_welcome(self.store)),
            Request::List { folder } => plain(self.list(folder)?),
            Request::Stat { names } => {
                let stats = names
                    .iter()
                    .map(|name| self.stat(name))
                    .collect::<Result<Vec<_>, Refusal>>()?;
                plain(wire::encode_stats(&stats))
            }
            Request::File { name, len_bytes_max, known } => {
                self.whole(name, *len_bytes_max, known.as_ref())
            }
            Request::Range { name, identity, offset, len_bytes, known } => {
                let file = self.file(name, *identity)?;
                let mut bytes = vec![0; *len_bytes as usize];
                file.read_at(*offset, &mut bytes)?;
                Ok(unless_known(
                    known.as_ref(),
                    Reply::Data { bytes, is_packed: true, share: None },
                ))
            }
            Request::State => {
                let (holder, is_pruned) = (self.backend.lock_holder()?, self.backend.is_pruning()?);
                let state = StoreState { holder, is_pruned, boot: self.backend.boot_id()? };
                plain(serde_json::to_vec(&state).unwrap_or_default())
            }
            Request::Join { writer, holder } => {
                let granted = RemoteWriters::join(self.writers()?, *writer, holder)?;
                plain(serde_json::to_vec(&granted).unwrap_or_default())
            }
            Request::Write { writer, sequence, act } => {
                self.writers()?.write(writer, *sequence, act)?;
                plain(Vec::new())
            }
            Request::Renew { writer, has_started } => {
                self.writers()?.renew(writer, *has_started)?;
                plain(Vec::new())
            }
            Request::Writers => {
                self.writers()?;
                let writers = self.backend.writers()?.into_iter().map(ToldWriter::from);
                plain(serde_json::to_vec(&writers.collect::<Vec<_>>()).unwrap_or_default())
            }
            Request::Space => {
                self.writers()?;
                plain(wire::encode_space(self.backend.space()))
            }
        }
    }

    fn list(&self, folder: &str) -> Result<Vec<u8>, Refusal> {
        let is_of_writers = self.writers.is_some() && folder == WRITERS;
        if !READ_FOLDERS.contains(&folder) && !is_of_writers {
            return Err(strange());
        }
        let names = self.backend.list(folder)?;
        let is_shown = |name: &&String| self.require_file(&format!("{folder}/{name}")).is_ok();
        let files = names.iter().filter(is_shown);
        let bytes = wire::encode_names(files.map(String::as_str));
        if bytes.len() as u64 > LIST_BYTES_MAX {
            return Err(Refusal(
                RefusalCode::Failed,
                "there are more files than a listing can have".into(),
            ));
        }
        Ok(bytes)
    }

    fn whole(
        &self,
        name: &str,
        len_bytes_max: u64,
        known: Option<&KnownHash>,
    ) -> Result<Reply, Refusal> {
        self.require_file(name)?;
        if name.split_once('/').is_some_and(|(folder, _)| folder == PACKS) {
            return Err(Refusal(RefusalCode::Strange, "a pack is read by ranges".into()));
        }
        let file = self.backend.open(name)?;
        let len = file.len_bytes()?;
        if len > len_bytes_max {
            return Err(Refusal(
                RefusalCode::TooLong,
                format!("{len} bytes long; at most {len_bytes_max} make sense"),
            ));
        }
        let is_long = len > u64::from(RANGE_BYTES_MAX);
        // The file, and its compressed copy.
        let share = if is_long { Some(self.memory.take(len.saturating_mul(2))?) } else { None };
        let mut bytes = vec![0; len as usize];
        file.read_at(0, &mut bytes)?;
        Ok(unless_known(known, Reply::Data { bytes, is_packed: false, share }))
    }

    /// Returns the present state of a file, also if an older file of that name is open; `None` if
    /// the file does not exist.
    fn stat(&self, name: &str) -> Result<Option<FileStat>, Refusal> {
        self.require_file(name)?;
        let file = match self.backend.open(name) {
            Err(error) if error.io_kind() == Some(ErrorKind::NotFound) => return Ok(None),
            other => other?,
        };
        let stamp = file.stamp()?.unwrap_or_default();
        let len_bytes = file.len_bytes()?;
        let mut head = vec![0; len_bytes.min(HEAD_BYTES as u64) as usize];
        file.read_at(0, &mut head)?;
        // What it held when it had that length: a stamp of before would be of less.
        let FileStamp { identity, modified } =
            file.stamp()?.filter(|now| *now == stamp).unwrap_or(FileStamp { modified: 0, ..stamp });
        self.keep(name, identity, file);
        Ok(Some(FileStat { identity, modified, len_bytes, head }))
    }

    fn keep(&self, name: &str, identity: u64, file: Arc<dyn ReadFile>) {
        let now = Instant::now();
        let mut open = self.open.lock().ignore_poison();
        if open.len() >= OPEN_MAX && !open.contains_key(name) {
            let oldest =
                open.iter().min_by_key(|(_, open)| open.used).map(|(name, _)| name.clone());
            open.retain(|name, open| {
                oldest.as_ref() != Some(name) && now.duration_since(open.used) < OPEN_FOR
            });
        }
        open.insert(name.to_owned(), Open { identity, file, used: now });
    }

    /// Opens the file `name`. Refuses if its identity is not `identity`; 0 accepts any file.
    fn file(&self, name: &str, identity: u64) -> Result<Arc<dyn ReadFile>, Refusal> {
        self.require_file(name)?;
        let mut open = self.open.lock().ignore_poison();
        if let Some(known) = open.get_mut(name).filter(|known| known.identity == identity) {
            known.used = Instant::now();
            return Ok(known.file.clone());
        }
        drop(open);
        let file = self.backend.open(name)?;
        let found = file.stamp()?.unwrap_or_default().identity;
        if identity != 0 && found != identity {
            return Err(Refusal(RefusalCode::NotFound, "the file has been replaced".into()));
        }
        self.keep(name, found, file.clone());
        Ok(file)
    }

    /// Closes the files that were not read for 5 minutes. A removed file takes space until it is
    /// closed.
    pub fn tidy(&self) {
        let now = Instant::now();
        let mut open = self.open.lock().ignore_poison();
        open.retain(|_, open| now.duration_since(open.used) < OPEN_FOR);
    }
}

fn strange() -> Refusal {
    Refusal(RefusalCode::Strange, "no name that a store's file has".into())
}

/// The reply, or that the client holds its bytes already.
fn unless_known(known: Option<&KnownHash>, reply: Reply) -> Reply {
    match (known, &reply) {
        (Some(known), Reply::Data { bytes, .. }) if blake3::hash(bytes) == *known => Reply::Same,
        _ => reply,
    }
}

/// The memory that whole files take.
#[derive(Debug, Default)]
pub struct Memory {
    taken: Mutex<u64>,
    freed: Condvar,
}

/// The memory that one answer takes, until this is dropped.
#[derive(Debug)]
pub struct MemoryShare {
    memory: Arc<Memory>,
    bytes: u64,
}

impl Memory {
    fn take(self: &Arc<Self>, bytes: u64) -> Result<MemoryShare, Refusal> {
        let taken = self.taken.lock().ignore_poison();
        let is_full =
            |taken: &mut u64| *taken > 0 && taken.saturating_add(bytes) > MEMORY_BYTES_MAX;
        let waited = self.freed.wait_timeout_while(taken, WAIT_MAX, is_full);
        let (mut taken, timeout) = waited.ignore_poison();
        if timeout.timed_out() {
            return Err(Refusal(RefusalCode::Failed, "the server has no memory for it now".into()));
        }
        *taken += bytes;
        Ok(MemoryShare { memory: Arc::clone(self), bytes })
    }

    /// Takes memory without a wait. Refuses if there is none.
    pub fn take_now(self: &Arc<Self>, bytes: u64) -> Result<MemoryShare, Refusal> {
        let mut taken = self.taken.lock().ignore_poison();
        let all = taken.saturating_add(bytes);
        if all > MEMORY_BYTES_MAX {
            return Err(Refusal(RefusalCode::Failed, "the server has no memory for it now".into()));
        }
        *taken = all;
        Ok(MemoryShare { memory: Arc::clone(self), bytes })
    }
}

impl Drop for MemoryShare {
    fn drop(&mut self) {
        *self.memory.taken.lock().ignore_poison() -= self.bytes;
        self.memory.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_store_backend::LocalBackend;

    #[test]
    fn a_long_answer_keeps_its_share_of_the_memory_until_it_is_sent() {
        const MAP: &str = "maps/0000000001.map";
        let dir = tempfile::tempdir().unwrap();
        let backend = LocalBackend::create(&dir.path().join("store")).unwrap();
        let bytes = vec![7; 3 << 20];
        backend.put(MAP, &bytes).unwrap();
        backend.put("tags/a", b"short").unwrap();
        let files = ServedFiles::new(Arc::new(backend), [0; 16]);
        let ask = |name: &str, known| {
            let (name, len_bytes_max) = (name.to_owned(), 1 << 30);
            files.answer(&Request::File { name, len_bytes_max, known })
        };
        let taken = || *files.memory.taken.lock().unwrap();
        let reply = ask(MAP, None).unwrap();
        assert_eq!(taken(), 6 << 20);
        drop(reply);
        assert_eq!(taken(), 0);
        let reply = ask("tags/a", None).unwrap();
        assert_eq!(taken(), 0);
        drop(reply);
        // The server sends nothing.
        let same = ask(MAP, Some(*blake3::hash(&bytes).as_bytes())).unwrap();
        assert!(matches!(same, Reply::Same));
        assert_eq!(taken(), 0);
    }
}
