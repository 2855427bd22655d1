//! A store in object storage, over the S3 protocol: `s3://BUCKET/PREFIX`.
//!
//! ```text
//!   PREFIX/store.json, PREFIX/maps/..., PREFIX/checkpoints/..., PREFIX/tags/...    an object each, put at once
//!   PREFIX/packs/00000001.pack/...                                                 a pack is several objects (`pack`)
//!   PREFIX/lock, PREFIX/prune.lock                                                 objects that end unless renewed (`lease`)
//!
//!   S3 ─▶ Shared: client (requests, retries) · parts (cache of what was read) · leases · packs that this process writes
//! ```
//!
//! Invariants: what returned `Ok` is stored, as the server understands that; a put by a writer
//! whose lease may have ended is refused before it is sent. The storage must be consistent (what
//! was put is read and listed from then on) and know conditional puts; a store is made only where
//! it does.
//!
//! Not here: files that are open outlive their names in a directory, but objects do not: a reader
//! whose pack a prune removes finds it gone.

mod client;
mod lease;
mod pack;
mod parts;
mod place;
mod refusal;
#[cfg(test)]
pub(crate) mod tests;

pub use place::is_url;

use super::cache;
use super::{Backend, Growing, LockGuard, Readable, Refusal, Unlocked};
use crate::config::{STORE_JSON, random};
use crate::names::PACKS;
use crate::{Error, Result};
use client::{Client, Depth, If, Put};
use lease::Lease;
use parts::Cache;
use place::Place;
use rustc_hash::FxHashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

const LOCK: &str = "lock";
const PRUNE_LOCK: &str = "prune.lock";
/// What is read of an object when it is opened; the rest when it is asked for.
const HEAD_BYTES: u64 = 4 << 20;

/// A place in object storage.
#[derive(Debug)]
pub struct S3 {
    shared: Arc<Shared>,
}

/// What the files of one store have in common.
#[derive(Debug)]
struct Shared {
    client: Arc<Client>,
    cache: Cache,
    leases: Mutex<Vec<Weak<Lease>>>,
    /// Packs that this process writes.
    open: Mutex<FxHashMap<String, Weak<pack::Open>>>,
}

impl Shared {
    /// An error where a lock that was taken is not surely held any more.
    fn check_leases(&self) -> Result<()> {
        let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        leases.retain(|lease| lease.strong_count() > 0);
        let held: Vec<Arc<Lease>> = leases.iter().filter_map(Weak::upgrade).collect();
        drop(leases);
        held.iter().try_for_each(|lease| lease.check())
    }

    fn open_pack(&self, name: &str) -> Option<Arc<pack::Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).get(name).and_then(Weak::upgrade)
    }
}

impl S3 {
    /// The place that `url` names, with the rights and the cache that the environment names.
    /// Nothing is asked yet.
    pub fn open(url: &Path) -> Result<Self> {
        let variable = |name: &str| std::env::var(name).ok();
        let place = Place::parse(url, &variable)?;
        Ok(Self::at(place, cache::place(&variable)))
    }

    fn at(place: Place, cache: Option<PathBuf>) -> Self {
        let cache = Cache::new(cache, &format!("{} {}", place.endpoint, place.name));
        Self::over(Client::new(place), cache)
    }

    fn over(client: Client, cache: Cache) -> Self {
        let client = Arc::new(client);
        Self {
            shared: Arc::new(Shared {
                client,
                cache,
                leases: Mutex::default(),
                open: Mutex::default(),
            }),
        }
    }

    /// A place for a new store: refuses one that holds anything, and storage on which two writers
    /// could not be told apart.
    pub fn create(url: &Path) -> Result<Self> {
        let this = Self::open(url)?;
        this.require_empty()?;
        this.require_conditions()?;
        Ok(this)
    }

    fn require_empty(&self) -> Result<()> {
        let client = &self.shared.client;
        let exists = |problem: &str| Error::Exists {
            object: client.place.name.clone(),
            problem: problem.into(),
        };
        if client.get_if_there(STORE_JSON)?.is_some() {
            return Err(exists("a store is already here"));
        }
        if client.list("", Depth::Below, Some(2))?.is_empty() {
            Ok(())
        } else {
            Err(exists("there are objects here already"))
        }
    }

    fn require_conditions(&self) -> Result<()> {
        let client = &self.shared.client;
        let name = format!("tmp/probe-{}", crate::bytes::to_hex(&random::<8>()?));
        let first = client.put(&name, b"first", If::Absent);
        let again = client.put(&name, b"again", If::Absent);
        let other = client.put(&name, b"other", If::Is("\"0123456789abcdef0123456789abcdef\""));
        client.delete(&name)?;
        if matches!(first?, Put::Done(_)) && again? == Put::Refused && other? == Put::Refused {
            return Ok(());
        }
        let problem = format!(
            "the server at {} does not honour conditional puts (If-None-Match, If-Match): two writers could not be kept apart",
            client.place.endpoint
        );
        let fix = Some("use a server that does".into());
        let source = io::Error::new(io::ErrorKind::Unsupported, Refusal { problem, fix });
        Err(Error::Io { object: client.place.name.clone(), operation: "make a store", source })
    }

