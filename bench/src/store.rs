//! The store against databases, archivers and a flat file: one stream of pages for all
//! (`bench/feed`), on one core.
//!
//! ```text
//!   --from STORE ─▶ recorded ─▶ place/stream                                else each child makes the stream
//!   for each round, each store:  place/STORE ◀── child process ── a Job     feeds it, reads it again, compares
//!                                                     └─▶ Measured ─▶ rows ─▶ figures, ratios, table, chart
//!   metadata, open:              Keyframe's store alone, in this process
//! ```
//!
//! Keyframe and the flat file must succeed. Any other that cannot run is left out, and said to be.

mod archiver;
mod child;
mod flat_file;
mod keyframe;
mod metadata;
mod peers;
mod place;
mod recorded;
mod rows;

use crate::cli::own_path;
use crate::interrupt::Interrupt;
use crate::part_selection::PartSelection;
use crate::{Error, Options, Report};
use archiver::{Archiver, Program};
use flat_file::{FlatFile, Hash};
use keyframe_bench_feed::{Job, Measured, Source, Store, Words};
use peers::Peers;
use place::Place;
use recorded::{Chosen, Recorded};
use rows::{DIRTIER, Rows};
use std::path::Path;

/// Those in this program.
const OWN: [&str; 3] = ["keyframe", "flat_file", "flat_file_blake3"];
/// Those in the program with the databases. The last one counts what deduplication and zstd leave.
const DATABASES: [&str; 7] =
    ["kyoto", "lmdb", "rocksdb", "leveldb", "redb", "sqlite", "dedup_zstd"];
const ARCHIVERS: [&str; 2] = ["borg", "restic"];
const METADATA: &str = "metadata";
const OPEN: &str = "open";

/// Memory files that one store takes, as a part of the image: what databases leave behind while
/// they merge is most of it.
const ROOM_IMAGES: u64 = 8;

/// How much is measured.
struct Plan {
    image_mib: u64,
    seconds: usize,
    rounds: usize,
}

const FULL: Plan = Plan { image_mib: 1024, seconds: 9, rounds: 3 };
const QUICK: Plan = Plan { image_mib: 64, seconds: 9, rounds: 1 };

pub fn run(options: &Options) -> Result<Report, Error> {
    let others = [DIRTIER, METADATA, OPEN];
    let from = options.from.as_ref();
    // A stream that was recorded is what it is.
    let others = others.iter().filter(|name| from.is_none() || **name != DIRTIER);
    let all = OWN.iter().chain(&DATABASES).chain(&ARCHIVERS).chain(others).map(ToString::to_string);
    let parts = PartSelection::new("store", &options.only, all)?;
    let mut plan = if options.quick { QUICK } else { FULL };
    let interrupt = Interrupt::listen()?;
    let chosen = from.map(Chosen::of).transpose()?;
    plan.image_mib = chosen.as_ref().map_or(plan.image_mib, Chosen::image_mib);
    let place = Place::new(options, (plan.image_mib << 20) * ROOM_IMAGES)?;
    let recorded = chosen.map(|chosen| chosen.write(place.path(), options)).transpose()?;
    let cpu = last_cpu()?;
    let mut bench = Bench {
        options,
        parts: &parts,
        interrupt: &interrupt,
        dir: place.path(),
        plan,
        recorded,
        cpu,
        rows: Rows::default(),
    };
    bench.stores()?;
    let mut report = bench.rows.report();
    if let Some(recorded) = &bench.recorded {
        report.notes.insert("stream".into(), recorded.what.clone());
    }
    if parts.has(METADATA) {
        options.say("metadata of checkpoints");
        metadata::sizes(&bench.dir.join(METADATA), &mut report)?;
    }
    if parts.has(OPEN) {
        options.say("a store of 10,000 checkpoints");
        metadata::opening(&bench.dir.join(OPEN), &mut report)?;
    }
    Ok(report)
}

/// Runs one job of `keyframe-bench store --job JOB` and returns its result as a line of JSON.
pub fn run_job(job: &str) -> Result<String, Error> {
    let failed = |e: keyframe_bench_feed::Error| Error::failed("do the job", e);
    let job = Job::parse(job).map_err(failed)?;
    let store: Box<dyn Store> = match job.store.as_str() {
        "keyframe" | DIRTIER => Box::new(keyframe::Keyframe),
        "flat_file" => Box::new(FlatFile(Hash::Xxh3)),
        "flat_file_blake3" => Box::new(FlatFile(Hash::Blake3)),
        "borg" => Box::new(Archiver::new(Program::Borg, job.cpu)),
        "restic" => Box::new(Archiver::new(Program::Restic, job.cpu)),
        other => return Err(Error::failed("do the job", format!("no store is named {other}"))),
    };
    let measured = keyframe_bench_feed::run(&job, store.as_ref()).map_err(failed)?;
    serde_json::to_string(&measured).map_err(|e| Error::failed("write what was measured", e))
}

