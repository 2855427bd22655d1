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
pub mod error;
pub mod event;
mod frames;
mod gate;
pub mod guard;
pub mod launch;
pub mod links;
mod notice_text;
pub mod primary;
mod resync;
mod sending;
pub mod settings;
pub mod standby;
mod vcpu_time;
mod verify;
mod vm;
pub mod witness;

pub use error::{Error, PageHashesError, Result};
pub use event::{Event, EventSink, SharedEventSink};
pub use frames::Arbiter;
pub use notice_text::notice_text;
