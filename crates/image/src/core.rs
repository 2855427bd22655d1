//! The head of a core file: ELF header, program headers, and a note or two for each processor, as
//! QEMU's `dump-guest-memory` writes them (docs/formats/images.md).
//!
//! ```text
//!   ELF header 64 │ PT_NOTE 56 │ PT_LOAD 56 ... │ CORE note ... │ QEMU note ... │ zeros │ segments, from a page boundary
//! ```
//!
//! The file is 64-bit ELF, also for a guest in an older processor mode.

mod aarch64;
mod riscv64;
mod x86_64;

use crate::view::GuestExtent;
use keyframe_machine::{CpuRegisters, Processor, RegisterValues};
use keyframe_units::PAGE_BYTES;

const ELF_BYTES: u64 = 64;
const PROGRAM_BYTES: u64 = 56;
const ET_CORE: u16 = 4;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
const NT_PRSTATUS: u32 = 1;
/// The offsets of pid and registers in Linux' `elf_prstatus`, and what follows the registers.
const PRSTATUS_PID: usize = 32;
const PRSTATUS_REGISTERS: usize = 112;
const PRSTATUS_END_BYTES: usize = 8;

/// Returns the bytes before the memory in a core file (ELF header and notes, padded to a whole
/// number of pages), and the offset in the file of each extent's memory, in bytes.
pub fn head(
    extents: &[GuestExtent],
    processor: Processor,
    cpus: &[CpuRegisters],
) -> (Vec<u8>, Vec<u64>) {
    let notes = notes(cpus);
    let notes_at = ELF_BYTES + PROGRAM_BYTES * (1 + extents.len() as u64);
    let head_bytes = (notes_at + notes.len() as u64).next_multiple_of(PAGE_BYTES as u64);
    let mut out = elf_header(processor, 1 + extents.len() as u16);
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

fn elf_header(processor: Processor, programs: u16) -> Vec<u8> {
    // 64 bits, little-endian, version 1.
    let mut out = b"\x7fELF\x02\x01\x01".to_vec();
    out.resize(16, 0);
    out.extend(ET_CORE.to_le_bytes());
    out.extend(processor.elf_machine().to_le_bytes());
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
        let status = match &cpu.values {
            RegisterValues::X86_64(values) => x86_64::status(cpu.index, values),
            RegisterValues::Aarch64(values) => aarch64::status(cpu.index, values),
            RegisterValues::Riscv64(values) => riscv64::status(cpu.index, values),
        };
        note(&mut out, b"CORE\0", NT_PRSTATUS, &status);
    }
    for cpu in cpus {
        if let RegisterValues::X86_64(values) = &cpu.values {
            note(&mut out, b"QEMU\0", 0, &x86_64::qemu_state(values));
        }
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

/// Linux' `elf_prstatus` of processor `index` with `registers`.
fn prstatus(index: u32, registers: &[u64]) -> Vec<u8> {
    let mut out = vec![0; PRSTATUS_PID];
    out.extend((index + 1).to_le_bytes());
    out.resize(PRSTATUS_REGISTERS, 0);
    out.extend(registers.iter().flat_map(|w| w.to_le_bytes()));
    out.resize(out.len() + PRSTATUS_END_BYTES, 0);
    out
}
