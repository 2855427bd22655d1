//! Encrypts the files of a store on any other backend.
//!
//! ```text
//!   store ─▶ Encrypted ─▶ Local, S3, ...
//!             put      header, frames, the last one marked as such
//!             append   more frames; each append is durable or lost for itself, as below
//!             read     the block that has the place, its frames opened one by one
//! ```
//!
//! Invariants: every byte that is given back was written under that name, at that place, with this
//! store's key ([`frame`]). So changing, moving, swapping and shortening within a file are noticed.
//! A file that grows ends where its last whole frame does, whatever a crash left behind that.
//!
//! Not hidden: names, sizes, times, the lock's text. Not noticed: that a file is missing, or an
//! older one under the same name.

mod frame;
#[cfg(test)]
mod tests;

use super::{Backend, Growing, LockGuard, Readable, Unlocked};
use crate::config::STORE_JSON;
use crate::secret::DataKey;
use crate::{Error, Result};
use frame::{BLOCK_BYTES, Frame, HEADER_BYTES, Header, Kind, PLAIN_BYTES_MAX, Sealer, Seals};
use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// A backend whose files are encrypted on another one.
#[derive(Debug)]
pub struct Encrypted {
    below: Arc<dyn Backend>,
    sealer: Arc<Sealer>,
}

impl Encrypted {
    /// Encrypts with `key` what goes to `below`.
    pub(crate) fn new(below: Arc<dyn Backend>, key: &DataKey) -> Self {
        Self { below, sealer: Arc::new(Sealer::new(key)) }
    }
}

/// The one file in plain: it holds what the key is found with.
fn is_plain(name: &str) -> bool {
    name == STORE_JSON
}

impl Backend for Encrypted {
    fn describe(&self, name: &str) -> String {
        self.below.describe(name)
    }

    fn lock(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        self.below.lock(holder)
    }

    fn lock_prune(&self, holder: &str) -> Result<Box<dyn LockGuard>> {
        self.below.lock_prune(holder)
    }

    fn holder(&self) -> Result<Option<String>> {
        self.below.holder()
    }

    fn relaxed(&self) -> Option<Arc<dyn Backend>> {
        let below = self.below.relaxed()?;
        Some(Arc::new(Self { below, sealer: Arc::clone(&self.sealer) }))
    }

    fn sync_all(&self) -> Result<()> {
        self.below.sync_all()
    }

    fn boot(&self) -> Result<String> {
        self.below.boot()
    }

    fn stays(&self) -> bool {
        self.below.stays()
    }

    fn is_pruned(&self) -> Result<bool> {
        self.below.is_pruned()
    }

    fn unlock(&self, force: bool) -> Result<Unlocked> {
        self.below.unlock(force)
    }

    fn below(&self) -> Option<Arc<dyn Backend>> {
        Some(self.below.clone())
    }

    fn create(&self, name: &str) -> Result<Box<dyn Growing>> {
        let seals = Seals::new(Kind::Growing, name)?;
        let mut file = self.below.create(name)?;
        if let Err(error) = file.append(&seals.header.encode()) {
            let _ = self.below.remove(name);
            return Err(error);
        }
        let ends = vec![(0, seals.sealed)];
        let (below, sealer, name) = (self.below.clone(), self.sealer.clone(), name.into());
        Ok(Box::new(Writing { below, sealer, name, file, seals, ends }))
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        if is_plain(name) {
            return self.below.put(name, bytes);
        }
        let mut seals = Seals::new(Kind::Whole, name)?;
        let mut out = seals.header.encode().to_vec();
        out.extend(seals.seal(&self.sealer, bytes)?);
        self.below.put(name, &out)
    }

