//! Keeps the memory of a session within what its VMs leave of the host's memory and of the limits
//! of memory cgroups.
//!
//! ```text
//!   start     caches of the store: a share of what is left       the VMs' RAM counts as in use
//!   capture   staging memory: as much as is left now; less than the last time gives memory back
//!   sealed    staging memory: what the checkpoints of late did not need is given back
//!   always    of QEMU and this process, the kernel ends this process first
//! ```
//!
//! A VM takes memory for its RAM only as its guest touches it, so what is free when a run begins is
//! not free for long. What a VM may still take is kept for it.

use crate::SessionOptions;
use crate::memory_limits::{self, ExpectedGrowth, RemainingMemory};
use keyframe_capture::StagingPool;
use keyframe_units::PAGE_BYTES;

/// What QEMU needs beside the guest's RAM: its own code and heap, and what TCG translates.
const QEMU_BYTES: u64 = 96 << 20;
/// What stays free: for the encoder's buffers, and for what begins between two looks.
const RESERVE_BYTES: u64 = 48 << 20;
/// The staging memory that is kept beside that of the checkpoints of late: 64 MiB.
const SPARE_PAGES: u64 = 16_384;
/// The least that each cache of the store gets.
const CACHE_BYTES_MIN: u64 = 8 << 20;

/// A VM's process and the size of its RAM.
#[derive(Clone, Copy, Debug)]
pub struct GuestMemory {
    /// The VMM's process; `None` if it is going to be a child of this one.
    pub pid: Option<u32>,
    /// The size of the RAM, in bytes.
    pub ram_bytes: u64,
}

impl GuestMemory {
    /// What the VM may still take.
    fn growth(&self) -> ExpectedGrowth {
        let resident_bytes = self.pid.map_or(0, memory_limits::resident_bytes);
        ExpectedGrowth {
            pid: self.pid.unwrap_or_else(std::process::id),
            bytes: (self.ram_bytes + QEMU_BYTES).saturating_sub(resident_bytes),
        }
    }
}

/// Memory that is too short for what was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryShortage {
    /// The memory that the VMs leave, in bytes.
    pub left_bytes: u64,
    /// The memory that remains for copied pages, in bytes.
    pub staging_bytes: u64,
    /// True if a memory cgroup is the limit, and not the host.
    pub is_limited: bool,
}

/// What `guests` leave.
fn remaining(guests: &[GuestMemory]) -> RemainingMemory {
    let growth: Vec<_> = guests.iter().map(GuestMemory::growth).collect();
    memory_limits::remaining(&growth)
}

/// Returns the sizes in bytes of the encoder's cache of pages and of the index: as `options` ask,
/// or what `guests` leave for them.
pub fn cache_bytes(options: &SessionOptions, guests: &[GuestMemory]) -> (u64, u64) {
    let asked = (options.encode_memory_mib << 20, options.index_memory_mib << 20);
    let share_bytes = remaining(guests).bytes.saturating_sub(RESERVE_BYTES) / 4;
    let cache = |asked: u64, share: u64| asked.min(share.max(CACHE_BYTES_MIN));
    (cache(asked.0, share_bytes), cache(asked.1, share_bytes / 2))
}

/// Limits the staging memory of a run.
pub struct MemoryGuard {
    guests: Vec<GuestMemory>,
    /// What a pool without limits would hold.
    wanted_pages: u64,
    has_told: bool,
    /// The pages of the largest checkpoint of late.
    peak_pages: u64,
}

impl MemoryGuard {
    /// Guards the memory that `guests` need, if a pool without limits would hold `wanted_pages`
    /// pages.
    pub fn new(guests: Vec<GuestMemory>, wanted_pages: u64) -> Self {
        Self { guests, wanted_pages, has_told: false, peak_pages: 0 }
    }

    /// Returns the memory that the VMs leave now, in bytes.
    pub fn left_bytes(&self) -> u64 {
        remaining(&self.guests).bytes
    }

