//! `keyframe rollback` of a running VM that has changed some 1000 pages, against QEMU's `loadvm`.
//!
//! ```text
//!   guest writes 4 MiB again and again
//!     under keyframe, 256 MiB ──▶ rollback, rollback --fast   the VM stands, as the engine measures it
//!     under keyframe, 4 GiB ────▶ rollback, rollback --fast
//!     plain, 256 MiB ───────────▶ loadvm                      from the command to the answer
//! ```
//!
//! The methods take turns. QEMU has no `loadvm` that keeps the state before, so `--fast` is its peer.

use crate::guest_files::SmallGuest;
use crate::keyframe_json::number;
use crate::qemu_peer::QemuPeer;
use crate::running_guest::{CheckpointedGuest, RollbackKind, Schedule};
use crate::sample::Sample;
use crate::{Error, Options, Report};
use std::path::Path;
use std::time::Duration;

/// 1024 pages, each of them written many times between two rollbacks.
const APPEND: &str = "kf.work=dirty kf.rate=20000 kf.mib=4";
const SMALL: &str = "256M";
const LARGE: &str = "4G";
/// The time in which the guest writes its pages.
const WRITES: Duration = Duration::from_millis(400);

/// The stands of rollbacks in nanoseconds, with a value for each round.
#[derive(Default)]
pub struct RollbackTimes {
    small: Sample,
    small_fast: Sample,
    large: Sample,
    large_fast: Sample,
    /// The pages that each rollback wrote.
    pages: Sample,
    loadvm: Sample,
}

/// Measures all methods `rounds` times.
pub fn measure(
    options: &Options,
    files: &SmallGuest,
    dir: &Path,
    rounds: u32,
) -> Result<RollbackTimes, Error> {
    let start = |mem: &str| {
        options.say(format!("guest of {mem} under keyframe: boot and checkpoint"));
        let schedule = Schedule { interval: "none", strategy: "auto" };
        let store = dir.join(format!("rollbacks-{mem}"));
        let command = files.compressed_kernel_command(mem, APPEND);
        let mut vm = CheckpointedGuest::start(options, &store, schedule, &command)?;
        vm.guest.wait_for("KF READY dirty", 240)?;
        // The guest reaches its usual state first.
        std::thread::sleep(Duration::from_secs(2));
        vm.take("auto")?;
        Ok::<_, Error>(vm)
    };
    let (small, large) = (start(SMALL)?, start(LARGE)?);
    let mut peer = QemuPeer::start_command(
        files.compressed_kernel_command(SMALL, APPEND),
        &dir.join("loadvm"),
        "KF READY dirty",
    )?;
    peer.save_for_loadvm()?;
    let mut times = RollbackTimes::default();
    for round in 0..rounds {
        options.say(format!("rollbacks, round {} of {rounds}", round + 1));
        for (vm, kind, sample) in [
            (&small, RollbackKind::Kept, &mut times.small),
            (&small, RollbackKind::Fast, &mut times.small_fast),
            (&large, RollbackKind::Kept, &mut times.large),
            (&large, RollbackKind::Fast, &mut times.large_fast),
        ] {
            std::thread::sleep(WRITES);
            let done = vm.roll_back("1", kind)?;
            sample.push(number(&done, "stood_ns")?);
            times.pages.push(number(&done, "pages")?);
        }
        std::thread::sleep(WRITES);
        times.loadvm.push(peer.load_snapshot()?);
    }
    Ok(times)
}

impl RollbackTimes {
    /// Adds the figures and ratios to `report`.
    pub fn add_to(&self, report: &mut Report) {
        for (key, sample) in [
            ("rollback_1000_pages_p50_ns", &self.small),
            ("rollback_fast_1000_pages_p50_ns", &self.small_fast),
            ("rollback_pages", &self.pages),
            ("rollback_4gib_p50_ns", &self.large),
            ("rollback_fast_4gib_p50_ns", &self.large_fast),
            ("loadvm_running_p50_ns", &self.loadvm),
        ] {
            report.figure(key, sample.median());
        }
        report.ratio_of(
            "rollback_4gib_over_256mib",
            "rollback_4gib_p50_ns",
            "rollback_1000_pages_p50_ns",
        );
        report.ratio_of(
            "loadvm_over_rollback",
            "loadvm_running_p50_ns",
            "rollback_1000_pages_p50_ns",
        );
        report.ratio_of(
            "loadvm_over_rollback_fast",
            "loadvm_running_p50_ns",
            "rollback_fast_1000_pages_p50_ns",
        );
    }
}
