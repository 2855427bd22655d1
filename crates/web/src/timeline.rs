//! Summarizes checkpoints into as many points as a chart shows.
//!
//! ```text
//!   checkpoints   1 2 3 4 5 6 7 8 9 ... 10,000          buckets   [1..25] [26..50] ...
//!                        └── of one VM, or of a range of numbers ──┘
//! ```
//!
//! Invariants: each checkpoint of the range is in one bucket; buckets are in order, and their
//! number is bounded. A bucket shows its longest pause with the phases of that pause, so that no
//! long pause disappears in a mean.

use crate::source::{CheckpointListing, CheckpointRow, PauseBreakdown};
use serde::Serialize;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

/// The largest number of points of a timeline that is sent.
pub const POINTS_MAX: usize = 1000;
/// The most tagged checkpoints of a timeline.
const TAGS_MAX: usize = 200;

/// A group of consecutive checkpoints, which a timeline shows as one point.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TimelineBucket {
    /// The number of the first checkpoint.
    pub first_id: u64,
    /// The number of the last checkpoint.
    pub last_id: u64,
    /// The number of checkpoints.
    pub count: u64,
    /// The time at which the first was taken, in RFC 3339.
    pub first_at: String,
    /// The time at which the last was taken, in RFC 3339.
    pub last_at: String,
    /// The number of the checkpoint with the longest pause.
    pub worst_id: u64,
    /// The longest pause, in nanoseconds.
    pub pause_ns: u64,
    /// The phases of the longest pause.
    pub pause: PauseBreakdown,
    /// The number of dirty pages of all checkpoints together.
    pub dirty_pages: u64,
    /// The number of zero pages of all checkpoints together.
    pub zero_pages: u64,
    /// The number of pages of all checkpoints whose content was in the store already.
    pub dedup_pages: u64,
    /// The number of pages of all checkpoints that the guest wrote without a change.
    pub unchanged_pages: u64,
    /// The number of pages of all checkpoints whose content was new.
    pub stored_pages: u64,
    /// The growth of the store by all checkpoints, in bytes.
    pub added_bytes: u64,
    /// The number of bytes written to disks before these checkpoints, since the ones before them.
    pub disk_written_bytes: u64,
    /// The largest backlog of a checkpoint, in nanoseconds.
    pub backlog_ns: u64,
    /// The longest interval before a checkpoint, in nanoseconds.
    pub interval_ns: u64,
    /// The longest time of encoding a checkpoint, in nanoseconds.
    pub encode_ns: u64,
}

/// A checkpoint that has tags or is pinned.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TaggedCheckpoint {
    /// The checkpoint's number.
    pub id: u64,
    /// Its tags.
    pub tags: Vec<String>,
    /// Whether it is pinned.
    pub pinned: bool,
}

/// A timeline of a VM's checkpoints, in buckets.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Timeline {
    /// The generation of the listing.
    pub generation: u64,
    /// The number of all checkpoints of the VM.
    pub total: usize,
    /// The number of those in the range.
    pub shown: usize,
    /// The number of the VM's first checkpoint. `None` if it has none.
    pub first_id: Option<u64>,
    /// The number of the VM's last checkpoint. `None` if it has none.
    pub last_id: Option<u64>,
    /// The buckets, from old to new.
    pub buckets: Vec<TimelineBucket>,
    /// The newest tagged or pinned checkpoints in the range.
    pub tagged: Vec<TaggedCheckpoint>,
}

impl Timeline {
    /// Creates the timeline of the checkpoints of `vm`, or of all VMs if it is `None`, with numbers
    /// in `range`, in at most `points` buckets.
    pub fn of(
        listing: &CheckpointListing,
        vm: Option<&str>,
        range: &RangeInclusive<u64>,
        points: usize,
    ) -> Self {
        let is_wanted = |one: &&Arc<CheckpointRow>| vm.is_none_or(|vm| one.vm == vm);
        let all: Vec<&Arc<CheckpointRow>> = listing.checkpoints.iter().filter(is_wanted).collect();
        let shown: Vec<&Arc<CheckpointRow>> =
            all.iter().copied().filter(|one| range.contains(&one.id)).collect();
        let pieces = chunks(shown.len(), points.clamp(1, POINTS_MAX));
        let buckets = pieces.filter_map(|piece| TimelineBucket::of(&shown[piece])).collect();
        let named = shown.iter().rev().filter(|one| one.pinned || !one.tags.is_empty());
        let tagged = |one: &&Arc<CheckpointRow>| TaggedCheckpoint {
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

impl TimelineBucket {
    fn of(all: &[&Arc<CheckpointRow>]) -> Option<Self> {
        let (first, last) = (all.first()?, all.last()?);
        let worst = all.iter().max_by_key(|one| one.pause_ns)?;
        let sum = |value: fn(&CheckpointRow) -> u64| all.iter().map(|one| value(one)).sum();
        let most =
            |value: fn(&CheckpointRow) -> u64| all.iter().map(|one| value(one)).max().unwrap_or(0);
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

/// Divides `len` elements into at most `pieces` ranges of about the same length, and returns these
/// in order.
pub fn chunks(len: usize, pieces: usize) -> impl Iterator<Item = Range<usize>> {
    let pieces = pieces.min(len);
    // There are no more pieces than elements, so none is empty.
    (0..pieces).map(move |at| at * len / pieces..(at + 1) * len / pieces)
}
