//! The slots of the writers of a store in a directory.
//!
//! ```text
//!   writers/NN   | token 16 | text of the writer, zeros |  state  |  state  |
//!                0                                      4096      20480     36864
//!                locked exclusively by its writer
//!
//!   state        | sequence number 8 | length 8 | XXH3-64 8 | bytes, at most 16,000 |
//! ```
//!
//! A writer overwrites the older one of the two states, so a reader finds one that is whole, also
//! if the writer was killed while it wrote. The state need not survive power loss, because no
//! writer does.
//!
//! Invariants: a slot file is never removed, so its lock has one inode. A new writer of a slot keeps
//! the state that it finds until it tells its own.

use super::io_error;
use super::locks::{Flock, is_locked, try_lock};
use super::regular_file::open_regular;
use crate::layout::parse_writer;
use crate::{Error, LockGuard, Result, STATE_BYTES_MAX, WriterEntry, WriterSlot};
use keyframe_locks::IgnorePoison;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

/// The most writers at a time.
const SLOTS_MAX: u32 = 10_000;
const TOKEN_BYTES: usize = 16;
const HEAD_BYTES: usize = 4096;
const STATE_HEAD_BYTES: usize = 24;
const STATE_SPACE: usize = 16_384;
const FILE_BYTES: usize = HEAD_BYTES + 2 * STATE_SPACE;
/// A read that meets a write is repeated so often.
const READS_MAX: u32 = 50;
const READ_PAUSE: Duration = Duration::from_millis(1);

const _: () = assert!(STATE_HEAD_BYTES + STATE_BYTES_MAX <= STATE_SPACE);

/// The slots in a directory.
pub struct Slots {
    pub folder: PathBuf,
}

/// The content of a slot file.
pub struct SlotText {
    pub number: u32,
    pub lives: bool,
    /// The token of its writer's temporary files.
    pub token: String,
    pub holder: String,
    state: Option<Vec<u8>>,
}

impl SlotText {
    pub fn into_entry(self) -> WriterEntry {
        let Self { number, lives, holder, state, .. } = self;
        WriterEntry { slot: Some(number), lives, holder, state }
    }
}

/// A slot that this process holds.
#[derive(Debug)]
struct OwnSlot {
    number: u32,
    path: PathBuf,
    lock: Flock,
    /// Keeps processes out that want the store alone.
    _shared: Flock,
    /// The sequence number of the newest state.
    sequence: Mutex<u64>,
}

impl LockGuard for OwnSlot {}

impl WriterSlot for OwnSlot {
    fn number(&self) -> Option<u32> {
        Some(self.number)
    }

    fn tell(&self, state: &[u8]) -> Result<()> {
        if state.len() > STATE_BYTES_MAX {
            let problem =
                format!("a state of {} bytes; a slot has room for {STATE_BYTES_MAX}", state.len());
            return Err(Error::damaged(self.path.display().to_string(), problem));
        }
        let mut sequence = self.sequence.lock().ignore_poison();
        let next = *sequence + 1;
        let written = self.lock.file.write_all_at(&encode(next, state), place_of(next));
        written.map_err(|e| io_error(&self.path, "write", e))?;
        *sequence = next;
        Ok(())
    }
}

impl Slots {
    /// Takes the first free slot for the writer that `holder` describes, whose temporary files have
    /// `token`. Errors: all slots are taken; the medium fails.
    pub fn take(
        &self,
        token: &str,
        holder: &str,
        shared: Flock,
    ) -> Result<impl WriterSlot + use<>> {
        for number in 0..SLOTS_MAX {
            let path = self.folder.join(format!("{number:02}"));
            let Some(lock) = try_lock(&path)? else { continue };
            let failed = |e| io_error(&path, "write", e);
            // Later writes need no space on the medium.
            let len_bytes = lock.file.metadata().map_err(failed)?.len();
            if len_bytes < FILE_BYTES as u64 {
                let missing = vec![0; FILE_BYTES - len_bytes as usize];
                lock.file.write_all_at(&missing, len_bytes).map_err(failed)?;
            }
            let mut head = token.as_bytes().to_vec();
            head.resize(TOKEN_BYTES, 0);
            head.extend_from_slice(holder.as_bytes());
            head.resize(HEAD_BYTES, 0);
            lock.file.write_all_at(&head, 0).map_err(failed)?;
            let bytes = read(&lock.file, &path)?;
            let newest = states(&bytes).into_iter().flatten().map(|(sequence, _)| sequence).max();
            let sequence = Mutex::new(newest.unwrap_or(0));
            return Ok(OwnSlot { number, path, lock, _shared: shared, sequence });
        }
        Err(Error::Locked { holder: format!("{SLOTS_MAX} writers") })
    }

