//! The virtual machine monitors that Keyframe drives.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The kind of program that runs a VM.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum VmmKind {
    /// QEMU's system emulator.
    #[default]
    Qemu,
    /// Firecracker.
    Firecracker,
}

impl VmmKind {
    /// True for [`VmmKind::Qemu`], which the JSON of a [`MachineSpec`](crate::MachineSpec) leaves
    /// out.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for VmmKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Qemu => "QEMU",
            Self::Firecracker => "Firecracker",
        })
    }
}
