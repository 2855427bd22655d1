//! `restore`: the time until a restored VM runs and until its RAM is loaded, against `-loadvm` and
//! plain copying.
//!
//! ```text
//!   guest, 1 GiB, 800 MiB of it written       measured from the command on
//!     under keyframe ─▶ one checkpoint ─┬──▶ restore --lazy    until it runs, until all RAM is there
//!                                       └──▶ restore           until it runs
//!     plain ─▶ savevm ─────────────────────▶ qemu -loadvm      until it runs
//!                          as many bytes ──▶ memcpy            on all cores
//! ```
//!
//! The methods alternate, with all files in the page cache. Separate parts compare the disk server
//! with `qemu-nbd` (`disk_*`), and rollbacks of a running VM with `loadvm` (`rollback_*`).

mod disk_server;
mod memory_copy;
pub mod restore_times;
mod rollback;

use crate::guest_files::SmallGuest;
use crate::qemu_peer::{QemuPeer, SaveMethod};
use crate::running_guest::{CheckpointedGuest, Schedule};
use crate::sample::Sample;
use crate::{Error, Options, Report};
use keyframe_plot::{Axis, Chart, Figure, Point, Scale, Series};
use restore_times::{CheckpointRestores, EagerTimes, LazyTimes};
use serde_json::Value;
use std::path::Path;

const MEM: &str = "1G";
const APPEND: &str = "kf.work=dirty kf.rate=20000 kf.mib=800";

/// The measured times in nanoseconds, with a value for each round.
#[derive(Default)]
struct Rows {
    lazy_first: Sample,
    lazy_resident: Sample,
    warm_first: Sample,
    warm_resident: Sample,
    eager: Sample,
    eager_fill: Sample,
    loadvm: Sample,
    memcpy: Sample,
    memcpy_resident: Sample,
}

pub fn run(options: &Options) -> Result<Report, Error> {
    let files = SmallGuest::find(options)?;
    let dir = tempfile::tempdir().map_err(Error::io("make a temporary directory"))?;
    let rounds = if options.quick { 3 } else { 11 };
    let store = dir.path().join("store");
    let bytes = checkpoint(options, &files, &store)?;
    let snapshot = snapshot(options, &files, &dir.path().join("peer"))?;
    let restores = CheckpointRestores { options, store: &store, dir: dir.path() };
    let mut rows = Rows::default();
    for round in 0..rounds {
        options.say(format!("round {} of {rounds}", round + 1));
        restores.forget_working_set()?;
        let LazyTimes { running, resident_ns } = restores.lazy()?;
        rows.lazy_first.push(running.whole_ns);
        rows.lazy_resident.push(resident_ns);
        let LazyTimes { running, resident_ns } = restores.lazy()?;
        rows.warm_first.push(running.whole_ns);
        rows.warm_resident.push(resident_ns);
        let EagerTimes { running, filled_ns } = restores.eager()?;
        rows.eager.push(running.whole_ns);
        rows.eager_fill.push(filled_ns);
        rows.loadvm.push(restore_times::loadvm(&snapshot, dir.path())?);
        let copied = memory_copy::measure(bytes)?;
        rows.memcpy.push(copied.into_new_ns);
        rows.memcpy_resident.push(copied.into_resident_ns);
    }
    let disks = disk_server::measure(options, dir.path(), rounds)?;
    let rollbacks = rollback::measure(options, &files, dir.path(), rounds)?;
    let mut report = report(&rows, bytes);
    disks.add_to(&mut report);
    rollbacks.add_to(&mut report);
    Ok(report)
}

/// Takes one complete checkpoint into `store`. Returns the number of its RAM bytes in pages that are
/// not zero.
fn checkpoint(options: &Options, files: &SmallGuest, store: &Path) -> Result<u64, Error> {
    options.say("guest under keyframe: boot and checkpoint");
    let schedule = Schedule { interval: "none", strategy: "stop-copy" };
    let mut vm = CheckpointedGuest::start(options, store, schedule, &files.command(MEM, APPEND))?;
    vm.guest.wait_for("KF READY dirty", 180)?;
    let taken = vm.take("stop-copy")?;
    let pages = |key: &str| {
        let value = taken.get(key).and_then(Value::as_u64);
        value.ok_or_else(|| Error::failed("read keyframe take --json", format!("no {key}")))
    };
    let nonzero = pages("dirty_pages")?.saturating_sub(pages("zero_pages")?);
    if nonzero < 100_000 {
        return Err(Error::failed(
            "take a complete checkpoint",
            format!("it holds only {nonzero} pages"),
        ));
    }
    Ok(nonzero * 4096)
}

