//! Reads a served file: pieces of it, from the cache of this host or from the server.
//!
//! ```text
//!   range ─▶ its pieces, each:
//!     cached for this state of the file       ─▶ used
//!     cached for another state, or received
//!     from another server                     ─▶ requested with its hash ─▶ "same" ─▶ used
//!     being fetched by another thread         ─▶ waited for, then looked up again
//!     not cached                              ─▶ requested, up to 64 at once ─▶ cached, used
//!
//!   a cached piece: 8 identity, 8 modified (the state of the file), 16 its server │ the bytes
//! ```
//!
//! A pack only grows, except that a crash of its writer may cut its end. So most pieces of an
//! earlier state are unchanged, and a hash proves it. A server can claim any store's id and any
//! state of a file, so a piece says from which server it came.

use super::connection::ANCHOR_BYTES;
use super::wire::{self, Answer, FileStat, Request, STATS_MAX};
use super::{FETCH_COUNTERS, Shared, is_pack};
use crate::cache::PieceKey;
use crate::layout::PACKS;
use crate::{Error, Result};
use crate::{FileStamp, ReadFile};
use keyframe_locks::IgnorePoison;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The size of a piece in bytes: small, because a VM may wait for one page; large, because each
/// piece costs a request.
pub const PIECE_BYTES: u64 = 128 << 10;
/// Pieces that are requested at once.
const PIECES_MAX: usize = 64;
/// The most pieces that are read ahead of a sequential reader.
const AHEAD_MAX: u64 = 8;
const STAMP_BYTES: usize = 16 + ANCHOR_BYTES;
/// A thread fetches a piece, or gives up, within this time.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// The lengths and identities of packs that the server has told.
#[derive(Debug, Default)]
pub struct PackStats {
    /// The generation ([`Shared::generation`]) in which it was known.
    generation: u64,
    /// The packs by name; none for a pack that was not asked for yet.
    known: BTreeMap<String, Option<FileStat>>,
}

impl PackStats {
    /// Announces the packs `files`, which will be opened.
    pub fn expect(&mut self, files: &[String]) {
        self.known.retain(|_, stat| stat.is_some());
        for file in files {
            let name = format!("{PACKS}/{file}");
            if let Entry::Vacant(place) = self.known.entry(name) {
                place.insert(None);
                // Makes the next question ask for all packs.
                self.generation = 0;
            }
        }
    }
}

impl Shared {
    /// The present state of a file; none if it does not exist.
    fn stat(&self, name: &str) -> Result<Option<FileStat>> {
        if !is_pack(name) {
            let found = self.ask_stats(vec![name.to_owned()])?.into_iter().next().flatten();
            self.bump_generation();
            return Ok(found);
        }
        // The lock is held during the request: other threads wait for the same answer.
        let mut stats = self.stats.lock().ignore_poison();
        let now = self.generation.load(Ordering::Acquire);
        let is_current = stats.generation == now;
        match stats.known.get(name) {
            Some(stat) if is_current => return Ok(stat.clone()),
            _ => {}
        }
        let mut names: Vec<String> =
            if is_current { Vec::new() } else { stats.known.keys().cloned().collect() };
        if !stats.known.contains_key(name) {
            names.push(name.to_owned());
        }
        for names in names.chunks(STATS_MAX) {
            for (name, stat) in names.iter().zip(self.ask_stats(names.to_vec())?) {
                stats.known.insert(name.clone(), stat);
            }
        }
        stats.generation = now;
        Ok(stats.known.get(name).cloned().flatten())
    }

    fn ask_stats(&self, names: Vec<String>) -> Result<Vec<Option<FileStat>>> {
        let (count, first) = (names.len(), names.first().cloned().unwrap_or_default());
        let answer = self.client.ask("look at", &first, Request::Stat { names })?;
        let Answer::Data(bytes) = answer else {
            return Err(self.client.strange("look at", &first, "no stats"));
        };
        wire::decode_stats(&bytes, count)
            .map_err(|problem| self.client.strange("look at", &first, &problem))
    }
}

