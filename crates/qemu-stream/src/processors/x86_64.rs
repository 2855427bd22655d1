//! The registers of x86-64 in a device state.
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

use crate::Result;
use crate::section_bodies::{Body, CPU, cpu};
use crate::sections::Section;
use keyframe_machine::{SegmentRegister, X86Registers};

const SEGMENTS: usize = 236;
const SEGMENT_BYTES: usize = 20;
const CR0: usize = 456;
const KERNEL_GS_BASE: usize = 856;

/// Reads the section `cpu` of `state`. Error: it has another layout.
pub(super) fn read(state: &[u8], section: &Section) -> Result<X86Registers> {
    let body = Body::new(state, section, &CPU)?;
    let segment = |k: usize| segment(&body, SEGMENTS + k * SEGMENT_BYTES);
    Ok(X86Registers {
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
    })
}

fn segment(body: &Body<'_>, at: usize) -> SegmentRegister {
    SegmentRegister {
        selector: body.u32(at),
        base: body.u64(at + 4),
        limit: body.u32(at + 12),
        flags: body.u32(at + 16),
    }
}
