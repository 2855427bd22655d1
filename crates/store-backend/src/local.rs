//! A store in a directory of this host, or of a network file system that honours `flock`, `fsync`
//! and `rename`.

mod regular_file;
#[cfg(test)]
mod tests;

use crate::{AppendFile, Backend, FileStamp, LockGuard, ReadFile, Space};
use crate::{Error, Result};
use regular_file::{open_regular, path_in, require_folder};
use rustix::fs::{FlockOperation, flock};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

const FOLDERS: [&str; 6] = ["packs", "maps", "checkpoints", "tags", "worksets", "tmp"];
/// The folder that a repair makes.
const QUARANTINE: &str = "quarantine";
const LOCK: &str = "lock";
const PRUNE_LOCK: &str = "prune.lock";
const HOLDER_BYTES_MAX: u64 = 4096;
const LOCK_ATTEMPTS: u32 = 5;
const LOCK_PAUSE: Duration = Duration::from_millis(2);

/// A backend whose files are in a directory.
#[derive(Debug)]
pub struct LocalBackend {
    root: PathBuf,
    /// Numbers the temporary files of this process.
    temporaries: Arc<AtomicU64>,
    /// The directory `root`, opened before the first write that is not synced. The kernel reports a
    /// write that failed later to this descriptor, even if another process has seen the error.
    root_file: Arc<OnceLock<File>>,
    /// Files and directories are not synced one by one ([`Backend::without_syncs`]).
    relaxed: bool,
}

impl LocalBackend {
    /// Creates the backend of the existing store in the directory `root`. Reads and writes nothing
    /// yet.
    pub fn open(root: &Path) -> Self {
        Self {
            root: root.to_path_buf(),
            temporaries: Arc::default(),
            root_file: Arc::default(),
            relaxed: false,
        }
    }

    /// Creates the directory `root` with the folders of a store, and its backend. Only the owner
    /// can read them, because they will hold the memory of guests. Errors: [`Error::Exists`] if the
    /// directory holds anything but the empty folders of an interrupted attempt; it cannot be
    /// created.
    pub fn create(root: &Path) -> Result<Self> {
        let this = Self::open(root);
        match root.symlink_metadata() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => this.make_folder(root)?,
            Err(e) => return Err(io_error(root, "look at", e)),
            Ok(_) => refuse_foreign_content(root)?,
        }
        for folder in FOLDERS {
            this.make_folder(&root.join(folder))?;
        }
        sync_folder(root)?;
        // The entry of the root itself. If the path names no parent, that is the working directory.
        let parent = root.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        sync_folder(parent)?;
        Ok(this)
    }

    fn make_folder(&self, path: &Path) -> Result<()> {
        match DirBuilder::new().mode(0o700).create(path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && self.root != path => Ok(()),
            other => other.map_err(|e| io_error(path, "make directory", e)),
        }
    }

    /// The path of a file. Fails if its folder is not in the store.
    fn path(&self, name: &str) -> Result<PathBuf> {
        path_in(&self.root, name)
    }

    fn require_folders(&self) -> Result<()> {
        let mut folders = FOLDERS.into_iter().chain([QUARANTINE]);
        folders.try_for_each(|folder| require_folder(&self.root, folder))
    }

    fn root_file(&self) -> Result<&File> {
        if let Some(file) = self.root_file.get() {
            return Ok(file);
        }
        let file = File::open(&self.root).map_err(|e| io_error(&self.root, "open", e))?;
        Ok(self.root_file.get_or_init(|| file))
    }

    fn sync_parent(&self, path: &Path) -> Result<()> {
        if self.relaxed { Ok(()) } else { sync_folder(path.parent().unwrap_or(&self.root)) }
    }
}

impl Backend for LocalBackend {
    fn describe(&self, name: &str) -> String {
        self.root.join(name).display().to_string()
    }

    fn lock(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        self.require_folders()?;
        let lock = take_lock(&self.root.join(LOCK), holder)?;
        self.root_file()?;
        for leftover in self.list("tmp")? {
            self.remove(&format!("tmp/{leftover}"))?;
        }
        Ok(Box::new(lock))
    }

    fn lock_prune(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        self.require_folders()?;
        let lock = take_lock(&self.root.join(PRUNE_LOCK), holder)?;
        self.root_file()?;
        Ok(Box::new(lock))
    }

    fn lock_holder(&self) -> Result<Option<String>> {
        holder_of(&self.root.join(LOCK))
    }

    fn is_persistent(&self) -> bool {
        true
    }

    fn is_pruning(&self) -> Result<bool> {
        Ok(holder_of(&self.root.join(PRUNE_LOCK))?.is_some())
    }

    fn without_syncs(&self) -> Option<Arc<dyn Backend>> {
        // If this fails, `sync_all` tries again and reports the error.
        let _ = self.root_file();
        let (root, temporaries) = (self.root.clone(), Arc::clone(&self.temporaries));
        let root_file = Arc::clone(&self.root_file);
        Some(Arc::new(Self { root, temporaries, root_file, relaxed: true }))
    }

