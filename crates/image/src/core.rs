//! The head of a core file: ELF header, program headers, and a note or two for each processor, as
//! QEMU's `dump-guest-memory` writes them (docs/formats/images.md).
//!
//! ```text
//!   ELF header 64 │ PT_NOTE 56 │ PT_LOAD 56 ... │ CORE note ... │ QEMU note ... │ zeros │ segments, from a page boundary
//! ```
//!
//! The file is 64-bit ELF, also for a guest in an older processor mode.

use crate::view::GuestExtent;
use keyframe_qemu_stream::{CpuRegisters, SegmentRegister};
use keyframe_units::PAGE_BYTES;

const ELF_BYTES: u64 = 64;
const PROGRAM_BYTES: u64 = 56;
const ET_CORE: u16 = 4;
const EM_X86_64: u16 = 62;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
const NT_PRSTATUS: u32 = 1;
/// The size of Linux' `elf_prstatus`, and the offsets of its pid and registers.
const PRSTATUS_BYTES: usize = 336;
const PRSTATUS_PID: usize = 32;
const PRSTATUS_REGISTERS: usize = 112;
/// The size and version of QEMU's own note.
const QEMU_BYTES: u32 = 440;
const QEMU_VERSION: u32 = 1;

/// Returns the bytes before the memory in a core file (ELF header and notes, padded to a whole
/// number of pages), and the offset in the file of each extent's memory, in bytes.
pub fn head(extents: &[GuestExtent], cpus: &[CpuRegisters]) -> (Vec<u8>, Vec<u64>) {
    let notes = notes(cpus);
    let notes_at = ELF_BYTES + PROGRAM_BYTES * (1 + extents.len() as u64);
    let head_bytes = (notes_at + notes.len() as u64).next_multiple_of(PAGE_BYTES as u64);
    let mut out = elf_header(1 + extents.len() as u16);
    program(&mut out, PT_NOTE, notes_at, 0, notes.len() as u64);
    let mut at = head_bytes;
    let mut places = Vec::with_capacity(extents.len());
    for extent in extents {
        program(&mut out, PT_LOAD, at, extent.start.0, extent.pages.len_bytes());
        places.push(at);
        at += extent.pages.len_bytes();
    }
    out.extend(notes);
    out.resize(head_bytes as usize, 0);
    (out, places)
}

fn elf_header(programs: u16) -> Vec<u8> {
    // 64 bits, little-endian, version 1.
    let mut out = b"\x7fELF\x02\x01\x01".to_vec();
    out.resize(16, 0);
    out.extend(ET_CORE.to_le_bytes());
    out.extend(EM_X86_64.to_le_bytes());
    out.extend(1u32.to_le_bytes());
    // entry, program headers, section headers
    for word in [0, ELF_BYTES, 0] {
        out.extend(word.to_le_bytes());
    }
    out.extend(0u32.to_le_bytes());
    for half in [ELF_BYTES as u16, PROGRAM_BYTES as u16, programs, 0, 0, 0] {
        out.extend(half.to_le_bytes());
    }
    out
}

/// The program header of an extent. QEMU sets its virtual address to 0. Here it is the physical
/// address, so that a debugger without symbols can read there.
fn program(out: &mut Vec<u8>, kind: u32, at: u64, address: u64, len_bytes: u64) {
    out.extend(kind.to_le_bytes());
    out.extend(0u32.to_le_bytes());
    for word in [at, address, address, len_bytes, len_bytes, 0] {
        out.extend(word.to_le_bytes());
    }
}

fn notes(cpus: &[CpuRegisters]) -> Vec<u8> {
    let mut out = Vec::new();
    for cpu in cpus {
        note(&mut out, b"CORE\0", NT_PRSTATUS, &prstatus(cpu));
    }
    for cpu in cpus {
        note(&mut out, b"QEMU\0", 0, &qemu_state(cpu));
    }
    out
}

fn note(out: &mut Vec<u8>, name: &[u8], kind: u32, contents: &[u8]) {
    for word in [name.len() as u32, contents.len() as u32, kind] {
        out.extend(word.to_le_bytes());
    }
    for part in [name, contents] {
        out.extend(part);
        out.resize(out.len().next_multiple_of(4), 0);
    }
}

/// Linux' `elf_prstatus` with the general registers.
fn prstatus(cpu: &CpuRegisters) -> Vec<u8> {
    let [rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15] =
        cpu.general;
    let [es, cs, ss, ds, fs, gs] = cpu.segments.map(|s| u64::from(s.selector));
    let [_, _, _, _, fs_base, gs_base] = cpu.segments.map(|s| s.base);
    // What Linux calls orig_rax, QEMU leaves 0.
    let words = [
        r15, r14, r13, r12, rbp, rbx, r11, r10, r9, r8, rax, rcx, rdx, rsi, rdi, 0, cpu.rip, cs,
        cpu.rflags, rsp, ss, fs_base, gs_base, ds, es, fs, gs,
    ];
    let mut out = vec![0; PRSTATUS_PID];
    out.extend((cpu.index + 1).to_le_bytes());
    out.resize(PRSTATUS_REGISTERS, 0);
    out.extend(words.iter().flat_map(|w| w.to_le_bytes()));
    out.resize(PRSTATUS_BYTES, 0);
    out
}

/// QEMU's `QEMUCPUState`, by which a tool finds the guest's page tables.
fn qemu_state(cpu: &CpuRegisters) -> Vec<u8> {
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
