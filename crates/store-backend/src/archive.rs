//! A store in one file: a tar archive of the store's files, read-only.
//!
//! ```text
//!   store.json   files/...   packs/...   maps/...   tags/...   checkpoints/...   end of the archive
//! ```
//!
//! Other programs can list and unpack the archive; what they unpack is a store. Each file is at one
//! place in the archive and is not compressed again, so it is read at any offset.
//!
//! Invariants: checkpoints come last, and an archive without tar's end mark is refused, so an
//! archive that was cut off is noticed when it is opened. An archive is opened only if each of its
//! members is a regular file with the name of a file of a store, and lies within the archive. The
//! store's checksums cover the contents.

#[cfg(test)]
mod tests;

use crate::layout::{self, CHECKPOINTS, FILES, MAPS, PACKS, STORE_JSON, TAGS};
use crate::{AppendFile, Backend, Error, LockGuard, ReadFile, RemoteFailure, Result};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tar::{Archive, Builder, EntryType, Header};

/// The most files of an archive.
const MEMBERS_MAX: usize = 1 << 20;
/// The beginning of an archive: the name of its first file.
const BEGIN: &[u8] = b"store.json\0";
/// The size of a block of a tar archive; two blocks of zeros end it.
const BLOCK_BYTES: u64 = 512;
/// The folders whose files an archive holds, in the order of the archive.
const ARCHIVED: [&str; 5] = [FILES, PACKS, MAPS, TAGS, CHECKPOINTS];

/// A backend for the files of a tar archive.
#[derive(Debug)]
pub struct ArchiveBackend {
    path: PathBuf,
    file: Arc<File>,
    members: BTreeMap<String, Member>,
}

/// The place of a file in an archive, in bytes.
#[derive(Clone, Copy, Debug)]
struct Member {
    offset: u64,
    len_bytes: u64,
}

impl ArchiveBackend {
    /// Opens the archive at `path`, and finds its files. Errors: [`Error::Damaged`] if it is no
    /// archive of a store, or not whole; it cannot be read.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| io_error(path, "open", e))?;
        Self::of_file(file, path)
    }

    /// Finds the files of the archive `file`, which has the name `path` in messages. Errors: those of
    /// [`Self::open`].
    pub(crate) fn of_file(file: File, path: &Path) -> Result<Self> {
        let members = members(&file, path)?;
        Ok(Self { path: path.to_path_buf(), file: Arc::new(file), members })
    }

    fn refuse<T>(&self, name: &str, operation: &'static str) -> Result<T> {
        let refusal = RemoteFailure {
            problem: "a bundle is read-only".to_owned(),
            fix: Some("import it into a store: keyframe import --store STORE BUNDLE".into()),
        };
        Err(Error::read_only(&self.describe(name), operation, refusal))
    }
}

/// Returns true if `place` is a file that begins as an archive of a store does.
pub fn is_archive(place: &Path) -> bool {
    let mut begin = [0; BEGIN.len()];
    // Another kind of file may block when it is opened.
    let mut read = || File::open(place).and_then(|mut file| file.read_exact(&mut begin));
    place.is_file() && read().is_ok() && begin == BEGIN
}

/// Writes the files of the store in the directory `store` to `output` as an archive. Calls `progress`
/// with the number of bytes written so far. Error: a file cannot be read, or `output` not written.
pub fn write_archive(store: &Path, output: &File, progress: &mut dyn FnMut(u64)) -> Result<()> {
    let mut builder = Builder::new(output);
    let mut written = 0;
    let mut names = vec![STORE_JSON.to_owned()];
    for folder in ARCHIVED {
        let mut files = files_of(&store.join(folder))?;
        files.sort_unstable();
        names.extend(files.into_iter().map(|file| format!("{folder}/{file}")));
    }
    for name in names.iter().filter(|name| layout::is_archived(name)) {
        let path = store.join(name);
        let file = File::open(&path).map_err(|e| io_error(&path, "open", e))?;
        let len_bytes = file.metadata().map_err(|e| io_error(&path, "look at", e))?.len();
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Regular);
        // Only the owner may read the memory of guests, also after the archive is unpacked.
        header.set_mode(0o600);
        header.set_size(len_bytes);
        let mut content = Counted { file: file.take(len_bytes), written: &mut written, progress };
        builder
            .append_data(&mut header, name, &mut content)
            .map_err(|e| io_error(&path, "add to the archive", e))?;
        if content.file.limit() > 0 {
            return Err(Error::damaged(path.display().to_string(), "it became shorter"));
        }
    }
    builder.into_inner().map(drop).map_err(|e| io_error(store, "write the archive of", e))
}

fn files_of(folder: &Path) -> Result<Vec<String>> {
    let entries = match std::fs::read_dir(folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(|e| io_error(folder, "list", e))?,
    };
    let name = |entry: io::Result<std::fs::DirEntry>| {
        entry.map(|entry| entry.file_name().to_string_lossy().into_owned())
    };
    entries.map(name).collect::<io::Result<_>>().map_err(|e| io_error(folder, "list", e))
}

