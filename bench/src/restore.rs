//! Restoring: how soon a VM runs and how soon all of its RAM is there, against `-loadvm` and
//! against plain copying.
//!
//! ```text
//!   guest, 1 GiB, 800 MiB of it written       measured from the command
//!     under keyframe ─▶ one checkpoint ─┬──▶ restore --lazy    until it runs, until all RAM is there
//!                                       └──▶ restore           until it runs
//!     plain ─▶ savevm ─────────────────────▶ qemu -loadvm      until it runs
//!                          as many bytes ──▶ memcpy            on all cores
//! ```
//!
//! By turns, all files in the page cache. What a served disk is against `qemu-nbd` (`disk_*`) is a
//! part of its own.

mod copying;
mod disk;
mod live;

use crate::guest::Guest as Files;
use crate::peer::{Peer, Way};
use crate::sample::Sample;
use crate::vm::Protected;
use crate::{Error, Options, Report};
use keyframe_plot::{Axis, Chart, Figure, Point, Scale, Series};
use live::{Eager, Lazy, Restores};
use serde_json::Value;
use std::path::Path;

const MEM: &str = "1G";
const APPEND: &str = "kf.work=dirty kf.rate=20000 kf.mib=800";

/// What was measured, in nanoseconds; a value a round.
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
    let files = Files::find(options)?;
    let dir = tempfile::tempdir().map_err(Error::io("make a temporary directory"))?;
    let rounds = if options.quick { 3 } else { 11 };
    let store = dir.path().join("store");
    let bytes = checkpoint(options, &files, &store)?;
    let snapshot = snapshot(options, &files, &dir.path().join("peer"))?;
    let restores = Restores { options, store: &store, dir: dir.path() };
    let mut rows = Rows::default();
    for round in 0..rounds {
        options.say(format!("round {} of {rounds}", round + 1));
        restores.forget_working_set()?;
        let Lazy { first_ns, resident_ns } = restores.lazy()?;
        rows.lazy_first.push(first_ns);
        rows.lazy_resident.push(resident_ns);
        let Lazy { first_ns, resident_ns } = restores.lazy()?;
        rows.warm_first.push(first_ns);
        rows.warm_resident.push(resident_ns);
        let Eager { first_ns, filled_ns } = restores.eager()?;
        rows.eager.push(first_ns);
        rows.eager_fill.push(filled_ns);
        rows.loadvm.push(live::loadvm(&snapshot, dir.path())?);
        let copied = copying::measure(bytes)?;
        rows.memcpy.push(copied.into_new_ns);
        rows.memcpy_resident.push(copied.into_resident_ns);
    }
    let disks = disk::measure(options, dir.path(), rounds)?;
    let mut report = report(&rows, bytes);
    disks.tell(&mut report);
    Ok(report)
}

/// Leaves one complete checkpoint in `store`; gives back how many bytes of its RAM are not zero.
fn checkpoint(options: &Options, files: &Files, store: &Path) -> Result<u64, Error> {
    options.say("guest under keyframe: boot and checkpoint");
    let mut vm =
        Protected::start(options, store, ("none", "stop-copy"), &files.command(MEM, APPEND))?;
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

/// Leaves the same guest as QEMU's own snapshot; gives back the line that loads it.
fn snapshot(options: &Options, files: &Files, dir: &Path) -> Result<Vec<String>, Error> {
    options.say("plain guest: boot and savevm");
    let mut peer = Peer::start(files, dir, MEM, APPEND)?;
    peer.save_for_loadvm()?;
    let mut line = files.command(MEM, APPEND);
    let image = dir.join("savevm.qcow2").display().to_string();
    line.extend(["-drive".into(), format!("if=none,id=vmstate,format=qcow2,file={image}")]);
    line.extend(["-loadvm".into(), Way::Savevm.key().into()]);
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
    // Of speeds: how many times faster memcpy is than filling the VM's RAM. Both find new memory as
    // they go.
    report.ratio_of("memcpy_over_eager", "eager_fill_ns", "memcpy_ns");
    report.ratio_of("memcpy_over_eager_command", "eager_first_instruction_ns", "memcpy_ns");
    report.ratio_of("memcpy_into_resident_over_eager", "eager_fill_ns", "memcpy_into_resident_ns");
    report.plot = chart(&figures[..6]);
    report
}

/// The medians, from the fastest way to the slowest.
fn chart(figures: &[(&str, &Sample)]) -> Figure {
    let series = figures.iter().zip(1_u32..).map(|((key, sample), place)| Series {
        name: key.trim_end_matches("_ns").replace('_', " "),
        points: vec![Point { x: f64::from(place), y: sample.median() / 1e6, deviation: None }],
    });
    let chart = Chart {
        title: "1 GiB, store and images in the page cache".into(),
        x: Axis::new("way, in the order of the legend", Scale::Linear),
        y: Axis::new("median from the command, ms", Scale::Log),
        series: series.collect(),
    };
    Figure { title: "How soon a restored VM runs".into(), charts: vec![chart] }
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
