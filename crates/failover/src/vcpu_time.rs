//! The time in which the threads of a VM's virtual CPUs ran or waited for a core.

use keyframe_kernel::cpu_time;
use keyframe_session::machines::{Machines, Member};
use std::time::{Duration, Instant};

/// The time for which a list of threads is used: virtual CPUs are plugged and unplugged.
const LISTED_FOR: Duration = Duration::from_secs(10);

/// Measures the processor time of all virtual CPUs' threads.
#[derive(Default)]
pub struct VcpuTime {
    /// Process and thread.
    threads: Vec<(u32, u32)>,
    listed: Option<Instant>,
}

impl VcpuTime {
    /// Returns the time for which all the threads together have run or waited for a processor since
    /// their start, in nanoseconds. Returns `None` if that is unknown or if the threads have
    /// changed.
    pub fn total_ns(&mut self, machines: &mut Machines) -> Option<u64> {
        if self.listed.is_none_or(|at| at.elapsed() > LISTED_FOR) {
            let threads = list(machines);
            let same = threads == self.threads;
            (self.threads, self.listed) = (threads, Some(Instant::now()));
            if !same {
                return None;
            }
        }
        if self.threads.is_empty() {
            return None;
        }
        let wanted =
            self.threads.iter().map(|(pid, thread)| cpu_time::thread_cpu_demand(*pid, *thread));
        let Some(all) = wanted.sum::<Option<Duration>>() else {
            self.listed = None;
            return None;
        };
        u64::try_from(all.as_nanos()).ok()
    }
}

/// The threads of all VMs; none if a monitor does not answer.
fn list(machines: &mut Machines) -> Vec<(u32, u32)> {
    let of_vm = |member: &mut Member| {
        let pid = member.vm.pid();
        let threads = member.vm.qemu().ok()?.qmp().cpu_threads().ok()?;
        Some(threads.into_iter().map(move |thread| (pid, thread)))
    };
    let all: Option<Vec<_>> = machines.members_mut().iter_mut().map(of_vm).collect();
    all.unwrap_or_default().into_iter().flatten().collect()
}
