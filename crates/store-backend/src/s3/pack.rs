//! A pack in object storage: parts, each an object named by the offset at which it begins.
//!
//! ```text
//!   packs/00000001.pack/begun           put first, if absent: takes the number
//!   packs/00000001.pack/000000000000    bytes 0 .. n   one part per sync and per 4 MiB; then
//!   packs/00000001.pack/000000065536    bytes n .. m   up to 16 parts, or 4 MiB, are merged
//!   packs/00000001.pack/closed          put last: the pack is complete
//!
//!   append ─▶ tail in memory ─4 MiB, or sync─▶ part ─16 parts─▶ merged part ─▶ old parts removed
//! ```
//!
//! Invariants:
//! - At every instant and for every reader, the parts from offset 0 on, each up to the next, are a
//!   prefix of the appended bytes. Everything that `sync` confirmed is in it.
//! - After a failed put nothing is appended, because the failed request may still arrive.

mod rewrite;

pub use rewrite::rewrite;

use super::Shared;
use super::client::{ListDepth, ListedObject, Precondition, S3PutOutcome};
use crate::random_bytes;
use crate::{AppendFile, ReadFile};
use crate::{Error, Result};
use keyframe_bytes::hex::to_hex;
use keyframe_locks::IgnorePoison;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

/// A part is put when this many bytes have been appended.
const PART_BYTES: usize = 4 << 20;
/// Parts that are merged into one.
const PIECES: usize = 16;
/// Longer than any part that a writer puts.
const PART_BYTES_MAX: u64 = 64 << 20;
/// Times that a reader lists the parts again because they were merged meanwhile.
const LOOKS: u32 = 8;

/// A pack that this process writes. Readers in this process see the bytes that are not uploaded
/// yet.
#[derive(Debug)]
pub struct UploadedPack {
    name: String,
    state: Mutex<WriteState>,
}

#[derive(Debug, Default)]
struct WriteState {
    /// The parts in the bucket, in rising order and without gaps.
    parts: Vec<PackPart>,
    /// The bytes after them, not put yet.
    tail: Vec<u8>,
    /// The bytes of the last parts, which will be merged.
    recent: Vec<u8>,
    pieces: usize,
    /// A put failed, and its request may still arrive.
    is_given_up: bool,
}

#[derive(Clone, Debug)]
struct PackPart {
    at: u64,
    object: ListedObject,
}

impl PackPart {
    fn end(&self) -> u64 {
        self.at.saturating_add(self.object.len_bytes)
    }
}

impl WriteState {
    fn put_bytes(&self) -> u64 {
        self.parts.last().map_or(0, PackPart::end)
    }
}

impl UploadedPack {
    fn state(&self) -> MutexGuard<'_, WriteState> {
        self.state.lock().ignore_poison()
    }
}

fn part_name(pack: &str, at: u64) -> String {
    format!("{pack}/{at:012}")
}

fn begun(pack: &str) -> String {
    format!("{pack}/begun")
}

fn closed(pack: &str) -> String {
    format!("{pack}/closed")
}

/// Creates the pack `name`. Errors: kind `AlreadyExists` if its number is taken; the service
/// refuses or cannot be reached.
pub fn create(
    shared: &Arc<Shared>,
    name: &str,
) -> Result<(Arc<UploadedPack>, Box<dyn AppendFile>)> {
    let object = begun(name);
    let token = to_hex(&random_bytes::<16>()?);
    if shared.put(&object, token.as_bytes(), Precondition::Absent)? == S3PutOutcome::Refused {
        let source = io::Error::from(io::ErrorKind::AlreadyExists);
        return Err(Error::Io {
            object: shared.client.describe(name),
            operation: "create",
            source,
        });
    }
    let open = Arc::new(UploadedPack { name: name.into(), state: Mutex::default() });
    Ok((open.clone(), Box::new(PackWriter { shared: shared.clone(), open })))
}

/// Removes the pack `name`, from its end, so that a crash leaves a shorter pack. Errors: the
/// service refuses or cannot be reached.
pub fn remove(shared: &Shared, name: &str) -> Result<()> {
    let objects = shared.client.list(&format!("{name}/"), ListDepth::Here, None)?;
    // `begun` and `closed` sort after the digits; `begun` is removed last.
    let is_begun = |object: &ListedObject| object.name == "begun";
    for object in
        objects.iter().rev().filter(|o| !is_begun(o)).chain(objects.iter().filter(|o| is_begun(o)))
    {
        shared.delete(&format!("{name}/{}", object.name))?;
    }
    Ok(())
}

