//! The interface of a backend, and which backend a path or URL stands for.
//!
//! A store has two kinds of files: packs, which grow while they are written, and small files, which
//! appear whole under their name. Names are relative to the store and use `/`
//! (`packs/00000001.pack`).
//!
//! ```text
//!   put(name)      write under tmp/ ─▶ sync ─▶ rename to name ─▶ sync the directory
//!   create(name)   new empty file ─▶ sync the directory;  then append* sync append* sync ...
//! ```
//!
//! A backend guarantees: after `put`, `create` or [`AppendFile::sync`] has returned `Ok`, a power
//! failure loses nothing of it; a file written by `put` never shows a part of its bytes.
//! It does not guarantee: that bytes appended since the last `sync` survive, completely, partly or
//! in order.

use crate::{
    ArchiveBackend, Error, FileRefusal, LocalBackend, Result, S3Backend, ServedBackend, archive,
    s3, served,
};
use std::fmt;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// The storage of one store's files.
pub trait Backend: Send + Sync + fmt::Debug {
    /// Returns the name of the file `name` in messages: its path or URL.
    fn describe(&self, name: &str) -> String;

    /// Takes the writers' lock for this process alone, and returns a guard that holds it until it is
    /// dropped. Stores `holder` where other processes can read it, and removes temporary files of
    /// earlier writers. Errors: [`Error::Locked`] with the texts of the present writers, one a line,
    /// if there is one; the medium fails.
    fn lock(&self, holder: &str) -> Result<Box<dyn LockGuard>>;

    /// Makes this process one of the store's writers. Stores `holder` where other processes can
    /// read it, and removes temporary files of processes that have ended. By default the store has
    /// one writer at a time. Errors: [`Error::Locked`] if a process has the store alone, if another
    /// writer takes too long to start, or if there are too many writers; the medium fails.
    fn join(&self, holder: &str) -> Result<StartingWriter> {
        self.lock(holder).map(StartingWriter::alone)
    }

    /// Returns the processes that write to the store, and what those said that have ended.
    /// By default there is at most the holder of the lock, whose state cannot be known. Error: the
    /// locks cannot be read.
    fn writers(&self) -> Result<Vec<WriterEntry>> {
        let entry = |holder| WriterEntry { slot: None, lives: true, holder, state: None };
        Ok(self.lock_holder()?.map(entry).into_iter().collect())
    }

    /// Takes the lock of a prune, which may run beside a writer, and returns a guard that holds it.
    /// `holder` describes this process to others. Removes no files. Errors: [`Error::Locked`] if
    /// another prune has it; the medium fails.
    fn lock_prune(&self, holder: &str) -> Result<Box<dyn LockGuard>>;

    /// Returns the texts with which the writers describe themselves, one a line; `None` if no
    /// process writes. Error: the locks cannot be read.
    fn lock_holder(&self) -> Result<Option<String>>;

    /// Removes locks whose holders have ended, and returns what it did. Also removes a lock whose
    /// holder cannot be checked, if `may_break` returns true for the holder's text. The lock that is
    /// removed is the one of that holder, also if another process takes the lock meanwhile. By
    /// default there is nothing to remove: the kernel drops a lock together with its process.
    /// Errors: the lock cannot be read or removed.
    fn unlock(&self, _may_break: &dyn Fn(&str) -> bool) -> Result<UnlockOutcome> {
        Ok(match self.lock_holder()? {
            Some(holder) => UnlockOutcome::Held(holder),
            None => UnlockOutcome::Nothing,
        })
    }

    /// Returns true while a process holds the lock of a prune. Error: the lock cannot be read.
    fn is_pruning(&self) -> Result<bool>;

    /// Returns a backend for the same files whose `put`, `create` and `remove` return before they
    /// are durable; [`Backend::sync_all`] makes them durable. Returns `None` if this backend has no
    /// such mode.
    fn without_syncs(&self) -> Option<Arc<dyn Backend>> {
        None
    }

