//! A cache of decoded descriptions of accesses: QEMU is asked once for each of about a dozen kinds.

use crate::api::{self, MemoryInfo};
use crate::translations::STORE;

/// A decoded description of an access.
#[derive(Clone, Copy)]
pub struct AccessKind {
    info: MemoryInfo,
    /// The logarithm of the size in bytes, below 16.
    pub size_log2: u32,
    /// [`STORE`] for a write, 0 for a read.
    pub store: u64,
}

impl AccessKind {
    /// Whether it is a write.
    #[inline]
    pub fn is_store(self) -> bool {
        self.store != 0
    }
}

/// The cache.
pub struct AccessKinds([AccessKind; 1 << AccessKinds::BITS]);

impl AccessKinds {
    const BITS: u32 = 6;

    /// An empty cache.
    pub fn new() -> Self {
        // No description has all bits set.
        let none = AccessKind { info: MemoryInfo::MAX, size_log2: 0, store: 0 };
        Self([none; 1 << Self::BITS])
    }

    #[inline]
    fn entry(info: MemoryInfo) -> usize {
        // The multiplier of Fibonacci hashing (Knuth, The Art of Computer Programming 3, 6.4).
        (info.wrapping_mul(0x9e37_79b9) >> (MemoryInfo::BITS - Self::BITS)) as usize
    }

    /// The decoded description, if it is cached.
    #[inline]
    pub fn known(&self, info: MemoryInfo) -> Option<AccessKind> {
        let kind = self.0[Self::entry(info)];
        (kind.info == info).then_some(kind)
    }

    /// The decoded description.
    #[inline]
    pub fn of(&mut self, info: MemoryInfo) -> AccessKind {
        self.known(info).unwrap_or_else(|| self.learn(info))
    }

    #[cold]
    fn learn(&mut self, info: MemoryInfo) -> AccessKind {
        let size_log2 = api::size_bytes(info).checked_ilog2().unwrap_or(0) & 15;
        let store = if api::is_store(info) { STORE } else { 0 };
        let kind = AccessKind { info, size_log2, store };
        self.0[Self::entry(info)] = kind;
        kind
    }
}
