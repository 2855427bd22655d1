//! The limits of a writer.

use crate::durability_kind::Durability;

/// The limits of a writer. They are not part of the format: every store can be read with any
/// limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// The size in bytes at which a pack is closed and followed by another. At most 2^39.
    pub pack_bytes_max: u64,
    /// The size in bytes up to which records gather in memory before they are written.
    pub buffer_bytes: usize,
    /// The base of the map chain rule, at least 2. A restore reads at most this many maps for each
    /// digit of the epoch.
    pub chain_base: u64,
    /// The largest memory for the sector index, in bytes, in a run with disks. If it is too small
    /// for an index, sectors are not deduplicated.
    pub sector_index_bytes: usize,
    /// The smallest number of the eight sectors of a block that must be found to make a composed
    /// record. Each saves about a ninth of the block. The cost, half of the speed of put and read,
    /// does not depend on the number (`examples/sectors.rs`).
    pub sector_parts_min: usize,
    /// The largest memory for the bases of deltas, in bytes. Other bases are read from the store
    /// each time.
    pub base_bytes: usize,
    /// The approximate memory for the deduplication index, in bytes. Further entries lie in files,
    /// if the store has a directory on this host. Entries that do not fit there are forgotten, the
    /// oldest first; their content is stored again when it occurs again.
    pub index_bytes: usize,
    /// The number of threads that hash and compress pages, at least one.
    pub encode_threads: usize,
    /// The time at which checkpoints become durable.
    pub durability: Durability,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            pack_bytes_max: 256 << 20,
            buffer_bytes: 1 << 20,
            chain_base: 16,
            sector_index_bytes: 64 << 20,
            sector_parts_min: 2,
            base_bytes: 256 << 20,
            index_bytes: 256 << 20,
            encode_threads: 1,
            durability: Durability::Checkpoint,
        }
    }
}
