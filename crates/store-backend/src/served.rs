//! A store behind a checkpoint server (`keyframe serve`): `kf://HOST:PORT`.
//!
//! ```text
//!   small file ─▶ request with the hash of the cached copy ─▶ "same", or the file, compressed
//!   pack       ─▶ pieces of 128 KiB ─▶ cached for this state of the file? ─▶ from the cache
//!                                      └─▶ else requested, many at once (`file`)
//!
//!   ServedBackend ─▶ Shared: client (connections, retries), piece cache, states of packs
//! ```
//!
//! A reader finds an offset of a pack in a map, which was written after the pack. So the client
//! asks again for the length of packs only after it has read something else.
//!
//! Invariants:
//! - Only a writer writes (`writer`), through the place that the server has given to it.
//! - A cached piece is used only if the server confirms it: by the stamp of the file, if the piece
//!   came from this very server, or by the hash of the piece.
//! - Lengths are checked before memory is allocated.
//!
//! The server is the crate `serve`. It needs no key: it sends the files of an encrypted store
//! encrypted.

mod address;
mod client;
mod connection;
mod file;
pub mod wire;
mod writer;

pub use address::{DEFAULT_PORT, TOKEN_VARIABLE, is_url, read_token, show_fingerprint};
pub use keyframe_tls::{Fingerprint, fingerprint};
pub use writer::{GrantedPlace, ToldWriter};

use crate::backend::read_whole;
use crate::cache::{self, CacheLimits, PieceCache, PieceKey};
use crate::layout::{CHECKPOINTS, MAPS, PACKS, READ_FOLDERS};
use crate::{
    AppendFile, Backend, Error, LockGuard, ReadFile, RemoteFailure, Result, Space, StartingWriter,
    WriterEntry,
};
use address::ServerAddress;
use client::ServeClient;
use file::{PackStats, ServedFile};
use keyframe_locks::IgnorePoison;
use rustc_hash::FxHashSet;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use wire::{Answer, Request};

const FOLDER: &str = "served";
const DISK_BYTES_MAX: u64 = 8 << 30;
const MEMORY_BYTES_MAX: usize = 64 << 20;

/// Counts the requests of this process to checkpoint servers.
pub(crate) static FETCH_COUNTERS: FetchCounters = FetchCounters::new();

/// Counts of what this process has fetched from checkpoint servers so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FetchStats {
    /// The number of answered requests.
    pub requests: u64,
    /// The number of bytes of their answers, without the overhead of TLS.
    pub bytes_fetched: u64,
    /// The number of wanted pieces of packs that were in the cache.
    pub cache_hits: u64,
    /// The number of wanted pieces of packs that had to be requested.
    pub cache_misses: u64,
}

/// Returns the counts of what this process has fetched so far.
pub fn fetch_stats() -> FetchStats {
    let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let FetchCounters { requests, bytes, hits, misses } = &FETCH_COUNTERS;
    FetchStats {
        requests: of(requests),
        bytes_fetched: of(bytes),
        cache_hits: of(hits),
        cache_misses: of(misses),
    }
}

pub(crate) struct FetchCounters {
    requests: AtomicU64,
    bytes: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
}

impl FetchCounters {
    const fn new() -> Self {
        let [requests, bytes, hits, misses] = [const { AtomicU64::new(0) }; 4];
        Self { requests, bytes, hits, misses }
    }

    fn count(&self, bytes: u64) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// The processes that work on a store, as its server reports them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct StoreState {
    /// The texts with which the writers describe themselves, one a line; `None` if no process
    /// writes.
    pub holder: Option<String>,
    /// True while a prune runs.
    pub is_pruned: bool,
    /// The boot id of the server's machine.
    pub boot: String,
}

/// A backend whose files are behind a checkpoint server. Clones share connections and caches.
#[derive(Clone, Debug)]
pub struct ServedBackend {
    shared: Arc<Shared>,
}

/// The state that all files of one store share.
#[derive(Debug)]
struct Shared {
    client: ServeClient,
    cache: PieceCache,
    /// Counts the reads after which packs may have grown.
    generation: AtomicU64,
    stats: Mutex<PackStats>,
    /// Pieces that a thread of this process is fetching.
    busy: Mutex<FxHashSet<PieceKey>>,
    done: Condvar,
}

impl ServedBackend {
    /// Returns the store at `url`. The environment names the token, the trusted certificate and the
    /// cache. Sends no request yet. Errors: the URL is malformed; the certificate cannot be read.
    pub fn open(url: &Path) -> Result<Self> {
        Self::open_in(url, &|name| std::env::var(name).ok())
    }

