//! The flash chips of a device state: `pflash_cfi01`, which holds a VM's UEFI firmware and its
//! variables.
//!
//! A reset puts a chip into a known state: it answers reads with its content, and is ready. A chip
//! that a state finds so needs no section after a reset.

use crate::Result;
use crate::accelerator_conversion::{Edit, apply};
use crate::sections::sections;

/// The section's name.
const FLASH: &str = "pflash_cfi01";
/// Length of the fields: `wcycle`, `cmd`, `status`, `counter`.
const FIELDS_BYTES: usize = 11;
/// The status of a chip that is ready.
const READY: u8 = 0x80;

/// How far the flash chips of a state are from their state after a reset. Of several chips, the
/// farthest counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FlashActivity {
    /// Each is as after a reset, or there is none.
    Reset,
    /// Each answers reads with its content. Their status registers differ from those after a reset.
    Idle,
    /// One is in the midst of a command.
    Busy,
}

/// Returns the activity of the flash chips of `state`. [`crate::check`] must have accepted `state`.
///
/// Error: [`crate::StreamError::DeviceState`] for a malformed state.
pub fn flash_activity(state: &[u8]) -> Result<FlashActivity> {
    if !mentions_flash(state) {
        return Ok(FlashActivity::Reset);
    }
    let all = sections(state)?;
    let chips = all.iter().filter(|section| section.name == FLASH);
    let of_chip = |body: &[u8]| match body {
        // The counter is set anew by the command that uses it.
        [0, 0, READY, ..] if body.len() == FIELDS_BYTES => FlashActivity::Reset,
        [0, 0, ..] if body.len() == FIELDS_BYTES => FlashActivity::Idle,
        _ => FlashActivity::Busy,
    };
    let bodies = chips.filter_map(|chip| state.get(chip.body.clone()));
    Ok(bodies.map(of_chip).max().unwrap_or(FlashActivity::Reset))
}

/// Returns `state` without the sections of its flash chips. [`crate::check`] must have accepted
/// `state`.
///
/// Error: [`crate::StreamError::DeviceState`] for a malformed state.
pub fn without_flash(state: &[u8]) -> Result<Vec<u8>> {
    if !mentions_flash(state) {
        return Ok(state.to_vec());
    }
    let all = sections(state)?;
    let chips = all.into_iter().filter(|section| section.name == FLASH);
    Ok(apply(state, chips.map(|chip| Edit { range: chip.whole, bytes: Vec::new() }).collect()))
}

/// False if `state` has no flash chip. Needs no section to be found.
fn mentions_flash(state: &[u8]) -> bool {
    state.windows(FLASH.len()).any(|bytes| bytes == FLASH.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A state with a timer and a chip for each of `bodies`.
    fn state(bodies: &[&[u8]]) -> Vec<u8> {
        let mut state = crate::tests::state();
        state.pop();
        for (number, body) in bodies.iter().enumerate() {
            let id = [0, 0, 0, 40 + number as u8];
            state.extend([&[4], &id[..], &[12], FLASH.as_bytes()].concat());
            state.extend([0, 0, 0, number as u8, 0, 0, 0, 1]);
            state.extend_from_slice(body);
            state.extend([&[0x7e], &id[..]].concat());
        }
        state.push(0);
        state
    }

    #[test]
    fn the_busiest_chip_counts() {
        let reset: &[u8] = &[0, 0, 0x80, 0, 0, 0, 0, 0, 0, 0, 9];
        let idle: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let command: &[u8] = &[0, 0x70, 0x80, 0, 0, 0, 0, 0, 0, 0, 0];
        let cycle: &[u8] = &[1, 0, 0x80, 0, 0, 0, 0, 0, 0, 0, 0];
        let with_part = [reset, b"\x05\x0fpflash_cfi01_xx\0\0\0\x01"].concat();
        let of = |bodies: &[&[u8]]| flash_activity(&state(bodies)).unwrap();
        assert_eq!(of(&[]), FlashActivity::Reset);
        assert_eq!(of(&[reset, reset]), FlashActivity::Reset);
        assert_eq!(of(&[reset, idle]), FlashActivity::Idle);
        for busy in [command, cycle, &with_part] {
            assert_eq!(of(&[busy, idle]), FlashActivity::Busy);
        }
    }

    #[test]
    fn only_the_chips_are_cut_out() {
        let body: &[u8] = &[0, 0, 0x80, 0, 0, 0, 0, 0, 0, 0, 0];
        let cut = without_flash(&state(&[body, body])).unwrap();
        assert_eq!(cut, state(&[]));
        assert!(crate::check(&cut).is_ok());
        assert_eq!(without_flash(&cut).unwrap(), cut);
    }
}
