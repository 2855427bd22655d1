//! The signals by which a user asks a command to end.

use crate::error::{Error, Result};
use keyframe_kernel::{END_SIGNALS, Interrupt};
use keyframe_locks::IgnorePoison;
use rustix::process::Signal;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

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
///
/// Each call returns the same flag: a signal that comes between two sessions ends the second one.
pub fn interruption_or_hangup() -> Result<Arc<AtomicBool>> {
    static FLAG: Mutex<Option<Arc<AtomicBool>>> = Mutex::new(None);
    let mut known = FLAG.lock().ignore_poison();
    if let Some(flag) = &*known {
        return Ok(Arc::clone(flag));
    }
    let flag = flag_on(&[&END_SIGNALS[..], &OTHER_END_SIGNALS].concat())?;
    Ok(Arc::clone(known.insert(flag)))
}

fn flag_on(signals: &[Signal]) -> Result<Arc<AtomicBool>> {
    let interrupt = Interrupt::on(signals).map_err(|e| Error::io("catch signals", e))?;
    Ok(interrupt.into_flag())
}
