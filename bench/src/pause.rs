//! `pause`: the pauses of Keyframe's strategies and of QEMU's own ways to save a VM.
//!
//! ```text
//!   load                 guest                            methods
//!   1k, 5k, 20k, 60k     1 GiB, writes in 512 MiB of it   precopy, stop-copy, fork: by turns
//!   dirty pages a second                                  cow: alone, it needs another tracker
//!                                                         QEMU's: alone, savevm needs an image
//!   1 to 12 GiB at 20k   all RAM was written, and is      precopy, stop-copy, fork; QEMU's up
//!                        written everywhere               to 4 GiB
//!   disk                 20k, and a disk that is idle,    precopy
//!                        or written to
//! ```
//!
//! A checkpoint follows one second after the one before, or when that one is sealed. Quick runs
//! measure QEMU's methods at one load only, because saving RAM takes them seconds.

mod chart;
mod disk_load;
mod rows;

use crate::guest_files::SmallGuest;
use crate::keyframe_json::number;
use crate::part_selection::PartSelection;
use crate::qemu_peer::{BEFORE, QemuPeer, SaveMethod};
use crate::running_guest::{CheckpointedGuest, Schedule};
use crate::sample::Sample;
use crate::{Error, Options, Report};
use rows::{Load, RATES, Rows, SIZES};
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, Instant};

/// The RAM of the guest of the rates.
const MEM: &str = "1G";
/// The part of its RAM that it writes.
const WRITTEN_MIB: u64 = 512;
/// The rate at which sizes of RAM are compared, in pages a second.
const RATE: u64 = 20_000;
/// QEMU's own methods take minutes with more RAM.
const PEERS_GIB_MAX: u64 = 4;
/// The time between two checkpoints.
const INTERVAL: Duration = Duration::from_secs(1);

/// How often each thing is measured.
#[derive(Clone)]
struct Plan {
    /// Rounds over the strategies at each of the rates.
    strategies: [usize; 4],
    /// Copy-on-write checkpoints at each of the rates.
    cow: [usize; 4],
    /// Checkpoints of a guest that writes nothing.
    empty: usize,
    /// Rounds over QEMU's methods at each of the rates.
    peers: [usize; 4],
    /// Rounds over the strategies at each size.
    sizes: usize,
    /// Whether QEMU's methods are measured at each size.
    peers_of_sizes: bool,
    /// Checkpoints with an idle disk, and with one that is written to.
    disk: usize,
}

const FULL: Plan = Plan {
    strategies: [6, 6, 16, 8],
    cow: [4, 4, 8, 5],
    empty: 30,
    peers: [1, 1, 3, 1],
    sizes: 4,
    peers_of_sizes: true,
    disk: 16,
};
const QUICK: Plan = Plan {
    strategies: [1, 1, 2, 1],
    cow: [1, 1, 1, 1],
    empty: 3,
    peers: [0, 0, 1, 0],
    sizes: 1,
    peers_of_sizes: false,
    disk: 3,
};

impl Plan {
    /// Makes the plan for `--quick`, `--only` and `--rounds`.
    fn new(options: &Options, parts: &PartSelection<'_>) -> Self {
        let mut plan = if options.quick { QUICK.clone() } else { FULL.clone() };
        if let Some(rounds) = options.rounds.map(usize::from) {
            let often = [rounds; 4];
            plan = Self {
                strategies: often,
                cow: often,
                empty: 3 * rounds,
                peers: often,
                sizes: rounds,
                disk: 2 * rounds,
                ..plan
            };
        }
        for (at, rate) in RATES.into_iter().enumerate() {
            if !parts.has(&Load { rate, gib: None }.label()) {
                (plan.strategies[at], plan.cow[at], plan.peers[at]) = (0, 0, 0);
            }
        }
        plan
    }

    /// Returns whether a rate is measured.
    fn has_rates(&self) -> bool {
        self.strategies.iter().any(|rounds| *rounds > 0)
    }
}

/// The name of the disk's part.
const DISK_PART: &str = "disk";

/// Returns the name of the part of a size.
fn size_name(gib: u64) -> String {
    format!("{gib}gib")
}