    /// Makes everything durable that any process has written so far. Error: the medium fails; what
    /// was written since the last sync may be lost.
    fn sync_all(&self) -> Result<()> {
        Ok(())
    }

    /// Returns true if later processes find the same files here. This host may then keep an index
    /// of them.
    fn is_persistent(&self) -> bool {
        false
    }

    /// Returns the size of the medium and its free space, in bytes; `None` if the medium does not
    /// tell.
    fn space(&self) -> Option<Space> {
        None
    }

    /// Returns an id of the current boot of the machine that holds the files. As long as it stays
    /// the same, written bytes survive that were not synced. Error: the medium does not tell.
    fn boot_id(&self) -> Result<String> {
        const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
        let text = std::fs::read_to_string(BOOT_ID);
        text.map_err(|source| Error::Io { object: BOOT_ID.into(), operation: "read", source })
    }

    /// Returns the backend beneath an encrypting one, which shows the encrypted bytes; `None` if
    /// this backend does not encrypt.
    fn ciphertext(&self) -> Option<Arc<dyn Backend>> {
        None
    }

    /// Creates an empty file. Errors: kind `AlreadyExists` if the name is taken; the medium fails.
    fn create(&self, name: &str) -> Result<Box<dyn AppendFile>>;

    /// Writes the file `name` as a whole, atomically and durably, and replaces a file of this name.
    /// Error: the medium fails; the file then holds either content.
    fn put(&self, name: &str, bytes: &[u8]) -> Result<()>;

    /// Writes the file `name` as [`Backend::put`] does, if there is no such file. By default it
    /// replaces a file, which is right for a backend with one writer at a time. Errors: kind
    /// `AlreadyExists` if the name is taken; the medium fails, and the file does not exist or holds
    /// `bytes`.
    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.put(name, bytes)
    }

    /// Opens a file for reading. Errors: there is no such file; the medium fails.
    fn open(&self, name: &str) -> Result<Arc<dyn ReadFile>>;

    /// Returns the names of the files in a folder, without the folder, in no particular order. A
    /// folder that does not exist is empty. Error: the medium fails.
    fn list(&self, folder: &str) -> Result<Vec<String>>;

    /// Removes a file durably. It is no error if the file does not exist. Error: the medium fails;
    /// the file may still exist.
    fn remove(&self, name: &str) -> Result<()>;

    /// Removes files of one folder durably, in any order. It is no error if some of them do not
    /// exist, or if `names` is empty. Afterwards all earlier changes of that folder are durable
    /// too, including those of a process that died or whose sync failed. Error: the medium fails.
    fn remove_all(&self, _folder: &str, names: &[String]) -> Result<()> {
        names.iter().try_for_each(|name| self.remove(name))
    }

    /// Makes the present contents of an existing file durable. Errors: there is no such file; the
    /// medium fails.
    fn sync(&self, name: &str) -> Result<()>;

    /// Reads a whole file. Errors: [`Error::Damaged`] if it is longer than `len_bytes_max` bytes;
    /// there is no such file; the medium fails.
    fn read(&self, name: &str, len_bytes_max: u64) -> Result<Vec<u8>> {
        read_whole(&*self.open(name)?, &self.describe(name), len_bytes_max)
    }
}

/// The size and the free space of a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Its size, in bytes.
    pub total_bytes: u64,
    /// The number of bytes that this process may still write.
    pub free_bytes: u64,
}

/// Holds a lock until it is dropped.
pub trait LockGuard: Send + Sync + fmt::Debug {}

/// Makes this process a writer of the store until it is dropped.
pub trait WriterSlot: LockGuard {
    /// Returns the number of the slot; `None` if this process is the only writer.
    fn number(&self) -> Option<u32>;
    /// Shows `state` to other processes, in place of what was said before. Keeps at most
    /// [`STATE_BYTES_MAX`] bytes. The state need not survive power loss. Error: the medium fails.
    fn tell(&self, state: &[u8]) -> Result<()>;
    /// Returns true if the process is no writer any more: its lease has ended. It can only become a
    /// writer anew. By default a place stays as long as its guard.
    fn is_lost(&self) -> bool {
        false
    }
}

