//! `keyframe __work`: a worker of an analysis that another process wants, on this node. Pilots of
//! Slurm's run it.

use crate::failure::paths;
use crate::failure::{DONE, FAILED, Failure, Outcome};
use crate::words::replay::ReplayWords;
use keyframe_cluster::{Queue, QueueItem, Slot, Worker, slurm::SlurmRunner};
use keyframe_locks::IgnorePoison;
use keyframe_replay_driver::{AnalysisHeader, JobSpec, PartMaker, jobs, tool};
use keyframe_store_keys::KeyArg;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Makes parts of an analysis until none is left
#[derive(clap::Args, Debug)]
pub struct Work {
    /// The analysis' directory
    #[arg(value_name = "DIR")]
    out: PathBuf,
    /// Intervals at a time
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=1024))]
    slots: u32,
    /// A worker that has shown no life for as long is lost
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = humantime::parse_duration)]
    lease: Duration,
}

impl Work {
    /// Runs it. What came of an interval is said in its directory; the exit code says whether this
    /// worker could work.
    pub fn run(&self) -> Outcome {
        let out = paths::absolute(&self.out)?;
        keyframe_kernel::malloc::keep_freed_memory();
        let interrupted = jobs::interruption()?;
        let (job_spec, head) = (JobSpec::read(&out)?, AnalysisHeader::read(&out)?);
        let tool = tool(&head.tool, &head.arguments, head.is_approximate)?;
        let opened = job_spec
            .open(&KeyArg::of_file(job_spec.key_file.clone()), Arc::new(ReplayWords::default()))?;
        let analysis = job_spec.join(&opened, head, &*tool, &out)?;

        let failed = |e| Failure::cluster(&e);
        let queue = Queue::open(&out.join("queue")).map_err(failed)?;
        let id = SlurmRunner::worker_id(|name| std::env::var(name).ok());
        // What this task had when its node was lost.
        queue.return_items(|other| SlurmRunner::is_earlier_start(&id, other)).map_err(failed)?;
        eprintln!("keyframe: {} works on {}", id.as_str(), out.display());
        let broken = Mutex::new(None);
        let job = |item: QueueItem, slot: &Slot<'_>| {
            let name = format!("{}-{:?}", id.as_str(), std::thread::current().id());
            let interval = analysis.interval_on_network(item.index, &interrupted);
            let maker =
                PartMaker { name: &name, tries_max: job_spec.tries, interrupted: &interrupted };
            let made = interval.and_then(|one| analysis.make(&one, slot, maker, &mut |_| ()));
            if let Err(failure) = made {
                // It cannot even say so where it should: nor will it with the next.
                *broken.lock().ignore_poison() = Some(failure);
                interrupted.store(true, Ordering::Relaxed);
            }
        };
        let slots = self.slots as usize;
        let share = SlurmRunner::share(|name| std::env::var(name).ok());
        let (placement, lease) = (analysis.placement(), self.lease);
        let worker = Worker { id: id.clone(), slots, placement, share, lease };
        let count = worker.run(&queue, &interrupted, job).map_err(failed)?;
        eprintln!("keyframe: {} settled {count} intervals", id.as_str());
        match broken.into_inner().ignore_poison() {
            Some(failure) => Err(failure.into()),
            None if interrupted.load(Ordering::Relaxed) => Ok(FAILED),
            None => Ok(DONE),
        }
    }
}
