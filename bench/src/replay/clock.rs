//! How long a guest took for something, without what the machine's other work took from it.
//!
//! ```text
//!   wall   ──────────────────────────────────────────────
//!   vCPU   runs  faults  stands for a checkpoint  waits for a core   runs
//!   time   ──────────────────────────────────────                 ───────     wall less what the vCPU's thread waited for a core
//!   CPU    of all of QEMU's threads
//! ```
//!
//! Time is what a recording costs its guest; that another process had the core is not its cost, and
//! nothing on a machine that has a core for each. The kernel tells it of each thread
//! (`/proc/PID/task/TID/schedstat`); it is looked at as QEMU runs, for afterwards it is gone.

use keyframe_locks::IgnorePoison;
use std::collections::HashMap;
use std::fs::read_to_string;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between two looks.
const EVERY: Duration = Duration::from_millis(20);
/// QEMU only says its version in less.
const GLIMPSE_MAX: Duration = Duration::from_millis(500);
/// Generations below the process that was started in which QEMU is looked for.
const DEPTH_MAX: u32 = 4;

/// What a stretch of a QEMU's life took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spent {
    /// By the host's clock, without waiting for a core.
    pub time_ns: f64,
    /// Of all its threads.
    pub cpu_ns: f64,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    at: Instant,
    cpu_ns: f64,
    /// What the vCPU's thread has waited for a core.
    waited_ns: f64,
}

/// Watches the first QEMU below a process that runs a guest.
pub struct Clock {
    ends: Arc<AtomicBool>,
    seen: Arc<Mutex<Vec<Seen>>>,
    thread: Option<JoinHandle<()>>,
}

impl Clock {
    /// Begins: `pid` is QEMU, or has it among its descendants sooner or later.
    pub fn watch(pid: u32) -> Self {
        let (ends, seen) = (Arc::<AtomicBool>::default(), Arc::<Mutex<Vec<Seen>>>::default());
        let (over, all) = (Arc::clone(&ends), Arc::clone(&seen));
        let thread = std::thread::spawn(move || {
            let mut qemu = None;
            let mut threads = HashMap::new();
            while !over.load(Ordering::Relaxed) {
                qemu = qemu.or_else(|| find(pid, DEPTH_MAX));
                let now = qemu.and_then(|qemu| look(qemu, &mut threads));
                let mut seen = all.lock().ignore_poison();
                match now {
                    Some(now) => seen.push(now),
                    None if is_glimpse(&seen) => {
                        // It was asked for its version and ended: the one that is meant comes
                        // later.
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

    /// What it took between two instants; none where it was not seen then.
    pub fn between(&self, from: Instant, to: Instant) -> Option<Spent> {
        spent(&self.seen.lock().ignore_poison(), from, to)
    }

    /// When it was seen last.
    pub fn last(&self) -> Option<Instant> {
        self.seen.lock().ignore_poison().last().map(|seen| seen.at)
    }

    /// What it took in all.
    pub fn life(&self) -> Option<Spent> {
        let seen = self.seen.lock().ignore_poison();
        spent(&seen, seen.first()?.at, seen.last()?.at)
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Whether what was seen is too short to be a guest's life.
fn is_glimpse(seen: &[Seen]) -> bool {
    match seen {
        [first, .., last] => last.at.duration_since(first.at) < GLIMPSE_MAX,
        _ => true,
    }
}

fn spent(seen: &[Seen], from: Instant, to: Instant) -> Option<Spent> {
    let (begin, end) = (at(seen, from)?, at(seen, to)?);
    let wall_ns = to.checked_duration_since(from)?.as_nanos() as f64;
    let waited_ns = (end.waited_ns - begin.waited_ns).max(0.0);
    Some(Spent {
        time_ns: (wall_ns - waited_ns).max(0.0),
        cpu_ns: (end.cpu_ns - begin.cpu_ns).max(0.0),
    })
}

/// What would have been seen at an instant: in between, as if it ran evenly.
fn at(seen: &[Seen], when: Instant) -> Option<Seen> {
    let next = seen.partition_point(|one| one.at < when);
    let (before, after) = (seen.get(next.saturating_sub(1))?, seen.get(next).or(seen.last())?);
    let length = after.at.saturating_duration_since(before.at).as_secs_f64();
    let part = if length > 0.0 {
        when.saturating_duration_since(before.at).as_secs_f64() / length
    } else {
        0.0
    };
    let mix = |a: f64, b: f64| a + (b - a) * part.min(1.0);
    Some(Seen {
        at: when,
        cpu_ns: mix(before.cpu_ns, after.cpu_ns),
        waited_ns: mix(before.waited_ns, after.waited_ns),
    })
}

/// The first QEMU that is `pid` or below it.
fn find(pid: u32, depth: u32) -> Option<u32> {
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
    children.into_iter().find_map(|child| find(child, below))
}

/// Time on a core, and waiting for one, of each thread that was ever seen: those of one that has
/// ended still count.
fn look(pid: u32, threads: &mut HashMap<std::ffi::OsString, (f64, f64)>) -> Option<Seen> {
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
    let vcpu = threads.values().max_by(|a, b| a.0.total_cmp(&b.0))?;
    Some(Seen {
        at: Instant::now(),
        cpu_ns: threads.values().map(|(ran, _)| ran).sum(),
        waited_ns: vcpu.1,
    })
}

/// It has ended, and nobody has taken notice yet.
fn is_zombie(pid: u32) -> bool {
    let stat = read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')')
        .next()
        .is_none_or(|rest| rest.trim_start().starts_with(['Z', 'X']) || rest.is_empty())
}

fn times(task: &Path) -> Option<(f64, f64)> {
    let text = read_to_string(task.join("schedstat")).ok()?;
    let mut numbers = text.split_whitespace().map(|word| word.parse::<f64>().ok());
    Some((numbers.next()??, numbers.next()??))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_for_a_core_is_nobodys_cost() {
        let begin = Instant::now();
        let ms = Duration::from_millis;
        let seen: Vec<Seen> = [(0, 0.0, 0.0), (100, 60e6, 40e6), (200, 160e6, 40e6)]
            .map(|(at, cpu_ns, waited_ns)| Seen { at: begin + ms(at), cpu_ns, waited_ns })
            .to_vec();
        let all = spent(&seen, begin, begin + ms(200)).unwrap();
        assert!((all.time_ns - 160e6).abs() < 1.0 && (all.cpu_ns - 160e6).abs() < 1.0, "{all:?}");
        let middle = spent(&seen, begin + ms(50), begin + ms(150)).unwrap();
        assert!(
            (middle.time_ns - 80e6).abs() < 1.0 && (middle.cpu_ns - 80e6).abs() < 1.0,
            "{middle:?}"
        );
        assert!(spent(&[], begin, begin).is_none());
    }

    #[test]
    fn this_process_is_seen_and_is_no_qemu() {
        let pid = std::process::id();
        assert!(look(pid, &mut HashMap::new()).is_some_and(|seen| seen.cpu_ns > 0.0));
        assert!(find(pid, 0).is_none());
    }
}
