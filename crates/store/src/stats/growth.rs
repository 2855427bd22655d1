//! The growth of a store: by checkpoint, and by hour.
//!
//! The numbers of a checkpoint were measured when it was taken. Forgotten checkpoints are not
//! included.

use crate::Sealed;
use jiff::Timestamp;
use keyframe_units::{CheckpointId, PAGE_BYTES};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

const HOUR_S: i64 = 3600;

/// The growth of the store by one checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointGrowth {
    /// Its number.
    pub id: CheckpointId,
    /// The VM.
    pub vm: String,
    /// The time at which its pause began.
    pub taken_at: Timestamp,
    /// The size of the pages and blocks put into it, in bytes.
    pub dirty_bytes: u64,
    /// The number of bytes by which the store grew: records, map, device state.
    pub added_bytes: u64,
    /// The sum of `added_bytes` so far, over all VMs, in the order of the numbers.
    pub sum_bytes: u64,
}

/// The growth of the store in one hour.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HourGrowth {
    /// The begin of the hour.
    pub from: Timestamp,
    /// The number of checkpoints taken in it.
    pub checkpoints: u64,
    /// The size of the pages and blocks put into them, in bytes.
    pub dirty_bytes: u64,
    /// The number of bytes by which the store grew.
    pub added_bytes: u64,
}

/// The growth of a store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Growth {
    /// The growth by each checkpoint, in the order of their numbers.
    pub checkpoints: Vec<CheckpointGrowth>,
    /// The hours, rising, without those in which no checkpoint was taken.
    pub hours: Vec<HourGrowth>,
}

impl Growth {
    /// Computes the growth from the checkpoints `sealed`, which are in rising order.
    pub fn of(sealed: &[Sealed]) -> Self {
        let mut growth = Self::default();
        let mut hours = BTreeMap::<i64, HourGrowth>::new();
        let mut sum_bytes = 0;
        for Sealed { id, meta, .. } in sealed {
            let counts = &meta.counts;
            let blocks: u64 = meta.disks.iter().map(|disk| disk.counts.written_blocks).sum();
            let of_disks: u64 = meta.disks.iter().map(|disk| disk.counts.stored_bytes).sum();
            let dirty_bytes = (counts.dirty_pages + blocks) * PAGE_BYTES as u64;
            let added_bytes =
                counts.stored_bytes + counts.map_bytes + counts.device_bytes + of_disks;
            sum_bytes += added_bytes;
            let (vm, taken_at) = (meta.vm.clone(), meta.taken_at);
            growth.checkpoints.push(CheckpointGrowth {
                id: *id,
                vm,
                taken_at,
                dirty_bytes,
                added_bytes,
                sum_bytes,
            });
            let from_s = taken_at.as_second().div_euclid(HOUR_S) * HOUR_S;
            let from = Timestamp::from_second(from_s).unwrap_or(taken_at);
            let hour = hours.entry(from_s);
            let hour =
                hour.or_insert(HourGrowth { from, checkpoints: 0, dirty_bytes: 0, added_bytes: 0 });
            hour.checkpoints += 1;
            hour.dirty_bytes += dirty_bytes;
            hour.added_bytes += added_bytes;
        }
        growth.hours = hours.into_values().collect();
        growth
    }
}