/// A file behind a checkpoint server, open for reading.
#[derive(Debug)]
pub struct ServedFile {
    shared: Arc<Shared>,
    name: String,
    seen: Mutex<FileStat>,
    /// Sequential reads: the piece after the last one that was read, and the number of reads in a
    /// row.
    streak: Mutex<(u64, u32)>,
}

/// A piece that must be fetched.
struct MissingPiece {
    /// Its index among the wanted pieces.
    at: usize,
    key: PieceKey,
    request: Request,
    /// The bytes cached for another state of the file.
    old: Option<Arc<Vec<u8>>>,
}

impl ServedFile {
    /// Opens the file `name`. Errors: kind `NotFound` if it does not exist; the server cannot be
    /// reached.
    pub fn new(shared: &Arc<Shared>, name: &str) -> Result<Self> {
        let Some(stat) = shared.stat(name)? else {
            let source = io::Error::from(io::ErrorKind::NotFound);
            return Err(Error::Io {
                object: shared.client.describe(name),
                operation: "open",
                source,
            });
        };
        Ok(Self {
            shared: shared.clone(),
            name: name.into(),
            seen: Mutex::new(stat),
            streak: Mutex::default(),
        })
    }

    /// The present state of the file.
    fn now(&self) -> Result<FileStat> {
        if !is_pack(&self.name) {
            // Such files are replaced, never changed. This one stays as it was opened.
            return Ok(self.seen.lock().ignore_poison().clone());
        }
        let found = self.shared.stat(&self.name)?;
        let mut seen = self.seen.lock().ignore_poison();
        // Otherwise the file was removed, and the server keeps it open for a while.
        if let Some(stat) = found.filter(|stat| stat.identity == seen.identity) {
            *seen = stat;
        }
        Ok(seen.clone())
    }

    /// The state of the file and its server, as cached pieces record them.
    fn stamp_of(&self, stat: &FileStat) -> [u8; STAMP_BYTES] {
        let modified = if stat.modified != 0 {
            stat.modified
        } else {
            // The server cannot identify the file. The piece is valid in this process, and until
            // the next generation.
            let process = u64::from(std::process::id()) << 32;
            let place = std::ptr::from_ref(&*self.shared) as u64;
            u64::MAX ^ process ^ place ^ self.shared.generation.load(Ordering::Acquire)
        };
        let state = stat.identity.to_le_bytes().into_iter().chain(modified.to_le_bytes());
        let mut out = [0; STAMP_BYTES];
        for (to, from) in out.iter_mut().zip(state.chain(self.shared.client.anchor())) {
            *to = from;
        }
        out
    }

    /// The pieces of these numbers, in this order, each after its stamp.
    fn pieces(&self, stat: &FileStat, numbers: &[u64]) -> Result<Vec<Arc<Vec<u8>>>> {
        let stamp = self.stamp_of(stat);
        let mut found: Vec<Option<Arc<Vec<u8>>>> = vec![None; numbers.len()];
        let mut is_first = true;
        loop {
            let mut missing = Vec::new();
            for (at, number) in numbers.iter().enumerate() {
                let Some(place) = found.get_mut(at).filter(|place| place.is_none()) else {
                    continue;
                };
                let (start, end) = bounds(*number, stat.len_bytes);
                let key = self.shared.key(&self.name, Some(*number))?;
                let cached = self.shared.cache.get(key);
                let cached =
                    cached.filter(|piece| piece.len() as u64 == STAMP_BYTES as u64 + end - start);
                if let Some(piece) = cached.as_ref().filter(|piece| piece.starts_with(&stamp)) {
                    *place = Some(piece.clone());
                    FETCH_COUNTERS.hits.fetch_add(u64::from(is_first), Ordering::Relaxed);
                    continue;
                }
                let known = cached.as_ref().map(|piece| *blake3::hash(bytes_of(piece)).as_bytes());
                let (name, identity) = (self.name.clone(), stat.identity);
                let len_bytes = (end - start) as u32;
                let request = Request::Range { name, identity, offset: start, len_bytes, known };
                missing.push(MissingPiece { at, key, request, old: cached });
            }
            is_first = false;
            if missing.is_empty() {
                return Ok(found.into_iter().flatten().collect());
            }
            let claim = FetchClaim::take(&self.shared, missing);
            if claim.mine.is_empty() {
                claim.wait();
                continue;
            }
            self.fetch(&claim, stamp, &mut found)?;
        }
    }

