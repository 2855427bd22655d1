//! The processor time of processes and threads.

use std::time::Duration;

/// Linux has no larger pid (`PID_MAX_LIMIT`), and a clock's id no room for one.
const PIDS: u32 = 1 << 22;

/// Returns the processor time of all threads of process `pid`. Returns `None` if there is no such
/// process or we may not inspect it.
pub fn process_cpu_time(pid: u32) -> Option<Duration> {
    if pid >= PIDS {
        return None;
    }
    let mut clock = 0;
    // SAFETY: the call writes one clock's id, whose place is ours; any pid may be asked for.
    if unsafe { libc::clock_getcpuclockid(pid.cast_signed(), &raw mut clock) } != 0 {
        return None;
    }
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one time, whose place is ours; a clock that has gone is an error.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return None;
    }
    Some(Duration::new(u64::try_from(time.tv_sec).ok()?, u32::try_from(time.tv_nsec).ok()?))
}

/// Returns how long thread `thread` of process `pid` ran or waited for a core. Returns `None` if
/// there is no such thread, or if the kernel was built without these figures.
pub fn thread_cpu_demand(pid: u32, thread: u32) -> Option<Duration> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{thread}/schedstat")).ok()?;
    let mut words = text.split_whitespace().map(str::parse::<u64>);
    let (ran, waited) = (words.next()?.ok()?, words.next()?.ok()?);
    Some(Duration::from_nanos(ran.saturating_add(waited)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn time_passes_on_a_processor_and_not_beside_it() {
        let own = || process_cpu_time(std::process::id()).unwrap();
        let (before, began) = (own(), Instant::now());
        while own() < before + Duration::from_millis(5) {
            assert!(began.elapsed() < Duration::from_mins(1), "it stands still");
        }
        // One that computes, and one that sleeps.
        let thread = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
        let wanted = || thread_cpu_demand(std::process::id(), thread).unwrap();
        let (ran, at) = (wanted(), Instant::now());
        while wanted() < ran + Duration::from_millis(5) {
            assert!(at.elapsed() < Duration::from_mins(1), "it stands still");
        }
        let (ran, at) = (wanted(), Instant::now());
        std::thread::sleep(Duration::from_millis(50));
        assert!(wanted() < ran + at.elapsed() / 2, "a sleep counts");
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        for none in [ended.id(), PIDS, u32::MAX] {
            assert!(
                process_cpu_time(none).is_none() && thread_cpu_demand(none, none).is_none(),
                "{none}"
            );
        }
    }
}
