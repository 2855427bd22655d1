//! The scheduling priority of the calling thread, or of all threads of this process: up for the
//! pause, down for work that may wait.
//!
//! Raised is `SCHED_RR` priority 1 (threads started meanwhile do not inherit it), or nice -10 where
//! real time is not permitted; both need `CAP_SYS_NICE` or a limit that allows it. Lowered is the
//! ordinary policy with nice +5.

use crate::cpu_affinity;
use rustix::process::{Pid, setpriority_process};

/// Nice value of a raised thread without real-time priority.
const RAISED_NICE: i32 = -10;
/// Nice value of a lowered thread.
const LOWERED_NICE: i32 = 5;
/// Nice value of a thread that takes as little as there is.
const LEAST_NICE: i32 = 19;

/// Raises this thread over the guest's; false where nothing of it is permitted.
pub fn raise_current_thread() -> bool {
    raise_thread(None)
}

fn raise_thread(thread: Option<Pid>) -> bool {
    set_policy(thread, libc::SCHED_RR | libc::SCHED_RESET_ON_FORK, 1)
        || setpriority_process(thread, RAISED_NICE).is_ok()
}

/// Raises every thread that this process has now: for a pause that waits for it.
pub fn raise_all_threads() {
    threads().for_each(|thread| {
        raise_thread(Some(thread));
    });
}

/// Every thread of this process is an ordinary one again.
pub fn restore_all_threads() {
    threads().for_each(|thread| {
        let _ = set_policy(Some(thread), libc::SCHED_OTHER, 0);
        let _ = setpriority_process(Some(thread), 0);
    });
}

fn threads() -> impl Iterator<Item = Pid> {
    cpu_affinity::threads_of("self").into_iter().filter_map(cpu_affinity::pid)
}

/// Lowers this thread under the guest's. Never an error: what cannot be lowered stays as it is.
pub fn lower_current_thread() {
    let _ = set_policy(None, libc::SCHED_OTHER, 0);
    let _ = setpriority_process(None, LOWERED_NICE);
}

/// Has thread `thread` of an ordinary process take no other thread's core when it is woken
/// (`SCHED_BATCH`), but wait until that one sleeps or its turn is over; or, `waits` false, as it
/// was. False where that cannot be had.
pub fn set_batch_policy(thread: u32, batch: bool) -> bool {
    let policy = if batch { libc::SCHED_BATCH } else { libc::SCHED_OTHER };
    cpu_affinity::pid(thread).is_some_and(|thread| set_policy(Some(thread), policy, 0))
}

/// Leaves thread `thread` as little of a core that others want as there is (nice 19); or, `little`
/// false, an ordinary share, where that is permitted.
pub fn set_lowest_share(thread: u32, lowest: bool) -> bool {
    let nice = if lowest { LEAST_NICE } else { 0 };
    cpu_affinity::pid(thread).is_some_and(|thread| setpriority_process(Some(thread), nice).is_ok())
}

/// Sets the policy of a thread; of the calling one without a number.
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
        // SAFETY: no memory is passed; a number of no thread is an error, which is no policy.
        let policy =
            unsafe { libc::syscall(libc::SYS_sched_getscheduler, Pid::as_raw(Some(thread))) };
        policy as i32 & !libc::SCHED_RESET_ON_FORK
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
        assert_eq!(rustix::process::getpriority_process(Some(thread)).unwrap(), LEAST_NICE);
        assert_eq!(
            set_lowest_share(child.id(), false),
            rustix::process::getpriority_process(Some(thread)) == Ok(0)
        );
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
    }
}