/// Saves the same guest as a snapshot of QEMU. Returns the command line that loads it.
fn snapshot(options: &Options, files: &SmallGuest, dir: &Path) -> Result<Vec<String>, Error> {
    options.say("plain guest: boot and savevm");
    let mut peer = QemuPeer::start(files, dir, MEM, APPEND)?;
    peer.save_for_loadvm()?;
    let mut line = files.command(MEM, APPEND);
    let image = dir.join("savevm.qcow2").display().to_string();
    line.extend(["-drive".into(), format!("if=none,id=vmstate,format=qcow2,file={image}")]);
    line.extend(["-loadvm".into(), SaveMethod::Savevm.key().into()]);
    Ok(line)
}

fn report(rows: &Rows, bytes: u64) -> Report {
    let mut report = Report::new("restore");
    report.figure("nonzero_ram_bytes", bytes as f64);
    report.figure("rounds", rows.eager.len() as f64);
    let figures = [
        ("lazy_first_instruction_ns", &rows.lazy_first),
        ("lazy_resident_ns", &rows.lazy_resident),
        ("lazy_again_first_instruction_ns", &rows.warm_first),
        ("lazy_again_resident_ns", &rows.warm_resident),
        ("eager_first_instruction_ns", &rows.eager),
        ("loadvm_first_instruction_ns", &rows.loadvm),
        ("eager_fill_ns", &rows.eager_fill),
        ("memcpy_ns", &rows.memcpy),
        ("memcpy_into_resident_ns", &rows.memcpy_resident),
    ];
    for (key, sample) in figures {
        report.figure(key, sample.median());
    }
    report.ratio_of(
        "loadvm_over_lazy_first_instruction",
        "loadvm_first_instruction_ns",
        "lazy_first_instruction_ns",
    );
    report.ratio_of(
        "loadvm_over_eager",
        "loadvm_first_instruction_ns",
        "eager_first_instruction_ns",
    );
    // The ratio of speeds: both fill new memory.
    report.ratio_of("memcpy_over_eager", "eager_fill_ns", "memcpy_ns");
    report.ratio_of("memcpy_over_eager_command", "eager_first_instruction_ns", "memcpy_ns");
    report.ratio_of("memcpy_into_resident_over_eager", "eager_fill_ns", "memcpy_into_resident_ns");
    report.plot = chart(&figures[..6]);
    report
}

/// Draws the medians, from the fastest method to the slowest.
fn chart(figures: &[(&str, &Sample)]) -> Figure {
    let series = figures.iter().zip(1_u32..).map(|((key, sample), place)| Series {
        name: key.trim_end_matches("_ns").replace('_', " "),
        points: vec![Point { x: f64::from(place), y: sample.median() / 1e6, deviation: None }],
    });
    let chart = Chart {
        title: "1 GiB, store and images in the page cache".into(),
        x: Axis::new("method, in the order of the legend", Scale::Linear),
        y: Axis::new("median from the command, ms", Scale::Log),
        series: series.collect(),
    };
    Figure { title: "Time until a restored VM runs".into(), charts: vec![chart] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratios_are_those_promised() {
        let mut rows = Rows::default();
        for (sample, value) in [
            (&mut rows.lazy_first, 1e8),
            (&mut rows.loadvm, 1e9),
            (&mut rows.eager, 9e8),
            (&mut rows.eager_fill, 6e8),
            (&mut rows.memcpy, 3e8),
            (&mut rows.memcpy_resident, 1e8),
        ] {
            sample.push(value);
        }
        let report = report(&rows, 4096);
        let close =
            |key: &str, value: f64| assert!((report.ratios[key] - value).abs() < 1e-9, "{key}");
        close("loadvm_over_lazy_first_instruction", 10.0);
        close("memcpy_over_eager", 2.0);
        close("memcpy_over_eager_command", 3.0);
        close("memcpy_into_resident_over_eager", 6.0);
        assert!((report.figures["lazy_first_instruction_ns"] - 1e8).abs() < 1.0);
    }
}
