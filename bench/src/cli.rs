//! The command line of `keyframe-bench`, and how the program fails.

use crate::benchmark::{self, Options};
use crate::{Error, Report, store};
use keyframe_store_keys::KeyArg;
use keyframe_units::error_chain as chain;
use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

const FAILED: u8 = 1;
const INCOMPLETE: u8 = 3;
const NO_STORE: u8 = 10;
const LOCKED: u8 = 11;

const AFTER_HELP: &str = "\
Each benchmark runs Keyframe and its peers side by side on the same guest and prints ratios;
absolute times hold for this machine alone. The JSON is one object with name, figures and ratios;
each key ends with its unit. docs/design/benchmarks.md defines every figure.

Benchmarks:
  pause        the pause of each strategy and of savevm, migrate exec: and background-snapshot, at
               1k to 60k dirty pages a second and with 1 to 4 GiB of RAM (8 minutes)
  overhead     the work that a guest loses to checkpoints, by strategy and interval: computing,
               dirtying, compiling (12 minutes)
  restore      the time until a VM of 1 GiB runs again, lazily and eagerly, against -loadvm and
               memcpy (2 minutes)
  replay       the cost of recording, replaying and analysing on the same guest work: recording
               over plain and over counting, with checkpoints, in two stages and three; replay over
               recording; each tool; two jobs (25 minutes)
  speedup      an analysis with two jobs, and with one, over one replay through all intervals, by
               tool; during the recording (--only live). --only wait: 1 to 16 workers with a
               stand-in for a slow simulator; --only nodes: 1 to 16 nodes of a Slurm cluster, over
               links, as root (40 minutes; wait: 45; nodes: 65)
  replication  the cost of a standby for the guest, over 1 and 10 Gbit/s, against the unprotected
               guest: compiling, computing, a web server, a coordinator; and the time of a failover;
               on hosts of network namespaces, as root (3 hours). Methods, by turns in each of five
               rounds: its writes are tracked, and nothing else (tracking100: keyframe profile with
               epochs of 100 ms); epochs are sent, and packets do not wait for them (transfer100:
               protect --policy fixed:100ms --hold-output none); each policy (fixed50, fixed100,
               paper, adaptive). --only knows 25, 50, 100 and 200 of each
  evaluation   chapter 6 of the SimuBoost checkpoint paper: written pages of workloads,
               deduplication, sizes, pauses, reading, run time and speed-up, by interval, and the
               model's predictions; CSV, plots and report.md in --out. Each measurement is a file
               in --out/measurements. Run the same command again to measure those that are missing
               (3 rounds of 50 minutes)
  memtrace-columns  the column encoders of memtrace.parquet against the parquet library's, on the rows
               of a guest: time and size (1 minute)
  vmm          checkpoint, restore and size of VMs with 128 to 1024 MiB, on Firecracker and on QEMU
               under TCG and KVM; against Firecracker's own snapshots and QEMU's; 20 clones
               (20 minutes)
  store        ten checkpoints of 1 GiB into the store, databases, borg, restic and a flat file:
               speed and size (15 minutes)

Examples:
  keyframe-bench pause
  keyframe-bench pause --quick --plot pause.svg
  keyframe-bench pause --only 20k,4gib --rounds 3
  keyframe-bench overhead --only compute,60k_1s
  keyframe-bench overhead --json > overhead.json
  keyframe-bench memtrace-columns --json
  keyframe-bench replay --quick
  keyframe-bench replay --only record,compute,redis --qemu /opt/qemu10/bin/qemu-system-x86_64
  keyframe-bench speedup --only icount,cache --rounds 1
  keyframe-bench replication --quick
  keyframe-bench replication --only web,1gbit,paper,adaptive --seconds 20 --json > web.json
  keyframe-bench replication --only sp,tracking100,transfer100,fixed100
  keyframe-bench replication --only failover
  keyframe-bench evaluation --only compile,2000ms --rounds 1 --out look
  keyframe-bench evaluation --stop-after 100m
  keyframe-bench evaluation --stop-after 0s
  keyframe-bench fleet --json
  keyframe-bench vmm --only firecracker,tcg_512mib --json
  keyframe-bench store --quick
  keyframe-bench store --only keyframe,kyoto,borg
  keyframe-bench store --from runs

