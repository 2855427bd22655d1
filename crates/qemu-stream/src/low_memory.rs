//! Reads from a device state whether an x86 guest sees RAM or ROM below 1 MiB.

use crate::sections::sections;
use crate::{Result, StreamError};
use keyframe_units::GuestPhys;

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
    use crate::processors::sample_states::state;

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
}
