//! A process that uses a [`super::FaultyBackend`].

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A process that uses a medium, and can be killed alone.
#[derive(Debug, Default)]
pub struct Process {
    pub id: u64,
    dead: AtomicBool,
    operations: AtomicU64,
    /// The operation at which it is killed; 0 for none.
    killed_at: AtomicU64,
    /// The number of failed syncs of the whole medium that it has heard of.
    heard: AtomicU64,
}

impl Process {
    pub fn new(id: u64, heard: u64) -> Self {
        Self { id, heard: AtomicU64::new(heard), ..Self::default() }
    }

    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }

    pub fn kill_in(&self, operations: u64) {
        let now = self.operations.load(Ordering::Relaxed);
        self.killed_at.store(now + 1 + operations, Ordering::Relaxed);
    }

    pub fn spare(&self) {
        self.killed_at.store(0, Ordering::Relaxed);
    }

    /// Counts an operation. Returns true if the process dies in it, or is dead.
    pub fn step(&self) -> bool {
        let now = self.operations.fetch_add(1, Ordering::Relaxed) + 1;
        let killed_at = self.killed_at.load(Ordering::Relaxed);
        if killed_at > 0 && now >= killed_at {
            self.dead.store(true, Ordering::Relaxed);
        }
        self.is_dead()
    }

    /// Tells it of `failures` failed syncs. Returns true if it had heard of all of them.
    pub fn hears(&self, failures: u64) -> bool {
        self.heard.fetch_max(failures, Ordering::Relaxed) >= failures
    }
}
