//! Encrypts the files of a store on top of any other backend.
//!
//! ```text
//!   store ─▶ EncryptedBackend ─▶ LocalBackend, S3Backend, ...
//!             put      file header, frames; the last frame is marked as the last
//!             append   more frames; each append is durable or lost as the backend below decides
//!             read     finds the block that holds the offset, and decrypts its frames
//! ```
//!
//! Invariants:
//! - Every byte that a read returns was written under that name, at that offset, with this store's
//!   key ([`frame`]). Changed, moved, swapped and truncated contents are noticed.
//! - A growing file ends with its last whole frame, whatever a crash left after it.
//!
//! File names, sizes, times and the text of locks are not hidden. A missing file, or an older file
//! under the same name, is not noticed.

mod frame;
#[cfg(test)]
mod tests;

use crate::layout::STORE_JSON;
use crate::{
    AppendFile, Backend, LockGuard, ReadFile, Space, StartingWriter, UnlockOutcome, WriterEntry,
};
use crate::{Error, Result};
use frame::{
    BLOCK_BYTES, EncryptedFrame, FileCipher, FileHeader, FileKind, FrameWriter, HEADER_BYTES,
    PLAIN_BYTES_MAX,
};
use keyframe_locks::IgnorePoison;
use std::io;
use std::sync::{Arc, Mutex, OnceLock};
use zeroize::Zeroizing;

/// The key that encrypts the files of a store. Its `Debug` form hides it.
#[derive(Clone)]
pub struct DataKey(pub Zeroizing<[u8; 32]>);

impl std::fmt::Debug for DataKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DataKey(secret)")
    }
}

/// A backend that encrypts the files of another backend.
#[derive(Debug)]
pub struct EncryptedBackend {
    below: Arc<dyn Backend>,
    cipher: Arc<FileCipher>,
}

impl EncryptedBackend {
    /// Makes a backend that encrypts the files of `below` with `key`.
    pub fn new(below: Arc<dyn Backend>, key: &DataKey) -> Self {
        Self { below, cipher: Arc::new(FileCipher::new(key)) }
    }

    /// The encrypted bytes of the file `name`, which is written as a whole.
    fn encrypt_whole(&self, name: &str, bytes: &[u8]) -> Result<Vec<u8>> {
        let mut seals = FrameWriter::new(FileKind::Whole, name)?;
        let mut out = seals.header.encode().to_vec();
        out.extend(seals.seal(&self.cipher, bytes)?);
        Ok(out)
    }
}

/// `store.json` is not encrypted: it holds the locked keys.
fn is_plain(name: &str) -> bool {
    name == STORE_JSON
}

impl Backend for EncryptedBackend {
    fn describe(&self, name: &str) -> String {
        self.below.describe(name)
    }

    fn lock(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        self.below.lock(holder)
    }

    fn join(&self, holder: &str) -> Result<StartingWriter> {
        let mut joined = self.below.join(holder)?;
        joined.files = joined.files.map(|below| -> Arc<dyn Backend> {
            Arc::new(Self { below, cipher: Arc::clone(&self.cipher) })
        });
        Ok(joined)
    }

    fn writers(&self) -> Result<Vec<WriterEntry>> {
        self.below.writers()
    }

    fn lock_prune(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        self.below.lock_prune(holder)
    }

    fn lock_holder(&self) -> Result<Option<String>> {
        self.below.lock_holder()
    }

    fn without_syncs(&self) -> Option<Arc<dyn Backend>> {
        let below = self.below.without_syncs()?;
        Some(Arc::new(Self { below, cipher: Arc::clone(&self.cipher) }))
    }

    fn sync_all(&self) -> Result<()> {
        self.below.sync_all()
    }

    fn space(&self) -> Option<Space> {
        self.below.space()
    }

    fn boot_id(&self) -> Result<String> {
        self.below.boot_id()
    }

    fn is_persistent(&self) -> bool {
        self.below.is_persistent()
    }

    fn is_pruning(&self) -> Result<bool> {
        self.below.is_pruning()
    }

    fn unlock(&self, may_break: &dyn Fn(&str) -> bool) -> Result<UnlockOutcome> {
        self.below.unlock(may_break)
    }

    fn ciphertext(&self) -> Option<Arc<dyn Backend>> {
        Some(self.below.clone())
    }

    fn create(&self, name: &str) -> Result<Box<dyn AppendFile>> {
        let seals = FrameWriter::new(FileKind::Growing, name)?;
        let mut file = self.below.create(name)?;
        if let Err(error) = file.append(&seals.header.encode()) {
            let _ = self.below.remove(name);
            return Err(error);
        }
        let ends = vec![(0, seals.sealed)];
        let (below, cipher, name) = (self.below.clone(), self.cipher.clone(), name.into());
        Ok(Box::new(EncryptedWriter { below, cipher, name, file, seals, ends }))
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        if is_plain(name) {
            return self.below.put(name, bytes);
        }
        self.below.put(name, &self.encrypt_whole(name, bytes)?)
    }

    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<()> {
        if is_plain(name) {
            return self.below.put_new(name, bytes);
        }
        self.below.put_new(name, &self.encrypt_whole(name, bytes)?)
    }

