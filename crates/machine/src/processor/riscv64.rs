//! RISC-V with 64 bits.

use super::Properties;

pub(super) const PROPERTIES: Properties = Properties {
    name: "riscv64",
    elf_machine: 243,
    known_machines: &["virt"],
    machine_names: "virt",
    has_hpet: false,
    instruction_pointer: &["pc"],
    // x0, which is 0, to x31.
    gdb_general: 32,
};
