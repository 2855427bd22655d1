//! Converts the device state of a VM with a free-running clock for a VM whose clock counts
//! instructions (`-icount`).
//!
//! ```text
//!   timer      + icount: the clock continues at its value; instructions begin at 0
//!   cpu (x86)  tsc_offset: with -icount the time-stamp counter is the clock; it continues at its
//!              value
//! ```
//!
//! Without the first change the clock would begin at 0, and each timer of the guest would fire an
//! uptime late. Without the second, the guest's time-stamp counter would jump back.

use crate::accelerator_conversion::{Edit, apply, refused, set};
use crate::section_bodies::{Body, CPU, TIMER, cpu, timer};
use crate::sections::sections;
use crate::{Result, StreamError};
use keyframe_machine::Processor;

/// Head of the optional part `timer/icount`: mark, name and version.
const ICOUNT: &[u8] = b"\x05\x0ctimer/icount\0\0\0\x01";

/// Converts `state`, a device state of a guest with the processor `processor` written under TCG,
/// for a VM whose clock counts instructions (`-icount`). The counters of other processors than x86
/// follow the clock anyway.
///
/// Errors: [`StreamError::Conversion`] if the VM's clock already counts instructions;
/// [`StreamError::DeviceState`] for a malformed state.
pub fn count_instructions(state: &[u8], processor: Processor) -> Result<Vec<u8>> {
    crate::check(state)?;
    let all = sections(state)?;
    let section = all.iter().find(|section| section.name == TIMER.name);
    let section = section.ok_or_else(|| StreamError::DeviceState {
        offset: state.len() as u64,
        problem: "it has no section timer".into(),
    })?;
    let body = Body::new(state, section, &TIMER)?;
    if let Some(part) = &body.unknown {
        let reason = format!("the VM's clock counts instructions already ({part})");
        return Err(refused(reason, "analyse its recording instead of a captured checkpoint"));
    }
    let (clock, ticks) = (body.u64(timer::CLOCK), body.u64(timer::TICKS));
    let end = body.section.body.end;
    let mut edits =
        vec![Edit { range: end..end, bytes: [ICOUNT, &clock.to_be_bytes(), &[0; 8]].concat() }];
    let has_counter = processor == Processor::X86_64;
    for section in all.iter().filter(|section| has_counter && section.name == CPU.name) {
        let body = Body::new(state, section, &CPU)?;
        let offset = body.u64(cpu::TSC_OFFSET).wrapping_add(ticks).wrapping_sub(clock);
        edits.push(set(&body, cpu::TSC_OFFSET, &offset.to_be_bytes()));
    }
    Ok(apply(state, edits))
}
