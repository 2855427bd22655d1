//! The scheduling priority of the calling thread, or of all threads of this process: up for the pause, down for work that may wait.
//!
//! Raised is `SCHED_RR` priority 1 (threads started meanwhile do not inherit it), or nice -10 where real time is not
//! permitted; both need `CAP_SYS_NICE` or a limit that allows it. Lowered is the ordinary policy with nice +5.

use rustix::process::{Pid, setpriority_process};

/// Nice value of a raised thread without real-time priority.
const RAISED_NICE: i32 = -10;
/// Nice value of a lowered thread.
const LOWERED_NICE: i32 = 5;

/// Raises this thread over the guest's; false where nothing of it is permitted.
pub fn raise() -> bool {
    raise_thread(None)
}

fn raise_thread(thread: Option<Pid>) -> bool {
    set_policy(thread, libc::SCHED_RR | libc::SCHED_RESET_ON_FORK, 1)
        || setpriority_process(thread, RAISED_NICE).is_ok()
}

/// Raises every thread that this process has now: for a pause that waits for it.
pub fn raise_all() {
    threads().for_each(|thread| {
        raise_thread(Some(thread));
    });
}

/// Every thread of this process is an ordinary one again.
pub fn restore_all() {
    threads().for_each(|thread| {
        let _ = set_policy(Some(thread), libc::SCHED_OTHER, 0);
        let _ = setpriority_process(Some(thread), 0);
    });
}

fn threads() -> impl Iterator<Item = Pid> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    tasks.filter_map(|task| Pid::from_raw(task.file_name().to_str()?.parse().ok()?))
}

/// Lowers this thread under the guest's. Never an error: what cannot be lowered stays as it is.
pub fn lower() {
    let _ = set_policy(None, libc::SCHED_OTHER, 0);
    let _ = setpriority_process(None, LOWERED_NICE);
}

/// Sets the policy of a thread; of the calling one without a number.
fn set_policy(thread: Option<Pid>, policy: i32, priority: i32) -> bool {
    let parameters = libc::sched_param { sched_priority: priority };
    let number = Pid::as_raw(thread);
    // SAFETY: a number of no thread is an error; the pointer is to a live `sched_param`, which is only read.
    unsafe { libc::sched_setscheduler(number, policy, &raw const parameters) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_threads_of_a_process_go_up_and_come_back() {
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || receiver.recv());
        let policies = || {
            // SAFETY: a number of no thread is an error, which is a policy that nothing below expects.
            threads()
                .map(|t| unsafe { libc::sched_getscheduler(t.as_raw_nonzero().get()) })
                .collect::<Vec<_>>()
        };
        raise_all();
        let up = policies();
        restore_all();
        let down = policies();
        drop(sender);
        let _ = other.join();
        assert!(up.len() >= 2 && down.iter().all(|policy| *policy == libc::SCHED_OTHER), "{up:?}, {down:?}");
        if raise_thread(None) {
            restore_all();
        } else {
            println!("skipped: priorities may not be raised here");
        }
    }
}
