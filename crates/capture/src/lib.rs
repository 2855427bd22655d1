//! Captures a VM: finds the pages that it wrote, copies them while it runs, pauses it for the rest,
//! hands all to a sink.
//!
//! ```text
//!            Tracker, PageReader                Machine                        Sink
//!   ┌──────────────▼──────────────┐   ┌────────────▼───────────┐   ┌────────────▼──────────┐
//!   │ pre-copy rounds             │──▶│ pause: device state,   │──▶│ encode, seal          │
//!   │ (guest runs)                │   │ last pages             │   │ (guest runs)          │
//!   └─────────────────────────────┘   └────────────────────────┘   └───────────────────────┘
//!                         Pool: bounded memory between the copy and the sink
//! ```
//!
//! [`cycle::Cycle`] captures a checkpoint, by a [`strategy`]; [`encoder::Encoder`] takes it from
//! there, on a thread of the caller's. The traits in [`ports`] are all that they know of QEMU, of
//! the kernel and of the store; [`ram`] implements those of the kernel.
//!
//! Architecture invariants: no page that was drained from a tracker is forgotten before a
//! checkpoint that holds it is sealed ([`dirty::DirtyLog`]); nothing is hashed, compressed or
//! written while the VM is paused; the queue before the encoder is bounded by memory
//! ([`pool::Pool`]).

pub mod compare;
pub mod cycle;
pub mod dirty;
pub mod encoder;
pub mod group;
pub mod parallel;
pub mod parcel;
pub mod pool;
pub mod ports;
pub mod ram;
pub mod strategy;

pub use cycle::{Captured, Cycle, CycleError, Phase, Settled, Timeline};
pub use encoder::{EncodeError, Encoder, Message, Outlet, Report};
pub use pool::Pool;
pub use ports::{
    BoxError, FirstWriteHook, FirstWrites, Freezer, Machine, Observer, PageReader, Resumed, Sink,
    Stopped, Tracker,
};
