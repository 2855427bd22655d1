//! Describes a virtual machine: which VMM runs it, with which command line, on which processors.
//!
//! [`MachineSpec`] is the one description that all parts of Keyframe share. A checkpoint stores it
//! as JSON, a restore starts a VMM from it, and a primary sends it to its standby.
//!
//! ```text
//!   running VM ──▶ MachineSpec ──▶ checkpoint ──▶ restore
//!                       └────────▶ standby ─────▶ failover
//! ```
//!
//! [`RamSource`] is the one interface through which restores and exports read a checkpoint's RAM.
//!
//! The RAM blocks are described by [`RamLayout`](keyframe_units::RamLayout), which checkpoints keep
//! beside the machine because a group of VMs has several machines and one RAM layout.
//!
//! This crate does no I/O.

mod accelerator;
mod lineage;
mod processor;
mod ram_source;
mod recording;
mod registers;
mod spec;
mod vmm_kind;

pub use accelerator::Accelerator;
pub use lineage::Lineage;
pub use processor::{Delivery, Processor};
pub use ram_source::{RamSource, read_ascending};
pub use recording::RecordingPosition;
pub use registers::{
    Aarch64Registers, CpuRegisters, RegisterValues, Riscv64Registers, SegmentRegister, X86Registers,
};
pub use spec::{MachineSpec, ReadFile};
pub use vmm_kind::VmmKind;

use keyframe_units::{HostVirt, RamBlock};

/// A RAM block of a running VM, with its address in the VMM's process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostBlock {
    /// The block.
    pub block: RamBlock,
    /// Address of the block's first byte in the VMM's address space. All `total_bytes` of the block
    /// are mapped there without a gap.
    pub host: HostVirt,
}
