//! Prepares a device state for a replay that begins at the very instant at which the timer of the
//! PIT (`i8254`) is due.
//!
//! ```text
//!   timer ─ ... ─ i8254                 ─▶  timer ─ ... ─ timer, one ns before the transition ─ i8254 ─ timer, as it was
//!   clock 219     next transition 215
//! ```
//!
//! The log holds the run of the timer as an event after the checkpoint. QEMU 11.1 computes the next
//! transition from its clock as it loads a PIT. If the transition is due, it loads a PIT that is past
//! it. The replay then waits for a timer that never comes, and stands still. With a clock just before
//! the transition, each QEMU arms the timer for the transition. The second `timer` section sets the
//! clock right again, before anything runs.

use crate::accelerator_conversion::{Edit, apply};
use crate::section_bodies::{Body, PIT, TIMER, pit};
use crate::sections::{Section, sections, u32_at, u64_at};
use crate::{Result, StreamError};
use std::borrow::Cow;

/// Head of the optional part `timer/icount`: mark, name and version. Two fields follow: what is added
/// to the guest's time in ns, and the number of instructions.
const ICOUNT: &[u8] = b"\x05\x0ctimer/icount\0\0\0\x01";
/// The largest shift that QEMU accepts.
const SHIFT_MAX: u32 = 10;

/// Returns `state`, of a VM whose clock counts instructions of 2^`shift` ns, so that a timer of the
/// PIT that is due runs after the load. Returns it unchanged if none is due.
///
/// Error: [`StreamError::DeviceState`] if it is malformed.
pub fn with_due_timer(state: &[u8], shift: u32) -> Result<Cow<'_, [u8]>> {
    crate::check(state)?;
    let all = sections(state)?;
    let find = |name: &str| all.iter().find(|section| section.name == name);
    let (Some(timer), Some(pit_section)) = (find(TIMER.name), find(PIT.name)) else {
        return Ok(state.into());
    };
    let Some(bias_at) = bias_of(state, timer) else { return Ok(state.into()) };
    let number = |at: usize| u64_at(state, at).unwrap_or_default().cast_signed();
    let (bias, instructions) = (number(bias_at), number(bias_at + 8));
    let clock = instructions.wrapping_shl(shift.min(SHIFT_MAX)).wrapping_add(bias);
    let body = Body::new(state, pit_section, &PIT)?;
    let next = body.u64(pit::NEXT_TRANSITION).cast_signed();
    let is_due = body.u32(pit::IRQ_DISABLED) == 0 && next > 0 && next <= clock;
    if !is_due {
        return Ok(state.into());
    }
    let last_id = all.iter().filter_map(|section| u32_at(state, section.whole.start + 1)).max();
    let copy = |number: u32, bias: i64| -> Result<Edit> {
        let id = last_id.and_then(|last| last.checked_add(number));
        let id = id.ok_or_else(|| StreamError::DeviceState {
            offset: timer.whole.start as u64,
            problem: "its sections have no free number".into(),
        })?;
        let mut bytes = state.get(timer.whole.clone()).unwrap_or_default().to_vec();
        let end = bytes.len();
        for at in [1, end - 4] {
            bytes[at..at + 4].copy_from_slice(&id.to_be_bytes());
        }
        let at = bias_at - timer.whole.start;
        bytes[at..at + 8].copy_from_slice(&bias.to_be_bytes());
        let at = if number == 1 { pit_section.whole.start } else { pit_section.whole.end };
        Ok(Edit { range: at..at, bytes })
    };
    let before = bias.wrapping_sub(clock.wrapping_sub(next - 1));
    Ok(apply(state, vec![copy(1, before)?, copy(2, bias)?]).into())
}

/// The place of the bias in the section `timer`, if the VM's clock counts instructions.
fn bias_of(state: &[u8], timer: &Section) -> Option<usize> {
    let body = state.get(timer.body.clone())?;
    let part = body.windows(ICOUNT.len()).position(|bytes| bytes == ICOUNT)?;
    let at = timer.body.start + part + ICOUNT.len();
    (at + 16 <= timer.body.end).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(id: u32, name: &str, version: u32, body: &[u8]) -> Vec<u8> {
        let (id, version) = (id.to_be_bytes(), version.to_be_bytes());
        let name = [&[name.len() as u8], name.as_bytes()].concat();
        [&[4], &id[..], &name, &[0; 4], &version, body, &[0x7e], &id].concat()
    }

    fn device_state(sections: &[Vec<u8>]) -> Vec<u8> {
        [b"QEVM\0\0\0\x03", &sections.concat()[..], &[0]].concat()
    }

    /// The bodies of `timer` and of the PIT.
    fn bodies(bias: i64, instructions: i64, next: i64) -> (Vec<u8>, Vec<u8>) {
        let timer = [&[0; 24], ICOUNT, &bias.to_be_bytes(), &instructions.to_be_bytes()].concat();
        let mut pit = vec![0; 108];
        pit[100..].copy_from_slice(&next.to_be_bytes());
        (timer, pit)
    }

    fn state(timer: &[u8], pit: &[u8]) -> Vec<u8> {
        device_state(&[
            section(3, "timer", 2, timer),
            section(7, "i8254", 3, pit),
            section(9, "x", 1, b"y"),
        ])
    }

    #[test]
    fn the_clock_is_before_a_due_transition_while_the_pit_is_loaded() {
        let (timer, pit) = bodies(63, 100, 860);
        let before = state(&timer, &pit);
        // 100 instructions of 8 ns and 63 ns: 863.
        let after = with_due_timer(&before, 3).unwrap();
        let (early, _) = bodies(59, 100, 860);
        let expected = device_state(&[
            section(3, "timer", 2, &timer),
            section(10, "timer", 2, &early),
            section(7, "i8254", 3, &pit),
            section(11, "timer", 2, &timer),
            section(9, "x", 1, b"y"),
        ]);
        assert_eq!(after, expected);
        assert_eq!(sections(&after).unwrap().len(), 5);
    }

    #[test]
    fn a_state_without_a_due_timer_stays_as_it_is() {
        let unchanged = |timer: &[u8], pit: &[u8]| {
            let state = state(timer, pit);
            assert_eq!(with_due_timer(&state, 3).unwrap(), state);
        };
        for next in [864, -1, 0] {
            let (timer, pit) = bodies(63, 100, next);
            unchanged(&timer, &pit);
        }
        let (timer, mut pit) = bodies(63, 100, 863);
        // Its clock does not count instructions; its interrupt is switched off.
        unchanged(&timer[..24], &pit);
        pit[3] = 1;
        unchanged(&timer, &pit);
        assert!(with_due_timer(b"", 3).is_err());
    }
}
