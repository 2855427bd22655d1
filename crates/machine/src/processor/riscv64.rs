//! RISC-V with 64 bits.

use super::{Delivery, Properties};

pub(super) const PROPERTIES: Properties = Properties {
    name: "riscv64",
    elf_machine: 243,
    known_machines: &["virt"],
    machine_names: "virt",
    has_hpet: false,
    instruction_pointer: &["pc"],
    // x0, which is 0, to x31.
    gdb_general: 32,
    told_page_bits: None,
    stops_before_access: true,
    delivery: Delivery { code_bytes: 4, after_instruction, writes_frame: false },
    // Earlier ones leave out the alarms of mtimer, stimer and vstimer.
    timers_saved_since: Some((10, 2)),
    unsaved: Some("the floating-point exceptions that instructions have raised (fflags)"),
    // QEMU 11 writes the firmware (-bios) at once; 7.2 at the reset.
    is_loaded_at_start: true,
};

/// `wfi`; `ecall`, `ebreak`, `c.ebreak`.
fn after_instruction(code: &[u8]) -> Option<u64> {
    if code.starts_with(&0x9002_u16.to_le_bytes()) {
        return Some(2);
    }
    let word = u32::from_le_bytes(*code.first_chunk()?);
    matches!(word, 0x1050_0073 | 0x0000_0073 | 0x0010_0073).then_some(4)
}