    fn open(&self, name: &str) -> Result<Arc<dyn ReadFile>> {
        let file = self.below.open(name)?;
        if is_plain(name) {
            return Ok(file);
        }
        let (cipher, object) = (self.cipher.clone(), self.below.describe(name));
        Ok(Arc::new(EncryptedReader {
            file,
            cipher,
            name: name.into(),
            object,
            header: OnceLock::new(),
            len: Mutex::default(),
        }))
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        self.below.list(folder)
    }

    fn remove(&self, name: &str) -> Result<()> {
        self.below.remove(name)
    }

    fn remove_all(&self, folder: &str, names: &[String]) -> Result<()> {
        self.below.remove_all(folder, names)
    }

    fn sync(&self, name: &str) -> Result<()> {
        self.below.sync(name)
    }
}

#[derive(Debug)]
struct EncryptedWriter {
    below: Arc<dyn Backend>,
    cipher: Arc<FileCipher>,
    name: String,
    file: Box<dyn AppendFile>,
    seals: FrameWriter,
    /// The ends of the appends: (offset in the plaintext, offset in the encrypted file), in bytes.
    ends: Vec<(u64, u64)>,
}

impl AppendFile for EncryptedWriter {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let frames = self.seals.seal(&self.cipher, bytes)?;
        self.file.append(&frames)?;
        self.ends.push((self.seals.plain, self.seals.sealed));
        Ok(())
    }

    fn sync(&mut self) -> Result<()> {
        self.file.sync()
    }

    fn truncate(&mut self, len_bytes: u64) -> Result<()> {
        let keep = self.ends.partition_point(|(plain, _)| *plain <= len_bytes);
        let (plain, sealed) =
            keep.checked_sub(1).and_then(|at| self.ends.get(at)).copied().unwrap_or_default();
        // If the cut lies inside an append, the kept part of that append is encrypted again, in new
        // frames.
        let mut rest = vec![0; (len_bytes - plain) as usize];
        if !rest.is_empty() {
            let sealed =
                EncryptedBackend { below: self.below.clone(), cipher: self.cipher.clone() };
            sealed.open(&self.name)?.read_at(plain, &mut rest)?;
        }
        self.file.truncate(sealed)?;
        (self.seals.plain, self.seals.sealed) = (plain, sealed);
        self.ends.truncate(keep);
        if rest.is_empty() { Ok(()) } else { self.append(&rest) }
    }
}

#[derive(Debug)]
struct EncryptedReader {
    file: Arc<dyn ReadFile>,
    cipher: Arc<FileCipher>,
    name: String,
    object: String,
    header: OnceLock<FileHeader>,
    /// The last length that was computed: (bytes of the encrypted file, bytes of the plaintext).
    len: Mutex<(u64, u64)>,
}

impl EncryptedReader {
    /// The file header. None if the file is too short, or if a power failure left zeros in its
    /// place before anything after it was durable.
    fn header(&self, sealed: u64) -> Result<Option<FileHeader>> {
        if let Some(header) = self.header.get() {
            return Ok(Some(*header));
        }
        if sealed < HEADER_BYTES as u64 {
            return Ok(None);
        }
        let mut bytes = [0; HEADER_BYTES];
        self.file.read_at(0, &mut bytes)?;
        if bytes == [0; HEADER_BYTES] {
            return Ok(None);
        }
        let header = FileHeader::decode(&bytes, &self.object)?;
        Ok(Some(*self.header.get_or_init(|| header)))
    }

    /// Block `number` of an encrypted file that is `sealed` bytes long.
    fn block(&self, number: u64, sealed: u64) -> Result<Vec<u8>> {
        let start = number * BLOCK_BYTES;
        let mut block = vec![0; sealed.saturating_sub(start).min(BLOCK_BYTES) as usize];
        self.file.read_at(start, &mut block)?;
        Ok(block)
    }

    fn open(&self, header: &FileHeader, block: &[u8], frame: &EncryptedFrame) -> Option<Vec<u8>> {
        frame::open(&self.cipher, header, &self.name, block, frame)
    }

    /// The end of the plaintext: where the last authentic frame ends. In a whole file, that must be
    /// the frame marked as the last.
    fn end(&self, header: &FileHeader, sealed: u64) -> Result<u64> {
        for number in (0..sealed.div_ceil(BLOCK_BYTES)).rev() {
            let block = self.block(number, sealed)?;
            for frame in frame::frames(&block, number).iter().rev() {
                let holds = self.open(header, &block, frame).is_some();
                if header.kind == FileKind::Whole && !(holds && frame.is_last) {
                    return Err(Error::damaged(&self.object, UNAUTHENTIC));
                }
                if holds {
                    return Ok(frame.plain.end);
                }
            }
        }
        match header.kind {
            FileKind::Growing => Ok(0),
            FileKind::Whole => {
                Err(Error::damaged(&self.object, "its end is missing: the file was cut off"))
            }
        }
    }

