//! A medium whose reads fail as those of a network or of an old disk do.

use super::observed::{ObservedMedium, Observer};
use super::*;
use keyframe_store_backend as backend;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// The reads that fail.
#[derive(Clone, Debug)]
pub enum BadReads {
    /// The read of this number, from 1, times out. The same read succeeds when it is repeated.
    TimedOut(u64),
    /// Each read of this byte of this file meets a bad sector.
    Sector(String, u64),
}

/// A medium whose reads fail as [`BadReads`] says.
pub struct Unreliable {
    medium: Arc<ObservedMedium<Failures>>,
    failures: Arc<Failures>,
}

/// The reads that fail, and the count of all.
#[derive(Debug)]
struct Failures {
    bad: BadReads,
    reads: AtomicU64,
}

impl Unreliable {
    pub fn new(medium: &FaultyBackend, bad: BadReads) -> Self {
        let failures = Arc::new(Failures { bad, reads: AtomicU64::new(0) });
        Self { medium: ObservedMedium::new(medium, &failures), failures }
    }

    /// Opens the store on the medium.
    pub fn open_store(&self) -> Result<Store> {
        on_backend(self.medium.clone())
    }

    /// True after the read that times out.
    pub fn has_failed(&self) -> bool {
        let reads = self.failures.reads.load(Ordering::Relaxed);
        matches!(self.failures.bad, BadReads::TimedOut(at) if at <= reads)
    }
}

impl Observer for Failures {
    fn before_read(&self, name: &str, bytes: Range<u64>) -> backend::Result<()> {
        let number = self.reads.fetch_add(1, Ordering::Relaxed) + 1;
        let source = match &self.bad {
            BadReads::TimedOut(at) if *at == number => io::Error::from(io::ErrorKind::TimedOut),
            BadReads::Sector(of, at) if of == name && bytes.contains(at) => {
                io::Error::from_raw_os_error(5)
            }
            _ => return Ok(()),
        };
        Err(backend::Error::Io { object: name.into(), operation: "read", source })
    }
}
