//! Who works intervals off, and where. Knows neither QEMU nor stores: an item is a number and how
//! long it probably takes.
//!
//! ```text
//!   feed ──▶ Queue (a directory) ──▶ workers ──▶ settled
//!                 ▲                    ├ Local: threads of this process
//!                 │ those of lost      └ Slurm: pilots, jobs that take item after item from the queue
//!                 └── workers go back ◀──┘
//! ```
//!
//! Starting a job costs Slurm a second, taking an item from the queue some hundred microseconds: so
//! a job is not an interval but a *pilot*, which works off intervals until none is left, in as many
//! slots as it has processors.
//!
//! Invariants: an item is with one worker at a time, unless that one was taken for lost; what it
//! makes must therefore be the same whoever makes it, and appear as a whole (`Queue` says where
//! that matters). Every wait is bounded or ends with `interrupted`.

mod drive;
mod error;
mod local;
mod placement;
mod queue;
mod runner;
pub mod slurm;
mod worker;

pub use drive::{Feed, More, drive, fill};
pub use error::{Error, Result};
pub use local::Local;
pub use placement::Placement;
pub use queue::{Item, Queue, WorkerId};
pub use runner::{On, Runner};
pub use worker::Worker;
