//! The resources of a process: CPU time, memory, disk space, and cores.

use crate::{Error, Result};
use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The size of a block in `stat`, in bytes.
const STAT_BLOCK_BYTES: u64 = 512;
/// The largest depth of directories.
const DEPTH_MAX: usize = 32;

/// The cores that this process may use. The default has no effect.
#[derive(Debug, Default)]
pub struct Cores(Option<CoreSets>);

#[derive(Debug)]
struct CoreSets {
    /// The cores of the process at its beginning.
    all: CpuSet,
    /// The core to which it is bound.
    one: CpuSet,
}

impl Cores {
    /// Binds this process, and the processes that it starts, to one core.
    pub fn bind_to(cpu: usize) -> Result<Self> {
        let mut one = CpuSet::new();
        if cpu >= CpuSet::MAX_CPU {
            return Err(Error::failed("choose a core", format!("there is no core {cpu}")));
        }
        one.set(cpu);
        let all = sched_getaffinity(None).map_err(|e| Error::io("ask for cores")(e.into()))?;
        let this = Self(Some(CoreSets { all, one }));
        this.use_one()?;
        Ok(this)
    }

    /// Lets this thread, and the threads that it starts, use all cores.
    pub fn use_all(&self) -> Result<()> {
        self.select(|sets| &sets.all)
    }

    /// Binds this thread, and the threads that it starts, to one core.
    pub fn use_one(&self) -> Result<()> {
        self.select(|sets| &sets.one)
    }

    fn select(&self, set: impl Fn(&CoreSets) -> &CpuSet) -> Result<()> {
        let Some(set) = self.0.as_ref().map(set) else { return Ok(()) };
        sched_setaffinity(None, set).map_err(|e| Error::io("choose cores")(e.into()))
    }
}

/// Ends this process with its parent, which removes its files and reads its result.
pub fn end_with_parent() -> Result<()> {
    let failed = |e: rustix::io::Errno| Error::io("tie this process to its parent")(e.into());
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(failed)
}

/// Returns the CPU time of all threads of this process.
pub fn cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The memory of this process since a point in time.
#[derive(Debug)]
pub struct MemoryPeak {
    before_bytes: u64,
}

impl MemoryPeak {
    /// Resets the kernel's record of the peak.
    pub fn watch() -> Result<Self> {
        let clear = "/proc/self/clear_refs";
        fs::write(clear, "5").map_err(Error::io(format!("write {clear}")))?;
        Ok(Self { before_bytes: status_bytes("VmRSS:")? })
    }

    /// Returns the largest resident memory since then, minus that at the beginning. It includes mapped
    /// pages of files.
    pub fn peak_bytes(&self) -> Result<u64> {
        Ok(status_bytes("VmHWM:")?.saturating_sub(self.before_bytes))
    }
}

fn status_bytes(key: &str) -> Result<u64> {
    let path = "/proc/self/status";
    let text = fs::read_to_string(path).map_err(Error::io(format!("read {path}")))?;
    let kib = text
        .lines()
        .find_map(|line| line.strip_prefix(key)?.trim().strip_suffix("kB")?.trim().parse().ok());
    kib.map(|kib: u64| kib * 1024)
        .ok_or_else(|| Error::failed(format!("read {path}"), format!("no {key}")))
}

/// Returns the disk space of the files in `dir` and its subdirectories, without holes.
pub fn stored_bytes(dir: &Path) -> Result<u64> {
    fn walk(dir: &Path, depth: usize) -> std::io::Result<u64> {
        let mut sum = 0;
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            // A store that works in the background may remove files meanwhile.
            sum += match entry.metadata() {
                Ok(meta) if meta.is_dir() && depth < DEPTH_MAX => walk(&entry.path(), depth + 1)?,
                Ok(meta) => meta.blocks() * STAT_BLOCK_BYTES,
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => 0,
                Err(e) => return Err(e),
            };
        }
        Ok(sum)
    }
    walk(dir, 0).map_err(Error::file("sum up the files below", dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_the_touched_memory() {
        let peak_bytes = || {
            let memory = MemoryPeak::watch().unwrap();
            let touched = std::hint::black_box(vec![1u8; 64 << 20]);
            drop(touched);
            memory.peak_bytes().unwrap()
        };
        // Memory of concurrent tests may count too.
        let found: Vec<u64> = std::iter::repeat_with(peak_bytes).take(20).collect();
        assert!(found.iter().any(|bytes| (60 << 20..128 << 20).contains(bytes)), "{found:?}");
    }
}
