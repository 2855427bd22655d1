//! Captures checkpoints of a VM: finds the pages that it wrote, copies most of them while it runs,
//! pauses it to copy the rest, and hands all of them to a sink.
//!
//! ```text
//!        DirtyTracker, PageReader              Machine                   CheckpointSink
//!   ┌──────────────▼──────────────┐   ┌───────────▼────────────┐   ┌────────────▼──────────┐
//!   │ pre-copy rounds             │──▶│ pause: device state,   │──▶│ encode, seal          │
//!   │ (guest runs)                │   │ last pages             │   │ (guest runs)          │
//!   └─────────────────────────────┘   └────────────────────────┘   └───────────────────────┘
//!                  StagingPool: the bounded memory between the copy and the sink
//! ```
//!
//! [`CaptureCycle`] captures checkpoints with a [`strategy::CopyStrategy`]; [`CheckpointEncoder`]
//! hands them to the sink, on a thread of the caller. They reach the VMM through [`Machine`], and
//! the guest's memory and the store through the traits in [`ports`]; [`ram`] implements the
//! memory's traits over the kernel.
//!
//! Architecture invariants: a page that was drained from a tracker stays in the [`dirty::DirtyLog`]
//! until a checkpoint that holds it is sealed; nothing is hashed, compressed or written while the
//! VM is paused; memory bounds the queue before the encoder ([`StagingPool`]).

pub mod checkpoint;
pub mod compare;
pub mod context;
pub mod cycle;
pub mod dirty;
pub mod encoder;
pub mod error;
pub mod group;
pub mod machine;
pub mod parallel;
pub mod ports;
pub mod ram;
pub mod staged_pages;
pub mod staging_pool;
pub mod strategy;

pub use checkpoint::{CapturePhase, CaptureTimeline, CapturedCheckpoint};
pub use cycle::{CaptureCycle, SettledReport};
pub use encoder::{CheckpointEncoder, EncodeError, EncodeReport, EncoderMessage, EncoderQueue};
pub use error::CaptureError;
pub use keyframe_vmm::{PauseVerdict, StopOutcome};
pub use machine::{Machine, PauseRecord, PauseSteps, PauseWork};
pub use ports::{
    BoxError, CaptureObserver, CheckpointSink, DirtyTracker, FirstWriteHook, FirstWriteMonitor,
    NoObserver, PageReader, PausedFind, RamFreezer,
};
pub use staging_pool::StagingPool;
