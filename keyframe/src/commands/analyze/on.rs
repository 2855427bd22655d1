//! `--on`: where the intervals are worked off.

use crate::failure::Failure;
use crate::words::replay::ReplayWords;
use indicatif::ProgressBar;
use keyframe_cluster::slurm::{PilotStates, SlurmOptions, SlurmPrograms, SlurmRunner};
use keyframe_cluster::{ItemSource, NewItems, Queue, QueueItem, Runner, RunnerKind, drive};
use keyframe_replay_driver::{Analysis, jobs as replays, jobs::JobCount};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A VM's RAM is not all that its QEMU and its reader have.
const MEMORY_BESIDE_MIB: u64 = 512;

/// Where the work is done.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Where")]
pub struct OnArgs {
    /// local: by this process; slurm or slurm:PARTITION: by pilots, jobs that take interval after
    /// interval. DIR must be the same on all nodes then, and so must be the recording, its store
    /// and Keyframe
    #[arg(long, value_name = "WHERE", default_value = "local")]
    on: RunnerKind,
    /// Pilots [default: one for each node of the partition that is up]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    nodes: Option<u32>,
    /// Pilots that may run at a time [default: as many as Slurm lets]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    nodes_at_once: Option<u32>,
    /// How long a pilot may take, as sbatch writes it (30, 1:00:00); what it leaves, new ones do
    #[arg(long, value_name = "TIME")]
    time_limit: Option<String>,
    /// Memory of a pilot, in MiB
    /// [default: the VM's RAM and 512 MiB, for each of its replays at a time]
    #[arg(long, value_name = "MIB")]
    memory_mib: Option<u64>,
    /// A further option for sbatch, such as --account=A; may be given several times
    #[arg(long, value_name = "OPTION", allow_hyphen_values = true)]
    sbatch_option: Vec<String>,
    /// The keyframe program on the nodes [default: the path of this one]
    #[arg(long, value_name = "FILE")]
    worker: Option<PathBuf>,
    /// Submit the pilots and return. The same command without it waits for them and puts the
    /// results together
    #[arg(long)]
    detach: bool,
    /// A pilot without a sign of life for this long is lost, even if Slurm has not noticed yet
    #[arg(long, value_name = "TIME", default_value = "30s", hide = true)]
    lease: String,
}

/// The options for distributing the intervals.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Replays at a time; `None` for a number that fits the machine.
    pub jobs: Option<JobCount>,
    /// How often an interval is tried.
    pub tries: u32,
}

/// The result of distributing the intervals.
pub enum Driven {
    /// All is settled.
    Settled,
    /// These jobs are at it.
    Detached(Vec<u64>),
}

impl OnArgs {
    /// True if this process does not do it itself.
    pub fn is_elsewhere(&self) -> bool {
        self.on != RunnerKind::Local
    }

    /// Distributes all intervals of `analysis` and waits until they are settled; with `--submit`
    /// only starts them.
    pub fn drive(
        &self,
        analysis: &mut Analysis<'_>,
        Effort { jobs, tries }: Effort,
        interrupted: &Arc<AtomicBool>,
        bar: &ProgressBar,
    ) -> Result<Driven, Failure> {
        let partition = match &self.on {
            RunnerKind::Local if self.detach => {
                return Err(Failure::new("--detach is for work that is done elsewhere")
                    .fix("add --on slurm"));
            }
            RunnerKind::Local => {
                let words = ReplayWords::above(bar);
                let jobs = match jobs {
                    Some(JobCount::Auto) => {
                        Some(analysis.best_job_count(tries, interrupted, &words)?)
                    }
                    Some(JobCount::Number(number)) => Some(number),
                    None => None,
                };
                let made = analysis.make_here(jobs, tries, interrupted, &words);
                bar.finish_and_clear();
                made?;
                return Ok(Driven::Settled);
            }
            RunnerKind::Slurm { partition } => partition.clone(),
        };
        let queue = analysis.queue()?;
        let mut slurm = self.slurm(analysis, partition, jobs)?;
        if self.detach {
            return detach(analysis, &queue, &mut slurm);
        }
        let analysis = &*analysis;
        bar.inc(analysis.old_instructions());
        let mut runner = Shown { slurm, bar, said: PilotStates::default() };
        let mut tell = |item: QueueItem| {
            // Those from before are in already.
            if !analysis.is_old(item.index) {
                bar.inc(analysis.interval(item.index).map_or(0, |interval| interval.len()));
            }
        };
        let driven = drive(&queue, &mut analysis.feed(), &mut runner, interrupted, &mut tell);
        bar.finish_and_clear();
        driven.map_err(|e| Failure::cluster(&e))?;
        replays::check_interrupted(interrupted)?;
        Ok(Driven::Settled)
    }

