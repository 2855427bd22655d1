//! Checks a whole store, and tells which checkpoints each damage affects. Repairs a damaged store.
//!
//! ```text
//!   store.json ─▶ checkpoint files ─▶ maps, and their references ─▶ packs ─▶ which checkpoints need the bad records ─▶ tags
//! ```
//!
//! Invariants: the checkpoints in the damages are exactly those whose description, device state,
//! RAM or disks cannot be read correctly. An unreadable file that nothing needs is a note if a
//! crash may leave it, else a damage without checkpoints. A check changes nothing, and a writer may
//! be at work meanwhile.

mod checker;
mod packs;
mod repair;
mod report;

pub use repair::{LostCheckpoint, QuarantinedFile, RepairReport};
pub use report::{CheckOptions, CheckProgress, CheckReport, Damage};