Exit codes: 0 done, 1 failed, 2 usage, 3 evaluation stopped before all was measured, 10 no store, 11 store locked";

/// Measure Keyframe against its peers on this machine
#[derive(clap::Parser, Debug)]
#[command(name = "keyframe-bench", version, max_term_width = 110, after_help = AFTER_HELP)]
pub struct Cli {
    /// The benchmark
    #[arg(value_parser = benchmark::names())]
    name: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Draw a chart to FILE.svg or FILE.png
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Measure fewer repetitions: for a look, not for a result
    #[arg(long)]
    quick: bool,
    /// Measure only these parts, named as in the keys: 1k 5k 20k 60k 1gib 2gib 4gib disk, or
    /// compute 60k_1s compile ..., or keyframe kyoto borg ..., or record jobs memtrace compute
    /// redis ..., or icount hot wait ..., or web failover 1gbit adaptive ..., or
    /// firecracker kvm tcg_128mib ..., or compile bonnie stream 500ms 1000ms ...
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    only: Vec<String>,
    /// Measure each thing N times [default: as many as a stable median needs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    rounds: Option<u16>,
    /// Count each run of `replication` or `fleet` for N seconds [default: 10, with --quick 5; `fleet`:
    /// 30, with --quick 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(3..=3600))]
    seconds: Option<u16>,
    /// The keyframe program to measure [default: the one beside this program]
    #[arg(long, value_name = "PATH", env = "KEYFRAME_BIN")]
    keyframe: Option<PathBuf>,
    /// The directory of the small guest [default: built by guests/build small]
    #[arg(long, value_name = "DIR", env = "KEYFRAME_GUEST")]
    guest: Option<PathBuf>,
    /// The directory of the guest that compiles [default: built by guests/build real]
    #[arg(long, value_name = "DIR", env = "KEYFRAME_REAL_GUEST")]
    real_guest: Option<PathBuf>,
    /// The directory of Firecracker and its payload [default: built by guests/build firecracker]
    #[arg(long, value_name = "DIR", env = "KEYFRAME_FIRECRACKER_GUEST")]
    firecracker_guest: Option<PathBuf>,
    /// The QEMU with which `replay`, `speedup` and `evaluation` record and replay
    /// [default: qemu-system-x86_64]
    #[arg(long, value_name = "PATH")]
    qemu: Option<PathBuf>,
    /// Let `store` feed the RAM of the last ten checkpoints of the newest run in STORE
    /// [default: pages made from a fixed seed]
    #[arg(long, value_name = "STORE")]
    from: Option<PathBuf>,
    #[command(flatten)]
    key: KeyArg,
    /// The directory to which `evaluation` writes its files [default: out/evaluation]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Let `evaluation` start no measurement after this time (90s, 100m); 0s only writes the report
    /// of the existing ones. Exit code 3: some are missing; run the same command again
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    stop_after: Option<Duration>,
    /// Measure one store of `store`, in a process of its own
    #[arg(long, hide = true, value_name = "JSON", conflicts_with = "json")]
    job: Option<String>,
    /// Do not report progress
    #[arg(long, short)]
    quiet: bool,
}

impl Cli {
    /// Measures and prints.
    pub fn run(&self) -> Result<(), Failure> {
        if let Some(job) = &self.job {
            return print(&store::run_job(job)?);
        }
        if let Some(path) = &self.plot {
            check_writable(path)?;
        }
        let report = benchmark::run(&self.name, &self.options()?)?;
        if let Some(path) = &self.plot {
            report.plot.write(path).map_err(|e| Failure::new(chain(&e)))?;
        }
        print(&self.output(&report)?)?;
        match report.incomplete {
            None => Ok(()),
            Some(why) => Err(Failure { code: INCOMPLETE, ..Failure::new(why) }),
        }
    }

