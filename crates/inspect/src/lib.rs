//! The contents of a checkpoint: its entry in listings, the RAM of its VMs as images, pictures of
//! their displays.

pub mod display_picture;
pub mod entry;
mod error;
pub mod guest_memory;
pub mod lineage;
pub mod loading_ram;
pub mod ram_export;
pub mod show;

pub use error::{Error, Result};

use keyframe_qemu::restore::RestoreSource;
use keyframe_store::MachineMeta;
use keyframe_units::RamLayout;

/// Makes the description of a machine that a restore needs, from `machine` and `ram` of a
/// checkpoint.
pub fn source_of(machine: &MachineMeta, ram: &RamLayout) -> RestoreSource {
    RestoreSource { machine: machine.clone(), ram: ram.clone() }
}
