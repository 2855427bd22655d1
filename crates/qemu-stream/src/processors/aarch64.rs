//! The registers of aarch64 in a device state.
//!
//! ```text
//!   cpu body, bytes:  0 16 registers of 32-bit code │ 64 x0 to x30, sp │ 320 pc │ 328 pstate │ ...
//! ```
//!
//! In 32-bit code QEMU writes `cpsr` in place of `pstate`, and the other registers at 0.

use crate::Result;
use crate::section_bodies::Start;
use crate::sections::Section;
use keyframe_machine::Aarch64Registers;

const VERSIONS: std::ops::RangeInclusive<u32> = 22..=22;
const GENERAL: usize = 64;
const SP: usize = GENERAL + 31 * 8;
const PC: usize = 320;
const PSTATE: usize = 328;
const BYTES: usize = 332;

/// Reads the section `cpu` of `state`. Error: it has another layout.
pub(super) fn read(state: &[u8], section: &Section) -> Result<Aarch64Registers> {
    let body = Start::new(state, section, VERSIONS, BYTES)?;
    Ok(Aarch64Registers {
        general: std::array::from_fn(|k| body.u64(GENERAL + k * 8)),
        sp: body.u64(SP),
        pc: body.u64(PC),
        pstate: body.u32(PSTATE).into(),
    })
}