    fn options(&self) -> Result<Options, Failure> {
        let open = |store: &PathBuf| self.key.open(store).map_err(|e| Failure::store(&e, store));
        Ok(Options {
            keyframe: self.keyframe()?,
            quick: self.quick,
            only: self.only.clone(),
            rounds: self.rounds,
            seconds: self.seconds,
            guest: self.guest.clone(),
            real_guest: self.real_guest.clone(),
            firecracker_guest: self.firecracker_guest.clone(),
            qemu: self.qemu.clone(),
            out: self.out.clone(),
            stop_after: self.stop_after,
            from: self.from.as_ref().map(open).transpose()?,
            progress: if self.quiet { |_| () } else { |line| eprintln!("keyframe-bench: {line}") },
            warning: |line| eprintln!("keyframe-bench: {line}"),
        })
    }

    /// Returns the path of the product: the one that is named, or the one beside this program.
    fn keyframe(&self) -> Result<PathBuf, Failure> {
        let path = match &self.keyframe {
            Some(path) => path.clone(),
            None => own_path()?.with_file_name("keyframe"),
        };
        if path.is_file() {
            return Ok(path);
        }
        Err(Failure::new(format!("find the keyframe program: no {}", path.display()))
            .with_fix("build it with make build, or name it with --keyframe PATH or KEYFRAME_BIN"))
    }

    fn output(&self, report: &Report) -> Result<String, Failure> {
        if !self.json {
            return Ok(report.text());
        }
        serde_json::to_string_pretty(report)
            .map_err(|e| Failure::new(format!("write the result as JSON: {e}")))
    }
}

/// Returns the path of this program.
pub fn own_path() -> Result<PathBuf, Error> {
    std::env::current_exe().map_err(Error::io("find the path of this program"))
}

/// Fails if `path` cannot be written to, before the benchmark takes minutes.
fn check_writable(path: &Path) -> Result<(), Failure> {
    keyframe_plot::FigureFormat::of(path).map_err(|e| Failure::new(e.to_string()))?;
    match OpenOptions::new().append(true).create(true).open(path) {
        Ok(_) => Ok(()),
        Err(e) => Err(Failure::new(format!("write {}: {e}", path.display()))
            .with_fix("name a file in a directory that exists and is writable")),
    }
}

/// Prints `text` and a newline. A reader that has closed the pipe is no error.
fn print(text: &str) -> Result<(), Failure> {
    match writeln!(io::stdout(), "{text}") {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::new(format!("write to standard output: {e}")))
        }
        _ => Ok(()),
    }
}

/// Why the program fails, for a person.
#[derive(Debug)]
pub struct Failure {
    /// The exit code.
    pub code: u8,
    message: String,
    fix: Option<String>,
}

impl Failure {
    fn new(message: impl Into<String>) -> Self {
        Self { code: FAILED, message: message.into(), fix: None }
    }

    fn with_fix(self, fix: impl Into<String>) -> Self {
        Self { fix: Some(fix.into()), ..self }
    }

    fn store(error: &keyframe_store::Error, store: &Path) -> Self {
        let failure = Self::new(chain(error));
        match error {
            keyframe_store::Error::NoStore { .. } => {
                let fix = format!("create it with: keyframe init {}", store.display());
                Self { code: NO_STORE, ..failure.with_fix(fix) }
            }
            keyframe_store::Error::Locked { .. } => Self { code: LOCKED, ..failure },
            _ => Self { fix: keyframe_store_keys::fix(error).or_else(|| error.fix()), ..failure },
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let failure = Self::new(chain(&error));
        match error.fix() {
            Some(fix) => failure.with_fix(fix),
            None => failure,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.message)?;
        match &self.fix {
            Some(fix) => write!(f, "\n  fix: {fix}"),
            None => Ok(()),
        }
    }
}
