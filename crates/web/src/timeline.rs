//! Checkpoints in a row, as few points as a chart has room for.
//!
//! ```text
//!   checkpoints   1 2 3 4 5 6 7 8 9 ... 10,000          buckets   [1..25] [26..50] ...      at most as many as asked for
//!                        └── all of one VM, or of a range of numbers ──┘
//! ```
//!
//! Invariant: each checkpoint of the range is in one bucket, buckets follow each other, and their
//! number is bounded whatever is asked for. Of a bucket's pauses the longest is shown, with its own
//! phases: a long pause never disappears in a mean.

use crate::source::{Checkpoint, Listing, Phases};
use serde::Serialize;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

/// Points that are given at most.
pub const POINTS_MAX: usize = 1000;
/// Tags that are given at most.
const TAGS_MAX: usize = 200;

/// Consecutive checkpoints of a VM.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bucket {
    /// The first one.
    pub first_id: u64,
    /// The last one.
    pub last_id: u64,
    /// How many there are.
    pub count: u64,
    /// When the first was taken.
    pub first_at: String,
    /// When the last was.
    pub last_at: String,
    /// The one with the longest pause.
    pub worst_id: u64,
    /// That pause.
    pub pause_ns: u64,
    /// Its phases.
    pub pause: Phases,
    /// Of all of them together.
    pub dirty_pages: u64,
    /// Of all of them together.
    pub zero_pages: u64,
    /// Of all of them together.
    pub dedup_pages: u64,
    /// Of all of them together.
    pub unchanged_pages: u64,
    /// Of all of them together.
    pub stored_pages: u64,
    /// Of all of them together.
    pub added_bytes: u64,
    /// Written to disks by all of them together.
    pub disk_written_bytes: u64,
    /// The longest.
    pub backlog_ns: u64,
    /// The longest.
    pub interval_ns: u64,
    /// The longest.
    pub encode_ns: u64,
}

/// A tag and its checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tagged {
    /// The checkpoint.
    pub id: u64,
    /// Its tags.
    pub tags: Vec<String>,
    /// It is pinned.
    pub pinned: bool,
}

/// A row of buckets.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Timeline {
    /// Of the listing that it was made from.
    pub generation: u64,
    /// Checkpoints of the VM.
    pub total: usize,
    /// Of these: in the range.
    pub shown: usize,
    /// The number of the VM's first one.
    pub first_id: Option<u64>,
    /// That of its last.
    pub last_id: Option<u64>,
    /// From old to new.
    pub buckets: Vec<Bucket>,
    /// Those in the range that have tags or are pinned; of many the newest.
    pub tagged: Vec<Tagged>,
}

impl Timeline {
    /// Those of `vm`, or of all VMs, with numbers in `range`, in at most `points` buckets.
    pub fn of(
        listing: &Listing,
        vm: Option<&str>,
        range: &RangeInclusive<u64>,
        points: usize,
    ) -> Self {
        let is_wanted = |one: &&Arc<Checkpoint>| vm.is_none_or(|vm| one.vm == vm);
        let all: Vec<&Arc<Checkpoint>> = listing.checkpoints.iter().filter(is_wanted).collect();
        let shown: Vec<&Arc<Checkpoint>> =
            all.iter().copied().filter(|one| range.contains(&one.id)).collect();
        let pieces = chunks(shown.len(), points.clamp(1, POINTS_MAX));
        let buckets = pieces.filter_map(|piece| Bucket::of(&shown[piece])).collect();
        let named = shown.iter().rev().filter(|one| one.pinned || !one.tags.is_empty());
        let tagged = |one: &&Arc<Checkpoint>| Tagged {
            id: one.id,
            tags: one.tags.clone(),
            pinned: one.pinned,
        };
        Self {
            generation: listing.generation,
            total: all.len(),
            shown: shown.len(),
            first_id: all.first().map(|one| one.id),
            last_id: all.last().map(|one| one.id),
            buckets,
            tagged: named.take(TAGS_MAX).map(tagged).collect(),
        }
    }
}

impl Bucket {
    fn of(all: &[&Arc<Checkpoint>]) -> Option<Self> {
        let (first, last) = (all.first()?, all.last()?);
        let worst = all.iter().max_by_key(|one| one.pause_ns)?;
        let sum = |value: fn(&Checkpoint) -> u64| all.iter().map(|one| value(one)).sum();
        let most =
            |value: fn(&Checkpoint) -> u64| all.iter().map(|one| value(one)).max().unwrap_or(0);
        Some(Self {
            first_id: first.id,
            last_id: last.id,
            count: all.len() as u64,
            first_at: first.taken_at.clone(),
            last_at: last.taken_at.clone(),
            worst_id: worst.id,
            pause_ns: worst.pause_ns,
            pause: worst.pause,
            dirty_pages: sum(|one| one.dirty_pages),
            zero_pages: sum(|one| one.zero_pages),
            dedup_pages: sum(|one| one.dedup_pages),
            unchanged_pages: sum(|one| one.unchanged_pages),
            stored_pages: sum(|one| one.stored_pages),
            added_bytes: sum(|one| one.added_bytes),
            disk_written_bytes: sum(|one| one.disk_written_bytes),
            backlog_ns: most(|one| one.backlog_ns),
            interval_ns: most(|one| one.interval_ns),
            encode_ns: most(|one| one.encode_ns),
        })
    }
}

/// `len` things in at most `pieces` pieces of about the same length, in order.
pub fn chunks(len: usize, pieces: usize) -> impl Iterator<Item = Range<usize>> {
    let pieces = pieces.min(len);
    // No piece is empty: there are no more of them than things.
    (0..pieces).map(move |at| at * len / pieces..(at + 1) * len / pieces)
}
