//! Reads the guest's processor registers, and whether it sees RAM or ROM below 1 MiB, from a device
//! state.
//!
//! ```text
//!   cpu body, bytes:  0 16 registers │ 128 rip, rflags │ 144 x87 │
//!                     236 es cs ss ds fs gs ldt tr gdt idt, 20 each │ 436 sysenter │
//!                     456 cr0 cr2 cr3 cr4 │ 488 debug registers, SSE │ 816 efer │ ... │
//!                     856 kernel_gs_base
//!   a segment:        selector u32 │ base u64 │ limit u32 │ flags u32
//! ```
//!
//! Not read: registers that core files do not hold (x87, SSE, model specific registers).

use crate::section_bodies::{Body, CPU, cpu};
use crate::sections::sections;
use crate::{Result, StreamError};
use keyframe_units::GuestPhys;

/// Upper bound of the number of processors.
const CPUS_MAX: usize = 4096;
const SEGMENTS: usize = 236;
const SEGMENT_BYTES: usize = 20;
const CR0: usize = 456;
const KERNEL_GS_BASE: usize = 856;

/// A segment register.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentRegister {
    /// The selector.
    pub selector: u32,
    /// The address of the segment's first byte.
    pub base: u64,
    /// Offset of the segment's last byte.
    pub limit: u32,
    /// Upper 32 bits of the descriptor.
    pub flags: u32,
}

/// The registers of a virtual CPU that a core file holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuRegisters {
    /// The index of the CPU, from 0.
    pub index: u32,
    /// The general registers: rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8 to r15.
    pub general: [u64; 16],
    /// The instruction pointer.
    pub rip: u64,
    /// The flags.
    pub rflags: u64,
    /// The segment registers: es, cs, ss, ds, fs, gs.
    pub segments: [SegmentRegister; 6],
    /// The local descriptor table.
    pub ldt: SegmentRegister,
    /// The task register.
    pub tr: SegmentRegister,
    /// The global descriptor table register; it has no selector.
    pub gdt: SegmentRegister,
    /// The interrupt descriptor table register; it has no selector.
    pub idt: SegmentRegister,
    /// The control registers cr0 to cr4. cr1 does not exist, and its entry is 0.
    pub control: [u64; 5],
    /// The GS base that `swapgs` exchanges.
    pub kernel_gs_base: u64,
}

/// Returns the registers of all virtual CPUs in the device state `state`, ordered by index.
///
/// Errors: [`StreamError::DeviceState`] for a malformed state, or one without a processor.
pub fn cpu_registers(state: &[u8]) -> Result<Vec<CpuRegisters>> {
    crate::check(state)?;
    let all = sections(state)?;
    let mut found = Vec::new();
    for section in all.iter().filter(|s| s.name == CPU.name).take(CPUS_MAX) {
        let body = Body::new(state, section, &CPU)?;
        let segment = |k: usize| segment(&body, SEGMENTS + k * SEGMENT_BYTES);
        found.push(CpuRegisters {
            index: section.instance,
            general: std::array::from_fn(|k| body.u64(k * 8)),
            rip: body.u64(128),
            rflags: body.u64(136),
            segments: std::array::from_fn(segment),
            ldt: segment(6),
            tr: segment(7),
            gdt: segment(8),
            idt: segment(9),
            control: [body.u64(CR0), 0, body.u64(CR0 + 8), body.u64(CR0 + 16), body.u64(cpu::CR4)],
            kernel_gs_base: body.u64(KERNEL_GS_BASE),
        });
    }
    if found.is_empty() {
        return Err(StreamError::DeviceState {
            offset: 0,
            problem: "it has no section cpu".into(),
        });
    }
    found.sort_by_key(|c| c.index);
    Ok(found)
}

fn segment(body: &Body<'_>, at: usize) -> SegmentRegister {
    SegmentRegister {
        selector: body.u32(at),
        base: body.u64(at + 4),
        limit: body.u32(at + 12),
        flags: body.u32(at + 16),
    }
}

/// A part of the guest-physical range from 768 KiB to 1 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LowMemoryPart {
    /// First address of the part.
    pub start: GuestPhys,
    /// The length in bytes: 16 or 64 KiB.
    pub len_bytes: u64,
    /// True if the guest reads RAM there, false if ROM.
    pub is_ram: bool,
}

/// The known chip sets: end of the section's name, PCI vendor and device id, and offset of the PAM
/// registers in the PCI configuration.
const CHIP_SETS: [(&str, u32, usize); 2] =
    [("/I440FX", 0x1237_8086, 0x59), ("/mch", 0x29c0_8086, 0x90)];
/// Offset of the PCI configuration in such a section, after the version of its format.
const CONFIG: usize = 4;
const SHADOW_START: u64 = 0xc_0000;
const PART_BYTES: u64 = 0x4000;

