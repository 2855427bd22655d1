//! The guests whose work is counted.

use super::{Plan, compile};
use crate::guest::{Guest as Files, Real};
use crate::vm::Guest;
use crate::{Error, Options};
use std::path::Path;
use std::time::{Duration, Instant};

const MEM: &str = "1G";

/// Work a second, by the host's clock.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// What the guest is for.
    pub work_per_s: f64,
    /// What it computes in the time that this leaves, if it does.
    pub spare_per_s: Option<f64>,
}

impl Done {
    /// The mean of both.
    pub fn mean(self, other: Self) -> Self {
        Self {
            work_per_s: f64::midpoint(self.work_per_s, other.work_per_s),
            spare_per_s: self.spare_per_s.zip(other.spare_per_s).map(|(a, b)| f64::midpoint(a, b)),
        }
    }
}

/// A guest that works.
pub struct Subject {
    /// As in keys.
    pub key: &'static str,
    /// What is counted.
    pub unit: &'static str,
    /// For people.
    pub title: &'static str,
    /// QEMU's command line.
    pub command: Vec<String>,
    count: Count,
}

/// How it is counted.
enum Count {
    /// By the lines that begin so, each second, and their fields.
    Lines { prefix: &'static str, work: &'static str, spare: Option<&'static str> },
    /// By the lines that tell of a compile.
    Compiles,
}

impl Subject {
    /// Arithmetic in registers; writes next to nothing.
    pub fn compute(files: &Files) -> Self {
        Self {
            key: "compute",
            unit: "units",
            title: "computing",
            command: files.command(MEM, "kf.work=compute"),
            count: Count::Lines { prefix: "compute ", work: "work=", spare: None },
        }
    }

    /// Writes 60,000 pages a second all over 512 MiB, and computes in the time left.
    pub fn dirty(files: &Files) -> Self {
        Self {
            key: "60k",
            unit: "pages",
            title: "writing 60,000 pages a second",
            command: files.command(MEM, "kf.work=dirty kf.rate=60000 kf.mib=512"),
            count: Count::Lines { prefix: "dirty ", work: "written=", spare: Some("work=") },
        }
    }

    /// Compiles a small C program again and again, in a Debian.
    pub fn compile(options: &Options, dir: &Path) -> Result<Self, Error> {
        let job = dir.join("compile.sh");
        std::fs::write(&job, compile::job())
            .map_err(Error::io(format!("write {}", job.display())))?;
        Ok(Self {
            key: "compile",
            unit: "files",
            title: "compiling",
            command: Real::find(options)?.command(MEM, &job),
            count: Count::Compiles,
        })
    }

    /// Whether what the others did is worth having where this one fails: it needs more of the
    /// machine than they do.
    pub fn may_be_left_out(&self) -> bool {
        matches!(self.count, Count::Compiles)
    }

    /// Waits until it works, and counts.
    pub fn measure(&self, guest: &mut Guest, plan: &Plan) -> Result<Done, Error> {
        match self.count {
            Count::Lines { prefix, work, spare } => {
                guest.wait_for("KF READY", 120)?;
                std::thread::sleep(Duration::from_secs(plan.settle_s));
                let from = Instant::now();
                // A second more: the first line comes up to that much later.
                std::thread::sleep(Duration::from_millis(plan.seconds * 1000 + 1200));
                let span = (from, Instant::now());
                let per_s = |field: &str| guest.rate(prefix, field, span);
                let work_per_s = per_s(work).ok_or_else(|| {
                    Error::failed("measure the guest's work", "it printed too few lines")
                })?;
                Ok(Done { work_per_s, spare_per_s: spare.and_then(per_s) })
            }
            Count::Compiles => {
                let seconds = compile::seconds(guest, plan.compiles)?;
                let files = plan.compiles as f64 * compile::SOURCES.len() as f64;
                Ok(Done { work_per_s: files / seconds, spare_per_s: None })
            }
        }
    }
}
