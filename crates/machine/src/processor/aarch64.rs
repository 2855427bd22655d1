//! ARM with 64 bits.

use super::Properties;

pub(super) const PROPERTIES: Properties = Properties {
    name: "aarch64",
    elf_machine: 183,
    known_machines: &["virt-"],
    machine_names: "virt",
    has_hpet: false,
    instruction_pointer: &["PC"],
    // x0 to x30, and the stack pointer.
    gdb_general: 32,
};
