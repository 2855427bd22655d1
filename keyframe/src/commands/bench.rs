//! `keyframe bench`: measures against peers, in one run.

use keyframe_failure::output;
use keyframe_failure::{DONE, Failure, Outcome};
use keyframe_store_keys::KeyArg;
use std::path::{Path, PathBuf};

/// Measure Keyframe against its peers on this machine
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Every benchmark runs Keyframe and its peers side by side on the same guest and prints ratios; absolute times are
this machine's. The JSON is one object: name, figures, ratios; keys carry their units. What each figure is:
docs/design/benchmarks.md.

Benchmarks:
  pause     pause of each strategy and of savevm, migrate exec:, background-snapshot, at 1k to 60k dirty pages a second
            and with 1 to 4 GiB of RAM (8 minutes)
  overhead  work that a guest loses to checkpoints, by strategy and interval: computing, dirtying, compiling (12 minutes)
  restore   how soon a VM of 1 GiB runs again, lazily and eagerly, against -loadvm and memcpy (2 minutes)
  replay    what recording, replaying and analysing cost on the same guest work: recording over plain and over counting,
            with checkpoints, in two stages and three; replay over recording; each tool; two jobs (25 minutes)
  replication  what a standby costs the guest, over 1 and 10 Gbit/s and by policy, against the unprotected guest: compiling,
            computing, a web server, a coordinator; and how long a failover takes; on hosts of network namespaces, as root (70 minutes)
  evaluation  what chapter 6 of the SimuBoost checkpoint paper measures: what workloads write, deduplication, sizes, pauses, reading,
            run time and speed-up, by interval; CSV, plots and report.md in --out (1 hour)
  store     ten checkpoints of 1 GiB into the store, databases, borg, restic and a flat file: speed and size (15 minutes)

Examples:
  keyframe bench pause
  keyframe bench pause --quick --plot pause.svg
  keyframe bench pause --only 20k,4gib --rounds 3
  keyframe bench overhead --only compute,60k_1s
  keyframe bench overhead --json > overhead.json
  keyframe bench replay --quick
  keyframe bench replay --only record,checkpoints,compute,redis --qemu /opt/qemu10/bin/qemu-system-x86_64
  keyframe bench replication --quick
  keyframe bench replication --only web,coordinator,1gbit,paper,adaptive --seconds 20 --json > replication.json
  keyframe bench replication --only failover
  keyframe bench evaluation --only compile,2000ms --out out/evaluation
  keyframe bench store --quick
  keyframe bench store --only keyframe,kyoto,borg
  keyframe bench store --from runs"
)]
pub struct Bench {
    /// Which one
    #[arg(value_parser = keyframe_bench::names())]
    name: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Draw it, as FILE.svg or FILE.png
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Fewer repetitions: a look, not a measurement
    #[arg(long)]
    quick: bool,
    /// Only these parts of it, as its keys name them: 1k 5k 20k 60k 1gib 2gib 4gib disk, or compute
    /// 60k_1s compile ..., or keyframe kyoto borg ..., or record jobs memtrace compute redis ...,
    /// or web failover 1gbit adaptive ..., or compile bonnie stream 500ms 1000ms ...
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    only: Vec<String>,
    /// How often each thing is measured [default: what it takes for a stable median]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    rounds: Option<u16>,
    /// How long each run of `bench replication` is counted [default: 10, with --quick 5]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(3..=3600))]
    seconds: Option<u16>,
    /// The guest's files [default: built by guests/build small]
    #[arg(long, value_name = "DIR", env = "KEYFRAME_GUEST")]
    guest: Option<PathBuf>,
    /// The files of the guest that compiles [default: built by guests/build real]
    #[arg(long, value_name = "DIR", env = "KEYFRAME_REAL_GUEST")]
    real_guest: Option<PathBuf>,
    /// The QEMU that `bench replay` and `bench evaluation` record and replay with
    /// [default: qemu-system-x86_64]
    #[arg(long, value_name = "PATH")]
    qemu: Option<PathBuf>,
    /// The store whose newest run `bench store` feeds: the RAM of its last ten checkpoints, as
    /// recorded [default: pages made from a fixed seed]
    #[arg(long, value_name = "STORE")]
    from: Option<PathBuf>,
    #[command(flatten)]
    key: KeyArg,
    /// Where `bench evaluation` writes its files [default: out/evaluation]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// One store of `bench store`, as a process of its own
    #[arg(long, hide = true, value_name = "JSON", conflicts_with = "json")]
    job: Option<String>,
    /// Say nothing of what is being measured
    #[arg(long, short)]
    quiet: bool,
}

impl Bench {
    /// Measures and prints.
    pub fn run(&self) -> Outcome {
        if let Some(job) = &self.job {
            let line = keyframe_bench::run_job(job)
                .map_err(|e| Failure::new(keyframe_failure::chain(&e)))?;
            output::print_line(&line)?;
            return Ok(DONE);
        }
        let keyframe = std::env::current_exe()
            .map_err(|e| Failure::new(format!("find the path of this program: {e}")))?;
        if let Some(path) = &self.plot {
            writable(path)?;
        }
        let open = |store: &PathBuf| self.key.open(store).map_err(|e| Failure::store(&e, store));
        let options = keyframe_bench::Options {
            keyframe,
            quick: self.quick,
            only: self.only.clone(),
            rounds: self.rounds,
            seconds: self.seconds,
            guest: self.guest.clone(),
            real_guest: self.real_guest.clone(),
            qemu: self.qemu.clone(),
            out: self.out.clone(),
            from: self.from.as_ref().map(open).transpose()?,
            progress: if self.quiet { |_| () } else { |line| eprintln!("keyframe bench: {line}") },
            warning: |line| eprintln!("keyframe bench: {line}"),
        };
        let result = keyframe_bench::run(&self.name, &options).map_err(|e| {
            let failure = Failure::new(keyframe_failure::chain(&e));
            match e.fix() {
                Some(fix) => failure.fix(fix),
                None => failure,
            }
        })?;
        if let Some(path) = &self.plot {
            result.plot.write(path).map_err(|e| Failure::new(keyframe_failure::chain(&e)))?;
        }
        if self.json {
            output::json(&result)?;
        } else {
            output::print_line(&result.text())?;
        }
        Ok(DONE)
    }
}

/// Fails before minutes are spent on what could not be written then.
fn writable(path: &Path) -> Result<(), Failure> {
    keyframe_plot::Format::of(path).map_err(|e| Failure::new(e.to_string()))?;
    match std::fs::OpenOptions::new().append(true).create(true).open(path) {
        Ok(_) => Ok(()),
        Err(e) => Err(Failure::new(format!("write {}: {e}", path.display()))
            .fix("name a file in a directory that exists and may be written to")),
    }
}
