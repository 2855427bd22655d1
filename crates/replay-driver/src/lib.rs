//! Recordings brought to life again: which intervals there are, and one QEMU for one of them.
//!
//! ```text
//!   Source: recording + store + log as QEMU reads it ──▶ intervals; Followed: the same while it is still made
//!   Analysis: a tool's plugin in each interval's QEMU ─▶ parts ─▶ results; Order: what a worker elsewhere must know of it
//!   Replay: checkpoint ─▶ QEMU ─▶ runs to an instruction ─▶ compare with a checkpoint ─▶ end
//!   Standing: a replay that stands at an instruction; Debugger: goes on from there, both ways
//!   Passage: how it gets from one instruction to the next, and how it is seen that it does not
//! ```

pub mod analysis;
pub mod captured;
pub mod compare;
pub mod console;
pub mod course;
pub mod debugging;
mod error;
pub mod event;
pub mod followed;
pub mod follower;
pub mod idling;
pub mod jobs;
pub mod order;
pub mod passage;
pub mod ram;
pub mod replay;
pub mod segment;
pub mod source;
pub mod subject;
pub mod travel;

pub use analysis::{Analysis, Done, Head, dispatch_ns, made_before, progress};
pub use captured::Captured;
pub use compare::{Difference, Side, differing, differing_disks, differing_vms};
pub use console::console;
pub use course::{Course, Known, Live};
pub use debugging::Debugger;
pub use error::{AnalysisError, Error, ReplayError, Result};
pub use event::{Event, EventSink, NoEvents, SharedEventSink};
pub use followed::Followed;
pub use follower::Follower;
pub use order::{Opened, Order, Stretch, tool};
pub use passage::{Passage, Reached};
pub use replay::{Replay, SOCKET, Started, With, begin};
pub use source::{Source, adopt_first, copy_places, places_in, sealed_in};
pub use subject::Subject;
pub use travel::{Standing, Way};