    fn sync_all(&self) -> Result<()> {
        rustix::fs::syncfs(self.root_file()?)
            .map_err(|e| io_error(&self.root, "sync the file system of", e.into()))
    }

    fn space(&self) -> Option<Space> {
        let space = rustix::fs::statvfs(&self.root).ok()?;
        let bytes = |blocks: u64| blocks.saturating_mul(space.f_frsize);
        // Some file systems keep blocks for root.
        let is_root = rustix::process::geteuid().is_root();
        let free = if is_root { space.f_bfree } else { space.f_bavail };
        let space = Space { total_bytes: bytes(space.f_blocks), free_bytes: bytes(free) };
        // A file system without a limit (ramfs) tells a size of 0.
        (space.total_bytes > 0).then_some(space)
    }

    fn create(&self, name: &str) -> Result<Box<dyn AppendFile>> {
        let path = self.path(name)?;
        let open = || OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        let file = match open() {
            // The folder was removed, or a store need not have it.
            Err(e) if e.kind() == io::ErrorKind::NotFound && self.root.is_dir() => {
                self.make_folder(path.parent().unwrap_or(&self.root))?;
                open()
            }
            other => other,
        };
        let file = file.map_err(|e| io_error(&path, "create", e))?;
        self.sync_parent(&path)?;
        Ok(Box::new(LocalAppendFile { file, path, len_bytes: 0 }))
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.path(name)?;
        let serial = self.temporaries.fetch_add(1, Ordering::Relaxed);
        let temporary =
            self.path(&format!("tmp/{}-{}-{serial}", name.replace('/', "-"), std::process::id()))?;
        let rename = || match std::fs::rename(&temporary, &path) {
            // The folder was removed.
            Err(e) if e.kind() == io::ErrorKind::NotFound && temporary.exists() => {
                self.make_folder(path.parent().unwrap_or(&self.root))?;
                std::fs::rename(&temporary, &path)
                    .map_err(|e| io_error(&path, "rename into place", e))
            }
            other => other.map_err(|e| io_error(&path, "rename into place", e)),
        };
        let written = write_temporary(&temporary, bytes, !self.relaxed).and_then(|()| rename());
        if let Err(error) = written {
            // Best effort: the next writer removes temporary files.
            let _ = std::fs::remove_file(&temporary);
            return Err(error);
        }
        self.sync_parent(&path)
    }

    fn open(&self, name: &str) -> Result<Arc<dyn ReadFile>> {
        let path = self.path(name)?;
        let file = open_regular(OpenOptions::new().read(true), &path)?;
        Ok(Arc::new(LocalReadFile { file, path }))
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        require_folder(&self.root, folder)?;
        let path = self.root.join(folder);
        let entries = match std::fs::read_dir(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(|e| io_error(&path, "list", e))?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|e| io_error(&path, "list", e))?;
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
        Ok(names)
    }

    fn remove(&self, name: &str) -> Result<()> {
        let path = self.path(name)?;
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(io_error(&path, "remove", e)),
            Ok(()) => self.sync_parent(&path),
        }
    }

    fn remove_all(&self, folder: &str, names: &[String]) -> Result<()> {
        require_folder(&self.root, folder)?;
        for path in names.iter().map(|name| self.root.join(name)) {
            match std::fs::remove_file(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                other => other.map_err(|e| io_error(&path, "remove", e))?,
            }
        }
        // Also if no file was there: the process that removed it may have died before its sync.
        if self.relaxed {
            return Ok(());
        }
        match sync_folder(&self.root.join(folder)) {
            Err(e) if e.is_not_found() => Ok(()),
            other => other,
        }
    }

    fn sync(&self, name: &str) -> Result<()> {
        let path = self.path(name)?;
        // Some file systems do not sync through a read-only descriptor.
        let file = open_regular(OpenOptions::new().write(true), &path)?;
        file.sync_all().map_err(|e| io_error(&path, "sync", e))?;
        self.sync_parent(&path)
    }
}

/// An `flock`. The kernel releases it when the descriptor closes, however the process ends.
#[derive(Debug)]
struct Flock {
    file: File,
}

impl LockGuard for Flock {}

impl Drop for Flock {
    fn drop(&mut self) {
        // Closing the descriptor releases the lock too, unless a child process inherited it. If
        // this fails, closing is all that is left.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

#[derive(Debug)]
struct LocalAppendFile {
    file: File,
    path: PathBuf,
    len_bytes: u64,
}

impl AppendFile for LocalAppendFile {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(bytes, self.len_bytes).map_err(|source| Error::Io {
            object: format!("{} at offset {}", self.path.display(), self.len_bytes),
            operation: "append",
            source,
        })?;
        self.len_bytes += bytes.len() as u64;
        Ok(())
    }

    fn sync(&mut self) -> Result<()> {
        self.file.sync_data().map_err(|e| io_error(&self.path, "sync", e))
    }

    fn truncate(&mut self, len_bytes: u64) -> Result<()> {
        self.file.set_len(len_bytes).map_err(|e| io_error(&self.path, "truncate", e))?;
        self.len_bytes = len_bytes;
        Ok(())
    }
}

#[derive(Debug)]
struct LocalReadFile {
    file: File,
    path: PathBuf,
}

impl ReadFile for LocalReadFile {
    fn len_bytes(&self) -> Result<u64> {
        self.file.metadata().map(|m| m.len()).map_err(|e| io_error(&self.path, "look at", e))
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(buffer, offset).map_err(|source| Error::Io {
            object: format!("{} at offset {offset}", self.path.display()),
            operation: "read",
            source,
        })
    }

