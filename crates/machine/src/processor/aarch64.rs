//! ARM with 64 bits.

use super::{Delivery, Properties};

pub(super) const PROPERTIES: Properties = Properties {
    name: "aarch64",
    elf_machine: 183,
    known_machines: &["virt-"],
    machine_names: "virt",
    has_hpet: false,
    instruction_pointer: &["PC"],
    // x0 to x30, and the stack pointer.
    gdb_general: 32,
    // Other boards of older processors have pages of 1 KiB.
    told_page_bits: Some(12),
    stops_before_access: true,
    delivery: Delivery { code_bytes: 4, after_instruction, writes_frame: false },
    timers_saved_since: None,
    unsaved: None,
    is_loaded_at_start: false,
};

/// `wfi` and `wfe`; `svc`, `hvc`, `smc`, `brk`.
fn after_instruction(code: &[u8]) -> Option<u64> {
    let word = u32::from_le_bytes(*code.first_chunk()?);
    let is_call = matches!(word & 0xffe0_001f, 0xd400_0001..=0xd400_0003 | 0xd420_0000);
    (is_call || matches!(word, 0xd503_207f | 0xd503_205f)).then_some(4)
}
