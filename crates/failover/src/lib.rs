//! A VM with a standby on another host: every epoch is there before what it sent leaves.
//!
//! ```text
//!   keyframe protect                                             keyframe standby
//!   ┌ QEMU ─ gate ─▶ network   guard ┐                           ┌ QEMU that waits, its RAM, disks ┐
//!   │ vm: policy, capture ─▶ sending ├── data streams (TLS) ────▶│ standby/streams ─▶ standby/image │
//!   │ primary: core, outputs         ├── control, beat (TLS) ───▶│ standby: core, outputs           │
//!   └───────────────┬────────────────┘                           └──────────────┬──────────────────┘
//!                   └───────────────▶ keyframe witness ◀────────────────────────┘
//! ```
//!
//! Who may do what, and when, is `keyframe_replication`'s, which does no I/O; here it is done. When
//! an epoch is taken is a policy's (`keyframe_scheduling::replication`), how its pages travel
//! `keyframe_transfer`'s.

mod arbitration;
mod busy;
pub mod error;
pub mod event;
mod frames;
mod gated;
pub mod guard;
mod having;
pub mod launch;
pub mod links;
mod notice_text;
pub mod primary;
mod sending;
pub mod settings;
pub mod standby;
mod verify;
mod vm;
pub mod witnessing;

pub use error::{Error, PageHashesError, Result};
pub use event::{Event, EventSink, SharedEventSink};
pub use frames::Arbiter;
pub use notice_text::notice_text;