    fn fetch(
        &self,
        claim: &FetchClaim<'_>,
        stamp: [u8; STAMP_BYTES],
        found: &mut [Option<Arc<Vec<u8>>>],
    ) -> Result<()> {
        let client = &self.shared.client;
        let requests: Vec<Request> =
            claim.mine.iter().map(|missing| missing.request.clone()).collect();
        FETCH_COUNTERS.misses.fetch_add(requests.len() as u64, Ordering::Relaxed);
        client.ask_all("read", &requests, &mut |number, answer| {
            let (Some(missing), Some(Request::Range { offset, len_bytes, .. })) =
                (claim.mine.get(number), requests.get(number))
            else {
                return Ok(());
            };
            let object = || format!("{} at offset {offset}", self.name);
            let mut piece = stamp.to_vec();
            match (answer, &missing.old) {
                (Answer::Data(bytes), _) if bytes.len() == *len_bytes as usize => {
                    piece.extend(bytes);
                }
                (Answer::Same, Some(old)) => piece.extend(bytes_of(old)),
                (Answer::Refused(code, said), _) => {
                    return Err(client.refused("read", &object(), code, &said));
                }
                _ => return Err(client.strange("read", &object(), "not what was asked for")),
            }
            let piece = Arc::new(piece);
            self.shared.cache.put(missing.key, &piece);
            if let Some(place) = found.get_mut(missing.at) {
                *place = Some(piece);
            }
            claim.give_up(missing.key);
            Ok(())
        })
    }

    /// The number of pieces to read ahead. It doubles with each read that continues the one before.
    fn ahead(&self, first: u64, last: u64) -> u64 {
        let mut streak = self.streak.lock().ignore_poison();
        let (next, count) = *streak;
        // Reads overlap if a record crosses a piece boundary.
        let goes_on = first == next || first + 1 == next;
        let count = if goes_on { (count + 1).min(8) } else { 0 };
        *streak = (last + 1, count);
        if count < 2 { 0 } else { (1 << (count - 1)).min(AHEAD_MAX) }
    }

    fn ends_before(&self, offset: u64) -> Error {
        let object = format!("{} at offset {offset}", self.shared.client.describe(&self.name));
        Error::Io { object, operation: "read", source: io::ErrorKind::UnexpectedEof.into() }
    }
}

/// The range of a piece in a file of `len_bytes`.
fn bounds(number: u64, len_bytes: u64) -> (u64, u64) {
    let start = number.saturating_mul(PIECE_BYTES).min(len_bytes);
    (start, start.saturating_add(PIECE_BYTES).min(len_bytes))
}

fn bytes_of(piece: &[u8]) -> &[u8] {
    piece.get(STAMP_BYTES..).unwrap_or_default()
}

impl ReadFile for ServedFile {
    fn len_bytes(&self) -> Result<u64> {
        Ok(self.now()?.len_bytes)
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let mut stat = self.now()?;
        let end =
            offset.checked_add(buffer.len() as u64).ok_or_else(|| self.ends_before(offset))?;
        if end > stat.len_bytes {
            // The pack may have grown.
            self.shared.bump_generation();
            stat = self.now()?;
        }
        if end > stat.len_bytes {
            return Err(self.ends_before(offset));
        }
        if buffer.is_empty() {
            return Ok(());
        }
        if let Some(bytes) =
            stat.head.get(offset as usize..end as usize).filter(|_| offset < PIECE_BYTES)
        {
            buffer.copy_from_slice(bytes);
            return Ok(());
        }
        let (first, last) = (offset / PIECE_BYTES, (end - 1) / PIECE_BYTES);
        let pieces_of_file = stat.len_bytes.div_ceil(PIECE_BYTES);
        let until = (last + self.ahead(first, last)).min(pieces_of_file - 1);
        let mut at = first;
        while at <= last {
            // The pieces read ahead come with the last request.
            let stop = (at + PIECES_MAX as u64 - 1).min(until);
            let numbers: Vec<u64> = (at..=stop).collect();
            for (number, piece) in numbers.iter().zip(self.pieces(&stat, &numbers)?) {
                let (start, _) = bounds(*number, stat.len_bytes);
                copy(bytes_of(&piece), start, offset, buffer);
            }
            at = stop + 1;
        }
        Ok(())
    }

