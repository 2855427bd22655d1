//! What a checkpoint holds, as people and programs ask for it: its entry in listings, its RAM as an
//! image, a picture of its display, what it grew from.

pub mod images;
pub mod lineage;
pub mod report;
pub mod screens;
pub mod show;

use keyframe_qemu::restore::RestoreSource;
use keyframe_store::MachineMeta;
use keyframe_units::RamLayout;

/// What a restore has to know of the machine.
pub fn source_of(machine: &MachineMeta, ram: &RamLayout) -> RestoreSource {
    RestoreSource { machine: machine.clone(), ram: ram.clone() }
}