/// The last core that this process may use: the first ones have the most to do.
fn last_cpu() -> Result<usize, Error> {
    let set = rustix::thread::sched_getaffinity(None)
        .map_err(|e| Error::io("ask for cores")(e.into()))?;
    let last = (0..rustix::thread::CpuSet::MAX_CPU).rev().find(|cpu| set.is_set(*cpu));
    last.ok_or_else(|| Error::failed("ask for cores", "there is none"))
}

/// What the parts have in common.
struct Bench<'a> {
    options: &'a Options,
    parts: &'a PartSelection<'a>,
    interrupt: &'a Interrupt,
    dir: &'a Path,
    plan: Plan,
    /// In place of the stream that is made.
    recorded: Option<Recorded>,
    cpu: usize,
    rows: Rows,
}

impl Bench<'_> {
    /// By turns, so that a minute in which the machine is slow does not hit one store alone.
    fn stores(&mut self) -> Result<(), Error> {
        let peers = self.peers();
        let mut left_out: Vec<&str> = Vec::new();
        let rounds = self.options.rounds.map_or(self.plan.rounds, usize::from);
        // One that does not count: under a hypervisor, memory that was never used has to be had
        // from the host, and whoever comes first pays for it.
        if let Some(first) = OWN.into_iter().find(|name| self.parts.has(name)) {
            self.measure(first, None, "does not count")?;
        }
        for round in 1..=rounds {
            let turn = format!("round {round} of {rounds}");
            let dirtier = self.recorded.is_none().then_some(DIRTIER);
            for name in OWN.into_iter().chain(dirtier).filter(|name| self.parts.has(name)) {
                let measured = self.measure(name, None, &turn)?;
                self.rows.add(name, &measured);
            }
            let databases =
                peers.iter().flat_map(|peers| DATABASES.map(|name| (name, Some(peers))));
            for (name, peers) in databases.chain(ARCHIVERS.map(|name| (name, None))) {
                let known_missing = peers.is_some_and(|peers| !peers.has(name));
                // These take minutes, and differ by more than one minute differs from another.
                let often_enough =
                    round > 1 && self.options.rounds.is_none() && ARCHIVERS.contains(&name);
                if known_missing
                    || often_enough
                    || left_out.contains(&name)
                    || !self.parts.has(name)
                {
                    continue;
                }
                match self.measure(name, peers, &turn) {
                    Ok(measured) => self.rows.add(name, &measured),
                    Err(e) if self.interrupt.is_set() => return Err(e),
                    Err(e) => {
                        self.options.left_out(name, &with_fix(name, e));
                        left_out.push(name);
                    }
                }
            }
        }
        Ok(())
    }

    /// The program with the databases, if any of them is wanted. Those that it does not have are
    /// said to be left out.
    fn peers(&self) -> Option<Peers> {
        let wanted: Vec<&str> = DATABASES.into_iter().filter(|name| self.parts.has(name)).collect();
        if wanted.is_empty() {
            return None;
        }
        match Peers::find(self.options, self.interrupt) {
            Ok(peers) => {
                for name in wanted.into_iter().filter(|name| !peers.has(name)) {
                    let problem = "its library was not there when bench/peers was built: run make bench-peers";
                    self.options.left_out(name, &Error::failed("find its library", problem));
                }
                Some(peers)
            }
            Err(e) => {
                let fix = e.fix().unwrap_or_default();
                self.options.left_out(
                    &wanted.join(", "),
                    &Error::failed("find the databases", format!("{e}; {fix}")),
                );
                None
            }
        }
    }

    fn measure(&self, name: &str, peers: Option<&Peers>, turn: &str) -> Result<Measured, Error> {
        let image_mib = self.plan.image_mib;
        self.options.say(format!("{name}, {image_mib} MiB, {turn}"));
        let dir = self.dir.join(name);
        std::fs::create_dir(&dir).map_err(Error::io(format!("make {}", dir.display())))?;
        let words = if name == DIRTIER { Words::Many } else { Words::Few };
        let source = match &self.recorded {
            Some(recorded) => Source::Recorded(recorded.path.clone()),
            None => Source::Made { image_mib, seconds: self.plan.seconds, words },
        };
        let job = Job {
            store: name.into(),
            dir: dir.clone(),
            source,
            pure: name != DIRTIER && name != "dedup_zstd" && !ARCHIVERS.contains(&name),
            cpu: self.cpu,
        };
        let measured = if let Some(peers) = peers {
            child::measure(&peers.program, &[], &job, self.interrupt)
        } else {
            child::measure(&own_path()?, &["store", "--job"], &job, self.interrupt)
        };
        std::fs::remove_dir_all(&dir).map_err(Error::io(format!("remove {}", dir.display())))?;
        measured
    }
}

/// An archiver that is missing can be installed.
fn with_fix(name: &str, error: Error) -> Error {
    let package = match name {
        "borg" => Program::Borg.package(),
        "restic" => Program::Restic.package(),
        _ => return error,
    };
    Error::failed(
        format!("run {name} (Debian: apt-get install {package}, or make bench-peers)"),
        error,
    )
}
