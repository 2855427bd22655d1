//! The note of a riscv64 processor.

use super::prstatus;
use keyframe_machine::Riscv64Registers;

/// Linux' `elf_prstatus` of processor `index` with the general registers: pc in the place of x0.
pub(super) fn status(index: u32, cpu: &Riscv64Registers) -> Vec<u8> {
    let mut words = cpu.general;
    words[0] = cpu.pc;
    prstatus(index, &words)
}
