//! Rights that a session gives up once it has started QEMU.

use crate::event::{Event, EventSink};
use keyframe_confine::{KeptRights, capabilities_but};
use std::sync::Arc;

/// Keeps the rights to trace QEMU and to use files, and gives up all others. To be called before
/// threads are started: a thread keeps the rights that it was started with.
pub fn trace_only(events: &dyn EventSink<Event>) {
    if let Err(error) = capabilities_but(KeptRights::Tracing) {
        events.event(&Event::RightsKept { error: Arc::new(error) });
    }
}
