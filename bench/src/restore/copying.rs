//! What memory allows: as many bytes as a checkpoint holds, copied on all cores.

use crate::Error;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Instant;

/// What a thread copies over and over: more than its cache holds, and little, so that the copies
/// and not the source decide which of the host's memory is used.
const SOURCE_BYTES: usize = 64 << 20;
/// Bytes that are written at once.
const WRITE_BYTES: usize = 256 << 10;

/// How long one copy took.
pub struct Copied {
    /// Into a new file in memory, as the RAM of a restored VM is: its pages have to be found first.
    pub into_new_ns: f64,
    /// Into memory that was there.
    pub into_resident_ns: f64,
}

/// Copies `bytes` bytes. The first copy into new memory does not count: under a hypervisor, memory
/// that was never used has to be had from the host, which is not what a restore among others pays.
pub fn measure(bytes: u64) -> Result<Copied, Error> {
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
    Ok(Copied { into_new_ns, into_resident_ns })
}

fn memory_file() -> Result<File, Error> {
    let fd = memfd_create("keyframe-bench", MemfdFlags::CLOEXEC);
    fd.map(File::from).map_err(|e| Error::io("make a file in memory")(e.into()))
}

/// Runs `copy` on each source at once; how long all took.
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
