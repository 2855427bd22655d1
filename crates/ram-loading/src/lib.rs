//! Loads the RAM of a restored VM, whatever its VMM is.
//!
//! [`fill`] copies a checkpoint's pages into the [`Memory`] of RAM blocks before the VM runs;
//! [`fill_sealed`] does so for several VMs that share it. [`Lazy`] gives a running VM its pages as it
//! touches them. [`PageRun`] and [`pieces`] are for a driver that fills memory of its own.

mod error;
mod fill;
mod lazy;
mod memory;
mod page_run;

pub use error::{Error, Result};
pub use fill::{fill, fill_sealed};
pub use lazy::{Lazy, Place};
pub use memory::Memory;
pub use page_run::{PageRun, check_within, pieces};
