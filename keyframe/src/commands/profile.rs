//! `keyframe profile`: what a VM writes in epochs of different lengths.

use crate::commands::vmms;
use crate::failure::{DONE, Failure, Outcome, WARNED, chain};
use crate::output;
use crate::progress;
use crate::words::profiler::ProfilerWords;
use keyframe_machine::VmmKind;
use keyframe_profile::{Curve, CurveRow, Ladder, PLATEAU_PERCENT, Statistic};
use keyframe_profiler::{MeasuredVm, MeasurementOptions, Profile, StartCondition, measure};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Measure what a VM writes, by the length of the epoch
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The number of distinct pages that a VM writes between two checkpoints depends on the time between them, the epoch. This
command measures it while the VM runs, without a store and without a pause. With a monitor it also counts the disk sectors
written and the network packets sent. Growth is in percent per doubling of the epoch. If it stays under 5 %, the workload has
reached its dirty page set.

A running QEMU is left as it was. Without --qmp its RAM is found by its command line, and sectors and packets are not counted.
A VM after -- is started for the measurement and ended afterwards. Its standard streams are passed through; with --json its
output goes to standard error. The monitor takes about a millisecond to tell the sectors, so short epochs count a few more.

Examples:
  keyframe profile 4711
  keyframe profile --api /run/fc.sock $(pidof firecracker)
  keyframe profile --qmp /run/vm.sock --epochs 10ms..500ms --plot pages.svg 4711
  keyframe profile --vcpus 1,2,4 --when login: --csv vm.csv --plot vm.png -- qemu-system-x86_64 -m 1G -nographic ..."
)]
pub struct ProfileCommand {
    /// Lengths of epochs: a range (10ms..2s), climbed in steps of 1, 2, 5, or a list (10ms,50ms)
    #[arg(long, value_name = "LENGTHS", default_value = "10ms..2s")]
    epochs: Ladder,
    /// Epochs of each length [default: what fits into a minute, at least 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    samples: Option<u32>,
    /// Start the VM with each of these numbers of vCPUs in turn (-smp is replaced)
    #[arg(long, value_name = "N,N", value_delimiter = ',', conflicts_with = "pid",
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    vcpus: Vec<u32>,
    /// Measure this long after the VM's start, or after --when [default: 5s; with --when 0s]
    #[arg(long, value_name = "TIME", conflicts_with = "pid", value_parser = super::checkpoints::parse_wait)]
    settle: Option<Duration>,
    /// Measure once the guest's console (on standard output) has shown TEXT
    #[arg(long, value_name = "TEXT", conflicts_with = "pid",
          value_parser = clap::builder::NonEmptyStringValueParser::new())]
    when: Option<String>,
    /// QMP socket of the running QEMU
    #[arg(long, value_name = "SOCKET", conflicts_with = "command")]
    qmp: Option<PathBuf>,
    /// The socket of Firecracker's API, for a VM of Firecracker
    #[arg(long, value_name = "SOCKET", requires = "pid", conflicts_with_all = ["command", "qmp"])]
    api: Option<PathBuf>,
    /// Write the figures as CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Draw them, as FILE.svg or FILE.png
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// No progress
    #[arg(long, short)]
    quiet: bool,
    /// The pid of a running QEMU, or of a Firecracker
    #[arg(value_name = "PID", required_unless_present = "command", conflicts_with = "command")]
    pid: Option<u32>,
    /// QEMU's command line
    #[arg(last = true, value_name = "QEMU COMMAND")]
    command: Vec<OsString>,
}

impl ProfileCommand {
    /// Measures, prints, writes.
    pub fn run(self) -> Outcome {
        self.check_files()?;
        let bar = progress::bar(self.quiet, Some(0), "{msg} {wide_bar} {percent} % {eta}");
        let options = MeasurementOptions { ladder: self.epochs.clone(), samples: self.samples };
        let words = ProfilerWords { bar: bar.clone() };
        let measured = measure(self.vm()?, &options, &words);
        bar.finish_and_clear();
        let profile = measured?;
        self.write_files(&profile)?;
        if self.json {
            output::json(&profile)?;
        } else {
            output::print_line(&text(&profile))?;
        }
        if profile.complete {
            return Ok(DONE);
        }
        eprintln!(
            "keyframe: the measuring ended early; these are the epochs that were over by then"
        );
        Ok(WARNED)
    }

    /// Fails before a minute is spent on what could not be written then.
    fn check_files(&self) -> Result<(), Failure> {
        if let Some(path) = &self.plot {
            keyframe_plot::FigureFormat::of(path).map_err(|e| Failure::new(e.to_string()))?;
        }
        [&self.csv, &self.plot].into_iter().flatten().try_for_each(|path| writable(path))
    }

