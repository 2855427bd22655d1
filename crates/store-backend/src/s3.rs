//! A store in object storage, over the S3 protocol: `s3://BUCKET/PREFIX`.
//!
//! ```text
//!   PREFIX/store.json, PREFIX/maps/..., PREFIX/checkpoints/..., PREFIX/tags/...   one object each
//!   PREFIX/packs/00000001.pack/...                   a pack is several objects (`pack`)
//!   PREFIX/lock, PREFIX/prune.lock                   objects that expire unless renewed (`lease`)
//!
//!   S3Backend ─▶ Shared: client (requests, retries), cache of parts, leases, open packs
//! ```
//!
//! Invariants:
//! - After a call returned `Ok`, the server has confirmed that the bytes are stored.
//! - A writer whose lease may have ended sends nothing more.
//!
//! The storage must be consistent (a stored object is read and listed from then on) and must honour
//! conditional puts. [`S3Backend::create`] checks the second.
//!
//! In a directory an open file outlives its name. An object does not: a reader whose pack a prune
//! removes gets an error of kind `NotFound`.

mod client;
mod failure;
#[cfg(any(test, feature = "testing"))]
pub mod faults;
mod lease;
mod location;
mod pack;
mod part_cache;
#[cfg(test)]
mod tests;

pub use location::is_url;

use crate::backend::read_whole;
use crate::cache;
use crate::layout::{PACKS, STORE_JSON};
use crate::{
    AppendFile, Backend, Error, LockGuard, ReadFile, RemoteFailure, Result, UnlockOutcome,
    random_bytes,
};
use client::{ListDepth, Precondition, S3Client, S3PutOutcome};
use keyframe_bytes::hex::to_hex;
use keyframe_locks::IgnorePoison;
use lease::Lease;
use location::S3Location;
use part_cache::PartCache;
use rustc_hash::FxHashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};

const LOCK: &str = "lock";
const PRUNE_LOCK: &str = "prune.lock";
/// Bytes that are read when an object is opened; the rest is read on demand.
const HEAD_BYTES: u64 = 4 << 20;

/// A backend whose files are in object storage.
#[derive(Debug)]
pub struct S3Backend {
    shared: Arc<Shared>,
}

/// The state that all files of one store share.
#[derive(Debug)]
struct Shared {
    client: Arc<S3Client>,
    cache: PartCache,
    leases: Mutex<Vec<Weak<Lease>>>,
    /// The packs that this process writes, by name.
    open: Mutex<FxHashMap<String, Weak<pack::UploadedPack>>>,
}

impl Shared {
    /// Fails if a lock that this process took may have been lost.
    fn check_leases(&self) -> Result<()> {
        let mut leases = self.leases.lock().ignore_poison();
        leases.retain(|lease| lease.strong_count() > 0);
        let held: Vec<Arc<Lease>> = leases.iter().filter_map(Weak::upgrade).collect();
        drop(leases);
        held.iter().try_for_each(|lease| lease.check())
    }

    /// Writes an object while this process holds its locks. Errors: [`Error::Locked`] if one may
    /// have been lost; the service refuses or cannot be reached.
    fn put(&self, name: &str, bytes: &[u8], condition: Precondition<'_>) -> Result<S3PutOutcome> {
        self.client.put_while(&|| self.check_leases(), name, bytes, condition)
    }

    /// Removes an object while this process holds its locks. Errors: those of [`Self::put`].
    fn delete(&self, name: &str) -> Result<()> {
        self.client.delete_while(&|| self.check_leases(), name)
    }

    fn open_pack(&self, name: &str) -> Option<Arc<pack::UploadedPack>> {
        self.open.lock().ignore_poison().get(name).and_then(Weak::upgrade)
    }
}

impl S3Backend {
    /// Returns the store at `url`. The environment names the credentials and the cache. Sends no
    /// request yet. Errors: the URL is malformed; the environment has no credentials.
    pub fn open(url: &Path) -> Result<Self> {
        let variable = |name: &str| std::env::var(name).ok();
        let place = S3Location::parse(url, &variable)?;
        Ok(Self::at(place, cache::cache_root(&variable)))
    }

    fn at(location: S3Location, cache: Option<PathBuf>) -> Self {
        let cache = PartCache::new(cache, &format!("{} {}", location.endpoint, location.name));
        Self::over(S3Client::new(location), cache)
    }

