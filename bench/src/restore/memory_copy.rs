//! Copies as many bytes as a checkpoint has on all cores: the speed that memory allows.

use crate::Error;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Instant;

/// The size of the source that a thread copies repeatedly. It exceeds the thread's cache, and is
/// small enough that the copies take most of the memory.
const SOURCE_BYTES: usize = 64 << 20;
/// The size of one write.
const WRITE_BYTES: usize = 256 << 10;

/// The times of one copy.
pub struct CopyTimes {
    /// Into a new file in memory, like the RAM of a restored VM: the kernel must find its pages first.
    pub into_new_ns: f64,
    /// Into memory that was present.
    pub into_resident_ns: f64,
}

/// Copies `bytes` bytes. The first copy into new memory does not count: under a hypervisor, unused
/// memory comes from the host first, which an average restore does not pay for.
pub fn measure(bytes: u64) -> Result<CopyTimes, Error> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let part_bytes = bytes / threads as u64;
    let mut sources =
        vec![(0..SOURCE_BYTES).map(|at| (at >> 6) as u8 | 1).collect::<Vec<u8>>(); threads];
    let mut into_new_ns = 0.0;
    for _ in 0..2 {
        let file = memory_file()?;
        into_new_ns = timed(&mut sources, |number, source| {
            let first = number as u64 * part_bytes;
            let mut pieces = source.chunks(WRITE_BYTES).cycle();
            for at in (first..first + part_bytes).step_by(WRITE_BYTES) {
                file.write_all_at(pieces.next().unwrap_or_default(), at)?;
            }
            Ok(())
        })?;
    }
    let into_resident_ns = timed(&mut sources, |_, source| {
        let (from, to) = source.split_at_mut(SOURCE_BYTES / 2);
        for _ in 0..part_bytes.div_ceil(SOURCE_BYTES as u64 / 2) {
            to.copy_from_slice(std::hint::black_box(&*from));
        }
        Ok(())
    })?;
    Ok(CopyTimes { into_new_ns, into_resident_ns })
}

fn memory_file() -> Result<File, Error> {
    let fd = memfd_create("keyframe-bench", MemfdFlags::CLOEXEC);
    fd.map(File::from).map_err(|e| Error::io("make a file in memory")(e.into()))
}

/// Runs `copy` on all sources at once. Returns the time until all have ended, in ns.
fn timed(
    sources: &mut [Vec<u8>],
    copy: impl Fn(usize, &mut [u8]) -> std::io::Result<()> + Sync,
) -> Result<f64, Error> {
    let copy = &copy;
    let started = Instant::now();
    std::thread::scope(|scope| {
        let sources = sources.iter_mut().enumerate();
        let threads: Vec<_> =
            sources.map(|(number, source)| scope.spawn(move || copy(number, source))).collect();
        threads.into_iter().try_for_each(|thread| match thread.join() {
            Ok(copied) => copied.map_err(Error::io("copy memory")),
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    Ok(started.elapsed().as_nanos() as f64)
}
