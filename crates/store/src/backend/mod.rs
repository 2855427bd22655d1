//! Where the files of a store live. One file per kind of place.
//!
//! A store needs two shapes of file: packs, which grow while they are written, and small files,
//! which appear whole under their name or not at all. Names are relative to the store and use `/`
//! (`packs/00000001.pack`).
//!
//! ```text
//!   put(name)      write under tmp/ ─▶ sync ─▶ rename to name ─▶ sync the directory
//!   create(name)   new empty file ─▶ sync the directory;  then append* sync append* sync ...
//! ```
//!
//! What a backend promises: after `put`, `create` or `Growing::sync` returned `Ok`, power loss
//! takes nothing of it away; a name written by `put` never shows part of its bytes. What it does
//! not: that bytes appended since the last `sync` survive, in whole, in part, or in order.

mod cache;
#[cfg(test)]
mod chance;
#[cfg(test)]
pub(crate) mod conformance;
mod encrypted;
#[cfg(test)]
pub(crate) mod faulty;
mod local;
mod s3;
pub mod served;

pub(crate) use encrypted::Encrypted;
pub use local::Local;
pub use s3::S3;
pub use served::Served;

use crate::{Error, Result};
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// A place for the files of one store.
pub trait Backend: Send + Sync + fmt::Debug {
    /// How a message calls the file `name`.
    fn describe(&self, name: &str) -> String;

    /// Makes the caller the one writer for as long as the guard lives, leaves `holder` for others
    /// to read, and removes what an earlier writer left unfinished. Answers [`Error::Locked`] with
    /// the text of the present holder.
    fn lock(&self, holder: &str) -> Result<Box<dyn LockGuard>>;

    /// The same for the one that prunes, beside the writer; removes nothing.
    fn lock_prune(&self, holder: &str) -> Result<Box<dyn LockGuard>>;

    /// The text of the present holder of the writer's lock, if somebody holds it.
    fn holder(&self) -> Result<Option<String>>;

    /// Removes locks that a dead process left behind; with `force` also where it cannot be told
    /// whether it lives. Here: the system drops a lock with its process, so that there is nothing
    /// to remove.
    fn unlock(&self, _force: bool) -> Result<Unlocked> {
        Ok(match self.holder()? {
            Some(holder) => Unlocked::Held(holder),
            None => Unlocked::Nothing,
        })
    }

    /// True while somebody prunes.
    fn is_pruned(&self) -> Result<bool>;

    /// The same place, where names and whole files become durable with [`Backend::sync_all`] only.
    /// None where they cannot be held back.
    fn relaxed(&self) -> Option<Arc<dyn Backend>> {
        None
    }

    /// Makes all durable that was written so far, by whomever.
    fn sync_all(&self) -> Result<()> {
        Ok(())
    }

    /// True where it is there for later processes, so that this host may keep what helps them.
    fn stays(&self) -> bool {
        false
    }

    /// Which life of the machine this is: what was written and not synced survives as long as it.
    fn boot(&self) -> Result<String> {
        const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
        let text = std::fs::read_to_string(BOOT_ID);
        text.map_err(|source| Error::Io { object: BOOT_ID.into(), operation: "read", source })
    }

    /// The place below, where files are seen as they lie there: encrypted ones as what they are
    /// encrypted to. None where this is that place.
    fn below(&self) -> Option<Arc<dyn Backend>> {
        None
    }

    /// Makes a new, empty file; an error where the name is taken.
    fn create(&self, name: &str) -> Result<Box<dyn Growing>>;

    /// Puts a whole file under `name`, in place of any other, at once and durably.
    fn put(&self, name: &str, bytes: &[u8]) -> Result<()>;

    /// Opens a file for reading.
    fn open(&self, name: &str) -> Result<Arc<dyn Readable>>;

    /// The names of the files in a folder, without the folder, in no order. A folder that is not
    /// there is empty.
    fn list(&self, folder: &str) -> Result<Vec<String>>;

    /// Removes a file durably; fine if it is not there.
    fn remove(&self, name: &str) -> Result<()>;

    /// Removes files of one folder durably, in any order; fine if some are not there, or none is
    /// named. Whatever was put into that folder or removed from it before is durable then, too: by
    /// one who died before it was, or whose sync failed.
    fn remove_all(&self, _folder: &str, names: &[String]) -> Result<()> {
        names.iter().try_for_each(|name| self.remove(name))
    }

