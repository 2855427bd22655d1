//! Packs as prune sees them: how much of each is needed, and which are worth rewriting. The choice
//! is pure.
//!
//! ```text
//!   nothing of it needed ──▶ removed
//!   part of it needed ─────▶ the emptiest first, until all that is unused is at most --max-unused of what stays: moved, removed
//!   being written, damaged ▶ left alone
//! ```

use crate::identity::PageRef;
use crate::pack_file::{Ending, PackFile};
use crate::record::{ENTRY_BYTES, Entry, FOOTER_BYTES};
use crate::store::Inner;
use crate::{Error, Result};
use keyframe_store_backend::layout;
use std::collections::BTreeSet;

/// A pack: its records, and where they end.
#[derive(Debug)]
pub struct Shape {
    pub number: u32,
    pub len_bytes: u64,
    /// Rising.
    pub entries: Vec<Entry>,
    /// It has its trailer.
    pub closed: bool,
    /// It was recompressed.
    pub is_dense: bool,
    start: u64,
    records_end: u64,
}

impl Shape {
    /// Looks at pack `number`. One that has no trailer is read record by record. `None` where it
    /// has gone, or cannot be read as a pack.
    pub fn of(inner: &Inner, number: u32) -> Result<Option<Self>> {
        let pack = match PackFile::open(inner, number) {
            Err(Error::Damaged { .. }) => return Ok(None),
            other => other?,
        };
        let len_bytes = pack.file.len_bytes()?;
        let (start, is_dense) = (pack.first, pack.is_dense());
        Ok(Some(match pack.ending(len_bytes) {
            Ending::Closed { entries, records_end } => {
                Self { number, len_bytes, entries, closed: true, start, is_dense, records_end }
            }
            Ending::Unfinished | Ending::Damaged(_) => {
                let mut entries = Vec::new();
                let stop = pack.walk(inner, start, len_bytes, &mut |held| entries.extend(held));
                let records_end = stop.map_or(len_bytes, |(at, _)| at);
                Self { number, len_bytes, entries, closed: false, start, is_dense, records_end }
            }
        }))
    }

    /// How much of it is needed, when the records at `live` (rising) are.
    pub fn usage(&self, live: &[u64]) -> Usage {
        let ends = self.entries.iter().skip(1).map(Entry::offset).chain([self.records_end]);
        let (mut live_bytes, mut found) = (0, 0);
        // Both rise.
        let mut rest = live.iter().peekable();
        for (entry, end) in self.entries.iter().zip(ends) {
            while rest.next_if(|at| **at < entry.offset()).is_some() {}
            if rest.next_if_eq(&&entry.offset()).is_some() {
                live_bytes += end.saturating_sub(entry.offset()) + ENTRY_BYTES as u64;
                found += 1;
            }
        }
        Usage {
            number: self.number,
            len_bytes: self.len_bytes,
            live_bytes,
            live_records: found,
            head_bytes: self.start,
            is_dense: self.is_dense,
            untouchable: found < live.len(),
            holds_none: self.entries.is_empty() && self.closed,
        }
    }
}

/// How much of a pack is needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    pub number: u32,
    pub len_bytes: u64,
    /// Bytes of the records that are needed, with their lines in the index.
    pub live_bytes: u64,
    pub live_records: usize,
    /// What comes before its records.
    pub head_bytes: u64,
    /// It was recompressed.
    pub is_dense: bool,
    /// It is being written, or lacks records that are needed: it stays as it is.
    pub untouchable: bool,
    /// It has no records: it only keeps its number from being used again.
    pub holds_none: bool,
}

impl Usage {
    /// What moving its live records would free.
    pub fn unused_bytes(&self) -> u64 {
        // Header, dictionary, footer, and the zeros before it.
        let frame_bytes = self.head_bytes + FOOTER_BYTES as u64 * 2;
        self.len_bytes.saturating_sub(self.live_bytes + frame_bytes)
    }
}

/// The packs to give up, in an order that frees much for little: at most `max_unused` (0 to 1) of
/// what stays is unused then.
pub fn choose(packs: &[Usage], max_unused: f64) -> Vec<u32> {
    let newest = packs.iter().map(|pack| pack.number).max();
    let may_go =
        |pack: &&Usage| !(pack.untouchable || pack.holds_none && Some(pack.number) == newest);
    let (dead, mut partly): (Vec<&Usage>, Vec<&Usage>) =
        packs.iter().filter(may_go).partition(|pack| pack.live_records == 0);
    let mut victims: Vec<u32> = dead.iter().map(|pack| pack.number).collect();
    let live_bytes: u64 = packs.iter().map(|pack| pack.live_bytes).sum();
    let mut unused_bytes: u64 = partly.iter().map(|pack| pack.unused_bytes()).sum();
    let part = |pack: &Usage| pack.unused_bytes() as f64 / (pack.len_bytes.max(1)) as f64;
    partly.sort_by(|a, b| part(b).total_cmp(&part(a)).then(a.number.cmp(&b.number)));
    for pack in partly {
        let is_enough = unused_bytes as f64 <= max_unused * (live_bytes + unused_bytes) as f64;
        if is_enough || pack.unused_bytes() == 0 {
            break;
        }
        unused_bytes -= pack.unused_bytes();
        victims.push(pack.number);
    }
    victims
}

