//! The dashboard: a page, the HTTP API behind it, live events and metrics.
//!
//! ```text
//!   browser ──▶ connection (bounded, timed) ──▶ guard: host, token ──▶ route ──▶ a blocking thread ──▶ Source
//!   Prometheus ─┘                                                       │                              (who serves implements it)
//!                                                                       └─▶ events ◀── one look a second, while somebody listens
//! ```
//!
//! What is shown comes from a [`Source`]; this crate knows neither stores nor QEMU. Async lives in
//! it and nowhere else: a source is plain code, called on threads that may block.
//!
//! Invariants:
//! 1. Reading changes nothing. What changes something needs the token, wherever it comes from.
//! 2. Off the loopback nothing but the page's own files is given without the token; on it, nothing to a request whose `Host` is another
//!    machine's name (DNS rebinding).
//! 3. Nothing in an answer grows with the number of checkpoints, whatever is asked for; connections, listeners, requests, time and slow
//!    questions at once are bounded.
//! 4. Names that come from outside are data: the page sets them as text, metrics and reports escape them.
//! 5. The page needs nothing from anywhere else, and the browser is told so (CSP).
//!
//! The API is described in `docs/api/openapi.json`, which is what is served; a test holds it
//! against the routes.

mod api;
mod error;
mod guard;
mod live;
mod log;
mod metrics;
mod page;
mod server;
mod source;
#[doc(hidden)]
pub mod synthetic;
#[cfg(test)]
mod tests;
mod timeline;

pub use error::{Error, Result};
pub use log::LogFormat;
pub use server::{Options, Server};
pub use source::{
    Action, Checkpoint, Heat, HeatRegion, Listing, Phases, Problem, Sizes, Source, StoreHead,
    VmState,
};
pub use timeline::{Bucket, POINTS_MAX, Timeline, chunks};
