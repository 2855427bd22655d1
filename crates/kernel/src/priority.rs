//! The scheduling priority of the calling thread: up for the pause, down for work that may wait.
//!
//! Raised is `SCHED_RR` priority 1 (threads started meanwhile do not inherit it), or nice -10 where real time is not
//! permitted; both need `CAP_SYS_NICE` or a limit that allows it. Lowered is the ordinary policy with nice +5.

use rustix::process::setpriority_process;

/// Nice value of a raised thread without real-time priority.
const RAISED_NICE: i32 = -10;
/// Nice value of a lowered thread.
const LOWERED_NICE: i32 = 5;

/// Raises this thread over the guest's; false where nothing of it is permitted.
pub fn raise() -> bool {
    set_policy(libc::SCHED_RR | libc::SCHED_RESET_ON_FORK, 1)
        || setpriority_process(None, RAISED_NICE).is_ok()
}

/// Lowers this thread under the guest's. Never an error: what cannot be lowered stays as it is.
pub fn lower() {
    let _ = set_policy(libc::SCHED_OTHER, 0);
    let _ = setpriority_process(None, LOWERED_NICE);
}

/// Sets the policy of the calling thread.
fn set_policy(policy: i32, priority: i32) -> bool {
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: pid 0 is the calling thread; the pointer is to a live `sched_param`, which is only read.
    unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) == 0 }
}