    /// Returns what the writers of all slots say, and what those said that have ended. Error: the
    /// medium fails.
    pub fn texts(&self) -> Result<Vec<SlotText>> {
        let entries = match std::fs::read_dir(&self.folder) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(|e| io_error(&self.folder, "list", e))?,
        };
        let mut texts = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|e| io_error(&self.folder, "list", e))?;
            if let Some(number) = entry.file_name().to_str().and_then(parse_writer) {
                texts.push(text(number, &entry.path())?);
            }
        }
        texts.sort_unstable_by_key(|text| text.number);
        Ok(texts)
    }
}

fn text(number: u32, path: &Path) -> Result<SlotText> {
    let file = open_regular(OpenOptions::new().read(true), path)?;
    let mut tries = 0;
    loop {
        let lives = is_locked(&file, path)?;
        let bytes = read(&file, path)?;
        let states = states(&bytes);
        let is_whole = states.iter().all(Option::is_some);
        tries += 1;
        if !is_whole && lives && tries < READS_MAX {
            std::thread::sleep(READ_PAUSE);
            continue;
        }
        let token = until_zero(bytes.get(..TOKEN_BYTES));
        let holder = until_zero(bytes.get(TOKEN_BYTES..HEAD_BYTES));
        let newest = states.into_iter().flatten().max_by_key(|(sequence, _)| *sequence);
        // The newest state of a living writer may be the one that cannot be read.
        let state = newest.filter(|_| is_whole || !lives).map(|(_, state)| state);
        return Ok(SlotText {
            number,
            lives,
            token: String::from_utf8_lossy(&token).into_owned(),
            holder: String::from_utf8_lossy(&holder).into_owned(),
            state,
        });
    }
}

fn until_zero(bytes: Option<&[u8]>) -> Vec<u8> {
    let bytes = bytes.unwrap_or_default();
    bytes.iter().copied().take_while(|byte| *byte != 0).collect()
}

/// The bytes of a slot file, which may be too short.
fn read(file: &File, path: &Path) -> Result<Vec<u8>> {
    let mut bytes = vec![0; FILE_BYTES];
    let mut have = 0;
    while let Some(rest) = bytes.get_mut(have..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, have as u64) {
            Ok(0) => break,
            Ok(len) => have += len,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(io_error(path, "read", e)),
        }
    }
    Ok(bytes)
}

fn place_of(sequence: u64) -> u64 {
    (HEAD_BYTES + usize::from(sequence.is_multiple_of(2)) * STATE_SPACE) as u64
}

fn encode(sequence: u64, state: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(STATE_HEAD_BYTES + state.len());
    bytes.extend(sequence.to_le_bytes());
    bytes.extend((state.len() as u64).to_le_bytes());
    bytes.extend(check_of(&bytes, state).to_le_bytes());
    bytes.extend_from_slice(state);
    bytes
}

fn check_of(head: &[u8], state: &[u8]) -> u64 {
    xxh3_64(&[head, state].concat())
}

/// The two states with their sequence numbers; `None` for one that is not whole. One that was
/// never written is empty and has the number 0.
fn states(bytes: &[u8]) -> [Option<(u64, Vec<u8>)>; 2] {
    [HEAD_BYTES, HEAD_BYTES + STATE_SPACE].map(|at| {
        let bytes = bytes.get(at..at + STATE_SPACE)?;
        let number = |at: usize| {
            bytes.get(at..at + 8).and_then(|n| n.try_into().ok()).map(u64::from_le_bytes)
        };
        let (sequence, len, check) = (number(0)?, number(8)?, number(16)?);
        if (sequence, len, check) == (0, 0, 0) {
            return Some((0, Vec::new()));
        }
        let end = STATE_HEAD_BYTES.checked_add(usize::try_from(len).ok()?)?;
        let state = bytes.get(STATE_HEAD_BYTES..end)?;
        (check_of(bytes.get(..16)?, state) == check).then(|| (sequence, state.to_vec()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_that_is_torn_leaves_the_one_before() {
        let mut bytes = vec![0; FILE_BYTES];
        let put = |bytes: &mut Vec<u8>, sequence: u64, state: &[u8]| {
            let at = place_of(sequence) as usize;
            let state = encode(sequence, state);
            bytes[at..at + state.len()].copy_from_slice(&state);
        };
        let newest = |bytes: &[u8]| {
            states(bytes).into_iter().flatten().max_by_key(|(sequence, _)| *sequence).unwrap()
        };
        assert_eq!(newest(&bytes), (0, Vec::new()));
        put(&mut bytes, 1, b"first");
        put(&mut bytes, 2, b"second");
        assert_eq!(newest(&bytes), (2, b"second".to_vec()));
        put(&mut bytes, 3, b"third, longer");
        let whole = bytes.clone();
        for at in 0..STATE_HEAD_BYTES + 13 {
            bytes.clone_from(&whole);
            bytes[place_of(3) as usize + at] ^= 1;
            assert_eq!(newest(&bytes), (2, b"second".to_vec()), "byte {at}");
        }
        assert!(states(&[]).iter().all(Option::is_none));
        assert!(states(&vec![0xff; FILE_BYTES]).iter().all(Option::is_none));
    }
}
