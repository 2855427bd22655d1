//! The workloads of the guests, and how their work is counted.

use super::{Plan, compile_job};
use crate::guest_files::{RealGuest, SmallGuest};
use crate::running_guest::{RunningGuest, TimeSpan};
use crate::{Error, Options};
use std::path::Path;
use std::time::{Duration, Instant};

const MEM: &str = "1G";

/// The work of a guest per second, by the host's clock.
#[derive(Clone, Copy, Debug)]
pub struct WorkRate {
    /// The counted work.
    pub work_per_s: f64,
    /// The computing in the remaining time, if the guest computes.
    pub spare_per_s: Option<f64>,
}

impl WorkRate {
    /// Returns the mean of two rates.
    pub fn mean(self, other: Self) -> Self {
        Self {
            work_per_s: f64::midpoint(self.work_per_s, other.work_per_s),
            spare_per_s: self.spare_per_s.zip(other.spare_per_s).map(|(a, b)| f64::midpoint(a, b)),
        }
    }
}

/// A guest with a workload.
pub struct Workload {
    /// Its name in keys.
    pub key: &'static str,
    /// The unit of the work in keys.
    pub unit: &'static str,
    /// Its name for a person.
    pub title: &'static str,
    /// QEMU's command line.
    pub command: Vec<String>,
    count: Counting,
}

/// How the work of a guest is counted.
enum Counting {
    /// By fields of the lines with this prefix, which the guest prints each second.
    Lines { prefix: &'static str, work: &'static str, spare: Option<&'static str> },
    /// By the lines that the guest prints after each compile.
    Compiles,
}

impl Workload {
    /// Makes the computing guest: arithmetic in registers, hardly any writes.
    pub fn compute(files: &SmallGuest) -> Self {
        Self {
            key: "compute",
            unit: "units",
            title: "computing",
            command: files.command(MEM, "kf.work=compute"),
            count: Counting::Lines { prefix: "compute ", work: "work=", spare: None },
        }
    }

    /// Makes the writing guest: it writes 60,000 pages a second in 512 MiB, and computes in the
    /// remaining time.
    pub fn dirty(files: &SmallGuest) -> Self {
        Self {
            key: "60k",
            unit: "pages",
            title: "writing 60,000 pages a second",
            command: files.command(MEM, "kf.work=dirty kf.rate=60000 kf.mib=512"),
            count: Counting::Lines { prefix: "dirty ", work: "written=", spare: Some("work=") },
        }
    }

    /// Makes the compiling guest: it compiles a small C program repeatedly, in a Debian.
    pub fn compile(options: &Options, dir: &Path) -> Result<Self, Error> {
        let job = dir.join("compile.sh");
        std::fs::write(&job, compile_job::job())
            .map_err(Error::io(format!("write {}", job.display())))?;
        Ok(Self {
            key: "compile",
            unit: "files",
            title: "compiling",
            command: RealGuest::find(options)?.command(MEM, &job),
            count: Counting::Compiles,
        })
    }

    /// Returns whether the benchmark goes on without this workload if it fails. The compiling guest
    /// needs more of the machine than the others.
    pub fn may_be_left_out(&self) -> bool {
        matches!(self.count, Counting::Compiles)
    }

    /// Waits until the guest works, and counts its work.
    pub fn measure(&self, guest: &mut RunningGuest, plan: &Plan) -> Result<WorkRate, Error> {
        match self.count {
            Counting::Lines { prefix, work, spare } => {
                guest.wait_for("KF READY", 120)?;
                std::thread::sleep(Duration::from_secs(plan.settle_s));
                let from = Instant::now();
                // The first line may come up to a second later.
                std::thread::sleep(Duration::from_millis(plan.seconds * 1000 + 1200));
                let span = TimeSpan { from, to: Instant::now() };
                let per_s = |field: &str| guest.rate(prefix, field, span);
                let work_per_s = per_s(work).ok_or_else(|| {
                    Error::failed("measure the guest's work", "it printed too few lines")
                })?;
                Ok(WorkRate { work_per_s, spare_per_s: spare.and_then(per_s) })
            }
            Counting::Compiles => {
                let seconds = compile_job::seconds(guest, plan.compiles)?;
                let files = plan.compiles as f64 * compile_job::SOURCES.len() as f64;
                Ok(WorkRate { work_per_s: files / seconds, spare_per_s: None })
            }
        }
    }
}