/// The most bytes that a writer can say about itself.
pub const STATE_BYTES_MAX: usize = 16_000;

/// A process that becomes a writer of a store.
#[derive(Debug)]
pub struct StartingWriter {
    /// Makes it a writer.
    pub slot: Box<dyn WriterSlot>,
    /// Keeps other writers from starting, until it is dropped.
    pub start: Box<dyn LockGuard>,
    /// The files as this writer alone may write them, if it needs another backend for that. A
    /// writer whose place is lost then cannot write through the place of a later one.
    pub files: Option<Arc<dyn Backend>>,
    /// Checkpoints that were set aside by a server that has settled what writers left that have
    /// ended, each with its problem. `None` if the process settles that itself.
    pub settled: Option<Vec<(u64, String)>>,
}

impl StartingWriter {
    /// Returns the only writer of a store, which holds `lock`.
    pub fn alone(lock: Box<dyn LockGuard>) -> Self {
        Self::new(Box::new(AloneSlot { _lock: lock }), Box::new(NoLock))
    }

    /// Returns a writer in the place `slot`, which settles itself what others left.
    pub fn new(slot: Box<dyn WriterSlot>, start: Box<dyn LockGuard>) -> Self {
        Self { slot, start, files: None, settled: None }
    }
}

/// A writer of a store, as other processes see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriterEntry {
    /// The number of its slot; `None` if it is the only writer.
    pub slot: Option<u32>,
    /// False if the process has ended.
    pub lives: bool,
    /// The text with which it describes itself.
    pub holder: String,
    /// What it said last with [`WriterSlot::tell`]. If it has said nothing, what the process before
    /// it in its slot said. `None` if it cannot be known.
    pub state: Option<Vec<u8>>,
}

/// The slot of the only writer.
#[derive(Debug)]
struct AloneSlot {
    _lock: Box<dyn LockGuard>,
}

impl LockGuard for AloneSlot {}

impl WriterSlot for AloneSlot {
    fn number(&self) -> Option<u32> {
        None
    }

    fn tell(&self, _state: &[u8]) -> Result<()> {
        Ok(())
    }
}

/// No lock.
#[derive(Debug)]
pub(crate) struct NoLock;

impl LockGuard for NoLock {}

/// A file that grows at its end.
pub trait AppendFile: Send + fmt::Debug {
    /// Appends `bytes` to the file. Error: the medium fails; the length is then unknown until
    /// [`AppendFile::truncate`] succeeds.
    fn append(&mut self, bytes: &[u8]) -> Result<()>;
    /// Makes everything appended so far durable. Error: the medium fails; bytes appended since the
    /// last successful sync may then be lost, even if they can still be read.
    fn sync(&mut self) -> Result<()>;
    /// Truncates the file to `len_bytes` bytes; the next append continues there. Error: the medium
    /// fails.
    fn truncate(&mut self, len_bytes: u64) -> Result<()>;
}

/// A file open for reading.
pub trait ReadFile: Send + Sync + fmt::Debug {
    /// Returns the present length in bytes. Error: the medium fails.
    fn len_bytes(&self) -> Result<u64>;
    /// Fills `buffer` from byte `offset` of the file on. Errors: kind `UnexpectedEof` if the file
    /// is too short; the medium fails.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()>;

    /// Returns an identification of this file and its present contents. Returns `None` if the
    /// backend cannot tell. Error: the medium fails.
    fn stamp(&self) -> Result<Option<FileStamp>> {
        Ok(None)
    }

    /// Returns true if [`ReadFile::prefetch`] saves time because every separate read is a round
    /// trip.
    fn wants_prefetch(&self) -> bool {
        false
    }

    /// Announces the byte ranges that will be read next, in rising order. The backend may fetch
    /// them in one request. The reads report errors.
    fn prefetch(&self, _ranges: &[Range<u64>]) {}
}

