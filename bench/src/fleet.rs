//! `fleet`: a host full of VMs of one image, in one store and in stores of their own.
//!
//! ```text
//!   alone   1 VM,  its own store     ─┐
//!   own     N VMs, N stores           ├─▶ a checkpoint a second, counted for some seconds: pauses, bytes,
//!   shared  N VMs, one store         ─┘   processor time and memory of each engine
//! ```
//!
//! The VMs boot a distribution one after the other and read its programs. Then they are mostly idle,
//! as on a host that holds many. The peer of the shared store is what a user has without it: a store
//! for each VM.

use crate::guest_files::RealGuest;
use crate::running_guest::{CheckpointedGuest, Schedule};
use crate::sample::Sample;
use crate::{Error, Options, Report};
use keyframe_kernel::cpu_time::process_cpu_time;
use keyframe_plot::{Axis, Chart, Figure, Point, Scale, Series};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const MEM: &str = "320M";
/// Reads the programs and libraries of the distribution into the guest's memory, and then does
/// little.
const JOB: &str = "#!/bin/bash
find /usr/bin /usr/sbin /usr/lib -xdev -type f -size -4M | sort | head -4000 | xargs cat >/dev/null
echo KF READY fleet
while sleep 1; do date >/run/now; done
";
/// QEMU takes up to 1 GiB for translated code unless it is told otherwise.
const TRANSLATED_CODE: [&str; 2] = ["-accel", "tcg,tb-size=32"];
const VMS: usize = 20;
const VMS_QUICK: usize = 4;
const SCHEDULE: Schedule<'static> = Schedule { interval: "1s", strategy: "auto" };
/// The longest boot of a VM on a busy host.
const BOOT_S: u64 = 180;

/// The measurements of some VMs that ran at the same time.
#[derive(Default)]
struct FleetRun {
    /// The median pause of each VM, in nanoseconds.
    pauses: Sample,
    /// The memory of each engine that belongs to no file, in bytes.
    memory: Sample,
    /// The part of a processor that each engine took.
    processor: Sample,
    /// The bytes of all stores at the end.
    stored_bytes: f64,
    /// The growth of all stores in a second.
    ingest_bytes_per_s: f64,
    checkpoints: f64,
}

pub fn run(options: &Options) -> Result<Report, Error> {
    let dir = tempfile::tempdir().map_err(Error::io("make a temporary directory"))?;
    let job = dir.path().join("job");
    std::fs::write(&job, JOB).map_err(Error::io("write the guests' job"))?;
    let mut command = RealGuest::find(options)?.compressed_kernel_command(MEM, &job);
    command.extend(TRANSLATED_CODE.map(str::to_owned));
    let vms = if options.quick { VMS_QUICK } else { VMS };
    let seconds = options.seconds.map_or(if options.quick { 8 } else { 30 }, u64::from);
    let measure = |name: &str, vms: usize, shared: bool| {
        let places: Vec<PathBuf> = (0..vms)
            .map(|number| dir.path().join(name).join(if shared { 0 } else { number }.to_string()))
            .collect();
        options.say(format!("{name}: {vms} VMs boot"));
        let run = measure(options, &command, &places, seconds)?;
        std::fs::remove_dir_all(dir.path().join(name)).map_err(Error::io("remove the stores"))?;
        Ok::<_, Error>(run)
    };
    let alone = measure("alone", 1, false)?;
    let own = measure("own", vms, false)?;
    let shared = measure("shared", vms, true)?;
    Ok(report(vms, seconds, [("alone", &alone), ("own", &own), ("shared", &shared)]))
}

/// Runs a VM over each of `stores`, and measures them for `seconds`.
fn measure(
    options: &Options,
    command: &[String],
    stores: &[PathBuf],
    seconds: u64,
) -> Result<FleetRun, Error> {
    let mut vms = Vec::with_capacity(stores.len());
    for (number, store) in stores.iter().enumerate() {
        if let Some(folder) = store.parent() {
            std::fs::create_dir_all(folder).map_err(Error::io("make a directory for stores"))?;
        }
        let name = format!("fleet-{number}");
        let mut vm = CheckpointedGuest::start_named(options, store, SCHEDULE, &name, command)?;
        // A host's VMs do not boot in the same second.
        vm.guest.wait_for("KF READY fleet", BOOT_S)?;
        vms.push(vm);
    }
    // The boot's pages are stored first.
    std::thread::sleep(Duration::from_secs(5));
    options.say(format!("{} VMs run for {seconds} s", vms.len()));
    let mut places = stores.to_vec();
    places.dedup();
    let ticks = |vms: &[CheckpointedGuest<'_>]| -> Result<Vec<f64>, Error> {
        vms.iter().map(|vm| processor_s(vm.guest.pid())).collect()
    };
    let (began, before, bytes_before) = (Instant::now(), ticks(&vms)?, bytes_of(&places)?);
    std::thread::sleep(Duration::from_secs(seconds));
    let (took_s, after, bytes_after) =
        (began.elapsed().as_secs_f64(), ticks(&vms)?, bytes_of(&places)?);
    let mut run = FleetRun {
        stored_bytes: bytes_after,
        ingest_bytes_per_s: (bytes_after - bytes_before) / took_s,
        ..FleetRun::default()
    };
    for ((vm, before), after) in vms.iter().zip(before).zip(after) {
        run.processor.push((after - before) / took_s);
        run.memory.push(anonymous_bytes(vm.guest.pid())?);
    }
    for place in &places {
        for (vm, pauses) in pauses_of(options, place, seconds)? {
            run.checkpoints += pauses.len() as f64;
            if pauses.len() < 3 {
                let problem = format!("only {} checkpoints were sealed", pauses.len());
                return Err(Error::failed(format!("checkpoint {vm}"), problem));
            }
            run.pauses.push(pauses.median());
        }
    }
    Ok(run)
}

