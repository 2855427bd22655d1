//! `store`: the store against databases, archivers and a flat file, with the same stream of pages
//! (`bench/feed`) on one core.
//!
//! ```text
//!   --from STORE ─▶ recorded_stream ─▶ DIR/stream       otherwise each process makes the stream
//!   for each round and store:  DIR/STORE ◀── process ── a Job       feeds, reads again, compares
//!                                               └─▶ StoreMeasurement ─▶ rows ─▶ report
//!   metadata, open:            Keyframe's store alone, in this process
//! ```
//!
//! Keyframe and the flat file must succeed. Another store that cannot run is left out with a warning.

mod archiver;
mod flat_file;
mod job_process;
mod keyframe_store;
mod metadata;
mod peer_program;
mod recorded_stream;
mod rows;
mod scratch_dir;

use crate::cli::own_path;
use crate::interrupt::Interrupt;
use crate::part_selection::PartSelection;
use crate::{Error, Options, Report};
use archiver::{Archiver, Program};
use flat_file::{FlatFile, Hash};
use keyframe_bench_feed::{ChangedWords, Job, Store, StoreMeasurement, StreamSource};
use peer_program::PeerProgram;
use recorded_stream::{RecordedStream, SelectedCheckpoints};
use rows::{DIRTIER, Rows};
use std::path::Path;

/// The stores in this program.
const OWN: [&str; 3] = ["keyframe", "flat_file", "flat_file_blake3"];
/// The stores in the program with the databases. The last one is a count of what deduplication and
/// zstd leave.
const DATABASES: [&str; 7] =
    ["kyoto", "lmdb", "rocksdb", "leveldb", "redb", "sqlite", "dedup_zstd"];
/// The archivers, each a program of its own.
const ARCHIVERS: [&str; 2] = ["borg", "restic"];
/// The part that measures metadata.
const METADATA: &str = "metadata";
/// The part that measures the opening of a store.
const OPEN: &str = "open";

/// The space that one store may take, as a multiple of the image. Databases take most of it while
/// they merge.
const ROOM_IMAGES: u64 = 8;

/// The extent of the benchmark.
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
    // The words that change are a property of the made stream only.
    let others = others.iter().filter(|name| from.is_none() || **name != DIRTIER);
    let all = OWN.iter().chain(&DATABASES).chain(&ARCHIVERS).chain(others).map(ToString::to_string);
    let parts = PartSelection::new("store", &options.only, all)?;
    let mut plan = if options.quick { QUICK } else { FULL };
    let interrupt = Interrupt::listen()?;
    let selected = from.map(SelectedCheckpoints::newest).transpose()?;
    plan.image_mib = selected.as_ref().map_or(plan.image_mib, SelectedCheckpoints::image_mib);
    let scratch = scratch_dir::make(options, (plan.image_mib << 20) * ROOM_IMAGES)?;
    let recorded = selected.map(|selected| selected.write(scratch.path(), options)).transpose()?;
    let cpu = last_cpu()?;
    let mut bench = Bench {
        options,
        parts: &parts,
        interrupt: &interrupt,
        dir: scratch.path(),
        plan,
        recorded,
        cpu,
        rows: Rows::default(),
    };
    bench.stores()?;
    let mut report = bench.rows.report();
    if let Some(recorded) = &bench.recorded {
        report.notes.insert("stream".into(), recorded.description.clone());
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
        "keyframe" | DIRTIER => Box::new(keyframe_store::KeyframeStore),
        "flat_file" => Box::new(FlatFile(Hash::Xxh3)),
        "flat_file_blake3" => Box::new(FlatFile(Hash::Blake3)),
        "borg" => Box::new(Archiver::new(Program::Borg, job.cpu)),
        "restic" => Box::new(Archiver::new(Program::Restic, job.cpu)),
        other => return Err(Error::failed("do the job", format!("no store is named {other}"))),
    };
    let measured = keyframe_bench_feed::run(&job, store.as_ref()).map_err(failed)?;
    serde_json::to_string(&measured).map_err(|e| Error::failed("write what was measured", e))
}

