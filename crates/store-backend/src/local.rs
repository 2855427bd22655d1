//! A store in a directory of this host, or of a network file system that honours `flock`, `fsync`
//! and `rename`.

mod locks;
mod regular_file;
mod slots;
#[cfg(test)]
mod tests;

use crate::layout::{FOLDERS, TMP, WRITERS};
use crate::{
    AppendFile, Backend, FileStamp, LockGuard, ReadFile, Space, StartingWriter, WriterEntry,
};
use crate::{Error, Result, random_bytes};
use keyframe_bytes::hex::to_hex;
use locks::{holder_of, lock_shared, take_lock, wait_for_lock};
use regular_file::{open_regular, path_in, require_folder};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use slots::Slots;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use xxhash_rust::xxh3::xxh3_64;

/// The folder that a repair makes.
const QUARANTINE: &str = "quarantine";
const LOCK: &str = "lock";
/// The lock of a writer that starts, in the folder of the slots.
const START: &str = "start";
const PRUNE_LOCK: &str = "prune.lock";

/// A backend whose files are in a directory.
#[derive(Debug)]
pub struct LocalBackend {
    root: PathBuf,
    /// Names the temporary files of this handle of the store, and numbers them.
    temporaries: Arc<Temporaries>,
    /// The directory `root`, opened before the first write that is not synced. The kernel reports a
    /// write that failed later to this descriptor, even if another process has seen the error.
    root_file: Arc<OnceLock<File>>,
    /// Files and directories are not synced one by one ([`Backend::without_syncs`]).
    relaxed: bool,
}

/// The names of temporary files: `tmp/TOKEN-NUMBER-NAME`. The slots of living writers show their
/// tokens, so the files of others can be told from leftovers.
#[derive(Debug)]
struct Temporaries {
    token: String,
    used: AtomicU64,
}

impl Default for Temporaries {
    fn default() -> Self {
        // Without random bytes, the number of the process has to do.
        let token = random_bytes::<8>().map_or_else(|_| pid_token(), |bytes| to_hex(&bytes));
        Self { token, used: AtomicU64::new(0) }
    }
}