pub fn run(options: &Options) -> Result<Report, Error> {
    let rates = RATES.map(|rate| Load { rate, gib: None }.label());
    let all = rates.into_iter().chain(SIZES.map(size_name)).chain([DISK_PART.to_owned()]);
    let parts = PartSelection::new("pause", &options.only, all)?;
    let files = SmallGuest::find(options)?;
    let dir = tempfile::tempdir().map_err(Error::io("make a temporary directory"))?;
    let bench = Bench { options, files: &files, dir: dir.path(), plan: Plan::new(options, &parts) };
    let (mut rows, mut empty) = (Rows::default(), Sample::default());
    if bench.plan.has_rates() {
        empty = bench.strategies(&mut rows)?;
        bench.copy_on_write(&mut rows)?;
        bench.peers(&mut rows).unwrap_or_else(|e| options.left_out("QEMU's own methods", &e));
    }
    for gib in SIZES.into_iter().filter(|gib| parts.has(&size_name(*gib))) {
        bench.size(gib, &mut rows)?;
    }
    let mut report = report(&rows, &empty);
    if parts.has(DISK_PART) {
        match disk_load::measure(options, &files, dir.path(), bench.plan.disk) {
            Ok(pauses) => pauses.add_to(&mut report),
            Err(e) => options.left_out("a disk under load", &e),
        }
    }
    Ok(report)
}

/// The benchmark with its options and files.
struct Bench<'a> {
    options: &'a Options,
    files: &'a SmallGuest,
    dir: &'a Path,
    plan: Plan,
}

impl Bench<'_> {
    fn under_keyframe(
        &self,
        strategy: &str,
        mem: &str,
        mib: u64,
        rate: u64,
    ) -> Result<CheckpointedGuest<'_>, Error> {
        let command = self.files.command(mem, &append(rate, mib));
        let store = self.dir.join(format!("store-{strategy}-{mem}-{mib}"));
        let mut vm =
            CheckpointedGuest::start(self.options, &store, no_interval(strategy), &command)?;
        vm.guest.wait_for("KF READY dirty", 180)?;
        // The first checkpoint is complete and not part of the comparison.
        vm.take(strategy)?;
        Ok(vm)
    }

    /// Measures the strategies that share one tracker, at each rate. Returns the pauses of checkpoints
    /// without dirty pages.
    fn strategies(&self, rows: &mut Rows) -> Result<Sample, Error> {
        self.options.say("strategies, 1 GiB: boot and first checkpoint");
        let mut vm = self.under_keyframe("precopy", MEM, WRITTEN_MIB, 0)?;
        for (rate, rounds) in chosen(self.plan.strategies) {
            let load = Load { rate, gib: None };
            self.options.say(format!("strategies at {} dirty pages a second", load.label()));
            set_rate(&mut vm, rate)?;
            let strategies = ["precopy", "stop-copy", "fork"].repeat(rounds);
            measure(&vm, load, &strategies, rows)?;
        }
        let at_rate = Load { rate: RATE, gib: None };
        let written = rows.dirty_pages_p50(at_rate);
        if rows.count("precopy", at_rate) > 0 && written < RATE as f64 / 4.0 {
            return Err(Error::failed(
                "load the guest",
                format!(
                    "it wrote only {written} of {RATE} pages a second: the machine is too busy"
                ),
            ));
        }
        self.options.say("checkpoints without dirty pages");
        set_rate(&mut vm, 0)?;
        let mut empty = Sample::default();
        for _ in 0..self.plan.empty {
            std::thread::sleep(Duration::from_millis(300));
            empty.push(number(&vm.take("precopy")?, "pause_ns")?);
        }
        Ok(empty)
    }

    fn copy_on_write(&self, rows: &mut Rows) -> Result<(), Error> {
        self.options.say("copy-on-write, 1 GiB: boot and first checkpoint");
        let mut vm = self.under_keyframe("cow", MEM, WRITTEN_MIB, 0)?;
        for (rate, rounds) in chosen(self.plan.cow) {
            let load = Load { rate, gib: None };
            self.options.say(format!("copy-on-write at {} dirty pages a second", load.label()));
            set_rate(&mut vm, rate)?;
            measure(&vm, load, &["cow"].repeat(rounds), rows)?;
        }
        Ok(())
    }

    fn peers(&self, rows: &mut Rows) -> Result<(), Error> {
        self.options.say("QEMU's own methods, 1 GiB: boot");
        let mut peer =
            QemuPeer::start(self.files, &self.dir.join("peer"), MEM, &append(0, WRITTEN_MIB))?;
        self.first_snapshot(&mut peer, "first", rows)?;
        for (rate, rounds) in chosen(self.plan.peers) {
            let load = Load { rate, gib: None };
            peer.guest.say(&format!("rate {rate}"))?;
            // The pause of a live migration is QEMU's downtime limit at any rate, so one rate is enough.
            let methods: &[SaveMethod] = match rate {
                RATE => &[
                    SaveMethod::Savevm,
                    SaveMethod::Migrate,
                    SaveMethod::LiveMigrate,
                    SaveMethod::BackgroundSnapshot,
                ],
                _ => &[SaveMethod::Savevm, SaveMethod::Migrate, SaveMethod::BackgroundSnapshot],
            };
            self.measure_peer(&mut peer, load, &methods.repeat(rounds), rows)?;
        }
        Ok(())
    }

    /// Measures a guest whose RAM was all written, under Keyframe and without.
    fn size(&self, gib: u64, rows: &mut Rows) -> Result<(), Error> {
        let load = Load { rate: RATE, gib: Some(gib) };
        // The rest is for the guest's kernel, its page tables and its first process.
        let mib = gib * (1024 - 64) - 120;
        let mem = format!("{gib}G");
        {
            self.options.say(format!(
                "strategies, {gib} GiB, all of it written: boot and first checkpoint"
            ));
            let vm = self.under_keyframe("precopy", &mem, mib, RATE)?;
            vm.take("precopy")?;
            self.options.say(format!("strategies, {gib} GiB"));
            // Pre-copy runs twice: the ratio of sizes uses it.
            measure(
                &vm,
                load,
                &["precopy", "stop-copy", "precopy", "fork"].repeat(self.plan.sizes),
                rows,
            )?;
        }
        if !self.plan.peers_of_sizes || gib > PEERS_GIB_MAX {
            return Ok(());
        }
        if let Err(e) = self.peers_of_size(load, &mem, mib, rows) {
            self.options.left_out(&format!("QEMU's own methods, with {gib} GiB"), &e);
        }
        Ok(())
    }

    fn peers_of_size(&self, load: Load, mem: &str, mib: u64, rows: &mut Rows) -> Result<(), Error> {
        self.options.say(format!("QEMU's own methods, {mem}, all of it written: boot"));
        let dir = self.dir.join(format!("peer{mem}"));
        let mut peer = QemuPeer::start(self.files, &dir, mem, &append(RATE, mib))?;
        let key = load.gib.map_or_else(String::new, |gib| format!("first_{gib}gib"));
        self.first_snapshot(&mut peer, &key, rows)?;
        self.measure_peer(
            &mut peer,
            load,
            &[SaveMethod::Savevm, SaveMethod::Migrate, SaveMethod::BackgroundSnapshot],
            rows,
        )
    }

    /// Measures the first background snapshot of a VM. It protects huge pages, and later ones protect
    /// the small pages into which it split them, so it is a separate figure.
    fn first_snapshot(&self, peer: &mut QemuPeer, key: &str, rows: &mut Rows) -> Result<(), Error> {
        self.options.say(format!("background_snapshot, {key}"));
        if let Some(saved) = peer.save(SaveMethod::BackgroundSnapshot, self.options)? {
            rows.first_snapshots
                .push((format!("background_snapshot_{key}_pause_ns"), saved.pause_ns));
        }
        Ok(())
    }

    fn measure_peer(
        &self,
        peer: &mut QemuPeer,
        load: Load,
        methods: &[SaveMethod],
        rows: &mut Rows,
    ) -> Result<(), Error> {
        for method in methods {
            self.options.say(format!("{} at {}", method.key(), load.label()));
            // The guest works during a background snapshot, so its work before is measured too.
            let background = *method == SaveMethod::BackgroundSnapshot;
            std::thread::sleep(if background { BEFORE } else { INTERVAL });
            if let Some(saved) = peer.save(*method, self.options)? {
                let row = rows.of(method.key(), load);
                row.pause_ns.push(saved.pause_ns);
                row.whole_ns.push(saved.whole_ns);
                if let (true, Some(lost)) = (background, saved.work_lost) {
                    row.work_lost.push(lost);
                }
            }
        }
        Ok(())
    }
}