/// Identifies a file and its contents, so that a reader notices a replaced or changed file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileStamp {
    /// A number that stays the same as long as it is the same file, whatever it contains; 0 if
    /// unknown.
    pub identity: u64,
    /// Another number after each change of the contents; 0 if unknown.
    pub modified: u64,
}

/// The effect of [`Backend::unlock`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnlockOutcome {
    /// There was no lock.
    Nothing,
    /// A lock was removed. The text describes its holder.
    Removed(String),
    /// The holder lives, or may live, and keeps its lock. The text describes it.
    Held(String),
}

/// Reads all bytes of a file; `object` names it in errors. Errors: [`Error::Damaged`] if it is
/// longer than `len_bytes_max` bytes; the medium fails.
pub fn read_whole(file: &dyn ReadFile, object: &str, len_bytes_max: u64) -> Result<Vec<u8>> {
    let len = file.len_bytes()?;
    if len > len_bytes_max {
        let problem = format!("{len} bytes long; at most {len_bytes_max} make sense");
        return Err(Error::damaged(object, problem));
    }
    let mut bytes = vec![0; len as usize];
    file.read_at(0, &mut bytes)?;
    Ok(bytes)
}

/// Returns true if `place` begins with the URL scheme `scheme`.
pub fn has_scheme(place: &Path, scheme: &str) -> bool {
    place.to_str().is_some_and(|text| text.starts_with(scheme))
}

/// Returns true if `place` is a URL and not a path on this host.
pub fn is_remote(place: &Path) -> bool {
    s3::is_url(place) || served::is_url(place)
}

/// Returns true if `place` holds no data of this host: a store behind a checkpoint server, or a
/// bundle.
pub fn is_read_only(place: &Path) -> bool {
    served::is_url(place) || archive::is_archive(place)
}

/// Refuses a URL of a kind that no store has, as in `http://HOST`.
fn require_known_kind(place: &Path) -> Result<()> {
    let text = place.to_string_lossy();
    let is_scheme = |scheme: &str| {
        !scheme.is_empty() && scheme.chars().all(|c| c.is_ascii_alphanumeric() || c == '+')
    };
    match text.split_once("://") {
        Some((scheme, _)) if is_scheme(scheme) && !is_remote(place) => {
            let refusal = FileRefusal {
                problem: format!("no store has a URL that begins with {scheme}://"),
                fix: "name a directory, s3://BUCKET/PREFIX, or kf://HOST:PORT (keyframe serve)"
                    .into(),
            };
            let source = io::Error::new(io::ErrorKind::InvalidInput, refusal);
            Err(Error::Io { object: text.into_owned(), operation: "open the store", source })
        }
        _ => Ok(()),
    }
}

/// Returns the backend of an existing store: a directory, `s3://BUCKET/PREFIX`, `kf://HOST:PORT`, or
/// the file of a bundle. Contacts no server yet. Errors: the URL is malformed; the environment lacks
/// what it needs; a file is no bundle.
pub fn open(place: &Path) -> Result<Arc<dyn Backend>> {
    require_known_kind(place)?;
    Ok(if s3::is_url(place) {
        Arc::new(S3Backend::open(place)?)
    } else if served::is_url(place) {
        Arc::new(ServedBackend::open(place)?)
    } else if archive::is_archive(place) {
        Arc::new(ArchiveBackend::open(place)?)
    } else {
        Arc::new(LocalBackend::open(place))
    })
}

/// Returns the backend for a new store: in a directory or in object storage. Errors:
/// [`Error::Exists`] if the place is not empty; the URL is malformed; the place cannot be created.
pub fn create(place: &Path) -> Result<Arc<dyn Backend>> {
    require_known_kind(place)?;
    if served::is_url(place) {
        return Err(served::read_only(&place.display().to_string(), "make a store"));
    }
    Ok(if is_remote(place) {
        Arc::new(S3Backend::create(place)?)
    } else {
        Arc::new(LocalBackend::create(place)?)
    })
}