    fn slurm(
        &self,
        analysis: &Analysis<'_>,
        partition: Option<String>,
        jobs: Option<JobCount>,
    ) -> Result<SlurmRunner, Failure> {
        let slots = match jobs {
            Some(JobCount::Auto) => {
                return Err(Failure::new("--jobs auto measures this machine, not Slurm's nodes")
                    .fix("give the number of replays at a time in a pilot: --jobs N"));
            }
            Some(JobCount::Number(number)) => u32::try_from(number).unwrap_or(1),
            None => 1,
        };
        let worker = match &self.worker {
            Some(path) => path.clone(),
            None => std::env::current_exe()
                .map_err(|e| Failure::new(format!("find this program: {e}")))?,
        };
        let out = analysis.out();
        let mut command: Vec<OsString> = vec![worker.into(), "__work".into(), out.into()];
        command.extend([
            "--slots".into(),
            slots.to_string().into(),
            "--lease".into(),
            (&self.lease).into(),
        ]);
        let memory_mib = match self.memory_mib {
            Some(mib) => mib,
            None => {
                (analysis.ram_bytes()?.div_ceil(1 << 20) + MEMORY_BESIDE_MIB) * u64::from(slots)
            }
        };
        let options = SlurmOptions {
            partition,
            pilots: self.nodes,
            limit: self.nodes_at_once,
            slots,
            memory_mib,
            time: self.time_limit.clone(),
            more: self.sbatch_option.clone(),
            command,
            name: format!("keyframe-{}", analysis.tool_name()),
            dir: out.join("slurm"),
        };
        SlurmRunner::new(options, SlurmPrograms::default()).map_err(|e| Failure::cluster(&e))
    }
}

fn detach(
    analysis: &Analysis<'_>,
    queue: &Queue,
    slurm: &mut SlurmRunner,
) -> Result<Driven, Failure> {
    let NewItems::Complete(items) =
        analysis.feed().new_items().map_err(|e| Failure::cluster(&e))?
    else {
        return Err(Failure::new(
            "a recording that is still being made needs a process that follows it",
        )
        .fix("leave --detach away, or wait until the recording has ended"));
    };
    let mut submit = || {
        keyframe_cluster::fill(queue, &items)?;
        slurm.tend(queue)?;
        Ok(slurm.jobs().to_vec())
    };
    submit().map(Driven::Detached).map_err(|e| Failure::cluster(&e))
}

/// Says how the pilots are, beside the bar.
struct Shown<'a> {
    slurm: SlurmRunner,
    bar: &'a ProgressBar,
    said: PilotStates,
}

impl Runner for Shown<'_> {
    fn tend(&mut self, queue: &Queue) -> keyframe_cluster::Result<()> {
        self.slurm.tend(queue)?;
        let standing = self.slurm.pilot_states();
        if *standing != self.said {
            self.said = standing.clone();
            self.bar.set_message(text(standing));
        }
        Ok(())
    }

    fn end(&mut self, queue: &Queue) -> keyframe_cluster::Result<()> {
        self.slurm.end(queue)
    }
}

/// Returns the states of the pilots as text for users.
fn text(standing: &PilotStates) -> String {
    let running = format!("{} pilots run", standing.running);
    match (&standing.reason, standing.waiting) {
        (_, 0) => running,
        (Some(reason), _) => format!("{running}, others wait: {reason}"),
        (None, _) => format!("{running}, others wait"),
    }
}