    fn over(client: S3Client, cache: PartCache) -> Self {
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

    /// Creates the backend of a new store at `url`. Errors: [`Error::Exists`] if any object is
    /// there; the server does not honour conditional puts, so that two writers could hold the lock
    /// at once; the URL is malformed; the service refuses or cannot be reached.
    pub fn create(url: &Path) -> Result<Self> {
        let this = Self::open(url)?;
        this.check_new()?;
        Ok(this)
    }

    /// Checks that a store can be created here. Errors: those of [`Self::create`].
    pub fn check_new(&self) -> Result<()> {
        self.require_empty()?;
        self.require_conditions()
    }

    fn require_empty(&self) -> Result<()> {
        let client = &self.shared.client;
        let exists = |problem: &str| Error::Exists {
            object: client.location.name.clone(),
            problem: problem.into(),
        };
        if client.get_if_there(STORE_JSON)?.is_some() {
            return Err(exists("a store is already here"));
        }
        if client.list("", ListDepth::Below, Some(2))?.is_empty() {
            Ok(())
        } else {
            Err(exists("objects are already here"))
        }
    }

    fn require_conditions(&self) -> Result<()> {
        let client = &self.shared.client;
        let name = format!("tmp/probe-{}", to_hex(&random_bytes::<8>()?));
        let first = client.put(&name, b"first", Precondition::Absent);
        let again = client.put(&name, b"again", Precondition::Absent);
        let other = client.put(
            &name,
            b"other",
            Precondition::Matches("\"0123456789abcdef0123456789abcdef\""),
        );
        client.delete(&name)?;
        if matches!(first?, S3PutOutcome::Done(_))
            && again? == S3PutOutcome::Refused
            && other? == S3PutOutcome::Refused
        {
            return Ok(());
        }
        let problem = format!(
            "the server at {} ignores the conditions of puts (If-None-Match, If-Match), so two \
             writers could write at once",
            client.location.endpoint
        );
        let fix = Some("use a server that supports conditional puts".into());
        let source = io::Error::new(io::ErrorKind::Unsupported, RemoteFailure { problem, fix });
        Err(Error::Io { object: client.location.name.clone(), operation: "make a store", source })
    }

    fn take(&self, name: &'static str, holder: &str) -> Result<Box<dyn LockGuard>> {
        let (lease, held) = Lease::take(&self.shared.client, name, holder)?;
        self.shared.leases.lock().ignore_poison().push(Arc::downgrade(&lease));
        Ok(Box::new(held))
    }
}

/// True for a pack, which is several objects.
fn is_pack(name: &str) -> bool {
    name.strip_prefix("packs/").is_some_and(|file| !file.contains('/'))
}

impl Backend for S3Backend {
    fn describe(&self, name: &str) -> String {
        self.shared.client.describe(name)
    }

    fn lock(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        self.take(LOCK, holder)
    }

    fn lock_prune(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        self.take(PRUNE_LOCK, holder)
    }

    fn lock_holder(&self) -> Result<Option<String>> {
        lease::holder(&self.shared.client, LOCK)
    }

    fn is_persistent(&self) -> bool {
        true
    }

    fn is_pruning(&self) -> Result<bool> {
        Ok(lease::holder(&self.shared.client, PRUNE_LOCK)?.is_some())
    }

    fn unlock(&self, may_break: &dyn Fn(&str) -> bool) -> Result<UnlockOutcome> {
        lease::break_lease(&self.shared.client, LOCK, may_break)
    }

    fn create(&self, name: &str) -> Result<Box<dyn AppendFile>> {
        let (open, growing) = pack::create(&self.shared, name)?;
        let mut all = self.shared.open.lock().ignore_poison();
        all.retain(|_, open| open.strong_count() > 0);
        all.insert(name.into(), Arc::downgrade(&open));
        Ok(growing)
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        if is_pack(name) {
            return pack::rewrite(&self.shared, name, bytes);
        }
        let condition =
            if name == STORE_JSON { Precondition::Absent } else { Precondition::Always };
        match self.shared.put(name, bytes, condition)? {
            S3PutOutcome::Done(_) => Ok(()),
            S3PutOutcome::Refused => {
                let object = self.shared.client.location.name.clone();
                Err(Error::Exists { object, problem: "a store is already here".into() })
            }
        }
    }

    fn open(&self, name: &str) -> Result<Arc<dyn ReadFile>> {
        if is_pack(name) {
            let open = self.shared.open_pack(name);
            return Ok(Arc::new(pack::PackReader::new(&self.shared, name, open)?));
        }
        let head = self.shared.client.get(name, Some(&(0..HEAD_BYTES)), HEAD_BYTES)?;
        let (client, name) = (self.shared.client.clone(), name.to_owned());
        Ok(Arc::new(ObjectFile { client, name, head: head.bytes, len_bytes: head.len_bytes }))
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        // Lists the objects inside the packs: a server that keeps directories lists an empty one
        // for a while.
        let depth = if folder == PACKS { ListDepth::Below } else { ListDepth::Here };
        let objects = self.shared.client.list(&format!("{folder}/"), depth, None)?;
        let names = objects
            .iter()
            .map(|object| object.name.split('/').next().unwrap_or_default().to_owned());
        let mut names: Vec<String> = names.collect();
        names.dedup();
        Ok(names)
    }

    fn remove(&self, name: &str) -> Result<()> {
        if is_pack(name) { pack::remove(&self.shared, name) } else { self.shared.delete(name) }
    }

    fn sync(&self, _name: &str) -> Result<()> {
        // Whatever can be read is durable.
        self.shared.check_leases()
    }

    fn read(&self, name: &str, len_bytes_max: u64) -> Result<Vec<u8>> {
        if !is_pack(name) {
            return Ok(self.shared.client.get(name, None, len_bytes_max)?.bytes);
        }
        let file = self.open(name)?;
        read_whole(&*file, &self.describe(name), len_bytes_max)
    }
}

/// An object that was put whole.
#[derive(Debug)]
struct ObjectFile {
    client: Arc<S3Client>,
    name: String,
    head: Vec<u8>,
    len_bytes: u64,
}

impl ReadFile for ObjectFile {
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