    /// The plaintext offset at which block `number` begins. None if it contradicts block `known.0`,
    /// which begins at `known.1`.
    fn beginning(
        &self,
        number: u64,
        sealed: u64,
        (known, plain): (u64, u64),
    ) -> Result<Option<u64>> {
        let mut first = [0; 8];
        let start = number * BLOCK_BYTES;
        if start + first.len() as u64 > sealed {
            return Ok(None);
        }
        self.file.read_at(start, &mut first)?;
        let begins = u64::from_le_bytes(first);
        let most = plain.saturating_add((number - known) * PLAIN_BYTES_MAX);
        Ok((plain < begins && begins <= most).then_some(begins))
    }

    /// The block that holds `offset` of the plaintext, if any does. The search never skips it,
    /// because a block holds at most [`PLAIN_BYTES_MAX`] of the plaintext.
    fn find(&self, offset: u64, sealed: u64) -> Result<BlockLocation> {
        let blocks = sealed.div_ceil(BLOCK_BYTES);
        let mut known = (0, 0);
        let mut unread = None;
        loop {
            let mut next = known.0 + ((offset - known.1) / PLAIN_BYTES_MAX).max(1);
            let begins = loop {
                if next >= blocks {
                    return self.find_near(offset, sealed, known, blocks, unread);
                }
                match passable(self.beginning(next, sealed, known), &mut unread)? {
                    Some(begins) => break begins,
                    None => next += 1,
                }
            };
            if begins > offset {
                return self.find_near(offset, sealed, known, next, unread);
            }
            known = (next, begins);
        }
    }

    /// The same among the blocks from `known` to `end`. All of them but the first may be damaged.
    fn find_near(
        &self,
        offset: u64,
        sealed: u64,
        mut known: (u64, u64),
        end: u64,
        mut unread: Option<Error>,
    ) -> Result<BlockLocation> {
        for number in known.0 + 1..end {
            match passable(self.beginning(number, sealed, known), &mut unread)? {
                Some(begins) if begins <= offset => known = (number, begins),
                _ => {}
            }
        }
        Ok(BlockLocation { number: known.0, unread })
    }

    fn ends_before(&self, offset: u64) -> Error {
        let object = format!("{} at offset {offset}", self.object);
        Error::Io { object, operation: "read", source: io::ErrorKind::UnexpectedEof.into() }
    }
}

/// A block that may hold an offset.
struct BlockLocation {
    number: u64,
    /// The beginning of some block could not be read, so that block may hold the offset.
    unread: Option<Error>,
}

/// A bad sector (EIO) does not keep the reader from other blocks; the error is kept in `unread`.
/// Any other error is returned.
fn passable(beginning: Result<Option<u64>>, unread: &mut Option<Error>) -> Result<Option<u64>> {
    const EIO: i32 = 5;
    match beginning {
        Err(error) if matches!(&error, Error::Io { source, .. } if source.raw_os_error() == Some(EIO)) =>
        {
            unread.get_or_insert(error);
            Ok(None)
        }
        other => other,
    }
}

const UNAUTHENTIC: &str =
    "the bytes are not authentic: they were changed, moved or cut off, or the key is wrong";

impl ReadFile for EncryptedReader {
    fn len_bytes(&self) -> Result<u64> {
        let sealed = self.file.len_bytes()?;
        let Some(header) = self.header(sealed)? else { return Ok(0) };
        let mut known = self.len.lock().ignore_poison();
        if known.0 != sealed {
            *known = (sealed, self.end(&header, sealed)?);
        }
        Ok(known.1)
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        if buffer.is_empty() {
            return Ok(());
        }
        let sealed = self.file.len_bytes()?;
        let Some(header) = self.header(sealed)? else { return Err(self.ends_before(offset)) };
        let end =
            offset.checked_add(buffer.len() as u64).ok_or_else(|| self.ends_before(offset))?;
        let mut at = offset;
        let BlockLocation { mut number, mut unread } = self.find(offset, sealed)?;
        while at < end {
            let start = number * BLOCK_BYTES;
            let block = if start < sealed { self.block(number, sealed)? } else { Vec::new() };
            let before = at;
            for frame in frame::frames(&block, number) {
                if !frame.plain.contains(&at) || at >= end {
                    continue;
                }
                let Some(plain) = self.open(&header, &block, &frame) else { break };
                let from = plain.get((at - frame.plain.start) as usize..).unwrap_or_default();
                let to = buffer.get_mut((at - offset) as usize..).unwrap_or_default();
                let len = from.len().min(to.len());
                for (to, from) in to.iter_mut().zip(from) {
                    *to = *from;
                }
                at += len as u64;
            }
            if at == before {
                // The offset may be in the block that could not be read; nothing else is known to
                // be damaged.
                if let Some(error) = unread.take() {
                    return Err(error);
                }
                // The offset is past the end, or the frame there is not authentic.
                if self.len_bytes()? < end {
                    return Err(self.ends_before(at));
                }
                return Err(Error::damaged(format!("{} at offset {at}", self.object), UNAUTHENTIC));
            }
            number += 1;
        }
        Ok(())
    }
}
