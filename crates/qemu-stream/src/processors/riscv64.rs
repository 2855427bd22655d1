//! The registers of riscv64 in a device state.
//!
//! ```text
//!   cpu body, bytes:  0 x0 to x31 │ 256 f0 to f31 │ 512 priorities of interrupts │ 640 pc │ ...
//! ```

use crate::Result;
use crate::section_bodies::Start;
use crate::sections::Section;
use keyframe_machine::Riscv64Registers;

/// Those of QEMU 7.2 to 11: the start is the same in all.
const VERSIONS: std::ops::RangeInclusive<u32> = 5..=12;
const PC: usize = 640;
const BYTES: usize = 648;

/// Reads the section `cpu` of `state`. Error: it has another layout.
pub(super) fn read(state: &[u8], section: &Section) -> Result<Riscv64Registers> {
    let body = Start::new(state, section, VERSIONS, BYTES)?;
    Ok(Riscv64Registers { general: std::array::from_fn(|k| body.u64(k * 8)), pc: body.u64(PC) })
}
