//! Reading a served file: pieces of it, from the cache of this node or from the server.
//!
//! ```text
//!   range ─▶ its pieces ─▶ in the cache, of this state of the file ──────────────────────────────▶ there
//!                       ├▶ in the cache, of another state ─▶ asked for with its hash ─▶ the same ─▶ there
//!                       ├▶ being fetched by another thread ─▶ waited for, looked for again
//!                       └▶ none ─▶ asked for, up to 64 at once ─▶ into the cache ─────────────────▶ there
//!
//!   a piece in the cache: 8 identity, 8 modified: the state of the file that it was seen in │ its bytes
//! ```
//!
//! A pack only grows, but for what a crash of its writer cuts off: so most pieces that were seen in
//! an earlier state are the same, and it takes a hash to know.

use super::wire::{self, Answer, LOOKS_MAX, Look, Request};
use super::{FETCHED, Shared, is_pack};
use crate::backend::cache::Key;
use crate::backend::{Readable, Stamp};
use crate::names::PACKS;
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Small enough for a page that a VM waits for, large enough for few requests.
pub const PIECE_BYTES: u64 = 128 << 10;
/// What is fetched at once.
const PIECES_MAX: usize = 64;
/// Pieces that are fetched ahead of who reads one after the other, at most.
const AHEAD_MAX: u64 = 8;
const STAMP_BYTES: usize = 16;
/// A thread that fetches a piece gives it up in that time, or has it.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// What is known of packs.
#[derive(Debug, Default)]
pub struct Looks {
    /// When it was known.
    generation: u64,
    /// Those that were not looked at yet, too.
    known: BTreeMap<String, Option<Look>>,
}

impl Looks {
    /// These packs will be looked at.
    pub fn expect(&mut self, files: &[String]) {
        self.known.retain(|_, look| look.is_some());
        for file in files {
            let name = format!("{PACKS}/{file}");
            if let Entry::Vacant(place) = self.known.entry(name) {
                place.insert(None);
                // Nothing is known of it at any time.
                self.generation = 0;
            }
        }
    }
}

impl Shared {
    /// What a file is now; none where there is none.
    fn look(&self, name: &str) -> Result<Option<Look>> {
        if !is_pack(name) {
            let found = self.ask_looks(vec![name.to_owned()])?.into_iter().next().flatten();
            self.goes_on();
            return Ok(found);
        }
        // Held meanwhile: who else wants to know it waits for the same answer.
        let mut looks = self.looks.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.generation.load(Ordering::Acquire);
        let is_current = looks.generation == now;
        match looks.known.get(name) {
            Some(look) if is_current => return Ok(look.clone()),
            _ => {}
        }
        let mut names: Vec<String> =
            if is_current { Vec::new() } else { looks.known.keys().cloned().collect() };
        if !looks.known.contains_key(name) {
            names.push(name.to_owned());
        }
        for names in names.chunks(LOOKS_MAX) {
            for (name, look) in names.iter().zip(self.ask_looks(names.to_vec())?) {
                looks.known.insert(name.clone(), look);
            }
        }
        looks.generation = now;
        Ok(looks.known.get(name).cloned().flatten())
    }

    fn ask_looks(&self, names: Vec<String>) -> Result<Vec<Option<Look>>> {
        let (count, first) = (names.len(), names.first().cloned().unwrap_or_default());
        let answer = self.client.ask("look at", &first, Request::Look { names })?;
        let Answer::Data(bytes) = answer else {
            return Err(self.client.strange("look at", &first, "no looks"));
        };
        wire::decode_looks(&bytes, count)
            .map_err(|problem| self.client.strange("look at", &first, &problem))
    }
}

/// A file open for reading.
#[derive(Debug)]
pub struct Reading {
    shared: Arc<Shared>,
    name: String,
    seen: Mutex<Look>,
    /// The piece behind the last one that was fetched, and how many in a row were.
    streak: Mutex<(u64, u32)>,
}

/// A piece that is not there yet.
struct Missing {
    /// Its place among those wanted.
    at: usize,
    key: Key,
    request: Request,
    /// What was seen of it in another state of the file.
    old: Option<Arc<Vec<u8>>>,
}