#[derive(Debug)]
struct PackWriter {
    shared: Arc<Shared>,
    open: Arc<UploadedPack>,
}

impl PackWriter {
    fn given_up(&self, operation: &'static str) -> Error {
        let source = io::Error::other(
            "an earlier part of the pack could not be stored, so nothing more is appended",
        );
        Error::Io { object: self.shared.client.describe(&self.open.name), operation, source }
    }

    /// Puts one part at offset `at`.
    fn put(&self, at: u64, bytes: &[u8]) -> Result<PackPart> {
        let name = part_name(&self.open.name, at);
        let tag = match self.shared.put(&name, bytes, Precondition::Always)? {
            S3PutOutcome::Done(tag) => tag,
            S3PutOutcome::Refused => String::new(),
        };
        let object = ListedObject { name, len_bytes: bytes.len() as u64, tag };
        Ok(PackPart { at, object })
    }

    /// Puts the first `len` bytes of the tail.
    fn put_tail(&self, len: usize) -> Result<()> {
        // Only this writer changes the state, so readers in this process need not wait during the
        // request.
        let (at, bytes) = {
            let state = self.open.state();
            (state.put_bytes(), state.tail.get(..len).unwrap_or_default().to_vec())
        };
        let put = self.put(at, &bytes);
        let mut state = self.open.state();
        let part = put.inspect_err(|_| state.is_given_up = true)?;
        state.tail.drain(..len);
        state.recent.extend_from_slice(&bytes);
        state.pieces += 1;
        state.parts.push(part.clone());
        let is_enough = state.pieces >= PIECES || state.recent.len() >= PART_BYTES;
        drop(state);
        if len >= PART_BYTES / 4 {
            self.shared.cache.put(&part.object, &Arc::new(bytes));
        }
        if is_enough {
            self.put_as_one();
        }
        Ok(())
    }

    /// Merges the last parts into one. If that fails they stay, which is slower to read but
    /// correct.
    fn put_as_one(&self) {
        let mut state = self.open.state();
        let (bytes, pieces) =
            (std::mem::take(&mut state.recent), std::mem::take(&mut state.pieces));
        let at = state.put_bytes() - bytes.len() as u64;
        drop(state);
        if pieces < 2 {
            return;
        }
        let Ok(part) = self.put(at, &bytes) else { return };
        self.shared.cache.put(&part.object, &Arc::new(bytes));
        let mut state = self.open.state();
        let first = state.parts.partition_point(|known| known.at < at);
        let old: Vec<PackPart> = state.parts.splice(first.., [part]).collect();
        drop(state);
        for part in old.iter().skip(1).rev() {
            let _ = self.shared.delete(&part.object.name);
        }
    }
}

impl AppendFile for PackWriter {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let mut state = self.open.state();
        if state.is_given_up {
            return Err(self.given_up("append"));
        }
        state.tail.extend_from_slice(bytes);
        drop(state);
        while self.open.state().tail.len() >= PART_BYTES {
            self.put_tail(PART_BYTES)?;
        }
        Ok(())
    }

    fn sync(&mut self) -> Result<()> {
        let (len, is_given_up) = {
            let state = self.open.state();
            (state.tail.len(), state.is_given_up)
        };
        if is_given_up {
            return Err(self.given_up("sync"));
        }
        if len > 0 { self.put_tail(len) } else { self.shared.check_leases() }
    }

    fn truncate(&mut self, len_bytes: u64) -> Result<()> {
        let mut state = self.open.state();
        let put_bytes = state.put_bytes();
        if let Some(keep) = len_bytes.checked_sub(put_bytes) {
            let is_given_up = state.is_given_up;
            state.tail.truncate(keep as usize);
            return if is_given_up { Err(self.given_up("truncate")) } else { Ok(()) };
        }
        if state.is_given_up {
            return Err(self.given_up("truncate"));
        }
        state.tail.clear();
        state.recent.clear();
        state.pieces = 0;
        let first = state.parts.partition_point(|part| part.end() <= len_bytes);
        let cut = state.parts.split_off(first);
        drop(state);
        for part in cut.iter().skip(1).rev() {
            self.shared.delete(&part.object.name)?;
        }
        let Some(part) = cut.first() else { return Ok(()) };
        let keep = (len_bytes - part.at) as usize;
        if keep == 0 {
            return self.shared.delete(&part.object.name);
        }
        let bytes = part_bytes(&self.shared, part)?;
        let part = self.put(part.at, bytes.get(..keep).unwrap_or_default())?;
        self.open.state().parts.push(part);
        Ok(())
    }
}

