//! CPU affinity of threads, and cores that a process claims for itself.
//!
//! A claim is a lock on the core's directory in sysfs. All processes that claim cores see it, it
//! does not keep other processes off the core, and the kernel drops it when its owner ends.

use rustix::io::Errno;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::BTreeSet;
use std::fmt::Display;
use std::fs::File;
use std::path::Path;

/// The most listings of the threads of a process whose threads keep ending.
const LISTINGS_MAX: u32 = 10;

/// A claim on one core. Dropping it ends the claim.
#[derive(Debug)]
pub struct CoreClaim {
    core: usize,
    _lock: File,
}

impl CoreClaim {
    /// Claims `core`. Returns `None` if another process has claimed it, or if there is no such
    /// core.
    pub fn take(core: usize) -> Option<Self> {
        let lock = locked(Path::new(&format!("/sys/devices/system/cpu/cpu{core}")))?;
        Some(Self { core, _lock: lock })
    }

    /// Returns the number of the core.
    pub fn core(&self) -> usize {
        self.core
    }
}

/// Locks a directory. `None` if another process holds the lock.
fn locked(directory: &Path) -> Option<File> {
    let lock = File::open(directory).ok()?;
    lock.try_lock().ok()?;
    Some(lock)
}

/// Returns the cores that thread `thread` may run on, the core of its last run first. Returns an
/// empty list if there is no such thread.
pub fn cores_of_thread(thread: u32) -> Vec<usize> {
    let Some(allowed) = pid(thread).and_then(|thread| sched_getaffinity(Some(thread)).ok()) else {
        return Vec::new();
    };
    let last = last(thread);
    let others = (0..CpuSet::MAX_CPU).filter(|core| Some(*core) != last);
    last.into_iter().chain(others).filter(|core| allowed.is_set(*core)).collect()
}

/// Binds all present threads of process `process`, and the threads that they will start, to `core`.
/// Returns false if a living thread cannot be bound.
pub fn bind_process(process: u32, core: usize) -> bool {
    let threads = threads_of(process);
    let is_done = |thread| matches!(bound(Some(thread), core), Ok(()) | Err(Errno::SRCH));
    !threads.is_empty() && threads.into_iter().filter_map(pid).all(is_done)
}

/// Lets all present threads of process `process` run on all cores that the main thread of this
/// process may use.
pub fn unbind_process(process: u32) {
    let Ok(allowed) = sched_getaffinity(pid(std::process::id())) else { return };
    for thread in threads_of(process).into_iter().filter_map(pid) {
        let _ = sched_setaffinity(Some(thread), &allowed);
    }
}

/// Binds the calling thread, and the threads that it will start, to `core`. Returns false if the
/// kernel refuses.
pub fn bind_current_thread(core: usize) -> bool {
    bound(None, core).is_ok()
}

/// Lets the calling thread run on all cores that the main thread of its process may use. A thread
/// inherits the binding of the thread that started it.
pub fn unbind_current_thread() {
    if let Ok(allowed) = sched_getaffinity(pid(std::process::id())) {
        let _ = sched_setaffinity(None, &allowed);
    }
}

/// Binds a thread, and the threads that it starts, to `core`; `None`: the calling thread.
fn bound(thread: Option<Pid>, core: usize) -> rustix::io::Result<()> {
    if core >= CpuSet::MAX_CPU {
        return Err(Errno::INVAL);
    }
    let mut only = CpuSet::new();
    only.set(core);
    sched_setaffinity(thread, &only)
}

/// Returns the present threads of process `process` (a pid, or `self`), or an empty list if there
/// is no such process.
///
/// If a thread ends during a listing, the kernel can leave out others. So the function lists until
/// a listing has as many living threads as the kernel counts afterwards.
pub fn threads_of(process: impl Display) -> Vec<u32> {
    let folder = format!("/proc/{process}/task");
    let list = || -> Vec<u32> {
        let tasks = std::fs::read_dir(&folder).into_iter().flatten().flatten();
        tasks.filter_map(|task| task.file_name().to_str()?.parse().ok()).collect()
    };
    let mut threads = BTreeSet::new();
    for _ in 0..LISTINGS_MAX {
        let listed = list();
        // Counted before the look at each, so that a thread that ends in between leads to one more
        // listing.
        let count = count_of_threads(&process);
        let lives = |thread: &&u32| Path::new(&format!("{folder}/{thread}")).exists();
        let is_complete = count.is_none_or(|count| listed.iter().filter(lives).count() >= count);
        threads.extend(listed);
        if is_complete {
            break;
        }
    }
    threads.into_iter().collect()
}

/// Returns the number of threads of process `process` by its `status`; `None` if there is no such
/// process.
fn count_of_threads(process: &impl Display) -> Option<usize> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Threads:"))?.trim().parse().ok()
}

/// A thread's number as the calls take it.
pub(crate) fn pid(thread: u32) -> Option<Pid> {
    i32::try_from(thread).ok().and_then(Pid::from_raw)
}

/// Returns the core on which a thread last ran: the 39th field of its `stat`, the 37th after its
/// name.
fn last(thread: u32) -> Option<usize> {
    let text = std::fs::read_to_string(format!("/proc/{thread}/stat")).ok()?;
    text.rsplit_once(')')?.1.split_whitespace().nth(36)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};
    use std::time::Duration;

    #[test]
    fn a_core_is_claimed_once_and_again_once_it_is_free() {
        // A directory in place of a core's, which others on this machine may claim.
        let dir = tempfile::tempdir().unwrap();
        let first = locked(dir.path());
        assert!(first.is_some() && locked(dir.path()).is_none());
        drop(first);
        assert!(locked(dir.path()).is_some());
        for core in cores_of_thread(std::process::id()) {
            let claim = CoreClaim::take(core);
            assert!(
                claim.is_none_or(|claim| claim.core() == core && CoreClaim::take(core).is_none())
            );
        }
        assert!(CoreClaim::take(usize::MAX).is_none());
    }

    /// A single listing misses one in about 500 of these.
    #[test]
    fn no_thread_is_left_out_while_others_end() {
        for round in 0..1000 {
            let ends = |number: u64| move || std::thread::sleep(Duration::from_micros(20 * number));
            let older: Vec<_> = (0..4).map(|number| std::thread::spawn(ends(number))).collect();
            let newer = std::thread::spawn(|| {
                let me = rustix::thread::gettid().as_raw_pid().cast_unsigned();
                (0..10).all(|_| threads_of("self").contains(&me))
            });
            for older in older {
                older.join().unwrap();
            }
            assert!(newer.join().unwrap(), "round {round}");
        }
    }

    #[test]
    fn all_threads_of_a_process_are_bound() {
        let mut child =
            Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let cores = cores_of_thread(child.id());
        let wanted = cores.last().copied().unwrap();
        assert!(bind_process(child.id(), wanted));
        assert_eq!(cores_of_thread(child.id()), [wanted]);
        assert!(!bind_process(child.id(), CpuSet::MAX_CPU));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(
            !bind_process(child.id(), wanted) && cores_of_thread(child.id()).is_empty(),
            "it has ended"
        );
    }
}
