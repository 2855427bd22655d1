//! The signals by which a user asks a command to end.

use keyframe_failure::Failure;
use keyframe_kernel::{END_SIGNALS, Interrupt};
use rustix::process::Signal;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Returns a flag that SIGINT and SIGTERM set. SIGHUP still ends the process.
pub fn interruption() -> Result<Arc<AtomicBool>, Failure> {
    flag_on(&[Signal::INT, Signal::TERM])
}

/// Returns a flag that SIGINT, SIGTERM and SIGHUP set.
pub fn interruption_or_hangup() -> Result<Arc<AtomicBool>, Failure> {
    flag_on(&END_SIGNALS)
}

fn flag_on(signals: &[Signal]) -> Result<Arc<AtomicBool>, Failure> {
    let interrupt =
        Interrupt::on(signals).map_err(|e| Failure::new(format!("catch signals: {e}")))?;
    Ok(interrupt.into_flag())
}