impl Reading {
    /// Opens a file; an error of kind `NotFound` where there is none.
    pub fn new(shared: &Arc<Shared>, name: &str) -> Result<Self> {
        let Some(look) = shared.look(name)? else {
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
            seen: Mutex::new(look),
            streak: Mutex::default(),
        })
    }

    /// The file that was opened, as it is now.
    fn now(&self) -> Result<Look> {
        if !is_pack(&self.name) {
            // Such files are replaced, not changed: this one is as it was.
            return Ok(self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone());
        }
        let found = self.shared.look(&self.name)?;
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        // Else it was removed, and the server has it open for a while.
        if let Some(look) = found.filter(|look| look.identity == seen.identity) {
            *seen = look;
        }
        Ok(seen.clone())
    }

    /// What a piece is of, as the cache knows it.
    fn stamp_of(&self, look: &Look) -> [u8; STAMP_BYTES] {
        let modified = if look.modified != 0 {
            look.modified
        } else {
            // The server cannot tell: it holds as long as nothing else is known, and in this
            // process alone.
            let process = u64::from(std::process::id()) << 32;
            let place = std::ptr::from_ref(&*self.shared) as u64;
            u64::MAX ^ process ^ place ^ self.shared.generation.load(Ordering::Acquire)
        };
        let mut out = [0; STAMP_BYTES];
        for (to, from) in out
            .iter_mut()
            .zip(look.identity.to_le_bytes().into_iter().chain(modified.to_le_bytes()))
        {
            *to = from;
        }
        out
    }

    /// The bytes of pieces, in their order, each behind its stamp.
    fn pieces(&self, look: &Look, numbers: &[u64]) -> Result<Vec<Arc<Vec<u8>>>> {
        let stamp = self.stamp_of(look);
        let mut found: Vec<Option<Arc<Vec<u8>>>> = vec![None; numbers.len()];
        let mut is_first = true;
        loop {
            let mut missing = Vec::new();
            for (at, number) in numbers.iter().enumerate() {
                let Some(place) = found.get_mut(at).filter(|place| place.is_none()) else {
                    continue;
                };
                let (start, end) = bounds(*number, look.len_bytes);
                let key = self.shared.key(&self.name, Some(*number))?;
                let cached = self.shared.cache.get(key);
                let cached =
                    cached.filter(|piece| piece.len() as u64 == STAMP_BYTES as u64 + end - start);
                if let Some(piece) = cached.as_ref().filter(|piece| piece.starts_with(&stamp)) {
                    *place = Some(piece.clone());
                    FETCHED.hits.fetch_add(u64::from(is_first), Ordering::Relaxed);
                    continue;
                }
                let known = cached.as_ref().map(|piece| *blake3::hash(bytes_of(piece)).as_bytes());
                let (name, identity) = (self.name.clone(), look.identity);
                let len_bytes = (end - start) as u32;
                let request = Request::Range { name, identity, offset: start, len_bytes, known };
                missing.push(Missing { at, key, request, old: cached });
            }
            is_first = false;
            if missing.is_empty() {
                return Ok(found.into_iter().flatten().collect());
            }
            let claim = Claim::take(&self.shared, missing);
            if claim.mine.is_empty() {
                claim.wait();
                continue;
            }
            self.fetch(&claim, stamp, &mut found)?;
        }
    }

    fn fetch(
        &self,
        claim: &Claim<'_>,
        stamp: [u8; STAMP_BYTES],
        found: &mut [Option<Arc<Vec<u8>>>],
    ) -> Result<()> {
        let client = &self.shared.client;
        let requests: Vec<Request> =
            claim.mine.iter().map(|missing| missing.request.clone()).collect();
        FETCHED.misses.fetch_add(requests.len() as u64, Ordering::Relaxed);
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
                    piece.extend(bytes)
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

    /// How far to read ahead where `first` begins what is read now: further each time that it goes
    /// on where it was.
    fn ahead(&self, first: u64, last: u64) -> u64 {
        let mut streak = self.streak.lock().unwrap_or_else(PoisonError::into_inner);
        let (next, count) = *streak;
        // Reads overlap where a record lies across pieces.
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

/// Where a piece begins and ends.
fn bounds(number: u64, len_bytes: u64) -> (u64, u64) {
    let start = number.saturating_mul(PIECE_BYTES).min(len_bytes);
    (start, start.saturating_add(PIECE_BYTES).min(len_bytes))
}

fn bytes_of(piece: &[u8]) -> &[u8] {
    piece.get(STAMP_BYTES..).unwrap_or_default()
}

impl Readable for Reading {
    fn len_bytes(&self) -> Result<u64> {
        Ok(self.now()?.len_bytes)
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let mut look = self.now()?;
        let end =
            offset.checked_add(buffer.len() as u64).ok_or_else(|| self.ends_before(offset))?;
        if end > look.len_bytes {
            // It may have grown.
            self.shared.goes_on();
            look = self.now()?;
        }
        if end > look.len_bytes {
            return Err(self.ends_before(offset));
        }
        if buffer.is_empty() {
            return Ok(());
        }
        if let Some(bytes) =
            look.head.get(offset as usize..end as usize).filter(|_| offset < PIECE_BYTES)
        {
            buffer.copy_from_slice(bytes);
            return Ok(());
        }
        let (first, last) = (offset / PIECE_BYTES, (end - 1) / PIECE_BYTES);
        let pieces_of_file = look.len_bytes.div_ceil(PIECE_BYTES);
        let until = (last + self.ahead(first, last)).min(pieces_of_file - 1);
        let mut at = first;
        while at <= last {
            // What is ahead comes with the last ones.
            let stop = (at + PIECES_MAX as u64 - 1).min(until);
            let numbers: Vec<u64> = (at..=stop).collect();
            for (number, piece) in numbers.iter().zip(self.pieces(&look, &numbers)?) {
                let (start, _) = bounds(*number, look.len_bytes);
                copy(bytes_of(&piece), start, offset, buffer);
            }
            at = stop + 1;
        }
        Ok(())
    }

    fn stamp(&self) -> Result<Option<Stamp>> {
        let look = self.now()?;
        Ok((look.identity != 0)
            .then_some(Stamp { identity: look.identity, modified: look.modified }))
    }

    fn wants_hints(&self) -> bool {
        true
    }

    fn will_read(&self, ranges: &[Range<u64>]) {
        let Ok(look) = self.now() else { return };
        let numbers = ranges.iter().flat_map(|range| {
            let end = range.end.min(look.len_bytes);
            range.start / PIECE_BYTES..end.div_ceil(PIECE_BYTES)
        });
        let mut numbers: Vec<u64> = numbers.take(PIECES_MAX).collect();
        numbers.dedup();
        // Who reads them hears of what is wrong.
        drop(self.pieces(&look, &numbers));
    }
}

/// Copies what a piece that begins at `start` has of what `buffer` wants from `offset` on.
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

/// The missing pieces that this thread fetches, so that no other does.
struct Claim<'a> {
    shared: &'a Shared,
    mine: Vec<Missing>,
    others: Vec<Key>,
}

impl<'a> Claim<'a> {
    /// Takes those that nobody fetches.
    fn take(shared: &'a Shared, missing: Vec<Missing>) -> Self {
        let mut busy = shared.busy.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// Waits until the others are there, or nobody fetches them any more.
    fn wait(&self) {
        let busy = self.shared.busy.lock().unwrap_or_else(PoisonError::into_inner);
        let is_busy = |busy: &mut rustc_hash::FxHashSet<Key>| {
            self.others.iter().any(|key| busy.contains(key))
        };
        drop(self.shared.done.wait_timeout_while(busy, WAIT_MAX, is_busy));
    }

    fn give_up(&self, key: Key) {
        self.shared.busy.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
        self.shared.done.notify_all();
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut busy = self.shared.busy.lock().unwrap_or_else(PoisonError::into_inner);
        for missing in &self.mine {
            busy.remove(&missing.key);
        }
        drop(busy);
        self.shared.done.notify_all();
    }
}
