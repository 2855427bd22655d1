//! The guest's physical memory, as QEMU's monitor describes it: where RAM and firmware lie
//! ([`regions`]), and which parts a reset of the machine overwrites ([`reset_files`]). Pure: the caller
//! asks QEMU, and gives the answers.

pub mod regions;
pub mod reset_files;

/// QEMU's description of the guest's memory contradicts itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MapError(pub String);
