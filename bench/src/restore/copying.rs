//! What memory allows: as many bytes as a checkpoint holds, copied on all cores.

use crate::Error;
use std::time::Instant;

/// How long one copy took.
pub struct Copied {
    /// Into memory that nobody had before, as the RAM of a restored VM is.
    pub into_new_ns: f64,
    /// Into memory that was there.
    pub into_resident_ns: f64,
}

/// Copies `bytes` bytes twice to the same place.
pub fn measure(bytes: u64) -> Result<Copied, Error> {
    let len = usize::try_from(bytes).map_err(|e| Error::failed("measure memcpy", e))?;
    // Not of one byte: the kernel may share pages of zeros.
    let from: Vec<u8> = (0..len).map(|at| (at >> 6) as u8 | 1).collect();
    let mut to = vec![0; len];
    let into_new_ns = copy(&from, &mut to);
    let into_resident_ns = copy(&from, &mut to);
    if from != to {
        return Err(Error::failed("measure memcpy", "the copy differs"));
    }
    Ok(Copied { into_new_ns, into_resident_ns })
}

fn copy(from: &[u8], to: &mut [u8]) -> f64 {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let part = from.len().div_ceil(threads).max(1);
    let started = Instant::now();
    std::thread::scope(|scope| {
        for (from, to) in from.chunks(part).zip(to.chunks_mut(part)) {
            scope.spawn(|| to.copy_from_slice(from));
        }
    });
    started.elapsed().as_nanos() as f64
}
