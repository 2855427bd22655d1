//! The signals by which a user asks a command to end.

use crate::error::{Error, Result};
use keyframe_kernel::{END_SIGNALS, Interrupt};
use rustix::process::Signal;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Returns a flag that SIGINT and SIGTERM set. SIGHUP still ends the process.
pub fn interruption() -> Result<Arc<AtomicBool>> {
    flag_on(&[Signal::INT, Signal::TERM])
}

/// Returns a flag that SIGINT, SIGTERM and SIGHUP set.
pub fn interruption_or_hangup() -> Result<Arc<AtomicBool>> {
    flag_on(&END_SIGNALS)
}

fn flag_on(signals: &[Signal]) -> Result<Arc<AtomicBool>> {
    let interrupt = Interrupt::on(signals).map_err(|e| Error::io("catch signals", e))?;
    Ok(interrupt.into_flag())
}