fn pid_token() -> String {
    format!("{:016x}", std::process::id())
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
        let mut folders = FOLDERS.into_iter().chain([QUARANTINE, WRITERS]);
        folders.try_for_each(|folder| require_folder(&self.root, folder))
    }

    fn root_file(&self) -> Result<&File> {
        if let Some(file) = self.root_file.get() {
            return Ok(file);
        }
        let file = File::open(&self.root).map_err(|e| io_error(&self.root, "open", e))?;
        Ok(self.root_file.get_or_init(|| file))
    }

    /// Writes a temporary file, and calls `place` to give it its name. Does it twice, because a
    /// writer that starts may take the file of a process that does not write to the store for a
    /// leftover.
    fn write_whole(
        &self,
        name: &str,
        bytes: &[u8],
        place: &dyn Fn(&Path) -> Result<()>,
    ) -> Result<()> {
        let write = || {
            let Temporaries { token, used } = &*self.temporaries;
            let serial = used.fetch_add(1, Ordering::Relaxed);
            let temporary =
                self.path(&format!("{TMP}/{token}-{serial}-{}", name.replace('/', "-")));
            let temporary = temporary.map_err(|error| (error, false))?;
            let written =
                write_temporary(&temporary, bytes, !self.relaxed).and_then(|()| place(&temporary));
            let was_removed = matches!(&written, Err(e) if e.is_not_found() && !temporary.exists());
            if written.is_err() {
                // Best effort: the next writer removes temporary files.
                let _ = std::fs::remove_file(&temporary);
            }
            written.map_err(|error| (error, was_removed))
        };
        match write() {
            Err((_, true)) => write().map_err(|(error, _)| error),
            other => other.map_err(|(error, _)| error),
        }
    }

    fn rename(&self, temporary: &Path, path: &Path) -> Result<()> {
        let rename =
            || std::fs::rename(temporary, path).map_err(|e| io_error(path, "rename into place", e));
        match rename() {
            // The folder was removed.
            Err(e) if e.is_not_found() && temporary.exists() => {
                self.make_folder(path.parent().unwrap_or(&self.root))?;
                rename()
            }
            other => other,
        }
    }

    fn slots(&self) -> Slots {
        Slots { folder: self.root.join(WRITERS) }
    }

    /// Removes the temporary files that no living writer has.
    fn clear_temporaries(&self, writers: &[slots::SlotText]) -> Result<()> {
        for leftover in self.list(TMP)? {
            let token = leftover.split_once('-').map_or("", |(token, _)| token);
            let is_of = |writer: &slots::SlotText| writer.lives && writer.token == token;
            if !writers.iter().any(is_of) && token != self.temporaries.token {
                self.remove(&format!("{TMP}/{leftover}"))?;
            }
        }
        Ok(())
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
        let lock = take_lock(&self.root.join(LOCK), holder).map_err(|error| match error {
            Error::Locked { holder } => {
                // The text of the lock names one of several writers.
                let texts = self.slots().texts().unwrap_or_default();
                let living: Vec<String> =
                    texts.into_iter().filter(|text| text.lives).map(|text| text.holder).collect();
                Error::Locked { holder: if living.is_empty() { holder } else { living.join("\n") } }
            }
            other => other,
        })?;
        self.root_file()?;
        self.clear_temporaries(&[])?;
        Ok(Box::new(lock))
    }

    fn join(&self, holder: &str) -> Result<StartingWriter> {
        self.require_folders()?;
        self.make_folder(&self.root.join(WRITERS))?;
        let lock = lock_shared(&self.root.join(LOCK), holder)?;
        self.root_file()?;
        let slots = self.slots();
        let start = wait_for_lock(&slots.folder.join(START), holder)?;
        let slot = slots.take(&self.temporaries.token, holder, lock)?;
        self.clear_temporaries(&slots.texts()?)?;
        Ok(StartingWriter::new(Box::new(slot), Box::new(start)))
    }

    fn writers(&self) -> Result<Vec<WriterEntry>> {
        require_folder(&self.root, WRITERS)?;
        let entry = |holder| WriterEntry { slot: None, lives: true, holder, state: None };
        let alone = holder_of(&self.root.join(LOCK))?.map(entry);
        let of_slots = self.slots().texts()?.into_iter().map(slots::SlotText::into_entry);
        Ok(alone.into_iter().chain(of_slots).collect())
    }

    fn lock_prune(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        self.require_folders()?;
        let lock = take_lock(&self.root.join(PRUNE_LOCK), holder)?;
        self.root_file()?;
        Ok(Box::new(lock))
    }

    fn lock_holder(&self) -> Result<Option<String>> {
        let living = self.writers()?.into_iter().filter(|writer| writer.lives);
        let texts: Vec<String> = living.map(|writer| writer.holder).collect();
        Ok((!texts.is_empty()).then(|| texts.join("\n")))
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
        self.write_whole(name, bytes, &|temporary| self.rename(temporary, &path))?;
        self.sync_parent(&path)
    }

    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.path(name)?;
        self.write_whole(name, bytes, &|temporary| rename_new(temporary, &path))?;
        self.sync_parent(&path).inspect_err(|_| {
            // The caller does not know that the file is its own.
            let _ = std::fs::remove_file(&path);
        })
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

fn sync_folder(path: &Path) -> Result<()> {
    File::open(path).and_then(|f| f.sync_all()).map_err(|e| io_error(path, "sync directory", e))
}

/// Gives the file `temporary` the name `path`, if that is free.
fn rename_new(temporary: &Path, path: &Path) -> Result<()> {
    let failed = |e: Errno| io_error(path, "rename into place", e.into());
    match renameat_with(CWD, temporary, CWD, path, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        // The file system cannot do that.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
            rustix::fs::link(temporary, path).map_err(failed)?;
            std::fs::remove_file(temporary).map_err(|e| io_error(temporary, "remove", e))
        }
        Err(e) => Err(failed(e)),
    }
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