    /// Returns the store at `url` as [`Self::open`] does, with `environment` to look up the
    /// variables. Errors: those of [`Self::open`].
    pub fn open_in(url: &Path, environment: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let place = ServerAddress::parse(url, environment)?;
        Ok(Self::over(ServeClient::new(place), cache::cache_root(environment)))
    }

    fn over(client: ServeClient, cache: Option<PathBuf>) -> Self {
        let limits = CacheLimits::of_environment(DISK_BYTES_MAX, MEMORY_BYTES_MAX);
        let cache = PieceCache::new(cache, FOLDER, limits);
        let shared = Shared {
            client,
            cache,
            generation: AtomicU64::new(1),
            stats: Mutex::default(),
            busy: Mutex::default(),
            done: Condvar::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    fn refuse<T>(&self, name: &str, operation: &'static str) -> Result<T> {
        Err(read_only(&self.shared.client.describe(name), operation))
    }

    /// Lists a folder. To a writer, the server also lists the marks of writers.
    fn list_any(&self, folder: &str) -> Result<Vec<String>> {
        let client = &self.shared.client;
        let names = match client.ask("list", folder, Request::List { folder: folder.to_owned() })? {
            Answer::Data(bytes) => wire::decode_names(&bytes)
                .map_err(|problem| client.strange("list", folder, &problem))?,
            _ => return Err(client.strange("list", folder, "no file names")),
        };
        self.shared.bump_generation();
        if folder == PACKS {
            // A caller that lists packs opens them next. Then one request asks for all of them.
            self.shared.stats.lock().ignore_poison().expect(&names);
        }
        Ok(names)
    }

    fn state(&self) -> Result<StoreState> {
        let client = &self.shared.client;
        match client.ask("look at", "lock", Request::State)? {
            Answer::Data(bytes) => serde_json::from_slice(&bytes)
                .map_err(|e| client.strange("look at", "lock", &e.to_string())),
            _ => Err(client.strange("look at", "lock", "no state of the store")),
        }
    }
}

/// The error of an attempt to write to a served store.
pub(crate) fn read_only(object: &str, operation: &'static str) -> Error {
    let problem = "a served store is read-only for this".to_owned();
    Error::read_only(object, operation, RemoteFailure { problem, fix: Some(READ_ONLY_FIX.into()) })
}

/// What a user can do in place of something that no client of a server can do.
const READ_ONLY_FIX: &str = "do this on the machine where the store is, or copy the checkpoints into a store of your own: keyframe \
    copy --to STORE";
/// What a user can do where a server accepts no checkpoints.
const DENIED_FIX: &str = "start the server with keyframe serve --allow-write, write on the machine where the store is, or write to a \
    store of your own";

fn io_error(
    object: String,
    operation: &'static str,
    kind: io::ErrorKind,
    refusal: RemoteFailure,
) -> Error {
    Error::Io { object, operation, source: io::Error::new(kind, refusal) }
}

fn is_pack(name: &str) -> bool {
    name.strip_prefix(PACKS).is_some_and(|rest| rest.starts_with('/'))
}

/// True for whole files that are cached: they never change and may be large.
fn is_cached_whole(name: &str) -> bool {
    name.starts_with(MAPS) || name.starts_with(CHECKPOINTS)
}

impl Backend for ServedBackend {
    fn describe(&self, name: &str) -> String {
        self.shared.client.describe(name)
    }

    fn lock(&self, _holder: &str) -> Result<Box<dyn LockGuard>> {
        self.refuse("lock", "write to")
    }

    fn join(&self, holder: &str) -> Result<StartingWriter> {
        writer::join(self, holder)
    }

    fn writers(&self) -> Result<Vec<WriterEntry>> {
        let client = &self.shared.client;
        let entries = match client.ask_answer("look at", "lock", Request::Writers)? {
            Answer::Data(bytes) => serde_json::from_slice::<Vec<ToldWriter>>(&bytes)
                .map_err(|e| client.strange("look at", "lock", &e.to_string()))?
                .into_iter()
                .map(WriterEntry::from)
                .collect(),
            // A server that accepts no checkpoints tells no more than the texts.
            Answer::Refused(wire::RefusalCode::Denied, _) => {
                let entry = |holder| WriterEntry { slot: None, lives: true, holder, state: None };
                self.lock_holder()?.map(entry).into_iter().collect()
            }
            Answer::Refused(code, said) => {
                return Err(client.refused("look at", "lock", code, &said));
            }
            Answer::Same => return Err(client.strange("look at", "lock", "no writers")),
        };
        // Packs may have grown, or were cut, before the writers said so.
        self.shared.bump_generation();
        Ok(entries)
    }

    fn lock_prune(&self, _holder: &str) -> Result<Box<dyn LockGuard>> {
        self.refuse("prune.lock", "prune")
    }

    fn space(&self) -> Option<Space> {
        match self.shared.client.ask_answer("look at", "", Request::Space).ok()? {
            Answer::Data(bytes) => wire::decode_space(&bytes).ok()?,
            _ => None,
        }
    }

    fn lock_holder(&self) -> Result<Option<String>> {
        Ok(self.state()?.holder)
    }

    fn is_pruning(&self) -> Result<bool> {
        Ok(self.state()?.is_pruned)
    }

    fn boot_id(&self) -> Result<String> {
        Ok(self.state()?.boot)
    }

    fn create(&self, name: &str) -> Result<Box<dyn AppendFile>> {
        self.refuse(name, "create")
    }

    fn put(&self, name: &str, _bytes: &[u8]) -> Result<()> {
        self.refuse(name, "write")
    }

    fn open(&self, name: &str) -> Result<Arc<dyn ReadFile>> {
        Ok(Arc::new(ServedFile::new(&self.shared, name)?))
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        if !READ_FOLDERS.contains(&folder) {
            // The server sends no other folder.
            return Ok(Vec::new());
        }
        if !READ_FOLDERS.contains(&folder) {
            // The server sends no other folder to readers.
            return Ok(Vec::new());
        }
        self.list_any(folder)
    }

    fn remove(&self, name: &str) -> Result<()> {
        self.refuse(name, "remove")
    }

    fn sync(&self, name: &str) -> Result<()> {
        self.refuse(name, "sync")
    }

    fn read(&self, name: &str, len_bytes_max: u64) -> Result<Vec<u8>> {
        if is_pack(name) {
            // Packs may have grown since they were looked at.
            self.shared.bump_generation();
            return read_whole(&*self.open(name)?, &self.describe(name), len_bytes_max);
        }
        let client = &self.shared.client;
        let key = if is_cached_whole(name) { Some(self.shared.key(name, None)?) } else { None };
        let cached = key.and_then(|key| self.shared.cache.get(key));
        let cached = cached.filter(|bytes| bytes.len() as u64 <= len_bytes_max);
        let known = cached.as_ref().map(|bytes| *blake3::hash(bytes).as_bytes());
        let request = Request::File { name: name.to_owned(), len_bytes_max, known };
        let answer = client.ask("read", name, request)?;
        self.shared.bump_generation();
        match (answer, cached) {
            (Answer::Data(bytes), _) => {
                if let Some(key) = key {
                    self.shared.cache.put(key, &Arc::new(bytes.clone()));
                }
                Ok(bytes)
            }
            (Answer::Same, Some(bytes)) => Ok(bytes.to_vec()),
            _ => Err(client.strange("read", name, "\"unchanged\" for a file that is not cached")),
        }
    }
}

/// A server in the process of its client, for tests.
#[cfg(any(test, feature = "testing"))]
pub trait DirectServer: Send + Sync + std::fmt::Debug {
    /// Answers a request. Error: the request or its answer is lost.
    fn answer(&self, request: &Request) -> io::Result<Answer>;
}

/// For tests.
#[cfg(any(test, feature = "testing"))]
impl ServedBackend {
    /// Returns the store behind a server in this process. Leases are not renewed by themselves.
    pub fn of_direct(server: Arc<dyn DirectServer>) -> Self {
        let url = format!("kf://test?fingerprint={}", "00".repeat(32));
        let address = ServerAddress::parse(Path::new(&url), &|_| None).expect("an address");
        Self::over(ServeClient::of_direct(address, server), None)
    }

    /// Makes requests fail after `patience` without an answer. To be called before the backend is
    /// used.
    pub fn hasten(&mut self, patience: std::time::Duration) {
        Arc::get_mut(&mut self.shared).expect("not in use yet").client.hasten(patience);
    }

    /// Makes the backend ask for the lengths of files again.
    pub fn expect_changes(&self) {
        self.shared.bump_generation();
    }

    /// Asks the server for any folder. Errors: the server does not answer, or denies it.
    pub fn list_unchecked(&self, folder: &str) -> Result<()> {
        let request = Request::List { folder: folder.to_owned() };
        self.shared.client.ask("list", folder, request).map(drop)
    }
}

impl Shared {
    /// Marks that packs may have grown.
    fn bump_generation(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
    }

    /// The key of a whole file, or of a piece of it, in the cache.
    fn key(&self, name: &str, piece: Option<u64>) -> Result<PieceKey> {
        let store = self.client.store()?;
        Ok(match piece {
            None => PieceKey::of(&[b"file", &store, name.as_bytes()]),
            Some(number) => {
                PieceKey::of(&[b"piece", &store, name.as_bytes(), &number.to_le_bytes()])
            }
        })
    }
}