    /// Limits `pool` to the memory that the VMs leave now. Returns a shortage the first time that
    /// the limit is too small, and `None` otherwise. If the host's memory is the limit, too small
    /// is less than half of the pool's largest capacity. If a memory cgroup is the limit, it is
    /// less than half of the pages that a pool without limits would hold.
    pub fn limit(&mut self, pool: &StagingPool) -> Option<MemoryShortage> {
        let left = remaining(&self.guests);
        let held_bytes = pool.held_pages() * PAGE_BYTES as u64;
        pool.set_limit(staging_bytes(left.bytes, held_bytes) / PAGE_BYTES as u64);
        let enough_pages =
            if left.is_limited { self.wanted_pages } else { pool.capacity_max_pages() };
        let is_short = pool.capacity_pages() < enough_pages / 2;
        if !is_short || self.has_told {
            return None;
        }
        self.has_told = true;
        Some(MemoryShortage {
            left_bytes: left.bytes,
            staging_bytes: pool.capacity_pages() * PAGE_BYTES as u64,
            is_limited: left.is_limited,
        })
    }

    /// Gives memory of `pool` back that the next checkpoints will hardly need, after one with
    /// `dirty_pages`.
    pub fn give_back(&mut self, pool: &StagingPool, dirty_pages: u64) {
        self.peak_pages = dirty_pages.max(self.peak_pages - self.peak_pages / 8);
        let enough_pages = 2 * self.peak_pages + SPARE_PAGES;
        // A little more is not worth the calls.
        if pool.held_pages() > enough_pages + enough_pages / 4 {
            pool.trim(enough_pages);
        }
    }
}

/// How large the staging memory may be that has `held_bytes`, if `left_bytes` are left beside it.
/// The other half is the encoder's.
fn staging_bytes(left_bytes: u64, held_bytes: u64) -> u64 {
    (held_bytes + left_bytes).saturating_sub(RESERVE_BYTES) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staging_memory_shrinks_with_what_is_left_and_counts_its_own() {
        assert_eq!(staging_bytes(RESERVE_BYTES, 0), 0);
        assert_eq!(staging_bytes(0, RESERVE_BYTES + 100), 50);
        assert_eq!(staging_bytes(RESERVE_BYTES + 60, 40), 50);
        assert_eq!(staging_bytes(0, 0), 0);
    }

    #[test]
    fn a_shortage_is_told_once_and_memory_is_given_back() {
        let pool = StagingPool::new(1 << 14);
        pool.reserve(1 << 14).unwrap();
        // The host's own memory is limited by no reservation, so this host has enough.
        let mut guard = MemoryGuard::new(Vec::new(), 1 << 14);
        let first = guard.limit(&pool);
        let second = guard.limit(&pool);
        assert!(second.is_none());
        let capacity_bytes = pool.capacity_pages() * PAGE_BYTES as u64;
        assert!(first.is_none_or(|short| short.staging_bytes == capacity_bytes));
        let asked = SessionOptions {
            encode_memory_mib: 1,
            index_memory_mib: 2,
            ..SessionOptions::every(None, crate::control::OnExit::Keep)
        };
        assert_eq!(cache_bytes(&asked, &[]), (1 << 20, 2 << 20), "a small cache always fits");
    }

    #[test]
    fn a_vm_keeps_what_its_guest_has_not_touched() {
        let own = GuestMemory { pid: Some(std::process::id()), ram_bytes: 1 << 40 };
        let fresh = GuestMemory { pid: None, ram_bytes: 1 << 40 };
        assert!(own.growth().bytes < fresh.growth().bytes);
        assert_eq!(fresh.growth().bytes, (1 << 40) + QEMU_BYTES);
    }

    #[test]
    fn memory_that_the_last_checkpoints_did_not_need_is_given_back() {
        let pool = StagingPool::new(1 << 17);
        pool.reserve(1 << 17).unwrap();
        let mut guard = MemoryGuard::new(Vec::new(), 1 << 17);
        guard.give_back(&pool, 1 << 16);
        assert_eq!(pool.held_pages(), 1 << 17, "one such checkpoint came now");
        for _ in 0..60 {
            guard.give_back(&pool, 1000);
        }
        assert!(pool.held_pages() < 24_000, "{}", pool.held_pages());
        assert_eq!(pool.capacity_pages(), 1 << 17);
    }
}
