//! Bundles: one file with everything that a restore of a checkpoint on another machine needs.
//!
//! ```text
//!   bundle   checkpoint, images beneath its disks ──▶ FILE.partial/, a store with one whole checkpoint
//!            kernel, firmware, CDs, read-only disks ─┘     └─▶ FILE, an archive of that store
//!   import   FILE ─▶ files/ of the target store ─▶ copy of the checkpoint, whose line names them
//! ```
//!
//! - [`write()`] makes a bundle. An interrupted one goes on where it was: what `FILE.partial` holds
//!   is not stored twice.
//! - [`Bundle`] opens one and imports it. An interrupted import goes on, too.
//!
//! Invariants: a bundle needs no file of the machine on which it was made, besides QEMU with its own
//! firmware. A file appears under its name only when it is whole. The checkpoint in a bundle holds
//! all blocks of its disks, so it lies over no image; it is another checkpoint than the one that it
//! was made of, which still needs its images.
//!
//! The bytes are described in `docs/formats/bundle.md`.

mod error;
mod files;
mod manifest;
mod read;
mod whole;
mod write;

pub use error::{Error, Result};
pub use manifest::{BundledFile, Manifest};
pub use read::{Bundle, Imported};
pub use write::{BundleReport, BundleRequest, Progress, Step, write};

use keyframe_store::{MachineMeta, Meta};

/// The machines of a checkpoint: that of its VM, or those of the members of its group.
fn machines(meta: &Meta) -> impl Iterator<Item = &MachineMeta> {
    let own = Some(&meta.machine).filter(|_| meta.members.is_empty());
    own.into_iter().chain(meta.members.iter().map(|member| &member.machine))
}