/// Returns the rates that are measured, with their rounds.
fn chosen(rounds: [usize; 4]) -> impl Iterator<Item = (u64, usize)> {
    RATES.into_iter().zip(rounds).filter(|(_, rounds)| *rounds > 0)
}

fn no_interval(strategy: &str) -> Schedule<'_> {
    Schedule { interval: "none", strategy }
}

/// Returns the kernel parameters of a guest that writes `rate` pages a second in `mib` MiB.
fn append(rate: u64, mib: u64) -> String {
    format!("kf.work=dirty kf.rate={rate} kf.mib={mib}")
}

/// Changes the rate. The checkpoint that still has pages of the old rate is not counted.
fn set_rate(vm: &mut CheckpointedGuest, rate: u64) -> Result<(), Error> {
    vm.guest.say(&format!("rate {rate}"))?;
    vm.guest.wait_for(&format!("rate {rate}"), 30)?;
    vm.take(vm.strategy())?;
    Ok(())
}

/// Takes a checkpoint with each of `strategies`, one after the other.
fn measure(
    vm: &CheckpointedGuest,
    load: Load,
    strategies: &[&str],
    rows: &mut Rows,
) -> Result<(), Error> {
    let mut next = Instant::now() + INTERVAL;
    for strategy in strategies {
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        next = Instant::now() + INTERVAL;
        let entry = vm.take(strategy)?;
        let row = rows.of(&strategy.replace('-', "_"), load);
        row.pause_ns.push(number(&entry, "pause_ns")?);
        row.dirty_pages.push(number(&entry, "dirty_pages")?);
        let scan = entry.pointer("/pause/scan").and_then(Value::as_f64);
        row.scan_ns
            .push(scan.ok_or_else(|| Error::failed("read keyframe take --json", "no pause.scan"))?);
    }
    Ok(())
}

