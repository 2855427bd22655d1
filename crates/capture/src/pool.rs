//! Bounded memory for copied pages, between the copy and the sink.
//!
//! ```text
//!   made, free        lent to a parcel             back when the parcel is dropped
//!   ┌────┐┌────┐      ┌────┐┌────┐┌────┐
//!   │4MiB││4MiB│ ───▶ │4MiB││4MiB││4MiB│ ───────────────▶ free
//!   └────┘└────┘      └────┘└────┘└────┘     made + free never exceed the capacity
//! ```
//!
//! Chunks are faulted in when they are made, which is outside the pause by [`Pool::reserve`]; they
//! are kept for the next checkpoint. Several checkpoints may hold chunks at a time: the queue
//! before the encoder is bounded by this memory.

use keyframe_kernel::memory::Arena;
use keyframe_units::{PAGE_BYTES, Page};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Pages of one chunk: 4 MiB.
const CHUNK_PAGES: u64 = 1024;
/// Fewer chunks than this leave no room for one checkpoint being captured beside one being encoded.
const CHUNKS_MIN: u64 = 16;

/// No memory for a chunk.
#[derive(Debug, thiserror::Error)]
#[error("allocate {len_bytes} bytes of staging memory: {source}")]
pub struct PoolError {
    /// Bytes of the chunk.
    pub len_bytes: u64,
    /// Why not.
    pub source: keyframe_kernel::Error,
}

/// The memory. Clones share it.
#[derive(Clone)]
pub struct Pool(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    freed: Condvar,
    capacity_chunks: u64,
    chunk_pages: u64,
}

#[derive(Default)]
struct State {
    free: Vec<Arena>,
    made: u64,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pool {
    /// At most `capacity_pages`, at least sixteen chunks.
    pub fn new(capacity_pages: u64) -> Self {
        Self::of_chunks(capacity_pages.div_ceil(CHUNK_PAGES).max(CHUNKS_MIN), CHUNK_PAGES)
    }

    /// `capacity_chunks` chunks of `chunk_pages` pages.
    pub(crate) fn of_chunks(capacity_chunks: u64, chunk_pages: u64) -> Self {
        Self(Arc::new(Shared {
            state: Mutex::default(),
            freed: Condvar::new(),
            capacity_chunks,
            chunk_pages,
        }))
    }

    /// Pages of one chunk.
    pub fn chunk_pages(&self) -> u64 {
        self.0.chunk_pages
    }

    /// Pages that it can hold at most.
    pub fn capacity_pages(&self) -> u64 {
        self.0.capacity_chunks * self.0.chunk_pages
    }

    /// Pages that can be taken now.
    pub fn free_pages(&self) -> u64 {
        let state = self.0.state();
        (self.0.capacity_chunks - state.made + state.free.len() as u64) * self.0.chunk_pages
    }

    /// Makes chunks until `pages` are free and faulted in, as far as the limit allows. Slow: never
    /// in the pause.
    pub fn reserve(&self, pages: u64) -> Result<(), PoolError> {
        let wanted = pages.div_ceil(self.0.chunk_pages);
        loop {
            {
                let mut state = self.0.state();
                if state.free.len() as u64 >= wanted || state.made >= self.0.capacity_chunks {
                    return Ok(());
                }
                state.made += 1;
            }
            let arena = self.make()?;
            self.0.state().free.push(arena);
        }
    }

    /// A chunk; none where the limit is reached.
    pub fn take(&self) -> Result<Option<Chunk>, PoolError> {
        let arena = {
            let mut state = self.0.state();
            match state.free.pop() {
                Some(arena) => Some(arena),
                None if state.made < self.0.capacity_chunks => {
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
        Ok(Some(Chunk { arena: Some(arena), home: Arc::clone(&self.0) }))
    }

    /// Waits until `pages` can be taken; false where they cannot be within `timeout`.
    pub fn wait_free(&self, pages: u64, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let wanted = pages.div_ceil(self.0.chunk_pages).min(self.0.capacity_chunks);
        let mut state = self.0.state();
        while self.0.capacity_chunks - state.made + (state.free.len() as u64) < wanted {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.0.freed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// A fresh arena, which the caller has counted already.
    fn make(&self) -> Result<Arena, PoolError> {
        let len_bytes = self.0.chunk_pages * PAGE_BYTES as u64;
        Arena::new(len_bytes as usize).map_err(|source| {
            self.0.state().made -= 1;
            PoolError { len_bytes, source }
        })
    }
}

/// Memory for a pool's [`Pool::chunk_pages`] pages; goes back to its pool when dropped.
pub struct Chunk {
    /// `None` only while it is being dropped.
    arena: Option<Arena>,
    home: Arc<Shared>,
}

impl Chunk {
    /// Its pages.
    pub fn pages(&self) -> &[Page] {
        self.arena.as_ref().map_or(&[], |arena| arena.as_chunks::<PAGE_BYTES>().0)
    }

    /// Its bytes from page `from` on, `len_pages` pages.
    pub fn bytes_mut(&mut self, from: u64, len_pages: u64) -> &mut [u8] {
        let (from, len) = (from as usize * PAGE_BYTES, len_pages as usize * PAGE_BYTES);
        self.arena.as_mut().and_then(|arena| arena.get_mut(from..from + len)).unwrap_or_default()
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if let Some(arena) = self.arena.take() {
            self.home.state().free.push(arena);
            self.home.freed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_bounded_and_come_back() {
        let pool = Pool::of_chunks(16, 8);
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
}
