//! Distributes the intervals of an analysis over workers: threads of this process, or jobs of
//! Slurm. This crate knows neither QEMU nor stores: an item is a number and an expected duration.
//!
//! ```text
//!   source ──▶ Queue (a directory) ──▶ workers ──▶ settled
//!                ▲                      ├ LocalRunner: threads of this process
//!                │ items of             └ SlurmRunner: pilots, jobs that take item after item
//!                └── lost workers ◀──────┘
//! ```
//!
//! Starting a job takes Slurm a second; taking an item from the queue takes some hundred
//! microseconds. A job is therefore not an interval but a *pilot*: it takes intervals from the
//! queue until none is left, as many at a time as it has slots.
//!
//! Invariants: one worker has an item at a time, unless that worker is taken for lost. Two workers
//! may then make the same output, which must not depend on the worker and must appear as a whole.
//! Every wait is bounded or ends when `interrupted` is set.

mod drive;
mod error;
mod local_runner;
mod placement;
mod queue;
mod runner;
pub mod slurm;
mod worker;

pub use drive::{ItemSource, NewItems, drive, fill};
pub use error::{Error, Result};
pub use local_runner::{LocalJob, LocalRunner};
pub use placement::{LiveRanges, Placement, Preference, Share};
pub use queue::{Queue, QueueItem, WorkerId};
pub use runner::{Runner, RunnerKind};
pub use worker::{Slot, Worker};