    /// Makes sure that what can be read of an existing file now is durable.
    fn sync(&self, name: &str) -> Result<()>;

    /// Reads a whole file; [`Error::Damaged`] where it is larger than `len_bytes_max`.
    fn read(&self, name: &str, len_bytes_max: u64) -> Result<Vec<u8>> {
        read_whole(&*self.open(name)?, &self.describe(name), len_bytes_max)
    }
}

/// Why a place elsewhere did not do what it was asked for, and what a person can do about it.
#[derive(Debug, thiserror::Error)]
#[error("{problem}")]
pub struct Refusal {
    /// What was answered, or that nothing was.
    pub problem: String,
    /// What to do about it, where that is known.
    pub fix: Option<String>,
}

/// What became of the locks of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unlocked {
    /// There was none.
    Nothing,
    /// A lock was removed; the text of the one that had it.
    Removed(String),
    /// Its holder lives, or may live: the lock is left to it.
    Held(String),
}

/// All bytes of a file; `object` is how errors call it.
fn read_whole(file: &dyn Readable, object: &str, len_bytes_max: u64) -> Result<Vec<u8>> {
    let len = file.len_bytes()?;
    if len > len_bytes_max {
        let problem = format!("{len} bytes long; at most {len_bytes_max} make sense");
        return Err(Error::damaged(object, problem));
    }
    let mut bytes = vec![0; len as usize];
    file.read_at(0, &mut bytes)?;
    Ok(bytes)
}

/// Whether `place` begins with `scheme`.
fn has_scheme(place: &Path, scheme: &str) -> bool {
    place.to_str().is_some_and(|text| text.starts_with(scheme))
}

/// True for what names a place that is not a path on this host.
pub fn is_remote(place: &Path) -> bool {
    s3::is_url(place) || served::is_url(place)
}

/// True for what names a place that can be read alone.
pub fn is_read_only(place: &Path) -> bool {
    served::is_url(place)
}

/// The place of a store that exists: a directory, `s3://BUCKET/PREFIX`, or `kf://HOST:PORT`.
pub fn open(place: &Path) -> Result<Arc<dyn Backend>> {
    Ok(if s3::is_url(place) {
        Arc::new(S3::open(place)?)
    } else if served::is_url(place) {
        Arc::new(Served::open(place)?)
    } else {
        Arc::new(Local::open(place))
    })
}

/// A place for a new store, which must be empty.
pub fn create(place: &Path) -> Result<Arc<dyn Backend>> {
    if served::is_url(place) {
        return Err(served::read_only(&place.display().to_string(), "make a store"));
    }
    Ok(if is_remote(place) {
        Arc::new(S3::create(place)?)
    } else {
        Arc::new(Local::create(place)?)
    })
}

/// Held by the one writer; dropping it lets the next one in.
pub trait LockGuard: Send + Sync + fmt::Debug {}

/// A file that grows at its end.
pub trait Growing: Send + fmt::Debug {
    /// Adds bytes at the end. After an error the length is unknown until [`Growing::truncate`]
    /// succeeds.
    fn append(&mut self, bytes: &[u8]) -> Result<()>;
    /// Makes everything appended so far durable. After an error nothing since the last success may
    /// be trusted.
    fn sync(&mut self) -> Result<()>;
    /// Cuts the file to `len_bytes`; appending goes on from there.
    fn truncate(&mut self, len_bytes: u64) -> Result<()>;
}

/// A file open for reading.
pub trait Readable: Send + Sync + fmt::Debug {
    /// Its length now.
    fn len_bytes(&self) -> Result<u64>;
    /// Fills `buffer` from `offset` on; an error of kind `UnexpectedEof` where the file ends
    /// before.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()>;

    /// What tells this file from another of its name, and a change of it; none where the place does
    /// not say.
    fn stamp(&self) -> Result<Option<Stamp>> {
        Ok(None)
    }

    /// True where [`Readable::will_read`] saves time: each read for itself would be a way to
    /// elsewhere and back.
    fn wants_hints(&self) -> bool {
        false
    }

    /// Says which ranges will be read next, rising. Advice: it may fetch them at once, and what
    /// fails fails when it is read.
    fn will_read(&self, _ranges: &[Range<u64>]) {}
}

/// What a file is known by while it may be replaced, cut, or grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp {
    /// Of the file, whatever is in it; 0 where the place does not say.
    pub identity: u64,
    /// Another one after each change of what is in it; 0 where the place does not say.
    pub modified: u64,
}