/// A file that tells how much of it was read.
struct Counted<'a> {
    file: io::Take<File>,
    written: &'a mut u64,
    progress: &'a mut dyn FnMut(u64),
}

impl Read for Counted<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        *self.written += read as u64;
        (self.progress)(*self.written);
        Ok(read)
    }
}

fn members(file: &File, path: &Path) -> Result<BTreeMap<String, Member>> {
    let damaged = |problem: String| Error::damaged(path.display().to_string(), problem);
    let no_archive = |e: io::Error| damaged(format!("it is no whole bundle: {e}"));
    let archive_bytes = file.metadata().map_err(|e| io_error(path, "look at", e))?.len();
    let mut members = BTreeMap::new();
    let mut end = 0;
    let mut archive = Archive::new(file);
    // Extended headers, which could make the reader allocate, are entries of other types here.
    let entries = archive.entries_with_seek().map_err(no_archive)?.raw(true);
    for entry in entries {
        let entry = entry.map_err(no_archive)?;
        let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        if entry.header().entry_type() != EntryType::Regular || !layout::is_archived(&name) {
            return Err(damaged(format!("it holds {name:?}, which is no file of a store")));
        }
        let member = Member { offset: entry.raw_file_position(), len_bytes: entry.size() };
        let member_end = member.offset.checked_add(member.len_bytes);
        let Some(member_end) = member_end.filter(|end| *end <= archive_bytes) else {
            return Err(damaged(format!("it ends within {name}: it was cut off")));
        };
        end = member_end;
        if members.len() == MEMBERS_MAX || members.insert(name.clone(), member).is_some() {
            return Err(damaged(format!("it holds {name} twice, or too many files")));
        }
    }
    if !members.contains_key(STORE_JSON) {
        return Err(damaged("it is no bundle: it holds no store.json".into()));
    }
    has_end_mark(file, end.next_multiple_of(BLOCK_BYTES), archive_bytes)
        .map_err(|e| io_error(path, "read", e))?
        .then_some(members)
        .ok_or_else(|| damaged("it lacks its end: it was cut off".into()))
}

/// Returns true if two blocks of zeros begin at `offset`.
fn has_end_mark(mut file: &File, offset: u64, archive_bytes: u64) -> io::Result<bool> {
    let mut blocks = [1; 2 * BLOCK_BYTES as usize];
    if offset.saturating_add(blocks.len() as u64) > archive_bytes {
        return Ok(false);
    }
    file.seek(SeekFrom::Start(offset))?;
    file.read_exact(&mut blocks)?;
    Ok(blocks.iter().all(|byte| *byte == 0))
}

impl Backend for ArchiveBackend {
    fn describe(&self, name: &str) -> String {
        format!("{name} in {}", self.path.display())
    }

    fn lock(&self, _holder: &str) -> Result<Box<dyn LockGuard>> {
        self.refuse("lock", "write to")
    }

    fn lock_prune(&self, _holder: &str) -> Result<Box<dyn LockGuard>> {
        self.refuse("prune.lock", "prune")
    }

    fn lock_holder(&self) -> Result<Option<String>> {
        Ok(None)
    }

    fn is_pruning(&self) -> Result<bool> {
        Ok(false)
    }

    fn create(&self, name: &str) -> Result<Box<dyn AppendFile>> {
        self.refuse(name, "create")
    }

    fn put(&self, name: &str, _bytes: &[u8]) -> Result<()> {
        self.refuse(name, "write")
    }

    fn open(&self, name: &str) -> Result<Arc<dyn ReadFile>> {
        let member = self.members.get(name).copied().ok_or_else(|| Error::Io {
            object: self.describe(name),
            operation: "open",
            source: io::ErrorKind::NotFound.into(),
        })?;
        let (file, object) = (Arc::clone(&self.file), self.describe(name));
        Ok(Arc::new(ArchivedFile { file, object, member }))
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        let prefix = format!("{folder}/");
        let names = self.members.keys().filter_map(|name| name.strip_prefix(&prefix));
        Ok(names.map(str::to_owned).collect())
    }

    fn remove(&self, name: &str) -> Result<()> {
        self.refuse(name, "remove")
    }

    fn sync(&self, name: &str) -> Result<()> {
        self.refuse(name, "sync")
    }
}

#[derive(Debug)]
struct ArchivedFile {
    file: Arc<File>,
    object: String,
    member: Member,
}

impl ReadFile for ArchivedFile {
    fn len_bytes(&self) -> Result<u64> {
        Ok(self.member.len_bytes)
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let io = |source| Error::Io { object: self.object.clone(), operation: "read", source };
        let end = offset.checked_add(buffer.len() as u64);
        if end.is_none_or(|end| end > self.member.len_bytes) {
            return Err(io(io::ErrorKind::UnexpectedEof.into()));
        }
        self.file.read_exact_at(buffer, self.member.offset + offset).map_err(io)
    }
}

fn io_error(path: &Path, operation: &'static str, source: io::Error) -> Error {
    Error::Io { object: path.display().to_string(), operation, source }
}
