//! The pause: pre-copy against stop-and-copy, QEMU's own `savevm`, and `stop` + `migrate`.
//!
//! One guest of 1 GiB that writes 20,000 pages a second over 512 MiB. Under Keyframe, strategies alternate second by
//! second on the same running guest. `savevm` and `migrate` run on a second instance of the same guest, because `savevm`
//! needs a writable image; their pause is the time that the monitor command holds the VM stopped.

use crate::guest::Guest as Files;
use crate::sample::Sample;
use crate::vm::{Guest, Protected};
use crate::{Error, Options, Report};
use keyframe_qemu::Qmp;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const RATE: u64 = 20_000;
const MEM: &str = "1G";

pub fn run(options: &Options) -> Result<Report, Error> {
    let files = Files::find(options)?;
    let dir = tempfile::tempdir().map_err(Error::io("make a temporary directory"))?;
    let mut report = Report::new("pause");
    under_keyframe(options, &files, dir.path(), &mut report)?;
    peers(options, &files, dir.path(), &mut report)?;
    let value = |report: &Report, key: &str| report.figures.get(key).copied().unwrap_or(f64::NAN);
    let precopy = value(&report, "precopy_20k_pause_p50_ns");
    for (ratio, figure) in [
        ("stop_copy_over_precopy_20k", "stop_copy_20k_pause_p50_ns"),
        ("savevm_over_precopy_20k", "savevm_20k_pause_p50_ns"),
        ("migrate_over_precopy_20k", "migrate_20k_pause_p50_ns"),
    ] {
        let peer = value(&report, figure);
        report.ratio(ratio, peer / precopy);
    }
    let empty = value(&report, "empty_pause_p50_ns");
    report.ratio("precopy_20k_over_empty", precopy / empty);
    Ok(report)
}

fn append() -> String {
    format!("kf.work=dirty kf.rate={RATE} kf.mib=512")
}

fn under_keyframe(options: &Options, files: &Files, dir: &Path, report: &mut Report) -> Result<(), Error> {
    let pairs = if options.quick { 6 } else { 60 };
    let mut vm = Protected::start(options, &dir.join("store"), "none", &files.command(MEM, &append()))?;
    vm.guest.wait_for("KF READY dirty", 120)?;
    let (mut precopy, mut stop_copy, mut empty) = (Sample::default(), Sample::default(), Sample::default());
    let mut dirty = Sample::default();
    vm.take("precopy")?;
    let mut next = Instant::now();
    for k in 0..2 * pairs {
        next += Duration::from_secs(1);
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        let (strategy, sample) =
            if k % 2 == 0 { ("precopy", &mut precopy) } else { ("stop-copy", &mut stop_copy) };
        let entry = vm.take(strategy)?;
        sample.push(number(&entry, "pause_ns")?);
        dirty.push(number(&entry, "dirty_pages")?);
    }
    vm.guest.say("rate 0")?;
    vm.take("precopy")?;
    for _ in 0..pairs {
        std::thread::sleep(Duration::from_millis(300));
        empty.push(number(&vm.take("precopy")?, "pause_ns")?);
    }
    if dirty.median() < RATE as f64 / 4.0 {
        return Err(Error::failed(
            "load the guest",
            format!("it wrote only {} of {RATE} pages a second: the machine is too busy", dirty.median()),
        ));
    }
    report.figure("dirty_pages_per_checkpoint_p50", dirty.median());
    report.figure("checkpoints_per_strategy", precopy.len() as f64);
    report.figure("precopy_20k_pause_p50_ns", precopy.median());
    report.figure("precopy_20k_pause_p99_ns", precopy.percentile(99));
    report.figure("stop_copy_20k_pause_p50_ns", stop_copy.median());
    report.figure("stop_copy_20k_pause_p99_ns", stop_copy.percentile(99));
    report.figure("empty_pause_p50_ns", empty.median());
    Ok(())
}

fn number(entry: &serde_json::Value, key: &str) -> Result<f64, Error> {
    entry
        .get(key)
        .and_then(serde_json::Value::as_f64)
        .ok_or_else(|| Error::failed("read keyframe take --json", format!("no {key}")))
}

fn peers(options: &Options, files: &Files, dir: &Path, report: &mut Report) -> Result<(), Error> {
    let image = dir.join("savevm.qcow2");
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2"])
        .arg(&image)
        .arg("64M")
        .output()
        .map_err(Error::io("run qemu-img (Debian: qemu-utils)"))?;
    if !made.status.success() {
        return Err(Error::failed("qemu-img create", String::from_utf8_lossy(&made.stderr)));
    }
    let socket = dir.join("peer.sock");
    let mut command = files.command(MEM, &append());
    command.extend([
        "-drive".into(),
        format!("if=none,id=vmstate,format=qcow2,file={}", image.display()),
        "-qmp".into(),
        format!("unix:{},server=on,wait=off", socket.display()),
    ]);
    let mut guest = Guest::start(&command)?;
    guest.wait_for("KF READY dirty", 120)?;
    let mut qmp = Qmp::connect(&socket, Duration::from_secs(10)).map_err(Error::qmp("connect to QEMU"))?;
    qmp.set_timeout(Duration::from_secs(120));
    let (mut savevm, mut migrate) = (Sample::default(), Sample::default());
    for _ in 0..if options.quick { 2 } else { 5 } {
        std::thread::sleep(Duration::from_secs(1));
        savevm.push(save(&mut qmp)?);
        std::thread::sleep(Duration::from_secs(1));
        migrate.push(migrate_to(&mut qmp, &dir.join("migrated"))?);
    }
    report.figure("savevm_20k_pause_p50_ns", savevm.median());
    report.figure("migrate_20k_pause_p50_ns", migrate.median());
    Ok(())
}

/// `savevm`: stops the VM, writes all of RAM, resumes it, and answers then.
fn save(qmp: &mut Qmp) -> Result<f64, Error> {
    let started = Instant::now();
    let answer = qmp.hmp("savevm bench").map_err(Error::qmp("savevm"))?;
    let ns = started.elapsed().as_nanos() as f64;
    if !answer.trim().is_empty() {
        return Err(Error::failed("savevm", answer));
    }
    qmp.hmp("delvm bench").map_err(Error::qmp("delvm"))?;
    Ok(ns)
}

/// `stop`, then a migration into a file as fast as it goes, then `cont`.
fn migrate_to(qmp: &mut Qmp, file: &Path) -> Result<f64, Error> {
    qmp.hmp("migrate_set_parameter max-bandwidth 100G").map_err(Error::qmp("migrate_set_parameter"))?;
    let started = Instant::now();
    qmp.stop().map_err(Error::qmp("stop"))?;
    qmp.hmp(&format!("migrate -d \"exec:cat > {}\"", file.display())).map_err(Error::qmp("migrate"))?;
    loop {
        let info = qmp.hmp("info migrate").map_err(Error::qmp("info migrate"))?;
        if info.contains("completed") {
            break;
        }
        if info.contains("failed") || started.elapsed() > Duration::from_secs(120) {
            return Err(Error::failed("migrate", info));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    qmp.cont().map_err(Error::qmp("cont"))?;
    Ok(started.elapsed().as_nanos() as f64)
}
