//! The bounded memory that holds copied pages until the sink has taken them.
//!
//! ```text
//!   free chunks       lent to staged pages         free again when these are dropped
//!   ┌────┐┌────┐      ┌────┐┌────┐┌────┐
//!   │4MiB││4MiB│ ───▶ │4MiB││4MiB││4MiB│ ───────────────▶ free
//!   └────┘└────┘      └────┘└────┘└────┘     free + lent chunks do not exceed the capacity
//! ```
//!
//! [`StagingPool::reserve`] allocates chunks and faults them in before the pause. Freed chunks stay
//! allocated for the next checkpoint. Several checkpoints may hold chunks at the same time, so this
//! memory bounds the queue before the encoder.
//!
//! [`StagingPool::set_limit`] lowers the capacity while memory is short: free chunks are given back
//! to the system at once, lent ones when they come back. [`StagingPool::trim`] gives back free chunks
//! that later checkpoints are not expected to need.

use keyframe_kernel::memory::PrefaultedBuffer;
use keyframe_locks::IgnorePoison;
use keyframe_units::{PAGE_BYTES, Page};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Pages per chunk: 4 MiB.
const CHUNK_PAGES: u64 = 1024;
/// Fewer chunks would not hold one checkpoint that is captured and one that is encoded. A pool for
/// less has smaller chunks.
const CHUNKS_MIN: u64 = 16;
/// The fewest pages per chunk: 256 KiB.
const CHUNK_PAGES_MIN: u64 = 64;

/// The error of a pool that got no memory for a chunk from the kernel.
#[derive(Debug, thiserror::Error)]
#[error("allocate {len_bytes} bytes of staging memory: {source}")]
pub struct StagingPoolError {
    /// The size of the chunk in bytes.
    pub len_bytes: u64,
    /// The kernel's error.
    pub source: keyframe_kernel::Error,
}

/// A bounded pool of memory for copied pages, in chunks. Clones share the pool.
#[derive(Clone)]
pub struct StagingPool(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    freed: Condvar,
    capacity_chunks: u64,
    chunk_pages: u64,
}

struct State {
    free: Vec<PrefaultedBuffer>,
    made: u64,
    /// The capacity now: at most that of the pool.
    limit_chunks: u64,
}

impl State {
    /// The number of chunks that can be taken.
    fn free_chunks(&self) -> u64 {
        self.limit_chunks.saturating_sub(self.made) + self.free.len() as u64
    }

    /// Takes free chunks out until `chunks` are left in all.
    fn take_surplus(&mut self, chunks: u64) -> Vec<PrefaultedBuffer> {
        let over = self.made.saturating_sub(chunks);
        let kept = self.free.len().saturating_sub(over as usize);
        let surplus = self.free.split_off(kept);
        self.made -= surplus.len() as u64;
        surplus
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().ignore_poison()
    }
}

impl StagingPool {
    /// Creates a pool of at most `capacity_pages` pages, and at least 4 MiB.
    pub fn new(capacity_pages: u64) -> Self {
        let chunk_pages = (capacity_pages / CHUNKS_MIN).clamp(CHUNK_PAGES_MIN, CHUNK_PAGES);
        Self::of_chunks(capacity_pages.div_ceil(chunk_pages).max(CHUNKS_MIN), chunk_pages)
    }

    /// Creates a pool of `capacity_chunks` chunks of `chunk_pages` pages each.
    pub(crate) fn of_chunks(capacity_chunks: u64, chunk_pages: u64) -> Self {
        Self(Arc::new(Shared {
            state: Mutex::new(State { free: Vec::new(), made: 0, limit_chunks: capacity_chunks }),
            freed: Condvar::new(),
            capacity_chunks,
            chunk_pages,
        }))
    }

    /// Returns the number of pages per chunk.
    pub fn chunk_pages(&self) -> u64 {
        self.0.chunk_pages
    }

    /// Returns the number of pages that the pool holds at most, under its present limit.
    pub fn capacity_pages(&self) -> u64 {
        self.0.state().limit_chunks * self.0.chunk_pages
    }

    /// Returns the number of pages that the pool was made for.
    pub fn capacity_max_pages(&self) -> u64 {
        self.0.capacity_chunks * self.0.chunk_pages
    }

    /// Returns the number of pages for which the pool has memory.
    pub fn held_pages(&self) -> u64 {
        self.0.state().made * self.0.chunk_pages
    }

    /// Limits the pool to `pages` pages, at least 16 chunks and at most what it was made for. Gives
    /// free chunks above the limit back to the system.
    pub fn set_limit(&self, pages: u64) {
        let least = CHUNKS_MIN.min(self.0.capacity_chunks);
        let surplus = {
            let mut state = self.0.state();
            state.limit_chunks = (pages / self.0.chunk_pages).clamp(least, self.0.capacity_chunks);
            let limit_chunks = state.limit_chunks;
            state.take_surplus(limit_chunks)
        };
        // Unmapped without the lock.
        drop(surplus);
        self.0.freed.notify_all();
    }

    /// Gives free chunks back to the system until the pool holds memory for `pages` pages. The
    /// capacity stays.
    pub fn trim(&self, pages: u64) {
        let surplus = self.0.state().take_surplus(pages.div_ceil(self.0.chunk_pages));
        drop(surplus);
    }

    /// Returns the number of pages that can be taken now.
    pub fn free_pages(&self) -> u64 {
        self.0.state().free_chunks() * self.0.chunk_pages
    }

