//! Measures the time of a guest without the time that other processes of the machine took from it.
//!
//! ```text
//!   wall   ────────────────────────────────────────────────────
//!   vCPU   runs  faults  paused for a checkpoint  waits for a core   runs
//!   time   ─────────────────────────────────────                  ──────
//!   CPU    of all threads of QEMU
//! ```
//!
//! The time is the wall time without the waiting of the vCPU's thread for a core: a core that another
//! process has is no cost of a recording. The kernel counts the waiting of each thread in
//! `/proc/PID/task/TID/schedstat`. A thread of this module reads it while QEMU runs, because the file
//! disappears with QEMU.

use keyframe_locks::IgnorePoison;
use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::read_to_string;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The time between two readings.
const EVERY: Duration = Duration::from_millis(20);
/// A QEMU that lives less long only printed its version.
const VERSION_QUERY_MAX: Duration = Duration::from_millis(500);
/// How many generations of descendants are searched for QEMU.
const DEPTH_MAX: u32 = 4;

/// The time and CPU time of a QEMU in a time span.
#[derive(Clone, Copy, Debug, Default)]
pub struct TimeSpent {
    /// Time by the host's clock, without waiting for a core.
    pub time_ns: f64,
    /// CPU time of all its threads.
    pub cpu_ns: f64,
}

/// The counters of a QEMU at one instant.
#[derive(Clone, Copy, Debug)]
struct ClockReading {
    at: Instant,
    cpu_ns: f64,
    /// The time that the vCPU's thread has waited for a core.
    waited_ns: f64,
}

/// Reads the counters of the first QEMU among the descendants of a process.
pub struct VcpuClock {
    ends: Arc<AtomicBool>,
    seen: Arc<Mutex<Vec<ClockReading>>>,
    thread: Option<JoinHandle<()>>,
}

impl VcpuClock {
    /// Begins to read. `pid` is QEMU, or will have QEMU among its descendants.
    pub fn watch(pid: u32) -> Self {
        let (ends, seen) =
            (Arc::<AtomicBool>::default(), Arc::<Mutex<Vec<ClockReading>>>::default());
        let (over, all) = (Arc::clone(&ends), Arc::clone(&seen));
        let thread = std::thread::spawn(move || {
            let mut qemu = None;
            let mut threads = HashMap::new();
            while !over.load(Ordering::Relaxed) {
                qemu = qemu.or_else(|| find_qemu(pid, DEPTH_MAX));
                let now = qemu.and_then(|qemu| read_clock(qemu, &mut threads));
                let mut seen = all.lock().ignore_poison();
                match now {
                    Some(now) => seen.push(now),
                    None if is_version_query(&seen) => {
                        // That QEMU printed its version only; the one that runs the guest follows.
                        seen.clear();
                        threads.clear();
                        qemu = None;
                    }
                    None => {}
                }
                drop(seen);
                std::thread::sleep(EVERY);
            }
        });
        Self { ends, seen, thread: Some(thread) }
    }

    /// Returns the time spent between two instants; `None` if QEMU was not read then.
    pub fn between(&self, from: Instant, to: Instant) -> Option<TimeSpent> {
        time_spent(&self.seen.lock().ignore_poison(), from, to)
    }

    /// Returns the time of the last reading.
    pub fn last(&self) -> Option<Instant> {
        self.seen.lock().ignore_poison().last().map(|seen| seen.at)
    }

    /// Returns the time spent from the first to the last reading.
    pub fn life(&self) -> Option<TimeSpent> {
        let seen = self.seen.lock().ignore_poison();
        time_spent(&seen, seen.first()?.at, seen.last()?.at)
    }
}

