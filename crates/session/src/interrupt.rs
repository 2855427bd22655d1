//! The signals by which a user asks a command to end.

use crate::error::{Error, Result};
use keyframe_kernel::{END_SIGNALS, Interrupt};
use rustix::process::Signal;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Returns a flag that SIGINT and SIGTERM set. SIGHUP still ends the process. Error: the kernel
/// refuses the handlers.
pub fn interruption() -> Result<Arc<AtomicBool>> {
    flag_on(&[Signal::INT, Signal::TERM])
}

/// Signals whose default action ends a process at once. An engine that ended so would leave bitmaps
/// and exports in QEMU.
const OTHER_END_SIGNALS: [Signal; 5] =
    [Signal::QUIT, Signal::USR1, Signal::USR2, Signal::ALARM, Signal::VTALARM];

/// Returns a flag that SIGINT, SIGTERM, SIGHUP, SIGQUIT and the signals without a use here set.
/// Error: the kernel refuses the handlers.
pub fn interruption_or_hangup() -> Result<Arc<AtomicBool>> {
    flag_on(&[&END_SIGNALS[..], &OTHER_END_SIGNALS].concat())
}

fn flag_on(signals: &[Signal]) -> Result<Arc<AtomicBool>> {
    let interrupt = Interrupt::on(signals).map_err(|e| Error::io("catch signals", e))?;
    Ok(interrupt.into_flag())
}
