//! A store that `keyframe serve` serves on another machine, for reading: `kf://HOST:PORT`.
//!
//! ```text
//!   small files ─▶ asked for with the hash of what is in the cache: sent compressed, or not at all
//!   packs       ─▶ pieces of 128 KiB ─▶ in the cache, and of this state of the file? ─▶ read there
//!                                        └─▶ the others asked for, many at once (`reading`)
//!
//!   Served ─▶ Shared: client (connections, attempts) · cache (this node's) · looks (what files are now)
//! ```
//!
//! How long a pack is now is asked again only after something else was read: who finds a place in a
//! pack has read of it in a map, which was written after the place was.
//!
//! Invariants: nothing is written; what the cache holds is used where the server has said that it
//! is what it holds, by the stamp of a file that has not changed or by its hash; bounds are checked
//! before memory is taken.
//!
//! Not here: the server (`crates/serve`). It needs no key: of an encrypted store it sends what is
//! encrypted.

mod client;
mod link;
mod place;
mod reading;
#[cfg(test)]
mod tests;
pub mod wire;

pub use crate::names::{FOLDERS, is_file};
pub use link::fingerprint;
pub use place::{Fingerprint, PORT, TOKEN, is_url, read_token, show_fingerprint};

use super::cache::{self, Cache, Key, Limits};
use super::{Backend, Growing, LockGuard, Readable, Refusal};
use crate::names::PACKS;
use crate::{Error, Result};
use client::Client;
use place::Place;
use reading::{Looks, Reading};
use rustc_hash::FxHashSet;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use wire::{Answer, Request};

const FOLDER: &str = "served";
const DISK_BYTES_MAX: u64 = 8 << 30;
const MEMORY_BYTES_MAX: usize = 64 << 20;

/// Counts what this process has fetched from checkpoint servers.
pub(crate) static FETCHED: Counters = Counters::new();

/// What this process has fetched from checkpoint servers so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Fetched {
    /// Requests that were answered.
    pub requests: u64,
    /// Bytes of their answers, without TLS around them.
    pub bytes_fetched: u64,
    /// Pieces of packs that were in the cache, each time that one was wanted.
    pub cache_hits: u64,
    /// Pieces that had to be asked for.
    pub cache_misses: u64,
}

/// See [`Fetched`].
pub fn fetched() -> Fetched {
    let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let Counters { requests, bytes, hits, misses } = &FETCHED;
    Fetched {
        requests: of(requests),
        bytes_fetched: of(bytes),
        cache_hits: of(hits),
        cache_misses: of(misses),
    }
}

pub(crate) struct Counters {
    requests: AtomicU64,
    bytes: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
}

impl Counters {
    const fn new() -> Self {
        let [requests, bytes, hits, misses] = [const { AtomicU64::new(0) }; 4];
        Self { requests, bytes, hits, misses }
    }

    fn count(&self, bytes: u64) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Who works at a store, as its server says it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct State {
    /// The text of the writer, if there is one.
    pub holder: Option<String>,
    /// Somebody prunes.
    pub is_pruned: bool,
    /// Which life of the server's machine this is.
    pub boot: String,
}

/// A store that is read through its server.
#[derive(Debug)]
pub struct Served {
    shared: Arc<Shared>,
}

/// What the files of one store have in common.
#[derive(Debug)]
struct Shared {
    client: Client,
    cache: Cache,
    /// Goes on when something was read that may tell of what files hold now.
    generation: AtomicU64,
    looks: Mutex<Looks>,
    /// Pieces that a thread of this process is fetching.
    busy: Mutex<FxHashSet<Key>>,
    done: Condvar,
}

impl Served {
    /// The place that `url` names, with the rights and the cache that the environment names.
    /// Nothing is asked yet.
    pub fn open(url: &Path) -> Result<Self> {
        Self::open_in(url, &|name| std::env::var(name).ok())
    }

    /// The same; `environment` gives the variables.
    pub fn open_in(url: &Path, environment: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let place = Place::parse(url, environment)?;
        Ok(Self::over(Client::new(place), cache::place(environment)))
    }