fn report(rows: &Rows, empty: &Sample) -> Report {
    let mut report = Report::new("pause");
    rows.figures(&mut report);
    let at_20k = Load { rate: RATE, gib: None };
    if rows.count("precopy", at_20k) > 0 {
        report.figure("dirty_pages_per_checkpoint_p50", rows.dirty_pages_p50(at_20k));
        report.figure("checkpoints_per_strategy", rows.count("precopy", at_20k) as f64);
    }
    if empty.len() > 0 {
        report.figure("empty_pause_p50_ns", empty.median());
    }
    let precopy = "precopy_20k_pause_p50_ns";
    for peer in
        ["stop_copy", "fork", "cow", "savevm", "migrate", "migrate_live", "background_snapshot"]
    {
        report.ratio_of(
            format!("{peer}_over_precopy_20k"),
            &format!("{peer}_20k_pause_p50_ns"),
            precopy,
        );
    }
    report.ratio_of("precopy_20k_over_empty", precopy, "empty_pause_p50_ns");
    report.ratio_of("precopy_60k_over_precopy_20k", "precopy_60k_pause_p50_ns", precopy);
    let of_size = |gib: u64, what| {
        format!("precopy_{}_{what}_p50_ns", Load { rate: RATE, gib: Some(gib) }.label())
    };
    report.ratio_of("pause_12gib_over_1gib", &of_size(12, "pause"), &of_size(1, "pause"));
    let scans = SIZES
        .into_iter()
        .filter_map(|gib| report.figures.get(&of_size(gib, "scan_in_pause")).copied());
    if let Some(longest) = scans.reduce(f64::max) {
        report.figure("scan_in_pause_p50_ns", longest);
    }
    let (small, large) = ("precopy_20k_1gib_pause_p50_ns", "precopy_20k_4gib_pause_p50_ns");
    report.ratio_of("pause_4gib_over_1gib", large, small);
    if let (Some(small), Some(large)) = (report.figures.get(small), report.figures.get(large)) {
        let growth = large - small;
        report.figure("precopy_growth_1gib_to_4gib_ns", growth);
    }
    report.plot = chart::figure(rows);
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(loads: &[Load]) -> Report {
        let mut rows = Rows::default();
        for load in loads {
            for way in ["precopy", "stop_copy", "savevm"] {
                let row = rows.of(way, *load);
                row.pause_ns.push(2e6);
                row.dirty_pages.push(20_000.0);
            }
        }
        let mut empty = Sample::default();
        empty.push(1e6);
        report(&rows, &empty)
    }

    /// Other programs read these keys.
    #[test]
    fn the_keys_are_those_promised() {
        let at = |rate, gib| Load { rate, gib };
        let all = [
            at(20_000, None),
            at(60_000, None),
            at(20_000, Some(1)),
            at(20_000, Some(4)),
            at(20_000, Some(12)),
        ];
        let report = measured(&all);
        for key in [
            "precopy_20k_pause_p50_ns",
            "precopy_20k_pause_p99_ns",
            "empty_pause_p50_ns",
            "precopy_60k_pause_p50_ns",
        ] {
            assert!(report.figures.contains_key(key), "no {key}");
        }
        for key in [
            "stop_copy_over_precopy_20k",
            "savevm_over_precopy_20k",
            "precopy_20k_over_empty",
            "pause_4gib_over_1gib",
            "pause_12gib_over_1gib",
        ] {
            assert!(report.ratios.contains_key(key), "no {key}");
        }
    }

    #[test]
    fn a_load_that_was_not_measured_has_no_key() {
        let report = measured(&[Load { rate: 1000, gib: None }]);
        let keys: Vec<_> = report.figures.keys().chain(report.ratios.keys()).collect();
        assert!(!keys.iter().any(|key| key.contains("20k") || key.contains("gib")), "{keys:?}");
        assert!(!report.figures.contains_key("dirty_pages_per_checkpoint_p50"));
    }
}
