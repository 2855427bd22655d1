//! The contents of a checkpoint: its entry in listings, the RAM of its VMs as images, pictures of their
//! displays.

pub mod display_picture;
pub mod entry;
mod error;
pub mod guest_memory;
pub mod lineage;
pub mod show;

pub use error::{Error, Result};

use keyframe_qemu::restore::RestoreSource;
use keyframe_store::MachineMeta;
use keyframe_units::RamLayout;

/// Makes what a restore needs to know of a checkpoint's machine: `machine`, and its RAM blocks
/// `ram`.
pub fn source_of(machine: &MachineMeta, ram: &RamLayout) -> RestoreSource {
    RestoreSource { machine: machine.clone(), ram: ram.clone() }
}