impl Drop for PackWriter {
    fn drop(&mut self) {
        let state = self.open.state();
        let is_whole = !state.is_given_up && state.tail.is_empty();
        drop(state);
        // Saves readers a listing. Nothing depends on it.
        if is_whole {
            let _ = self.shared.put(&closed(&self.open.name), b"", Precondition::Always);
        }
    }
}

/// A pack in object storage that is open for reading.
#[derive(Debug)]
pub struct PackReader {
    shared: Arc<Shared>,
    name: String,
    /// The pack, if this process writes it.
    open: Option<Arc<UploadedPack>>,
    seen: Mutex<PackListing>,
}

#[derive(Clone, Debug, Default)]
struct PackListing {
    parts: Vec<PackPart>,
    is_closed: bool,
}

impl PackReader {
    /// Opens the pack `name`. `open` is the pack if this process writes it, and otherwise `None`.
    /// Errors: kind `NotFound` if it does not exist; the service refuses or cannot be reached.
    pub fn new(shared: &Arc<Shared>, name: &str, open: Option<Arc<UploadedPack>>) -> Result<Self> {
        let this = Self { shared: shared.clone(), name: name.into(), open, seen: Mutex::default() };
        this.look()?;
        Ok(this)
    }

    fn seen(&self) -> MutexGuard<'_, PackListing> {
        self.seen.lock().ignore_poison()
    }

    /// Lists the parts.
    fn look(&self) -> Result<PackListing> {
        if let Some(open) = &self.open {
            let parts = open.state().parts.clone();
            return Ok(PackListing { parts, is_closed: false });
        }
        let objects = self.shared.client.list(&format!("{}/", self.name), ListDepth::Here, None)?;
        if objects.is_empty() {
            let source = io::Error::from(io::ErrorKind::NotFound);
            return Err(Error::Io {
                object: self.shared.client.describe(&self.name),
                operation: "open",
                source,
            });
        }
        let is_closed = objects.iter().any(|object| object.name == "closed");
        let seen = PackListing { parts: stitch(&self.name, objects), is_closed };
        *self.seen() = seen.clone();
        Ok(seen)
    }

    /// The parts, listed again if the pack may have grown.
    fn current(&self) -> Result<PackListing> {
        let seen = self.seen().clone();
        if seen.is_closed { Ok(seen) } else { self.look() }
    }

    /// Fills `buffer` from the parts; returns the number of bytes filled.
    fn fill(&self, seen: &PackListing, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        let mut done = 0;
        while done < buffer.len() {
            let at = offset + done as u64;
            let next = seen.parts.partition_point(|part| part.at <= at);
            let Some(part) =
                next.checked_sub(1).and_then(|last| seen.parts.get(last)).filter(|p| at < p.end())
            else {
                break;
            };
            let end = seen.parts.get(next).map_or(part.end(), |next| part.end().min(next.at));
            let bytes = part_bytes(&self.shared, part)?;
            let from =
                bytes.get((at - part.at) as usize..(end - part.at) as usize).unwrap_or_default();
            let len = from.len().min(buffer.len() - done);
            let (Some(to), Some(from)) = (buffer.get_mut(done..done + len), from.get(..len)) else {
                break;
            };
            if len == 0 {
                break;
            }
            to.copy_from_slice(from);
            done += len;
        }
        Ok(done)
    }

    /// Fills `buffer` from the bytes that are not put yet; false if they do not hold all of it.
    fn fill_from_tail(&self, offset: u64, buffer: &mut [u8]) -> bool {
        let Some(open) = &self.open else { return false };
        let state = open.state();
        let Some(from) = offset.checked_sub(state.put_bytes()) else { return false };
        let Some(tail) = state.tail.get(from as usize..from as usize + buffer.len()) else {
            return false;
        };
        buffer.copy_from_slice(tail);
        true
    }
}

