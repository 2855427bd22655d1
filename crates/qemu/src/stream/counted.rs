//! Device state of a VM whose clock ran by itself, made into one for a VM whose clock goes by its
//! instructions (`-icount`).
//!
//! ```text
//!   timer      + icount: the clock goes on where it stood; instructions begin at 0
//!   cpu        tsc_offset: there the processors' counter is the clock; it goes on where it stood, too
//! ```
//!
//! Without the first, the clock would begin at 0, and every timer of the guest lie an uptime ahead;
//! without the second, the guest's counter would go back.

use super::convert::{Edit, apply, refused, set};
use super::registers::{Body, CPU, TIMER, cpu, timer};
use super::sections::sections;
use crate::{Error, Result};

/// The head of the optional part of `timer`: its name and version.
const ICOUNT: &[u8] = b"\x05\x0ctimer/icount\0\0\0\x01";

/// Makes `state`, as TCG has it, into one for a VM that counts instructions.
///
/// Errors: [`Error::Conversion`] where its clock does so already; [`Error::DeviceStream`] for a
/// state that is not understood.
pub(crate) fn counted(state: &[u8]) -> Result<Vec<u8>> {
    super::check(state)?;
    let all = sections(state)?;
    let section = all.iter().find(|section| section.name == TIMER.name);
    let section = section.ok_or_else(|| Error::DeviceStream {
        offset: state.len() as u64,
        problem: "it has no section timer".into(),
    })?;
    let body = Body::new(state, section, &TIMER)?;
    if let Some(part) = &body.unknown {
        let reason = format!("the VM's clock counts instructions already ({part})");
        return Err(refused(reason, "analyse its recording, not what was captured of it"));
    }
    let (clock, ticks) = (body.u64(timer::CLOCK), body.u64(timer::TICKS));
    let end = body.section.body.end;
    let mut edits =
        vec![Edit { range: end..end, bytes: [ICOUNT, &clock.to_be_bytes(), &[0; 8]].concat() }];
    for section in all.iter().filter(|section| section.name == CPU.name) {
        let body = Body::new(state, section, &CPU)?;
        let offset = body.u64(cpu::TSC_OFFSET).wrapping_add(ticks).wrapping_sub(clock);
        edits.push(set(&body, cpu::TSC_OFFSET, &offset.to_be_bytes()));
    }
    Ok(apply(state, edits))
}
