//! What a process takes: CPU time, memory, disk, and the one core that it may use.

use crate::{Error, Result};
use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Bytes of a block in `stat`.
const STAT_BLOCK_BYTES: u64 = 512;
/// Directories within directories.
const DEPTH_MAX: usize = 32;

/// The cores that this process could use when it began, and the one that it is bound to. The
/// default is bound to none.
#[derive(Debug, Default)]
pub struct Cores(Option<[CpuSet; 2]>);

impl Cores {
    /// Binds this process, and all that it starts, to one core.
    pub fn bind_to(cpu: usize) -> Result<Self> {
        let mut one = CpuSet::new();
        if cpu >= CpuSet::MAX_CPU {
            return Err(Error::failed("choose a core", format!("there is no core {cpu}")));
        }
        one.set(cpu);
        let all = sched_getaffinity(None).map_err(|e| Error::io("ask for cores")(e.into()))?;
        let this = Self(Some([all, one]));
        this.use_one()?;
        Ok(this)
    }

    /// From here on this thread, and all that it starts, may use all of them.
    pub fn use_all(&self) -> Result<()> {
        self.set(0)
    }

    /// And only the one again.
    pub fn use_one(&self) -> Result<()> {
        self.set(1)
    }

    fn set(&self, which: usize) -> Result<()> {
        let Some(set) = self.0.as_ref().and_then(|sets| sets.get(which)) else { return Ok(()) };
        sched_setaffinity(None, set).map_err(|e| Error::io("choose cores")(e.into()))
    }
}

/// Nobody would take away what this process leaves, or read what it says.
pub fn end_with_parent() -> Result<()> {
    let failed = |e: rustix::io::Errno| Error::io("tie this process to its parent")(e.into());
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(failed)
}

/// CPU time of all threads of this process.
pub fn cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Memory of this process from here on.
#[derive(Debug)]
pub struct Memory {
    before_bytes: u64,
}

impl Memory {
    /// Forgets the peak before.
    pub fn watch() -> Result<Self> {
        let clear = "/proc/self/clear_refs";
        fs::write(clear, "5").map_err(Error::io(format!("write {clear}")))?;
        Ok(Self { before_bytes: status_bytes("VmRSS:")? })
    }

    /// The most that was resident since, beyond what was at the beginning. Mapped pages of files
    /// count.
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

/// What the files below `dir` take on disk: holes do not count.
pub fn stored_bytes(dir: &Path) -> Result<u64> {
    fn walk(dir: &Path, depth: usize) -> std::io::Result<u64> {
        let mut sum = 0;
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            // Files come and go where a store tidies up in the background.
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
    fn the_peak_is_what_was_touched_since() {
        let peak_bytes = || {
            let memory = Memory::watch().unwrap();
            let touched = std::hint::black_box(vec![1u8; 64 << 20]);
            drop(touched);
            memory.peak_bytes().unwrap()
        };
        // What the tests beside this one touch and give back counts too, now and then.
        let found: Vec<u64> = std::iter::repeat_with(peak_bytes).take(20).collect();
        assert!(found.iter().any(|bytes| (60 << 20..128 << 20).contains(bytes)), "{found:?}");
    }
}
