//! x86 with 64 bits.

use super::Properties;

pub(super) const PROPERTIES: Properties = Properties {
    name: "x86_64",
    elf_machine: 62,
    known_machines: &["pc-i440fx-", "pc-q35-", "microvm"],
    machine_names: "pc, q35 and microvm",
    has_hpet: true,
    instruction_pointer: &["RIP", "EIP"],
    gdb_general: 16,
};