    fn over(client: Client, cache: Option<PathBuf>) -> Self {
        let limits = Limits::of_environment(DISK_BYTES_MAX, MEMORY_BYTES_MAX);
        let cache = Cache::new(cache, FOLDER, limits);
        let shared = Shared {
            client,
            cache,
            generation: AtomicU64::new(1),
            looks: Mutex::default(),
            busy: Mutex::default(),
            done: Condvar::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    fn refuse<T>(&self, name: &str, operation: &'static str) -> Result<T> {
        Err(read_only(&self.shared.client.describe(name), operation))
    }

    fn state(&self) -> Result<State> {
        let client = &self.shared.client;
        match client.ask("look at", "lock", Request::State)? {
            Answer::Data(bytes) => serde_json::from_slice(&bytes)
                .map_err(|e| client.strange("look at", "lock", &e.to_string())),
            _ => Err(client.strange("look at", "lock", "no state")),
        }
    }
}

/// The error for who wants to write to a served store.
pub(crate) fn read_only(object: &str, operation: &'static str) -> Error {
    let problem = "a served store is read-only".to_owned();
    let fix = "do this where the store is, or copy what you need into a store of your own: keyframe copy --to STORE";
    io_error(
        object.into(),
        operation,
        io::ErrorKind::ReadOnlyFilesystem,
        Refusal { problem, fix: Some(fix.into()) },
    )
}

fn io_error(
    object: String,
    operation: &'static str,
    kind: io::ErrorKind,
    refusal: Refusal,
) -> Error {
    Error::Io { object, operation, source: io::Error::new(kind, refusal) }
}

fn is_pack(name: &str) -> bool {
    name.strip_prefix(PACKS).is_some_and(|rest| rest.starts_with('/'))
}

/// Whole files that are worth keeping: those that are never changed and may be large.
fn is_kept(name: &str) -> bool {
    name.starts_with(crate::names::MAPS) || name.starts_with(crate::names::CHECKPOINTS)
}

impl Backend for Served {
    fn describe(&self, name: &str) -> String {
        self.shared.client.describe(name)
    }

    fn lock(&self, _holder: &str) -> Result<Box<dyn LockGuard>> {
        self.refuse("lock", "write to")
    }

    fn lock_prune(&self, _holder: &str) -> Result<Box<dyn LockGuard>> {
        self.refuse("prune.lock", "prune")
    }

    fn holder(&self) -> Result<Option<String>> {
        Ok(self.state()?.holder)
    }

    fn is_pruned(&self) -> Result<bool> {
        Ok(self.state()?.is_pruned)
    }

    fn boot(&self) -> Result<String> {
        Ok(self.state()?.boot)
    }

    fn create(&self, name: &str) -> Result<Box<dyn Growing>> {
        self.refuse(name, "create")
    }

    fn put(&self, name: &str, _bytes: &[u8]) -> Result<()> {
        self.refuse(name, "write")
    }

    fn open(&self, name: &str) -> Result<Arc<dyn Readable>> {
        Ok(Arc::new(Reading::new(&self.shared, name)?))
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        if !FOLDERS.contains(&folder) {
            // Nothing of it is served.
            return Ok(Vec::new());
        }
        let client = &self.shared.client;
        let names = match client.ask("list", folder, Request::List { folder: folder.to_owned() })? {
            Answer::Data(bytes) => wire::decode_names(&bytes)
                .map_err(|problem| client.strange("list", folder, &problem))?,
            _ => return Err(client.strange("list", folder, "no names")),
        };
        self.shared.goes_on();
        if folder == PACKS {
            // Who lists packs opens them next: then all are looked at with one request.
            self.shared.looks.lock().unwrap_or_else(PoisonError::into_inner).expect(&names);
        }
        Ok(names)
    }

    fn remove(&self, name: &str) -> Result<()> {
        self.refuse(name, "remove")
    }

    fn sync(&self, name: &str) -> Result<()> {
        self.refuse(name, "sync")
    }

    fn read(&self, name: &str, len_bytes_max: u64) -> Result<Vec<u8>> {
        if is_pack(name) {
            // All that it holds by now, whatever was known of it.
            self.shared.goes_on();
            return super::read_whole(&*self.open(name)?, &self.describe(name), len_bytes_max);
        }
        let client = &self.shared.client;
        let key = if is_kept(name) { Some(self.shared.key(name, None)?) } else { None };
        let cached = key.and_then(|key| self.shared.cache.get(key));
        let cached = cached.filter(|bytes| bytes.len() as u64 <= len_bytes_max);
        let known = cached.as_ref().map(|bytes| *blake3::hash(bytes).as_bytes());
        let request = Request::File { name: name.to_owned(), len_bytes_max, known };
        let answer = client.ask("read", name, request)?;
        self.shared.goes_on();
        match (answer, cached) {
            (Answer::Data(bytes), _) => {
                if let Some(key) = key {
                    self.shared.cache.put(key, &Arc::new(bytes.clone()));
                }
                Ok(bytes)
            }
            (Answer::Same, Some(bytes)) => Ok(bytes.to_vec()),
            _ => Err(client.strange("read", name, "the same as nothing")),
        }
    }
}

impl Shared {
    /// Something was read that may tell of what files hold now.
    fn goes_on(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
    }

    /// What a whole file, or a piece of one, is kept by.
    fn key(&self, name: &str, piece: Option<u64>) -> Result<Key> {
        let store = self.client.store()?;
        Ok(match piece {
            None => Key::of(&[b"file", &store, name.as_bytes()]),
            Some(number) => Key::of(&[b"piece", &store, name.as_bytes(), &number.to_le_bytes()]),
        })
    }
}