/// Returns the last core that this process may use: the first cores are the busiest.
fn last_cpu() -> Result<usize, Error> {
    let set = rustix::thread::sched_getaffinity(None)
        .map_err(|e| Error::io("ask for cores")(e.into()))?;
    let last = (0..rustix::thread::CpuSet::MAX_CPU).rev().find(|cpu| set.is_set(*cpu));
    last.ok_or_else(|| Error::failed("ask for cores", "there is none"))
}

/// The benchmark with its options and results.
struct Bench<'a> {
    options: &'a Options,
    parts: &'a PartSelection<'a>,
    interrupt: &'a Interrupt,
    dir: &'a Path,
    plan: Plan,
    /// The stream to feed in place of a made one.
    recorded: Option<RecordedStream>,
    cpu: usize,
    rows: Rows,
}

impl Bench<'_> {
    /// Measures the stores by turns, so that a slow minute of the machine does not hit one store alone.
    fn stores(&mut self) -> Result<(), Error> {
        let peers = self.peers();
        let mut left_out: Vec<&str> = Vec::new();
        let rounds = self.options.rounds.map_or(self.plan.rounds, usize::from);
        // The first measurement does not count: under a hypervisor, it pays for memory that comes from
        // the host.
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
                // The archivers take minutes, so one round is enough.
                let is_done =
                    round > 1 && self.options.rounds.is_none() && ARCHIVERS.contains(&name);
                if known_missing || is_done || left_out.contains(&name) || !self.parts.has(name) {
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

    /// Returns the program with the databases if one of them is selected. Warns of the databases that
    /// it lacks.
    fn peers(&self) -> Option<PeerProgram> {
        let selected: Vec<&str> =
            DATABASES.into_iter().filter(|name| self.parts.has(name)).collect();
        if selected.is_empty() {
            return None;
        }
        match PeerProgram::find(self.options, self.interrupt) {
            Ok(peers) => {
                for name in selected.into_iter().filter(|name| !peers.has(name)) {
                    let problem = "bench/peers was built without its library: run make bench-peers";
                    self.options.left_out(name, &Error::failed("find its library", problem));
                }
                Some(peers)
            }
            Err(e) => {
                let fix = e.fix().unwrap_or_default();
                self.options.left_out(
                    &selected.join(", "),
                    &Error::failed("find the databases", format!("{e}; {fix}")),
                );
                None
            }
        }
    }

    fn measure(
        &self,
        name: &str,
        peers: Option<&PeerProgram>,
        turn: &str,
    ) -> Result<StoreMeasurement, Error> {
        let image_mib = self.plan.image_mib;
        self.options.say(format!("{name}, {image_mib} MiB, {turn}"));
        let dir = self.dir.join(name);
        std::fs::create_dir(&dir).map_err(Error::io(format!("make {}", dir.display())))?;
        let words = if name == DIRTIER { ChangedWords::Many } else { ChangedWords::Few };
        let source = match &self.recorded {
            Some(recorded) => StreamSource::Recorded(recorded.path.clone()),
            None => StreamSource::Made { image_mib, seconds: self.plan.seconds, words },
        };
        let job = Job {
            store: name.into(),
            dir: dir.clone(),
            source,
            pure: name != DIRTIER && name != "dedup_zstd" && !ARCHIVERS.contains(&name),
            cpu: self.cpu,
        };
        let measured = if let Some(peers) = peers {
            job_process::measure(&peers.program, &[], &job, self.interrupt)
        } else {
            job_process::measure(&own_path()?, &["store", "--job"], &job, self.interrupt)
        };
        std::fs::remove_dir_all(&dir).map_err(Error::io(format!("remove {}", dir.display())))?;
        measured
    }
}

/// Adds the Debian package of an archiver to its error.
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
