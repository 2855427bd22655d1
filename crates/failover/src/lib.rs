//! A VM with a standby on another host: an epoch's output leaves after the standby holds the epoch.
//!
//! ```text
//!   keyframe protect                                         keyframe standby
//!   ┌ QEMU ─ gate ─▶ network   guard ┐                       ┌ QEMU that waits, its RAM, disks ──┐
//!   │ vm: policy, capture ─▶ sending ├─ data streams (TLS) ─▶│ standby/streams ─▶ standby/image  │
//!   │ primary: core, actions         ├─ control, beat (TLS) ▶│ standby: core, actions            │
//!   └───────────────┬────────────────┘                       └────────────────┬──────────────────┘
//!                   └───────────────▶ keyframe witness ◀──────────────────────┘
//! ```
//!
//! This crate drives other crates that do no I/O: `keyframe_replication` decides which host may run
//! the VM, `keyframe_scheduling::replication` when an epoch is taken, and `keyframe_transfer` how
//! pages are encoded.

mod arbitration;
mod directory_lock;
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
pub use event::{FailoverEvent, FailoverEventSink, SharedFailoverEventSink};
pub use frames::Arbiter;
pub use notice_text::notice_text;