    fn take(&self, name: &'static str, holder: &str) -> Result<Box<dyn LockGuard>> {
        let (lease, held) = Lease::take(&self.shared.client, name, holder)?;
        self.shared
            .leases
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Arc::downgrade(&lease));
        Ok(Box::new(held))
    }
}

/// Packs are not objects of their own.
fn is_pack(name: &str) -> bool {
    name.strip_prefix("packs/").is_some_and(|file| !file.contains('/'))
}

impl S3 {
    /// Takes the writer's lock away from whoever holds it, and says who that was; that one writes
    /// nothing more.
    fn break_lock(&self) -> Result<Option<String>> {
        lease::break_it(&self.shared.client, LOCK)
    }
}

impl Backend for S3 {
    fn describe(&self, name: &str) -> String {
        self.shared.client.describe(name)
    }

    fn lock(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        self.take(LOCK, holder)
    }

    fn lock_prune(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        self.take(PRUNE_LOCK, holder)
    }

    fn holder(&self) -> Result<Option<String>> {
        lease::holder(&self.shared.client, LOCK)
    }

    fn stays(&self) -> bool {
        true
    }

    fn is_pruned(&self) -> Result<bool> {
        Ok(lease::holder(&self.shared.client, PRUNE_LOCK)?.is_some())
    }

    fn unlock(&self, force: bool) -> Result<Unlocked> {
        match self.holder()? {
            Some(holder) if !force => Ok(Unlocked::Held(holder)),
            // Also one whose time is over.
            _ => Ok(self.break_lock()?.map_or(Unlocked::Nothing, Unlocked::Removed)),
        }
    }

    fn create(&self, name: &str) -> Result<Box<dyn Growing>> {
        self.shared.check_leases()?;
        let (open, growing) = pack::create(&self.shared, name)?;
        let mut all = self.shared.open.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, open| open.strong_count() > 0);
        all.insert(name.into(), Arc::downgrade(&open));
        Ok(growing)
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.shared.check_leases()?;
        let condition = if name == STORE_JSON { If::Absent } else { If::Always };
        match self.shared.client.put(name, bytes, condition)? {
            Put::Done(_) => Ok(()),
            Put::Refused => {
                let object = self.shared.client.place.name.clone();
                Err(Error::Exists { object, problem: "a store is already here".into() })
            }
        }
    }

    fn open(&self, name: &str) -> Result<Arc<dyn Readable>> {
        if is_pack(name) {
            let open = self.shared.open_pack(name);
            return Ok(Arc::new(pack::Reading::new(&self.shared, name, open)?));
        }
        let head = self.shared.client.get(name, Some(&(0..HEAD_BYTES)), HEAD_BYTES)?;
        let (client, name) = (self.shared.client.clone(), name.to_owned());
        Ok(Arc::new(Whole { client, name, head: head.bytes, len_bytes: head.len_bytes }))
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        // Of packs the objects in them: servers that keep directories list them for a while after
        // what was in them.
        let depth = if folder == PACKS { Depth::Below } else { Depth::Here };
        let objects = self.shared.client.list(&format!("{folder}/"), depth, None)?;
        let names = objects
            .iter()
            .map(|object| object.name.split('/').next().unwrap_or_default().to_owned());
        let mut names: Vec<String> = names.collect();
        names.dedup();
        Ok(names)
    }

    fn remove(&self, name: &str) -> Result<()> {
        self.shared.check_leases()?;
        if is_pack(name) {
            pack::remove(&self.shared, name)
        } else {
            self.shared.client.delete(name)
        }
    }

    fn sync(&self, _name: &str) -> Result<()> {
        // What can be read is durable.
        self.shared.check_leases()
    }

    fn read(&self, name: &str, len_bytes_max: u64) -> Result<Vec<u8>> {
        if !is_pack(name) {
            return Ok(self.shared.client.get(name, None, len_bytes_max)?.bytes);
        }
        let file = self.open(name)?;
        super::read_whole(&*file, &self.describe(name), len_bytes_max)
    }
}

/// An object that is put at once.
#[derive(Debug)]
struct Whole {
    client: Arc<Client>,
    name: String,
    head: Vec<u8>,
    len_bytes: u64,
}

impl Readable for Whole {
    fn len_bytes(&self) -> Result<u64> {
        Ok(self.len_bytes)
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let end = offset.saturating_add(buffer.len() as u64);
        if end > self.len_bytes {
            let object = format!("{} at offset {offset}", self.client.describe(&self.name));
            return Err(Error::Io {
                object,
                operation: "read",
                source: io::ErrorKind::UnexpectedEof.into(),
            });
        }
        if let Some(bytes) = self.head.get(offset as usize..end as usize) {
            buffer.copy_from_slice(bytes);
            return Ok(());
        }
        let object = self.client.get(&self.name, Some(&(offset..end)), buffer.len() as u64)?;
        if object.bytes.len() != buffer.len() {
            let problem =
                format!("{} bytes came of {} asked for", object.bytes.len(), buffer.len());
            return Err(Error::damaged(
                format!("{} at offset {offset}", self.client.describe(&self.name)),
                problem,
            ));
        }
        buffer.copy_from_slice(&object.bytes);
        Ok(())
    }
}
