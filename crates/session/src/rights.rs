//! Rights that a session gives up once it has started QEMU.

use crate::event::{Event, EventSink};
use keyframe_confine::{KeptRights, capabilities_but};
use std::sync::Arc;

/// Keeps the rights to trace QEMU and to use files, and gives up all others. To be called before
/// threads are started: a thread keeps the rights that it was started with.
pub fn trace_only(events: &dyn EventSink<Event>) {
    keep(KeptRights::Tracing, events);
}

/// Does the same for a VM whose successor must be able to open its taps.
pub fn trace_and_open_taps(events: &dyn EventSink<Event>) {
    keep(KeptRights::TracingAndTaps, events);
}

fn keep(rights: KeptRights, events: &dyn EventSink<Event>) {
    if let Err(error) = capabilities_but(rights) {
        events.event(&Event::RightsKept { error: Arc::new(error) });
    }
}