    fn vm(&self) -> Result<MeasuredVm, Failure> {
        match (self.pid, &self.api) {
            (Some(pid), Some(socket)) => {
                return Ok(MeasuredVm::Attached(vmms::attach(pid, socket)?));
            }
            (Some(pid), None) => return Ok(MeasuredVm::Running { pid, qmp: self.qmp.clone() }),
            (None, _) => {}
        }
        let program = self.command.first();
        if program.is_some_and(|program| vmms::of_program(program) != VmmKind::Qemu) {
            return Err(Failure::new("profile starts a VM of QEMU alone")
                .fix("start Firecracker by yourself: keyframe profile --api SOCKET PID"));
        }
        let settle = if self.when.is_some() { Duration::ZERO } else { Duration::from_secs(5) };
        let start = StartCondition {
            when: self.when.clone(),
            settle: self.settle.unwrap_or(settle),
            quiet_stdout: self.json,
        };
        let (command, vcpus) = (self.command.clone(), self.vcpus.clone());
        Ok(MeasuredVm::Launched { command, vcpus, start })
    }

    fn write_files(&self, profile: &Profile) -> Result<(), Failure> {
        if let Some(path) = &self.csv {
            let text = keyframe_profile::curves_to_csv(&profile.curves)
                .map_err(|e| Failure::new(chain(&e)))?;
            std::fs::write(path, text)
                .map_err(|e| Failure::new(format!("write {}: {e}", path.display())))?;
        }
        if let Some(path) = &self.plot {
            let who = match (self.pid, self.command.first()) {
                (None, Some(program)) => {
                    Path::new(program).file_name().unwrap_or(program).to_string_lossy().into()
                }
                (pid, _) => format!("process {}", pid.unwrap_or_default()),
            };
            let title = format!("What {who} writes, by the length of the epoch");
            let figure = keyframe_profile::figure(&title, &profile.curves);
            figure.write(path).map_err(|e| Failure::new(chain(&e)))?;
        }
        Ok(())
    }
}

/// Fails if `path` could not be written later.
fn writable(path: &Path) -> Result<(), Failure> {
    match std::fs::OpenOptions::new().append(true).create(true).open(path) {
        Ok(_) => Ok(()),
        Err(e) => Err(Failure::new(format!("write {}: {e}", path.display()))
            .fix("name a file in a directory that exists and may be written to")),
    }
}

const HEADER: [&str; 11] = [
    "epoch", "vCPUs", "samples", "pages", "+-", "min", "max", "growth", "sectors", "writes",
    "packets",
];

fn text(profile: &Profile) -> String {
    let rows: Vec<Vec<String>> =
        profile.curves.iter().flat_map(|c| c.rows.iter().map(|r| cells(c, r))).collect();
    let mut lines = vec![output::table(&HEADER, &rows), String::new()];
    lines.extend(profile.curves.iter().map(verdict));
    lines.push(format!(
        "RAM: {}; averages per epoch, +- standard deviation",
        output::bytes(profile.ram_bytes)
    ));
    lines.extend(profile.notes.iter().map(|note| format!("note: {note}")));
    lines.join("\n")
}

fn cells(curve: &Curve, row: &CurveRow) -> Vec<String> {
    let count = |s: Option<Statistic>| {
        s.map_or_else(|| "-".into(), |s| format!("{} +- {}", round(s.mean), round(s.deviation)))
    };
    vec![
        length(row.epoch_ns),
        curve.vcpus.map_or_else(|| "-".into(), |n| n.to_string()),
        row.samples.to_string(),
        round(row.pages.mean),
        round(row.pages.deviation),
        row.pages.min.to_string(),
        row.pages.max.to_string(),
        row.growth_percent.map_or_else(|| "-".into(), |g| format!("{g:.0} %")),
        count(row.sectors),
        row.disk_writes.map_or_else(|| "-".into(), |s| round(s.mean)),
        count(row.packets),
    ]
}

/// The line about the end of growth.
fn verdict(curve: &Curve) -> String {
    let who = curve
        .vcpus
        .map_or_else(String::new, |n| format!(" ({n} vCPU{})", if n == 1 { "" } else { "s" }));
    let (Some(first), Some(last)) = (curve.rows.first(), curve.rows.last()) else {
        return format!("dirty page set{who}: nothing was measured");
    };
    match (curve.dirty_page_set, last.growth_percent) {
        (Some(set), _) => format!(
            "dirty page set{who}: {} pages ({}), reached in epochs of {}; longer ones grow by less than {PLATEAU_PERCENT} % per doubling{}",
            round(set.pages),
            output::bytes((set.pages * 4096.0) as u64),
            length(set.epoch_ns),
            if set.certain { "" } else { " (uncertain: epochs differ much; take more --samples)" }
        ),
        (None, Some(growth)) => {
            format!(
                "dirty page set{who}: not reached in {}: pages still grow by {growth:.0} % per doubling",
                length(last.epoch_ns)
            )
        }
        (None, None) if first.epoch_ns == last.epoch_ns => {
            format!("dirty page set{who}: unknown from a single length of epochs")
        }
        (None, None) => format!("dirty page set{who}: no pages were written"),
    }
}

fn length(ns: u64) -> String {
    humantime::format_duration(Duration::from_nanos(ns)).to_string()
}

/// Whole numbers, but for small ones.
fn round(value: f64) -> String {
    if value == 0.0 || value >= 10.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}
