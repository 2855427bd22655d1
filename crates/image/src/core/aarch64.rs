//! The note of an aarch64 processor.

use super::prstatus;
use keyframe_machine::Aarch64Registers;

/// Linux' `elf_prstatus` of processor `index` with the general registers.
pub(super) fn status(index: u32, cpu: &Aarch64Registers) -> Vec<u8> {
    let mut words = cpu.general.to_vec();
    words.extend([cpu.sp, cpu.pc, cpu.pstate]);
    prstatus(index, &words)
}
