//! Appending pages to packs, each content once.
//!
//! ```text
//!             put                    buffer full             seal, or pack full
//!   page ──▶ index knows it? ──no──▶ buffer ──append──▶ file ──────sync──────▶ durable
//!                 │yes      │        |<- entries from `flushed` ->|<- from `synced` ->|
//!                 ▼         ├─▶ a page of RAM: has it a base? then a delta, if that is smaller ([`pages`])
//!              its PageRef  └─▶ a block of a disk: are its sectors known? then composed, if that is smaller
//!
//!   placed, open_pack ─▶ encode ─▶ writer ─▶ pages, blocks, keep, learn, kinds
//! ```
//!
//! Invariants:
//!
//! - The index holds only records that are verified (an unfinished pack was read), under a trailer,
//!   or in the open pack and durable after the next sync. A record that failed to get there leaves
//!   the index before the error is returned.
//! - Only one pack is open, so one sync makes all of a checkpoint durable.
//! - A derived record (composed, or a delta) refers only to plain records before it that were read
//!   and compared at that moment, or whose content was kept since. A derived record of an earlier
//!   writer or from a spill of the index is read once before it is used.
//! - A run without disks does no work for sectors.

mod blocks;
mod encode;
mod keep;
mod kinds;
mod learn;
mod open_pack;
mod pages;
mod placed;
mod writer;

pub use placed::{PageInput, Placed, PlacedBlock};
pub use writer::PackWriter;
