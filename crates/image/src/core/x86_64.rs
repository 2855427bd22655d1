//! The notes of an x86-64 processor.

use super::prstatus;
use keyframe_machine::{SegmentRegister, X86Registers};

/// The size and version of QEMU's own note.
const QEMU_BYTES: u32 = 440;
const QEMU_VERSION: u32 = 1;

/// Linux' `elf_prstatus` of processor `index` with the general registers.
pub(super) fn status(index: u32, cpu: &X86Registers) -> Vec<u8> {
    let [rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15] =
        cpu.general;
    let [es, cs, ss, ds, fs, gs] = cpu.segments.map(|s| u64::from(s.selector));
    let [_, _, _, _, fs_base, gs_base] = cpu.segments.map(|s| s.base);
    // What Linux calls orig_rax, QEMU leaves 0.
    let words = [
        r15, r14, r13, r12, rbp, rbx, r11, r10, r9, r8, rax, rcx, rdx, rsi, rdi, 0, cpu.rip, cs,
        cpu.rflags, rsp, ss, fs_base, gs_base, ds, es, fs, gs,
    ];
    prstatus(index, &words)
}

/// QEMU's `QEMUCPUState`, by which a tool finds the guest's page tables.
pub(super) fn qemu_state(cpu: &X86Registers) -> Vec<u8> {
    let [rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, others @ ..] = cpu.general;
    let [es, cs, ss, ds, fs, gs] = cpu.segments;
    let mut out = Vec::with_capacity(QEMU_BYTES as usize);
    out.extend(QEMU_VERSION.to_le_bytes());
    out.extend(QEMU_BYTES.to_le_bytes());
    for word in [rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp].iter().chain(&others) {
        out.extend(word.to_le_bytes());
    }
    out.extend(cpu.rip.to_le_bytes());
    out.extend(cpu.rflags.to_le_bytes());
    for segment in [cs, ds, es, fs, gs, ss, cpu.ldt, cpu.tr, cpu.gdt, cpu.idt] {
        put_segment(&mut out, segment);
    }
    out.extend(cpu.control.iter().flat_map(|w| w.to_le_bytes()));
    out.extend(cpu.kernel_gs_base.to_le_bytes());
    debug_assert_eq!(out.len(), QEMU_BYTES as usize, "the note has the size it tells");
    out
}

fn put_segment(out: &mut Vec<u8>, segment: SegmentRegister) {
    for word in [segment.selector, segment.limit, segment.flags, 0] {
        out.extend(word.to_le_bytes());
    }
    out.extend(segment.base.to_le_bytes());
}