/// The packs to give up beside `victims` because they were not recompressed yet: of about
/// `bytes_max`, the oldest first.
pub fn to_recompress(packs: &[Usage], victims: &[u32], bytes_max: u64) -> Vec<u32> {
    let mut left = bytes_max;
    let may_go = |pack: &&Usage| {
        !(pack.untouchable
            || pack.is_dense
            || pack.live_records == 0
            || victims.contains(&pack.number))
    };
    let takes = |pack: &&Usage| {
        let takes = left > 0;
        left = left.saturating_sub(pack.len_bytes);
        takes
    };
    packs.iter().filter(may_go).take_while(takes).map(|pack| pack.number).collect()
}

/// Cuts the victims, in the order of [`choose`], into rounds of at most `bytes_max` and
/// `records_max` to move, so that an interruption costs one of them.
pub fn rounds(
    packs: &[Usage],
    victims: &[u32],
    bytes_max: u64,
    records_max: usize,
) -> Vec<BTreeSet<u32>> {
    let mut rounds = vec![BTreeSet::new()];
    let (mut bytes, mut records) = (0, 0);
    for victim in victims {
        let usage = packs.iter().find(|pack| pack.number == *victim);
        let (more_bytes, more_records) = usage.map_or((0, 0), |u| (u.live_bytes, u.live_records));
        let full = bytes + more_bytes > bytes_max || records + more_records > records_max;
        // Those of which nothing is needed go first: on a full disk they make the room.
        let first_to_copy = records == 0 && more_records > 0;
        if (full || first_to_copy) && rounds.last().is_some_and(|round| !round.is_empty()) {
            rounds.push(BTreeSet::new());
            (bytes, records) = (0, 0);
        }
        bytes += more_bytes;
        records += more_records;
        if let Some(round) = rounds.last_mut() {
            round.insert(*victim);
        }
    }
    rounds.retain(|round| !round.is_empty());
    rounds
}

/// Numbers of all packs, rising.
pub fn numbers(inner: &Inner) -> Result<Vec<u32>> {
    let listed = inner.backend.list(layout::PACKS)?;
    let mut numbers: Vec<u32> = listed.iter().filter_map(|file| layout::parse_pack(file)).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// The highest number of a pack; 0 where there is none.
pub fn newest(inner: &Inner) -> Result<u32> {
    Ok(numbers(inner)?.last().copied().unwrap_or(0))
}

/// The live records of a pack.
pub fn places(number: u32, live: &[u64]) -> impl Iterator<Item = PageRef> + '_ {
    live.iter().map(move |at| PageRef::new(number, *at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn usage(number: u32, len_bytes: u64, live_bytes: u64) -> Usage {
        let live_records = usize::from(live_bytes > 0);
        Usage {
            number,
            len_bytes,
            live_bytes,
            live_records,
            head_bytes: 64,
            is_dense: false,
            untouchable: false,
            holds_none: false,
        }
    }

    #[test]
    fn the_emptiest_packs_go_until_little_is_unused() {
        let packs = [
            usage(1, 10_000, 0),
            usage(2, 10_000, 9000),
            usage(3, 10_000, 1000),
            usage(4, 10_000, 5000),
        ];
        assert_eq!(choose(&packs, 0.3), [1, 3]);
        assert_eq!(choose(&packs, 0.1), [1, 3, 4]);
        assert_eq!(choose(&packs, 0.0), [1, 3, 4, 2]);
        assert_eq!(choose(&packs, 1.0), [1]);
        let stub = Usage { holds_none: true, ..usage(5, 128, 0) };
        assert_eq!(choose(std::slice::from_ref(&stub), 0.0), [0u32; 0]);
        assert_eq!(choose(&[stub, usage(6, 10_000, 9990)], 0.0), [5]);
    }

    proptest! {
        #[test]
        fn what_stays_keeps_the_limit_and_rounds_hold_every_victim_once(
            packs in prop::collection::vec((200u64..100_000, 0.0f64..1.0, any::<bool>()), 0..40), max in 0.0f64..1.0,
            bytes_max in 1u64..200_000,
        ) {
            let of = |(number, (len, part, untouchable)): (u32, (u64, f64, bool))| Usage {
                untouchable, ..usage(number, len, ((len - 192) as f64 * part) as u64)
            };
            let packs: Vec<Usage> = (1..).zip(packs).map(of).collect();
            let victims = choose(&packs, max);
            let goes = |pack: &&Usage| victims.contains(&pack.number);
            prop_assert!(packs.iter().filter(goes).all(|pack| !pack.untouchable));
            let dead = |pack: &&Usage| pack.live_records == 0 && !pack.untouchable;
            prop_assert!(packs.iter().filter(dead).all(|pack| goes(&pack)));
            let live: u64 = packs.iter().map(|pack| pack.live_bytes).sum();
            let stays = packs.iter().filter(|pack| !goes(pack) && !pack.untouchable);
            let unused: u64 = stays.map(Usage::unused_bytes).sum();
            prop_assert!(unused as f64 <= max * (live + unused) as f64 + 1e-6, "{} of {}", unused, live);
            let rounds = rounds(&packs, &victims, bytes_max, 1000);
            let all: Vec<u32> = rounds.iter().flatten().copied().collect();
            prop_assert_eq!(all.len(), victims.len());
            for round in &rounds {
                let bytes: u64 = packs.iter().filter(|p| round.contains(&p.number)).map(|p| p.live_bytes).sum();
                prop_assert!(bytes <= bytes_max || round.len() == 1);
            }
        }
    }
}