/// Returns which parts of the range from 768 KiB to 1 MiB are RAM, by the chip set's PAM registers;
/// `None` for a machine without such a chip set (`microvm`).
///
/// Error: [`StreamError::DeviceState`] for a malformed state.
pub fn low_memory(state: &[u8]) -> Result<Option<Vec<LowMemoryPart>>> {
    crate::check(state)?;
    let all = sections(state)?;
    for (name, ids, pam) in CHIP_SETS {
        let Some(section) = all.iter().find(|s| s.name.ends_with(name)) else { continue };
        let body = state.get(section.body.clone()).unwrap_or_default();
        let config = body.get(CONFIG..).unwrap_or_default();
        let registers = config.get(pam..).and_then(<[u8]>::first_chunk::<7>);
        let (Some(registers), Some(found)) =
            (registers, config.first_chunk().map(|b| u32::from_le_bytes(*b)))
        else {
            return Err(chip_set(section.body.start, name, "is cut short"));
        };
        if found != ids {
            return Err(chip_set(section.body.start, name, &format!("has PCI ids {found:#010x}")));
        }
        return Ok(Some(parts(*registers)));
    }
    Ok(None)
}

fn chip_set(offset: usize, name: &str, problem: &str) -> StreamError {
    let name = name.trim_start_matches('/');
    StreamError::DeviceState {
        offset: offset as u64,
        problem: format!("the chip set {name} {problem}"),
    }
}

/// Decodes PAM registers: each register after the first describes two parts of 16 KiB; the upper
/// half of the first describes the last 64 KiB.
fn parts([first, others @ ..]: [u8; 7]) -> Vec<LowMemoryPart> {
    let halves = others.iter().flat_map(|r| [r & 0xf, r >> 4]);
    let mut all: Vec<LowMemoryPart> = halves
        .zip(0u64..)
        .map(|(bits, k)| LowMemoryPart {
            start: GuestPhys(SHADOW_START + k * PART_BYTES),
            len_bytes: PART_BYTES,
            is_ram: bits & 1 != 0,
        })
        .collect();
    all.push(LowMemoryPart {
        start: GuestPhys(0xf_0000),
        len_bytes: 0x1_0000,
        is_ram: first & 0x10 != 0,
    });
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn section(out: &mut Vec<u8>, id: u32, name: &str, version: u32, body: &[u8]) {
        out.push(4);
        out.extend(id.to_be_bytes());
        out.push(name.len() as u8);
        out.extend(name.as_bytes());
        out.extend([0; 4]);
        out.extend(version.to_be_bytes());
        out.extend(body);
        out.push(0x7e);
        out.extend(id.to_be_bytes());
    }

    fn state(sections: &[(&str, u32, Vec<u8>)]) -> Vec<u8> {
        let mut out = b"QEVM\0\0\0\x03".to_vec();
        for (id, (name, version, body)) in sections.iter().enumerate() {
            section(&mut out, id as u32, name, *version, body);
        }
        out.push(0);
        out
    }

    #[test]
    fn registers_are_read_at_their_offsets() {
        let mut body = vec![0; 1817];
        body[8..16].copy_from_slice(&0x1111u64.to_be_bytes());
        body[472..480].copy_from_slice(&0x2222u64.to_be_bytes());
        body[256..260].copy_from_slice(&0x10u32.to_be_bytes());
        let found = cpu_registers(&state(&[("cpu", 12, body)])).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(
            (found[0].general[1], found[0].control[3], found[0].segments[1].selector),
            (0x1111, 0x2222, 0x10)
        );
    }

    #[test]
    fn pam_registers_tell_ram_from_rom() {
        let mut body = vec![0; 300];
        body[4..8].copy_from_slice(&0x1237_8086u32.to_le_bytes());
        body[4 + 0x59] = 0x30;
        body[4 + 0x5a] = 0x13;
        let all = low_memory(&state(&[("0000:00:00.0/I440FX", 3, body.clone())])).unwrap().unwrap();
        let ram: Vec<u64> = all.iter().filter(|s| s.is_ram).map(|s| s.start.0).collect();
        assert_eq!(ram, [0xc_0000, 0xc_4000, 0xf_0000]);
        assert_eq!(all.iter().map(|s| s.len_bytes).sum::<u64>(), 0x4_0000);
        body[4] = 0;
        assert!(low_memory(&state(&[("0000:00:00.0/I440FX", 3, body)])).is_err());
        assert_eq!(low_memory(&state(&[("timer", 2, vec![0; 24])])).unwrap(), None);
    }

    proptest! {
        #[test]
        fn no_state_panics(body in prop::collection::vec(any::<u8>(), 0..400), tail in prop::collection::vec(any::<u8>(), 0..300)) {
            let good = state(&[("x/mch", 1, body.clone()), ("cpu", 12, body)]);
            let _ = (low_memory(&good), cpu_registers(&good));
            let _ = (low_memory(&tail), cpu_registers(&tail));
        }
    }
}
