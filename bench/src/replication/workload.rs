//! The workloads of the guests, and how their work is counted.

use super::clients::{self, ClientGroup};
use super::test_bed::{CpuTime, EpochTotals, GuestOnHosts};
use crate::Error;
use crate::running_guest::TimeSpan;
use crate::sample::Sample;
use crate::vcpu_clock::VcpuClock;
use std::time::{Duration, Instant};

/// The time from the ready (and protected) guest to the first count.
const SETTLE: Duration = Duration::from_millis(1500);
/// The time for the first reading of the clock.
const CLOCK_BEGINS: Duration = Duration::from_millis(100);

/// A workload.
pub struct Workload {
    /// Its name in keys.
    pub key: &'static str,
    /// Its description for a person.
    pub about: &'static str,
    /// The figure of the paper that it stands for.
    pub figure: &'static str,
    /// The kernel parameters of the guest.
    pub append: &'static str,
    counts: Counting,
}

/// How the work is counted.
enum Counting {
    /// By the counter `field` in console lines that begin with `prefix`.
    Console { prefix: &'static str, field: &'static str },
    /// Answers to clients.
    Answers(ClientGroup),
}

/// All workloads.
pub const ALL: [Workload; 5] = [
    Workload {
        key: "compile",
        about: "processes, small files, sorting, allocation, pipes",
        figure: "figure 7",
        append: "kf.work=compile",
        counts: Counting::Console { prefix: "compile", field: "round=" },
    },
    Workload {
        key: "ep",
        about: "computes, 256 pages written",
        figure: "figure 8a",
        append: "kf.work=compute kf.compute.mib=1 kf.compute.pages=4 kf.compute.words=2",
        counts: Counting::Console { prefix: "compute", field: "work=" },
    },
    Workload {
        key: "sp",
        about: "computes, 24,576 pages written, a quarter of each",
        figure: "figure 8b",
        append: "kf.work=compute kf.compute.mib=96 kf.compute.pages=32 kf.compute.words=128",
        counts: Counting::Console { prefix: "compute", field: "work=" },
    },
    Workload {
        key: "web",
        about: "answers of 16 KiB to 16 clients that think for 200 ms",
        figure: "figure 9",
        append: "kf.work=web kf.web.bytes=16384 kf.web.read=1024 kf.web.dirty=24 kf.web.mib=16",
        counts: Counting::Answers(clients::WEB),
    },
    Workload {
        key: "coordinator",
        about: "heartbeats of 8 workers, each after 100 ms of work",
        figure: "figure 10",
        append: "kf.work=ledger kf.ledger.dirty=32",
        counts: Counting::Answers(clients::COORDINATOR),
    },
];

/// The results of one run.
#[derive(Clone, Debug, Default)]
pub struct RunResult {
    /// Work per second: the guest's units, or answers.
    pub per_s: f64,
    /// The same without the time that the guest's thread waited for a core; `None` for answers.
    pub own_per_s: Option<f64>,
    /// Good answers per second.
    pub good_per_s: f64,
    /// Good and tolerable answers per second.
    pub tolerable_per_s: f64,
    /// The times of the answers, in ns.
    pub took_ns: Sample,
    /// The epochs of the counted time.
    pub epochs: EpochTotals,
    /// The CPU time of Keyframe's processes in the counted time.
    pub cpu: CpuTime,
}

impl Workload {
    /// Returns whether the workload has clients.
    pub fn has_clients(&self) -> bool {
        matches!(self.counts, Counting::Answers(_))
    }

    /// Counts the work of the guest for `seconds`.
    pub fn measure(&self, running: &GuestOnHosts<'_>, seconds: u16) -> Result<RunResult, Error> {
        let test_bed = running.test_bed();
        let asking = match &self.counts {
            Counting::Answers(clients) => {
                Some(clients.start(&test_bed.network.c, test_bed.interrupt)?)
            }
            Counting::Console { .. } => None,
        };
        test_bed.interrupt.sleep(SETTLE)?;
        let clock = VcpuClock::watch(running.guest.pid());
        test_bed.interrupt.sleep(CLOCK_BEGINS)?;
        let (before, cpu_before) = (running.epochs()?, running.cpu_time());
        let from = Instant::now();
        test_bed.interrupt.sleep(Duration::from_secs(seconds.into()))?;
        let to = Instant::now();
        let cpu = running.cpu_time().since(cpu_before);
        let epochs = match running.end_tracking(seconds)? {
            Some(tracked) => tracked,
            None => running.epochs()?.since(before),
        };
        running.check()?;
        let mut done = match (&self.counts, asking) {
            (Counting::Console { prefix, field }, _) => {
                let per_s = running.guest.rate(prefix, field, TimeSpan { from, to });
                let per_s = per_s.ok_or_else(|| {
                    Error::failed(
                        format!("count the work of {}", self.key),
                        "fewer than two lines in the counted time",
                    )
                })?;
                let own_ns =
                    clock.between(from, to).map(|spent| spent.time_ns).filter(|ns| *ns > 0.0);
                let own_per_s =
                    own_ns.map(|ns| per_s * to.duration_since(from).as_nanos() as f64 / ns);
                RunResult { per_s, own_per_s, ..RunResult::default() }
            }
            (Counting::Answers(_), Some(asking)) => asking.end(from, to)?,
            (Counting::Answers(_), None) => RunResult::default(),
        };
        (done.epochs, done.cpu) = (epochs, cpu);
        Ok(done)
    }
}
