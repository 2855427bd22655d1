//! The places of RAM blocks in the guest's physical address space.
//!
//! ```text
//!   0 ............... 0xc0000000          0xfffc0000 ... 4 GiB ...........      guest-physical
//!   │ pc.ram from 0   │  devices, nothing │ pc.bios │   │ pc.ram from 3 GiB │
//! ```

use serde::{Deserialize, Serialize};
use std::fmt;

/// An address in the guest's physical address space.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GuestPhys(pub u64);

impl fmt::Debug for GuestPhys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for GuestPhys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A part of a RAM block that is contiguous in the guest's physical address space.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestRegion {
    /// The guest-physical address of the first byte.
    pub start: GuestPhys,
    /// The length in bytes.
    pub len_bytes: u64,
    /// The name of the RAM block.
    pub block: String,
    /// The offset of the first byte in the RAM block, in bytes.
    pub offset_bytes: u64,
}
