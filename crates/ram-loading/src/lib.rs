//! Loads the RAM of a restored VM, whatever its VMM is.
//!
//! [`Lazy`] gives a running VM its pages as it touches them. [`PageRun`] and [`pieces`] are for a
//! driver that fills memory before the VM runs.

mod error;
mod lazy;
mod page_run;

pub use error::{Error, Result};
pub use lazy::{Lazy, Place};
pub use page_run::{PageRun, check_within, pieces};