    fn stamp(&self) -> Result<Option<FileStamp>> {
        let stat = self.now()?;
        Ok((stat.identity != 0)
            .then_some(FileStamp { identity: stat.identity, modified: stat.modified }))
    }

    fn wants_prefetch(&self) -> bool {
        true
    }

    fn prefetch(&self, ranges: &[Range<u64>]) {
        let Ok(stat) = self.now() else { return };
        let numbers = ranges.iter().flat_map(|range| {
            let end = range.end.min(stat.len_bytes);
            range.start / PIECE_BYTES..end.div_ceil(PIECE_BYTES)
        });
        let mut numbers: Vec<u64> = numbers.take(PIECES_MAX).collect();
        numbers.dedup();
        // If this fails, the read fails too and reports it.
        drop(self.pieces(&stat, &numbers));
    }
}

/// Copies the part of `piece`, which begins at `start`, that `buffer` needs from `offset` on.
fn copy(piece: &[u8], start: u64, offset: u64, buffer: &mut [u8]) {
    let skip = offset.saturating_sub(start) as usize;
    let at = start.saturating_sub(offset) as usize;
    let from = piece.get(skip..).unwrap_or_default();
    let to = buffer.get_mut(at..).unwrap_or_default();
    let len = from.len().min(to.len());
    if let (Some(to), Some(from)) = (to.get_mut(..len), from.get(..len)) {
        to.copy_from_slice(from);
    }
}

/// The missing pieces that this thread fetches; other threads wait for them.
struct FetchClaim<'a> {
    shared: &'a Shared,
    mine: Vec<MissingPiece>,
    others: Vec<PieceKey>,
}

impl<'a> FetchClaim<'a> {
    /// Claims the pieces that no other thread fetches.
    fn take(shared: &'a Shared, missing: Vec<MissingPiece>) -> Self {
        let mut busy = shared.busy.lock().ignore_poison();
        let (mut mine, mut others) = (Vec::new(), Vec::new());
        for piece in missing {
            if busy.insert(piece.key) {
                mine.push(piece);
            } else {
                others.push(piece.key);
            }
        }
        drop(busy);
        Self { shared, mine, others }
    }

    /// Waits until the other threads have fetched their pieces or have given up.
    fn wait(&self) {
        let busy = self.shared.busy.lock().ignore_poison();
        let is_busy = |busy: &mut rustc_hash::FxHashSet<PieceKey>| {
            self.others.iter().any(|key| busy.contains(key))
        };
        drop(self.shared.done.wait_timeout_while(busy, WAIT_MAX, is_busy));
    }

    fn give_up(&self, key: PieceKey) {
        self.shared.busy.lock().ignore_poison().remove(&key);
        self.shared.done.notify_all();
    }
}

impl Drop for FetchClaim<'_> {
    fn drop(&mut self) {
        let mut busy = self.shared.busy.lock().ignore_poison();
        for missing in &self.mine {
            busy.remove(&missing.key);
        }
        drop(busy);
        self.shared.done.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ServedBackend;
    use std::path::Path;

    /// Another server may claim the id of the store and the same state of its files.
    #[test]
    fn a_cached_piece_tells_from_which_server_it_came() {
        let stat = FileStat { identity: 1, modified: 2, len_bytes: 3, head: Vec::new() };
        let stamp = |digits: &str| {
            let url = format!("kf://node1?fingerprint={}", digits.repeat(32));
            let served = ServedBackend::open_in(Path::new(&url), &|_| None).unwrap();
            let file = ServedFile {
                shared: served.shared.clone(),
                name: "packs/00000001.pack".into(),
                seen: Mutex::new(stat.clone()),
                streak: Mutex::default(),
            };
            file.stamp_of(&stat)
        };
        assert_eq!(stamp("ab"), stamp("ab"));
        assert_ne!(stamp("ab"), stamp("ac"));
    }
}