    fn stamp(&self) -> Result<Option<FileStamp>> {
        let about = self.file.metadata().map_err(|e| io_error(&self.path, "look at", e))?;
        // Inode numbers are reused, so the stamp includes the birth time if the file system has
        // one.
        let born =
            about.created().ok().and_then(|at| at.duration_since(std::time::UNIX_EPOCH).ok());
        let born = born.map_or(0, |since| since.as_nanos() as u64);
        let of = |numbers: &[u64]| {
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            // 0 means that the stamp is unknown.
            xxh3_64(&bytes).max(1)
        };
        let changed = [about.mtime(), about.mtime_nsec(), about.ctime(), about.ctime_nsec()]
            .map(|t| t as u64);
        let identity = of(&[about.dev(), about.ino(), born]);
        let modified = of(&[&changed[..], &[about.len()]].concat());
        Ok(Some(FileStamp { identity, modified }))
    }
}

fn take_lock(path: &Path, holder: &str) -> Result<Flock> {
    let mut file = open_regular(
        OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600),
        path,
    )?;
    if !exclude(&file, path)? {
        return Err(Error::Locked { holder: holder_in(&file, path)? });
    }
    // The text is for messages only, so a crash while it is written does no harm.
    file.set_len(0)
        .and_then(|()| file.rewind())
        .and_then(|()| file.write_all(holder.as_bytes()))
        .map_err(|e| io_error(path, "write", e))?;
    Ok(Flock { file })
}

/// Takes the lock; false if another process has it. Retries a few times, because a process that
/// asks for the holder ([`Backend::lock_holder`]) holds the lock for a moment.
fn exclude(file: &File, path: &Path) -> Result<bool> {
    for attempt in 0..LOCK_ATTEMPTS {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(rustix::io::Errno::WOULDBLOCK) if attempt + 1 < LOCK_ATTEMPTS => {
                std::thread::sleep(LOCK_PAUSE);
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {}
            Err(e) => return Err(io_error(path, "lock", e.into())),
        }
    }
    Ok(false)
}

/// The text of the process that holds a lock, if any does.
fn holder_of(path: &Path) -> Result<Option<String>> {
    let file = match open_regular(OpenOptions::new().read(true), path) {
        Err(e) if e.is_not_found() => return Ok(None),
        other => other?,
    };
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        // Closing the file releases it.
        Ok(()) => Ok(None),
        Err(rustix::io::Errno::WOULDBLOCK) => holder_in(&file, path).map(Some),
        Err(e) => Err(io_error(path, "lock", e.into())),
    }
}

fn holder_in(file: &File, path: &Path) -> Result<String> {
    let mut text = Vec::new();
    file.take(HOLDER_BYTES_MAX).read_to_end(&mut text).map_err(|e| io_error(path, "read", e))?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn sync_folder(path: &Path) -> Result<()> {
    File::open(path).and_then(|f| f.sync_all()).map_err(|e| io_error(path, "sync directory", e))
}

fn write_temporary(path: &Path, bytes: &[u8], durably: bool) -> Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(|e| io_error(path, "create", e))?;
    file.write_all(bytes).map_err(|e| io_error(path, "write", e))?;
    if durably { file.sync_all().map_err(|e| io_error(path, "sync", e)) } else { Ok(()) }
}

fn io_error(path: &Path, operation: &'static str, source: io::Error) -> Error {
    Error::Io { object: path.display().to_string(), operation, source }
}

/// A directory may become a store if it is empty except for the empty folders of an interrupted
/// attempt.
fn refuse_foreign_content(root: &Path) -> Result<()> {
    let exists = |problem: &str| {
        Err(Error::Exists { object: root.display().to_string(), problem: problem.into() })
    };
    if !root.is_dir() {
        return exists("exists and is not a directory");
    }
    if root.join(crate::layout::STORE_JSON).exists() {
        return exists("a store is already here");
    }
    for entry in std::fs::read_dir(root).map_err(|e| io_error(root, "list", e))? {
        let entry = entry.map_err(|e| io_error(root, "list", e))?;
        let known = entry.file_name().to_str().is_some_and(|name| FOLDERS.contains(&name));
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let is_tmp = entry.file_name() == "tmp";
        let empty =
            || std::fs::read_dir(entry.path()).is_ok_and(|mut inner| inner.next().is_none());
        if !known || !is_folder || !(is_tmp || empty()) {
            return exists("the directory is not empty");
        }
    }
    Ok(())
}
