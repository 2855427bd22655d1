//! The formats of a checkpoint store's files: encoders, and decoders that bound what they allocate.
//!
//! ```text
//!   identity, page_ref, page_hash         what files and records are named by
//!     codec, dictionary                   a page's content ◀─▶ a payload
//!       composed, delta ─▶ derived        content that is made from other records
//!         record ─▶ pack                  a record; the header and the trailer of a pack
//!     page_map, disk_map ─▶ map_run       which record holds each page
//!     envelope ─▶ map_run, checkpoint, moves, working_set      the frame around other files
//!     disk_meta ─▶ meta ─▶ checkpoint     the description of a checkpoint
//!     tag
//! ```
//!
//! An arrow points to the module that uses the other one. The bytes are described in
//! `docs/formats/store.md`.
//!
//! Invariants: a decoder never panics, whatever the bytes, and allocates memory in proportion to
//! them. Every byte of a file is covered by a checksum. A file of another version is distinguished
//! from a damaged one.
//!
//! Not here: files. `keyframe-store` reads and writes them.

pub mod checkpoint;
pub mod codec;
pub mod composed;
pub mod delta;
pub mod derived;
pub mod dictionary;
pub mod disk_map;
pub mod disk_meta;
pub mod envelope;
pub mod error;
#[doc(hidden)]
pub mod fuzzing;
pub mod identity;
pub mod map_run;
pub mod meta;
pub mod moves;
pub mod pack;
pub mod page_hash;
pub mod page_map;
pub mod page_ref;
pub mod record;
pub mod tag;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod working_set;

pub use error::FormatError;