impl ReadFile for PackReader {
    fn len_bytes(&self) -> Result<u64> {
        if let Some(open) = &self.open {
            let state = open.state();
            return Ok(state.put_bytes() + state.tail.len() as u64);
        }
        Ok(self.current()?.parts.last().map_or(0, PackPart::end))
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let mut seen = if self.open.is_some() { self.look()? } else { self.seen().clone() };
        let mut failure = None;
        for _ in 0..LOOKS {
            match self.fill(&seen, offset, buffer) {
                Ok(done) if done == buffer.len() => return Ok(()),
                Ok(done) => {
                    let rest = buffer.get_mut(done..).unwrap_or_default();
                    if self.fill_from_tail(offset + done as u64, rest) {
                        return Ok(());
                    }
                    if seen.is_closed || failure.is_some() {
                        break;
                    }
                    failure = Some(io::Error::from(io::ErrorKind::UnexpectedEof));
                }
                // The part was merged into another, or the pack was removed.
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error),
            }
            seen = self.look()?;
        }
        let source = failure.unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into());
        let object = format!("{} at offset {offset}", self.shared.client.describe(&self.name));
        Err(Error::Io { object, operation: "read", source })
    }
}

/// The parts from offset 0 up to the first gap. A part that lies inside the one before is dropped.
fn stitch(pack: &str, objects: Vec<ListedObject>) -> Vec<PackPart> {
    let mut parts: Vec<PackPart> = objects
        .into_iter()
        .filter_map(|object| {
            let at: u64 = object.name.parse().ok()?;
            let name = part_name(pack, at);
            (name.ends_with(&format!("/{}", object.name)) && object.len_bytes > 0)
                .then_some(PackPart { at, object: ListedObject { name, ..object.clone() } })
        })
        .collect();
    parts.sort_unstable_by_key(|part| part.at);
    let mut whole: Vec<PackPart> = Vec::with_capacity(parts.len());
    for part in parts {
        let end = whole.last().map_or(0, PackPart::end);
        if part.at > end {
            break;
        }
        if part.end() > end {
            whole.push(part);
        }
    }
    whole
}

/// All bytes of a part.
fn part_bytes(shared: &Shared, part: &PackPart) -> Result<Arc<Vec<u8>>> {
    let ListedObject { name, len_bytes, .. } = &part.object;
    if let Some(bytes) = shared.cache.get(&part.object) {
        return Ok(bytes);
    }
    if *len_bytes > PART_BYTES_MAX {
        let problem = format!("{len_bytes} bytes long; a part has at most {PART_BYTES_MAX}");
        return Err(Error::damaged(shared.client.describe(name), problem));
    }
    let object = shared.client.get(name, None, PART_BYTES_MAX)?;
    let mut bytes = object.bytes;
    // The part has become longer, because others were merged into it.
    bytes.truncate(*len_bytes as usize);
    if (bytes.len() as u64) < *len_bytes {
        let problem = format!("{} bytes long; its listing says {len_bytes}", bytes.len());
        return Err(Error::damaged(shared.client.describe(name), problem));
    }
    let bytes = Arc::new(bytes);
    if object.tag == part.object.tag {
        shared.cache.put(&part.object, &bytes);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(name: &str, len_bytes: u64) -> ListedObject {
        ListedObject { name: name.into(), len_bytes, tag: name.into() }
    }

    #[test]
    fn parts_are_stitched_up_to_the_first_gap_whatever_else_lies_there() {
        let of = |objects: &[(&str, u64)]| -> Vec<(u64, u64)> {
            let all = objects.iter().map(|(name, len)| listed(name, *len)).collect();
            stitch("packs/00000001.pack", all).iter().map(|p| (p.at, p.end())).collect()
        };
        assert_eq!(of(&[("begun", 32)]), []);
        assert_eq!(
            of(&[("000000000000", 5), ("000000000005", 2), ("begun", 32)]),
            [(0, 5), (5, 7)]
        );
        // Merged, but the old parts are not removed yet; then another part.
        let one =
            [("000000000000", 9), ("000000000005", 2), ("000000000007", 2), ("000000000009", 1)];
        assert_eq!(of(&one), [(0, 9), (9, 10)]);
        assert_eq!(of(&[("000000000000", 5), ("000000000006", 2)]), [(0, 5)]);
        assert_eq!(of(&[("000000000001", 5)]), []);
        assert_eq!(of(&[("0", 5), ("+00000000000", 5), ("000000000000", 0), ("x", 1)]), []);
        // An old, longer part that arrived late.
        assert_eq!(of(&[("000000000000", 9), ("000000000005", 9)]), [(0, 9), (5, 14)]);
    }
}
