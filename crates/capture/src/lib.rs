//! Captures a VM: finds the pages that it wrote, copies them while it runs, pauses it for the rest, hands all to a sink.
//!
//! ```text
//!            Tracker, PageReader                Machine                        Sink
//!   ┌──────────────▼──────────────┐   ┌────────────▼───────────┐   ┌────────────▼──────────┐
//!   │ pre-copy rounds             │──▶│ pause: device state,   │──▶│ encode, seal          │
//!   │ (guest runs)                │   │ last pages             │   │ (guest runs)          │
//!   └─────────────────────────────┘   └────────────────────────┘   └───────────────────────┘
//!                         Staging: bounded memory between the copy and the sink
//! ```
//!
//! [`cycle::Cycle`] is the state machine of one checkpoint. The four traits in [`ports`] are all that it knows of QEMU,
//! of the kernel and of the store; [`ram`] implements two of them over `keyframe-kernel`.
//!
//! Architecture invariants: no page that was drained from a tracker is forgotten before a checkpoint that holds it is
//! sealed ([`dirty::DirtyLog`]); nothing is hashed, compressed or written while the VM is paused.

pub mod cycle;
pub mod dirty;
pub mod ports;
pub mod ram;
pub mod staging;

pub use cycle::{Captured, Cycle, CycleError, Limits, Phase, Timeline};
pub use ports::{BoxError, Machine, Observer, PageReader, Resumed, Sink, Stopped, Tracker};
