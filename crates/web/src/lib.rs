//! The dashboard: a web page, its HTTP API, live events and metrics.
//!
//! ```text
//!   browser ────▶ connection ──▶ guard ──▶ route ──▶ blocking thread ──▶ DashboardSource
//!   Prometheus ─┘ (bounded,      (host,       │
//!                  timed)         token)      └─▶ events ◀── one reading a second, with listeners
//! ```
//!
//! All data comes from a [`DashboardSource`]; this crate knows neither stores nor QEMU. It is the
//! only crate with async code: a source is plain code, called on threads that may block.
//!
//! Invariants:
//! 1. Reading changes nothing. Every change needs the token, even on the loopback.
//! 2. Off the loopback, only the page's own files are served without the token. On the loopback, a
//!    request whose `Host` names another machine is refused (DNS rebinding).
//! 3. No answer grows with the number of checkpoints. Connections, event listeners, requests,
//!    answer times and concurrent slow requests are bounded.
//! 4. Names of VMs, tags and files are untrusted: the page sets them as text; metrics and reports
//!    escape them.
//! 5. The page loads nothing from other servers, and its content security policy forbids it.
//!
//! `docs/api/openapi.json` describes the API and is served; a test compares it with the routes.

mod api;
mod error;
mod event_hub;
mod guard;
mod metrics;
mod page;
mod request_log;
mod server;
mod source;
#[doc(hidden)]
pub mod synthetic;
#[cfg(test)]
mod tests;
mod timeline;

pub use error::{Error, Result};
pub use request_log::LogFormat;
pub use server::{DashboardOptions, DashboardServer};
pub use source::{
    ApiError, CheckpointListing, CheckpointRow, DashboardAction, DashboardSource, HeatMap,
    HeatRegion, PauseBreakdown, StoreHead, StoreSizes, VmState,
};
pub use timeline::{POINTS_MAX, Timeline, TimelineBucket, chunks};
