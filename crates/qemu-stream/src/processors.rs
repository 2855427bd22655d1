//! Reads the registers of the guest's processors from a device state, one file for each kind.

mod aarch64;
mod riscv64;
mod x86_64;

use crate::sections::sections;
use crate::{Result, StreamError};
use keyframe_machine::{CpuRegisters, Processor, RegisterValues};

/// The name of a processor's section.
const SECTION: &str = "cpu";
/// Upper bound of the number of processors.
const CPUS_MAX: usize = 4096;

/// Returns the registers of all virtual CPUs in the device state `state` of a guest with the
/// processor `processor`, ordered by index.
///
/// Errors: [`StreamError::DeviceState`] for a malformed state, one without a processor, and one
/// whose processors have another layout.
pub fn cpu_registers(state: &[u8], processor: Processor) -> Result<Vec<CpuRegisters>> {
    crate::check(state)?;
    let all = sections(state)?;
    let mut found = Vec::new();
    for section in all.iter().filter(|s| s.name == SECTION).take(CPUS_MAX) {
        let values = match processor {
            Processor::X86_64 => RegisterValues::X86_64(x86_64::read(state, section)?),
            Processor::Aarch64 => RegisterValues::Aarch64(aarch64::read(state, section)?),
            Processor::Riscv64 => RegisterValues::Riscv64(riscv64::read(state, section)?),
        };
        found.push(CpuRegisters { index: section.instance, values });
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

#[cfg(test)]
pub(crate) mod sample_states {
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

    pub(crate) fn state(sections: &[(&str, u32, Vec<u8>)]) -> Vec<u8> {
        let mut out = b"QEVM\0\0\0\x03".to_vec();
        for (id, (name, version, body)) in sections.iter().enumerate() {
            section(&mut out, id as u32, name, *version, body);
        }
        out.push(0);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::sample_states::state;
    use super::*;
    use crate::low_memory;
    use proptest::prelude::*;

    fn values(version: u32, body: Vec<u8>, processor: Processor) -> RegisterValues {
        let found = cpu_registers(&state(&[("cpu", version, body)]), processor).unwrap();
        assert_eq!(found.len(), 1);
        found.into_iter().next().unwrap().values
    }

    fn body(len: usize, words: &[(usize, u64)]) -> Vec<u8> {
        let mut body = vec![0; len];
        for (at, word) in words {
            body[*at..at + 8].copy_from_slice(&word.to_be_bytes());
        }
        body
    }

    #[test]
    fn registers_are_read_at_their_offsets() {
        let mut bytes = body(1817, &[(8, 0x1111), (472, 0x2222)]);
        bytes[256..260].copy_from_slice(&0x10u32.to_be_bytes());
        let RegisterValues::X86_64(x86) = values(12, bytes, Processor::X86_64) else { panic!() };
        assert_eq!(
            (x86.general[1], x86.control[3], x86.segments[1].selector),
            (0x1111, 0x2222, 0x10)
        );
        let bytes = body(3000, &[(64, 1), (312, 2), (320, 3), (328, 4 << 32)]);
        let RegisterValues::Aarch64(arm) = values(22, bytes, Processor::Aarch64) else { panic!() };
        assert_eq!((arm.general[0], arm.sp, arm.pc, arm.pstate), (1, 2, 3, 4));
        let bytes = body(3000, &[(16, 1), (640, 2)]);
        let RegisterValues::Riscv64(riscv) = values(6, bytes, Processor::Riscv64) else { panic!() };
        assert_eq!((riscv.general[2], riscv.pc), (1, 2));
    }

    #[test]
    fn another_layout_is_an_error() {
        for processor in Processor::ALL {
            for (version, len) in [(1, 3000), (22, 300), (6, 300), (12, 300)] {
                let state = state(&[("cpu", version, vec![0; len])]);
                assert!(cpu_registers(&state, processor).is_err(), "{processor} {version} {len}");
            }
        }
    }

    proptest! {
        #[test]
        fn no_state_panics(body in prop::collection::vec(any::<u8>(), 0..400), tail in prop::collection::vec(any::<u8>(), 0..300)) {
            let good = state(&[("x/mch", 1, body.clone()), ("cpu", 12, body)]);
            for state in [&good, &tail] {
                let _ = low_memory(state);
                for processor in Processor::ALL {
                    let _ = cpu_registers(state, processor);
                }
            }
        }
    }
}