impl Drop for VcpuClock {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Returns whether the readings cover too short a time for a guest.
fn is_version_query(seen: &[ClockReading]) -> bool {
    match seen {
        [first, .., last] => last.at.duration_since(first.at) < VERSION_QUERY_MAX,
        _ => true,
    }
}

fn time_spent(seen: &[ClockReading], from: Instant, to: Instant) -> Option<TimeSpent> {
    let (begin, end) = (at(seen, from)?, at(seen, to)?);
    let wall_ns = to.checked_duration_since(from)?.as_nanos() as f64;
    let waited_ns = (end.waited_ns - begin.waited_ns).max(0.0);
    Some(TimeSpent {
        time_ns: (wall_ns - waited_ns).max(0.0),
        cpu_ns: (end.cpu_ns - begin.cpu_ns).max(0.0),
    })
}

/// Returns the reading at an instant, interpolated between its neighbours.
fn at(seen: &[ClockReading], when: Instant) -> Option<ClockReading> {
    let next = seen.partition_point(|one| one.at < when);
    let (before, after) = (seen.get(next.saturating_sub(1))?, seen.get(next).or(seen.last())?);
    let length = after.at.saturating_duration_since(before.at).as_secs_f64();
    let part = if length > 0.0 {
        when.saturating_duration_since(before.at).as_secs_f64() / length
    } else {
        0.0
    };
    let mix = |a: f64, b: f64| a + (b - a) * part.min(1.0);
    Some(ClockReading {
        at: when,
        cpu_ns: mix(before.cpu_ns, after.cpu_ns),
        waited_ns: mix(before.waited_ns, after.waited_ns),
    })
}

/// Finds the first QEMU among `pid` and its descendants.
fn find_qemu(pid: u32, depth: u32) -> Option<u32> {
    let name = read_to_string(format!("/proc/{pid}/comm")).ok()?;
    if name.starts_with("qemu-system") {
        return Some(pid);
    }
    let below = depth.checked_sub(1)?;
    let mut children: Vec<u32> = std::fs::read_dir(format!("/proc/{pid}/task"))
        .ok()?
        .flatten()
        .filter_map(|task| read_to_string(task.path().join("children")).ok())
        .flat_map(|list| {
            list.split_whitespace().filter_map(|word| word.parse().ok()).collect::<Vec<_>>()
        })
        .collect();
    children.sort_unstable();
    children.into_iter().find_map(|child| find_qemu(child, below))
}

/// Reads the counters of process `pid`. `threads` keeps the counters of threads that have ended.
fn read_clock(pid: u32, threads: &mut HashMap<OsString, ThreadTimes>) -> Option<ClockReading> {
    let mut lives = false;
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten() {
        if let Some(times) = times(&task.path()) {
            threads.insert(task.file_name(), times);
            lives = true;
        }
    }
    if !lives || is_zombie(pid) {
        return None;
    }
    // The thread that runs the guest is the one that runs most.
    let vcpu = threads.values().max_by(|a, b| a.ran_ns.total_cmp(&b.ran_ns))?;
    Some(ClockReading {
        at: Instant::now(),
        cpu_ns: threads.values().map(|times| times.ran_ns).sum(),
        waited_ns: vcpu.waited_ns,
    })
}

/// Returns whether the process has ended and waits for its parent.
fn is_zombie(pid: u32) -> bool {
    let stat = read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')')
        .next()
        .is_none_or(|rest| rest.trim_start().starts_with(['Z', 'X']) || rest.is_empty())
}

/// The counters of one thread.
#[derive(Clone, Copy, Debug)]
struct ThreadTimes {
    /// The time on a core.
    ran_ns: f64,
    /// The time waiting for a core.
    waited_ns: f64,
}

fn times(task: &Path) -> Option<ThreadTimes> {
    let text = read_to_string(task.join("schedstat")).ok()?;
    let mut numbers = text.split_whitespace().map(|word| word.parse::<f64>().ok());
    Some(ThreadTimes { ran_ns: numbers.next()??, waited_ns: numbers.next()?? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_for_a_core_does_not_count() {
        let begin = Instant::now();
        let ms = Duration::from_millis;
        let seen: Vec<ClockReading> = [(0, 0.0, 0.0), (100, 60e6, 40e6), (200, 160e6, 40e6)]
            .map(|(at, cpu_ns, waited_ns)| ClockReading { at: begin + ms(at), cpu_ns, waited_ns })
            .to_vec();
        let all = time_spent(&seen, begin, begin + ms(200)).unwrap();
        assert!((all.time_ns - 160e6).abs() < 1.0 && (all.cpu_ns - 160e6).abs() < 1.0, "{all:?}");
        let middle = time_spent(&seen, begin + ms(50), begin + ms(150)).unwrap();
        assert!(
            (middle.time_ns - 80e6).abs() < 1.0 && (middle.cpu_ns - 80e6).abs() < 1.0,
            "{middle:?}"
        );
        assert!(time_spent(&[], begin, begin).is_none());
    }

    #[test]
    fn this_process_is_read_and_is_no_qemu() {
        let pid = std::process::id();
        assert!(read_clock(pid, &mut HashMap::new()).is_some_and(|seen| seen.cpu_ns > 0.0));
        assert!(find_qemu(pid, 0).is_none());
    }
}
