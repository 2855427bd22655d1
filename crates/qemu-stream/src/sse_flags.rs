//! The MXCSR register of each virtual CPU in a device state, and the exception flags that QEMU
//! leaves out of it.
//!
//! ```text
//!   cpu body, bytes:  0 general registers │ 128 rip │ ... │ 556 MXCSR │ ...
//! ```

use crate::Result;
use crate::section_bodies::{Body, CPU, cpu};
use crate::sections::sections;

/// The exception flags: bits 0 to 5 of MXCSR.
const FLAGS: u32 = 0x3f;

/// The registers by which a virtual CPU of a device state is found in QEMU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedCpu {
    /// The index of the CPU, from 0.
    pub index: u32,
    /// The general registers: rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8 to r15.
    pub general: [u64; 16],
    /// The instruction pointer.
    pub rip: u64,
    /// The SSE control and status register.
    pub mxcsr: u32,
}

/// Adds exception flags to the MXCSR of each virtual CPU in the device state `state`. `flags_of`
/// returns the flags of a CPU, of which only bits 0 to 5 count. Returns the number of CPUs.
///
/// Error: [`crate::StreamError::DeviceState`] for a malformed state, or a CPU of an unknown format.
/// `state` is then as it was.
pub fn add_sse_flags(
    state: &mut [u8],
    flags_of: &mut dyn FnMut(&SavedCpu) -> u32,
) -> Result<usize> {
    crate::check(state)?;
    let all = sections(state)?;
    let mut changes = Vec::new();
    for section in all.iter().filter(|section| section.name == CPU.name) {
        let body = Body::new(state, section, &CPU)?;
        let saved = SavedCpu {
            index: section.instance,
            general: std::array::from_fn(|k| body.u64(k * 8)),
            rip: body.u64(cpu::RIP),
            mxcsr: body.u32(cpu::MXCSR),
        };
        let at = section.body.start + cpu::MXCSR;
        changes.push((at, saved.mxcsr | flags_of(&saved) & FLAGS));
    }
    for (at, mxcsr) in &changes {
        if let Some(field) = state.get_mut(*at..at + 4) {
            field.copy_from_slice(&mxcsr.to_be_bytes());
        }
    }
    Ok(changes.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn with_cpu(body: &[u8]) -> Vec<u8> {
        let mut state = crate::tests::state();
        state.pop();
        state.extend(b"\x04\0\0\0\x77\x03cpu\0\0\0\x02\0\0\0\x0c");
        state.extend(body);
        state.extend(b"\x7e\0\0\0\x77\0");
        state
    }

    #[test]
    fn flags_are_added_and_nothing_else_changes() {
        let mut body = vec![0; 1817];
        body[8..16].copy_from_slice(&0x1111u64.to_be_bytes());
        body[128..136].copy_from_slice(&0x2222u64.to_be_bytes());
        body[556..560].copy_from_slice(&0x9f80u32.to_be_bytes());
        let mut state = with_cpu(&body);
        let mut seen = Vec::new();
        let mut flags = |cpu: &SavedCpu| {
            seen.push(*cpu);
            0xffff_ffc5
        };
        assert_eq!(add_sse_flags(&mut state, &mut flags).unwrap(), 1);
        let mut general = [0; 16];
        general[1] = 0x1111;
        assert_eq!(seen, [SavedCpu { index: 2, general, rip: 0x2222, mxcsr: 0x9f80 }]);
        body[559] = 0x85;
        assert_eq!(state, with_cpu(&body));
    }

    #[test]
    fn a_cpu_of_another_format_is_refused_and_the_state_stays() {
        let state = with_cpu(&[0; 1816]);
        let mut changed = state.clone();
        assert!(add_sse_flags(&mut changed, &mut |_| 0x3f).is_err());
        assert_eq!(changed, state);
    }

    proptest! {
        #[test]
        fn no_state_panics(tail in prop::collection::vec(any::<u8>(), 0..300), body in prop::collection::vec(any::<u8>(), 0..2200)) {
            let _ = (add_sse_flags(&mut tail.clone(), &mut |_| 1), add_sse_flags(&mut with_cpu(&body), &mut |_| 1));
        }
    }
}