    /// Allocates chunks until `pages` pages are free and faulted in, or until the limit is reached.
    /// Slow: not for the pause. Error: the kernel refuses memory.
    pub fn reserve(&self, pages: u64) -> Result<(), StagingPoolError> {
        let wanted = pages.div_ceil(self.0.chunk_pages);
        loop {
            {
                let mut state = self.0.state();
                if state.free.len() as u64 >= wanted || state.made >= state.limit_chunks {
                    return Ok(());
                }
                state.made += 1;
            }
            let arena = self.make()?;
            self.0.state().free.push(arena);
        }
    }

    /// Takes a chunk. Returns `None` if the limit is reached. Error: the kernel refuses memory.
    pub fn take(&self) -> Result<Option<StagingChunk>, StagingPoolError> {
        let arena = {
            let mut state = self.0.state();
            match state.free.pop() {
                Some(arena) => Some(arena),
                None if state.made < state.limit_chunks => {
                    state.made += 1;
                    None
                }
                None => return Ok(None),
            }
        };
        let arena = match arena {
            Some(arena) => arena,
            None => self.make()?,
        };
        Ok(Some(StagingChunk { arena: Some(arena), home: Arc::clone(&self.0) }))
    }

    /// Waits until `pages` pages can be taken. Returns false if they cannot within `timeout`.
    pub fn wait_free(&self, pages: u64, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let wanted = pages.div_ceil(self.0.chunk_pages);
        let mut state = self.0.state();
        while state.free_chunks() < wanted.min(state.limit_chunks) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.0.freed.wait_timeout(state, left);
            state = waited.ignore_poison().0;
        }
        true
    }

    /// Allocates an arena, which the caller has counted in `made` already.
    fn make(&self) -> Result<PrefaultedBuffer, StagingPoolError> {
        let len_bytes = self.0.chunk_pages * PAGE_BYTES as u64;
        PrefaultedBuffer::new(len_bytes as usize).map_err(|source| {
            self.0.state().made -= 1;
            StagingPoolError { len_bytes, source }
        })
    }
}

/// Memory for [`StagingPool::chunk_pages`] pages. Dropping it returns it to its pool.
pub struct StagingChunk {
    /// `None` only while the chunk is being dropped.
    arena: Option<PrefaultedBuffer>,
    home: Arc<Shared>,
}

impl StagingChunk {
    /// Returns the pages of the chunk.
    pub fn pages(&self) -> &[Page] {
        self.arena.as_ref().map_or(&[], |arena| arena.as_chunks::<PAGE_BYTES>().0)
    }

    /// Returns the bytes of `len_pages` pages of the chunk, from its page number `from` on.
    pub fn bytes_mut(&mut self, from: u64, len_pages: u64) -> &mut [u8] {
        let (from, len) = (from as usize * PAGE_BYTES, len_pages as usize * PAGE_BYTES);
        self.arena.as_mut().and_then(|arena| arena.get_mut(from..from + len)).unwrap_or_default()
    }
}

impl Drop for StagingChunk {
    fn drop(&mut self) {
        if let Some(arena) = self.arena.take() {
            let mut state = self.home.state();
            if state.made > state.limit_chunks {
                state.made -= 1;
                drop(state);
                drop(arena);
            } else {
                state.free.push(arena);
                drop(state);
            }
            self.home.freed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_bounded_and_come_back() {
        let pool = StagingPool::of_chunks(16, 8);
        pool.reserve(1000).unwrap();
        assert_eq!((pool.free_pages(), pool.capacity_pages()), (128, 128));
        let taken: Vec<_> = std::iter::from_fn(|| pool.take().unwrap()).collect();
        assert_eq!((taken.len(), pool.free_pages()), (16, 0));
        assert!(!pool.wait_free(1, Duration::from_millis(1)));
        let other = pool.clone();
        let waiter = std::thread::spawn(move || other.wait_free(128, Duration::from_secs(60)));
        drop(taken);
        assert!(waiter.join().unwrap());
        assert_eq!(pool.take().unwrap().unwrap().pages().len(), 8);
    }

    #[test]
    fn a_trim_gives_memory_back_and_keeps_the_capacity() {
        let pool = StagingPool::of_chunks(32, 8);
        pool.reserve(256).unwrap();
        let taken: Vec<_> = (0..20).map(|_| pool.take().unwrap().unwrap()).collect();
        pool.trim(180);
        assert_eq!((pool.capacity_pages(), pool.held_pages(), pool.free_pages()), (256, 184, 96));
        pool.trim(0);
        assert_eq!((pool.held_pages(), pool.free_pages()), (160, 96), "lent chunks stay");
        drop(taken);
        assert_eq!((pool.held_pages(), pool.free_pages()), (160, 256));
    }

    #[test]
    fn a_limit_gives_memory_back_and_can_be_lifted() {
        let pool = StagingPool::of_chunks(32, 8);
        pool.reserve(256).unwrap();
        let mut taken: Vec<_> = (0..20).map(|_| pool.take().unwrap().unwrap()).collect();
        pool.set_limit(0);
        assert_eq!((pool.capacity_pages(), pool.held_pages(), pool.free_pages()), (128, 160, 0));
        assert!(pool.take().unwrap().is_none());
        taken.truncate(10);
        assert_eq!((pool.held_pages(), pool.free_pages()), (128, 48));
        pool.set_limit(u64::MAX);
        assert_eq!((pool.capacity_pages(), pool.held_pages(), pool.free_pages()), (256, 128, 176));
        drop(taken);
        assert_eq!(pool.free_pages(), 256);
        assert_eq!(StagingPool::new(0).capacity_pages(), 1024);
        assert_eq!(StagingPool::new(1 << 20).chunk_pages(), CHUNK_PAGES);
    }
}