/// The processor time of process `pid`, in seconds.
fn processor_s(pid: u32) -> Result<f64, Error> {
    let time = process_cpu_time(pid);
    let time = time.ok_or_else(|| Error::failed("look at an engine", "it has ended"))?;
    Ok(time.as_secs_f64())
}

/// The memory of process `pid` that belongs to no file, in bytes.
fn anonymous_bytes(pid: u32) -> Result<f64, Error> {
    let path = format!("/proc/{pid}/status");
    let text = std::fs::read_to_string(&path).map_err(Error::io(format!("read {path}")))?;
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    kib.map(|kib| kib * 1024.0).ok_or_else(|| Error::failed(path, "no RssAnon"))
}

/// The bytes of all files of some stores.
fn bytes_of(stores: &[PathBuf]) -> Result<f64, Error> {
    stores.iter().map(|store| bytes_below(store)).sum()
}

/// The bytes of all files below `folder`. A file that is removed meanwhile counts nothing.
fn bytes_below(folder: &Path) -> Result<f64, Error> {
    let failed = || Error::io(format!("read {}", folder.display()));
    let mut bytes = 0.0;
    for entry in std::fs::read_dir(folder).map_err(failed())? {
        let entry = entry.map_err(failed())?;
        match entry.metadata() {
            Ok(about) if about.is_dir() => bytes += bytes_below(&entry.path())?,
            Ok(about) => bytes += about.len() as f64,
            Err(_) => {}
        }
    }
    Ok(bytes)
}

/// The pauses of the newest checkpoints of each VM in a store, `newest` of each at most.
fn pauses_of(options: &Options, store: &Path, newest: u64) -> Result<Vec<(String, Sample)>, Error> {
    let output = Command::new(&options.keyframe)
        .args(["list", "--json", "--store"])
        .arg(store)
        .output()
        .map_err(Error::io("run keyframe list"))?;
    let list: Vec<Value> = serde_json::from_slice(&output.stdout)
        .map_err(|e| Error::failed("read keyframe list --json", e))?;
    let mut all: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for entry in &list {
        let (Some(vm), Some(pause)) = (entry["vm"].as_str(), entry["pause_ns"].as_f64()) else {
            return Err(Error::failed("read keyframe list --json", "an entry has no pause"));
        };
        all.entry(vm.to_owned()).or_default().push(pause);
    }
    let newest = usize::try_from(newest).unwrap_or(usize::MAX);
    let sample = |pauses: Vec<f64>| {
        let mut sample = Sample::default();
        pauses.into_iter().rev().take(newest).for_each(|pause| sample.push(pause));
        sample
    };
    Ok(all.into_iter().map(|(vm, pauses)| (vm, sample(pauses))).collect())
}

fn report(vms: usize, seconds: u64, runs: [(&str, &FleetRun); 3]) -> Report {
    let mut report = Report::new("fleet");
    report.figure("vms", vms as f64);
    report.figure("seconds", seconds as f64);
    for (name, run) in runs {
        for (key, value) in [
            ("stored_bytes", run.stored_bytes),
            ("ingest_bytes_per_s", run.ingest_bytes_per_s),
            ("checkpoints", run.checkpoints),
            ("median_pause_p50_ns", run.pauses.median()),
            ("median_pause_slowest_ns", run.pauses.percentile(100)),
            ("engine_memory_p50_bytes", run.memory.median()),
            ("engine_memory_max_bytes", run.memory.percentile(100)),
            ("engine_processors_p50", run.processor.median()),
            ("engine_processors_max", run.processor.percentile(100)),
        ] {
            report.figure(format!("{name}_{key}"), value);
        }
    }
    report.ratio_of("shared_over_own_bytes", "shared_stored_bytes", "own_stored_bytes");
    report.ratio_of(
        "slowest_pause_over_alone",
        "shared_median_pause_slowest_ns",
        "alone_median_pause_p50_ns",
    );
    report.ratio_of(
        "slowest_pause_over_own",
        "shared_median_pause_slowest_ns",
        "own_median_pause_slowest_ns",
    );
    let series = runs.into_iter().zip(1_u32..).map(|((name, run), place)| Series {
        name: name.into(),
        points: vec![Point {
            x: f64::from(place),
            y: run.stored_bytes / f64::from(1 << 20),
            deviation: None,
        }],
    });
    let chart = Chart {
        title: format!("{vms} VMs of one image, a checkpoint a second"),
        x: Axis::new("stores, in the order of the legend", Scale::Linear),
        y: Axis::new("stored, MiB", Scale::Linear),
        series: series.collect(),
    };
    report.plot = Figure { title: "Bytes of a fleet".into(), charts: vec![chart] };
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratios_are_those_promised() {
        let run = |bytes: f64, pause: f64| {
            let mut run = FleetRun { stored_bytes: bytes, ..FleetRun::default() };
            run.pauses.push(pause);
            run
        };
        let (alone, own, shared) = (run(50.0, 2.0), run(1000.0, 4.0), run(100.0, 3.0));
        let report = report(20, 30, [("alone", &alone), ("own", &own), ("shared", &shared)]);
        for (key, value) in [
            ("shared_over_own_bytes", 0.1),
            ("slowest_pause_over_alone", 1.5),
            ("slowest_pause_over_own", 0.75),
        ] {
            assert!((report.ratios[key] - value).abs() < 1e-9, "{key}");
        }
    }

    #[test]
    fn this_process_has_memory_and_time() {
        let pid = std::process::id();
        assert!(anonymous_bytes(pid).unwrap() > 0.0);
        assert!(processor_s(pid).unwrap() >= 0.0);
    }
}
