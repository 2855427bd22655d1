//! What the guests do, and how it is counted.

use super::clients::{self, Clients};
use super::pair::{Running, Travelled};
use crate::Error;
use crate::replay::clock::Clock;
use crate::sample::Sample;
use std::time::{Duration, Instant};

/// From the guest's being ready, and protected, to the first count.
const SETTLE: Duration = Duration::from_millis(1500);
const CLOCK_BEGINS: Duration = Duration::from_millis(100);

/// A workload.
pub struct Kind {
    /// As in keys.
    pub key: &'static str,
    /// For people.
    pub about: &'static str,
    /// What of the paper it stands for.
    pub figure: &'static str,
    /// The guest's parameters.
    pub append: &'static str,
    counts: Counts,
}

/// What is counted.
enum Counts {
    /// A number of the guest's own, in lines that begin with the first, behind the second.
    Console(&'static str, &'static str),
    /// Answers to clients.
    Answers(Clients),
}

/// All of them.
pub const ALL: [Kind; 5] = [
    Kind {
        key: "compile",
        about: "processes, small files, sorting, allocation, pipes",
        figure: "figure 7",
        append: "kf.work=compile",
        counts: Counts::Console("compile", "round="),
    },
    Kind {
        key: "ep",
        about: "computes, 256 pages written",
        figure: "figure 8a",
        append: "kf.work=compute kf.compute.mib=1 kf.compute.pages=4 kf.compute.words=2",
        counts: Counts::Console("compute", "work="),
    },
    Kind {
        key: "sp",
        about: "computes, 24,576 pages written, a quarter of each",
        figure: "figure 8b",
        append: "kf.work=compute kf.compute.mib=96 kf.compute.pages=32 kf.compute.words=128",
        counts: Counts::Console("compute", "work="),
    },
    Kind {
        key: "web",
        about: "answers of 16 KiB to 16 clients that think for 200 ms",
        figure: "figure 9",
        append: "kf.work=web kf.web.bytes=16384 kf.web.read=1024 kf.web.dirty=24 kf.web.mib=16",
        counts: Counts::Answers(clients::WEB),
    },
    Kind {
        key: "coordinator",
        about: "heartbeats of 8 workers, each after 100 ms of work",
        figure: "figure 10",
        append: "kf.work=ledger kf.ledger.dirty=32",
        counts: Counts::Answers(clients::COORDINATOR),
    },
];

/// What one run of a guest did.
#[derive(Clone, Debug, Default)]
pub struct Done {
    /// Work in a second: the guest's units, or answers.
    pub per_s: f64,
    /// The same over the time that the guest's thread did not wait for a core, which whatever else
    /// the machine does had.
    pub own_per_s: Option<f64>,
    /// Where clients ask: answers in a second that came in time, and somewhat late.
    pub good_per_s: f64,
    pub tolerable_per_s: f64,
    /// How long answers took, ns.
    pub took_ns: Sample,
    /// Where it was protected.
    pub travelled: Travelled,
}

impl Kind {
    /// Whether clients ask it.
    pub fn has_clients(&self) -> bool {
        matches!(self.counts, Counts::Answers(_))
    }

    /// Lets the guest work for `seconds`, and counts.
    pub fn measure(
        &self,
        running: &Running<'_>,
        is_protected: bool,
        seconds: u16,
    ) -> Result<Done, Error> {
        let lab = running.lab();
        let asking = match &self.counts {
            Counts::Answers(clients) => Some(clients.start(&lab.network.c, lab.interrupt)?),
            Counts::Console(..) => None,
        };
        lab.interrupt.sleep(SETTLE)?;
        let clock = Clock::watch(running.guest.pid());
        // Its first look is over by then.
        lab.interrupt.sleep(CLOCK_BEGINS)?;
        let look = || if is_protected { running.travelled() } else { Ok(Travelled::default()) };
        let before = look()?;
        let from = Instant::now();
        lab.interrupt.sleep(Duration::from_secs(seconds.into()))?;
        let to = Instant::now();
        let travelled = look()?.since(before);
        if is_protected {
            running.is_protected()?;
        }
        let mut done = match (&self.counts, asking) {
            (Counts::Console(prefix, field), _) => {
                let per_s = running.guest.rate(prefix, field, (from, to));
                let per_s = per_s.ok_or_else(|| {
                    Error::failed(
                        format!("count what {} did", self.key),
                        "no two lines of it in the time",
                    )
                })?;
                let own_ns =
                    clock.between(from, to).map(|spent| spent.time_ns).filter(|ns| *ns > 0.0);
                let own_per_s =
                    own_ns.map(|ns| per_s * to.duration_since(from).as_nanos() as f64 / ns);
                Done { per_s, own_per_s, ..Done::default() }
            }
            (Counts::Answers(_), Some(asking)) => asking.end(from, to)?,
            (Counts::Answers(_), None) => Done::default(),
        };
        done.travelled = travelled;
        Ok(done)
    }
}
