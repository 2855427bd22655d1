//! x86 with 64 bits.

use super::{Delivery, Properties};

pub(super) const PROPERTIES: Properties = Properties {
    name: "x86_64",
    elf_machine: 62,
    known_machines: &["pc-i440fx-", "pc-q35-", "microvm"],
    machine_names: "pc, q35 and microvm",
    has_hpet: true,
    instruction_pointer: &["RIP", "EIP"],
    gdb_general: 16,
    told_page_bits: None,
    stops_before_access: false,
    delivery: Delivery { code_bytes: 3, after_instruction, writes_frame: true },
    timers_saved_since: None,
    unsaved: None,
    is_loaded_at_start: false,
};

/// `hlt`, `mwait`; `int3`, `int`, `into`, `int1`.
fn after_instruction(code: &[u8]) -> Option<u64> {
    match code {
        [0xf4 | 0xcc | 0xce | 0xf1, ..] => Some(1),
        [0xcd, ..] => Some(2),
        [0x0f, 0x01, 0xc9, ..] => Some(3),
        _ => None,
    }
}
