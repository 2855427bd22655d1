//! Sinks for events: a library reports what happens as typed events, and the program that runs the
//! library turns them into text.

use std::sync::Arc;

/// Receives the events of a library, which are of type `E`.
///
/// The library calls [`event`](Self::event) from several threads and waits until it returns.
pub trait EventSink<E>: Send + Sync {
    /// Receives an event that has just happened.
    fn event(&self, event: &E);
}

/// A sink that several threads share.
pub type SharedEventSink<E> = Arc<dyn EventSink<E>>;

/// A sink that ignores all events, of any type.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoEvents;

impl<E> EventSink<E> for NoEvents {
    fn event(&self, _: &E) {}
}
