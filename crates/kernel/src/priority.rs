//! Scheduling priorities of threads: raised for a pause, lowered for work that may wait.
//!
//! A raised thread has `SCHED_RR` priority 1, or nice -10 if real time is not permitted. Both need
//! `CAP_SYS_NICE` or a resource limit that allows it. A lowered thread has the ordinary policy and
//! nice +5. Threads that a raised thread starts do not inherit its policy.

use crate::cpu_affinity;
use rustix::process::{Pid, getpriority_process, setpriority_process};

/// Nice value of a raised thread without real-time priority.
const RAISED_NICE: i32 = -10;
/// Nice value of a lowered thread.
const LOWERED_NICE: i32 = 5;
/// Nice value of a thread that takes as little as there is.
const LEAST_NICE: i32 = 19;

/// Raises the calling thread above the guest's threads: to real-time scheduling, or else to a more
/// favourable nice value. Returns false if the kernel permits neither.
pub fn raise_current_thread() -> bool {
    raise_thread(None)
}

fn raise_thread(thread: Option<Pid>) -> bool {
    set_policy(thread, libc::SCHED_RR | libc::SCHED_RESET_ON_FORK, 1)
        || setpriority_process(thread, RAISED_NICE).is_ok()
}

/// Raises all present threads of this process, for a pause that waits for them.
pub fn raise_all_threads() {
    threads().for_each(|thread| {
        raise_thread(Some(thread));
    });
}

/// The present threads of this process, raised until it is dropped. Then each has its former priority
/// again.
pub struct RaisedThreads(Vec<FormerPriority>);

/// The scheduling of a thread.
struct FormerPriority {
    thread: Pid,
    policy: i32,
    nice: i32,
}

impl RaisedThreads {
    /// Raises all present threads of this process.
    pub fn raise() -> Self {
        let former = threads().filter_map(|thread| {
            let nice = getpriority_process(Some(thread)).ok()?;
            Some(FormerPriority { thread, policy: policy_of(thread)?, nice })
        });
        let former = Self(former.collect());
        raise_all_threads();
        former
    }
}

impl Drop for RaisedThreads {
    fn drop(&mut self) {
        for FormerPriority { thread, policy, nice } in self.0.drain(..) {
            let is_urgent = policy & !libc::SCHED_RESET_ON_FORK == libc::SCHED_RR;
            let _ = set_policy(Some(thread), policy, i32::from(is_urgent));
            let _ = setpriority_process(Some(thread), nice);
        }
    }
}

/// Returns the scheduling policy of `thread` with its flags; `None` if it has ended.
fn policy_of(thread: Pid) -> Option<i32> {
    let number = Pid::as_raw(Some(thread));
    // SAFETY: no memory is passed; a number of no thread is an error.
    let policy = unsafe { libc::syscall(libc::SYS_sched_getscheduler, number) };
    i32::try_from(policy).ok().filter(|policy| *policy >= 0)
}

/// Gives all threads of this process the ordinary priority.
pub fn restore_all_threads() {
    threads().for_each(|thread| {
        let _ = set_policy(Some(thread), libc::SCHED_OTHER, 0);
        let _ = setpriority_process(Some(thread), 0);
    });
}

fn threads() -> impl Iterator<Item = Pid> {
    cpu_affinity::threads_of("self").into_iter().filter_map(cpu_affinity::pid)
}

/// Lowers the calling thread below the guest's threads. If that fails, the thread stays as it is.
pub fn lower_current_thread() {
    let _ = set_policy(None, libc::SCHED_OTHER, 0);
    let _ = setpriority_process(None, LOWERED_NICE);
}

/// Sets the policy of thread `thread` to `SCHED_BATCH` (`batch` true) or to the ordinary policy. A
/// batch thread that wakes does not preempt the thread that runs; it waits for its turn. Returns
/// false if the kernel refuses.
pub fn set_batch_policy(thread: u32, batch: bool) -> bool {
    let policy = if batch { libc::SCHED_BATCH } else { libc::SCHED_OTHER };
    cpu_affinity::pid(thread).is_some_and(|thread| set_policy(Some(thread), policy, 0))
}

/// Gives thread `thread` the smallest share of its core (nice 19; `lowest` true), or an ordinary
/// share. Returns false if the kernel refuses.
pub fn set_lowest_share(thread: u32, lowest: bool) -> bool {
    let nice = if lowest { LEAST_NICE } else { 0 };
    cpu_affinity::pid(thread).is_some_and(|thread| setpriority_process(Some(thread), nice).is_ok())
}

/// Sets the scheduling policy of a thread; `None`: of the calling thread.
fn set_policy(thread: Option<Pid>, policy: i32, priority: i32) -> bool {
    let number = Pid::as_raw(thread);
    // The kernel's own call: musl has none behind its name. The kernel's `sched_param` is the
    // priority alone. SAFETY: a number of no thread is an error; the pointer is to a live `int`,
    // which is only read.
    unsafe { libc::syscall(libc::SYS_sched_setscheduler, number, policy, &raw const priority) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy_of(thread: Pid) -> i32 {
        super::policy_of(thread).unwrap_or(-1) & !libc::SCHED_RESET_ON_FORK
    }

    /// Whether each of `wanted` runs in real time.
    fn urgent(wanted: [Pid; 2]) -> [bool; 2] {
        wanted.map(|thread| policy_of(thread) == libc::SCHED_RR)
    }

    #[test]
    fn a_thread_waits_for_its_core_until_it_is_to_do_so_no_more() {
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let thread = Pid::from_raw(child.id().cast_signed()).unwrap();
        assert!(set_batch_policy(child.id(), true));
        assert_eq!(policy_of(thread), libc::SCHED_BATCH);
        assert!(set_batch_policy(child.id(), false));
        assert_eq!(policy_of(thread), libc::SCHED_OTHER);
        assert!(set_lowest_share(child.id(), true));
        assert_eq!(getpriority_process(Some(thread)).unwrap(), LEAST_NICE);
        assert_eq!(set_lowest_share(child.id(), false), getpriority_process(Some(thread)) == Ok(0));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(!set_batch_policy(child.id(), true), "it has ended");
        assert!(!set_batch_policy(0, true) && !set_batch_policy(u32::MAX, true));
        assert!(!set_lowest_share(0, true) && !set_lowest_share(u32::MAX, true));
    }

    #[test]
    fn all_threads_of_a_process_go_up_and_come_back() {
        let (told, hears) = std::sync::mpsc::channel();
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || {
            told.send(rustix::thread::gettid()).unwrap();
            receiver.recv()
        });
        let both = [rustix::thread::gettid(), hears.recv().unwrap()];
        assert_eq!(urgent(both), [false; 2]);
        raise_all_threads();
        let up = urgent(both);
        restore_all_threads();
        let down = urgent(both);
        drop(sender);
        let _ = other.join();
        assert_eq!(down, [false; 2]);
        let is_permitted = set_policy(None, libc::SCHED_RR | libc::SCHED_RESET_ON_FORK, 1);
        restore_all_threads();
        assert_eq!(up, [is_permitted; 2]);
        lower_current_thread();
        let raised = RaisedThreads::raise();
        let up = policy_of(rustix::thread::gettid()) == libc::SCHED_RR;
        drop(raised);
        assert_eq!(up, is_permitted);
        let this = Some(rustix::thread::gettid());
        assert_eq!(getpriority_process(this), Ok(LOWERED_NICE));
        assert_eq!(policy_of(rustix::thread::gettid()), libc::SCHED_OTHER);
    }
}