    fn open(&self, name: &str) -> Result<Arc<dyn Readable>> {
        let file = self.below.open(name)?;
        if is_plain(name) {
            return Ok(file);
        }
        let (sealer, object) = (self.sealer.clone(), self.below.describe(name));
        Ok(Arc::new(Reading {
            file,
            sealer,
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
struct Writing {
    below: Arc<dyn Backend>,
    sealer: Arc<Sealer>,
    name: String,
    file: Box<dyn Growing>,
    seals: Seals,
    /// Where appends ended, in the plain file and in the encrypted one.
    ends: Vec<(u64, u64)>,
}

impl Growing for Writing {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let frames = self.seals.seal(&self.sealer, bytes)?;
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
        // The cut goes through an append: what of that stays is written anew, in frames of its own.
        let mut rest = vec![0; (len_bytes - plain) as usize];
        if !rest.is_empty() {
            let sealed = Encrypted { below: self.below.clone(), sealer: self.sealer.clone() };
            sealed.open(&self.name)?.read_at(plain, &mut rest)?;
        }
        self.file.truncate(sealed)?;
        (self.seals.plain, self.seals.sealed) = (plain, sealed);
        self.ends.truncate(keep);
        if rest.is_empty() { Ok(()) } else { self.append(&rest) }
    }
}

#[derive(Debug)]
struct Reading {
    file: Arc<dyn Readable>,
    sealer: Arc<Sealer>,
    name: String,
    object: String,
    header: OnceLock<Header>,
    /// The last length that was asked for: of the encrypted file, of the plain one.
    len: Mutex<(u64, u64)>,
}

impl Reading {
    /// None where the file is shorter, or power loss has left zeros in its place, before anything
    /// behind it was durable.
    fn header(&self, sealed: u64) -> Result<Option<Header>> {
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
        let header = Header::decode(&bytes, &self.object)?;
        Ok(Some(*self.header.get_or_init(|| header)))
    }

    /// Block number `number` of a file of `sealed` bytes.
    fn block(&self, number: u64, sealed: u64) -> Result<Vec<u8>> {
        let start = number * BLOCK_BYTES;
        let mut block = vec![0; sealed.saturating_sub(start).min(BLOCK_BYTES) as usize];
        self.file.read_at(start, &mut block)?;
        Ok(block)
    }

    fn open(&self, header: &Header, block: &[u8], frame: &Frame) -> Option<Vec<u8>> {
        frame::open(&self.sealer, header, &self.name, block, frame)
    }

    /// Where the last frame that holds ends, of a file that grows; of a whole one, that frame must
    /// be its last.
    fn end(&self, header: &Header, sealed: u64) -> Result<u64> {
        for number in (0..sealed.div_ceil(BLOCK_BYTES)).rev() {
            let block = self.block(number, sealed)?;
            for frame in frame::frames(&block, number).iter().rev() {
                let holds = self.open(header, &block, frame).is_some();
                if header.kind == Kind::Whole && !(holds && frame.is_last) {
                    return Err(Error::damaged(&self.object, UNAUTHENTIC));
                }
                if holds {
                    return Ok(frame.plain.end);
                }
            }
        }
        match header.kind {
            Kind::Growing => Ok(0),
            Kind::Whole => Err(Error::damaged(&self.object, "has no end: it was cut off")),
        }
    }

    /// Where block `number` begins in the plain file, if what it says makes sense behind block
    /// `known`, which begins at `plain`.
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

    /// The block that has the place `offset` of the plain file, if any has. A step is never too
    /// long, as a block holds no more than [`PLAIN_BYTES_MAX`].
    fn find(&self, offset: u64, sealed: u64) -> Result<Found> {
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

    /// The same among the blocks from `known` on and before `end`, of which all but the first may
    /// be damaged.
    fn find_near(
        &self,
        offset: u64,
        sealed: u64,
        mut known: (u64, u64),
        end: u64,
        mut unread: Option<Error>,
    ) -> Result<Found> {
        for number in known.0 + 1..end {
            match passable(self.beginning(number, sealed, known), &mut unread)? {
                Some(begins) if begins <= offset => known = (number, begins),
                _ => {}
            }
        }
        Ok(Found { number: known.0, unread })
    }

    fn ends_before(&self, offset: u64) -> Error {
        let object = format!("{} at offset {offset}", self.object);
        Error::Io { object, operation: "read", source: io::ErrorKind::UnexpectedEof.into() }
    }
}

/// Where a place is thought to be.
struct Found {
    number: u64,
    /// The beginning of some block could not be read, so that the place may be in that one.
    unread: Option<Error>,
}

/// A bad sector is no reason not to find what lies in other blocks, and is remembered; every other
/// failure is one.
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
    "was not written so with this store's key: it was changed, moved or cut off";

impl Readable for Reading {
    fn len_bytes(&self) -> Result<u64> {
        let sealed = self.file.len_bytes()?;
        let Some(header) = self.header(sealed)? else { return Ok(0) };
        let mut known = self.len.lock().unwrap_or_else(PoisonError::into_inner);
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
        let Found { mut number, mut unread } = self.find(offset, sealed)?;
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
                // In a block whose beginning the medium did not give: nothing is known to be wrong
                // with it.
                if let Some(error) = unread.take() {
                    return Err(error);
                }
                // Behind its end, or where something that was written does not hold.
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
