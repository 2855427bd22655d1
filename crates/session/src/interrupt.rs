//! The signals by which a user asks for an end.

use keyframe_failure::Failure;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Set when the user asks for an end, by SIGINT or SIGTERM.
pub fn interruption() -> Result<Arc<AtomicBool>, Failure> {
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&interrupted))
            .map_err(|e| Failure::new(format!("catch signal {signal}: {e}")))?;
    }
    Ok(interrupted)
}
