//! The deduplicating checkpoint store: sealed checkpoints of VMs on disk.
//!
//! ```text
//!   STORE/
//!     store.json                    identity, format version, the secret key of the page hashes
//!     lock, writers/00              held by the writers
//!     packs/00000001.pack           page contents, each once, compressed; append only
//!     maps/0000000012.map           the records of the pages that changed since an older checkpoint of the run
//!     checkpoints/0000000012.ckpt   description and device state; under this name, it seals the checkpoint
//!     tags/NAME                     names for checkpoints
//!     disks/NAME.1/DISK/            what a run has written to a disk (the disk crate's)
//!     worksets/0000000012.wset      the pages that a restored VM touched first: advice
//!     quarantine/                   damaged files that a repair took out of the store
//!     tmp/                          files being written
//!
//!   Store ──lock_writer──▶ Writer ──begin_run──▶ Run ──put_page*, seal──▶ Sealed        (any number in a directory)
//!     ├────load──────────▶ LoadedCheckpoint ──read_pages──▶ pages                        (any number of readers)
//!     └────forget, prune                                                                 (at the same time as these)
//! ```
//!
//! Layers, each of which uses the ones above it:
//!
//! ```text
//!   error, config, secret, files, local, medium      keys and files
//!   chain, bases, sectors                     structures in memory; the index is keyframe-deduplication-index
//!   pack_file, open_store                     open packs; the state that all handles share
//!   folders, metadata, moves, quarantine, lock_holder, writers   the other files of a store
//!   assemble, references, pack_walk, parallel, fill, hold, pack_shape        reading records
//!   store, tags, listing                      the handle of a store
//!   durability, pack_writer, session, run, writer            writing
//!   loaded, disks, worksets                   reading checkpoints
//!   forget, prune, check, copy, bundled, diff, stats, unlock operations on a whole store
//! ```
//!
//! Invariants: a sealed checkpoint is complete, verifiable and immutable; an unsealed one is
//! invisible. A crash at any instant loses at most the checkpoint in progress. A checksum covers
//! every byte on disk. A guest cannot construct two pages that the store takes for one.
//!
//! The bytes are described in `docs/formats/store.md` and encoded by `keyframe-store-format`. Not
//! here: when to take a checkpoint, and what a page's number means (see `keyframe-units`).

mod assemble;
mod bases;
mod bundled;
mod chain;
mod check;
mod config;
mod copy;
mod diff;
mod disks;
mod durability;
mod durability_kind;
mod error;
mod files;
mod fill;
mod folders;
mod forget;
#[doc(hidden)]
pub mod fuzzing;
mod hold;
mod listing;
mod loaded;
mod local;
mod lock_holder;
mod medium;
mod metadata;
mod moves;
mod open_store;
mod pack_file;
mod pack_shape;
mod pack_walk;
mod pack_writer;
mod parallel;
mod prune;
mod quarantine;
mod references;
mod retention;
mod run;
mod sealed;
mod secret;
mod secret_kind;
mod sectors;
mod session;
mod settle_for;
mod stats;
mod store;
mod tags;
#[cfg(test)]
mod tests;
mod tuning;
mod unlock;
mod worksets;
mod writer;
mod writers;

pub use check::{
    CheckOptions, CheckProgress, CheckReport, Damage, LostCheckpoint, QuarantinedFile, RepairReport,
};
pub use copy::{CopiedCheckpoint, CopyProgress, CopyReport, FailedCopy};
pub use diff::{Diff, RegionDiff};
pub use disks::{BlockContent, LoadedDisks};
pub use durability::TornCheckpoint;
pub use durability_kind::Durability;
pub use error::{Error, Result};
pub use keyframe_deduplication_index::IndexUse;
/// The backends.
pub use keyframe_store_backend as backend;
pub use keyframe_store_format::disk_meta::{
    BLANK, BaseFile, BaseMeta, DedupSectors, DiskCounts, DiskMeta, SectorBreakdown, SectorCounts,
    SectorTotal,
};
pub use keyframe_store_format::identity::FORMAT_VERSION;
pub use keyframe_store_format::meta::{
    Counts, MachineMeta, MemberMeta, Meta, Origin, PausePhases, ProcessingPhases, Recorded,
    SinceBoot, Timing,
};
pub use keyframe_units::CheckpointId;
pub use listing::{Listing, UnreadableCheckpoint};
pub use loaded::{LoadedCheckpoint, UnmappedCheckpoint};
pub use local::{state_folder, store_of as store_of_folder};
pub use prune::{PruneOptions, PruneProgress, PruneReport, PruneStep};
pub use retention::{KeepReason, Retention, RetentionCandidate, RetentionVerdict};
pub use run::{DiskState, PutOutcome, Run, SealRequest};
pub use sealed::Sealed;
pub use secret::Secret;
pub use secret_kind::SecretKind;
pub use settle_for::settle_for;
pub use stats::{CheckpointGrowth, Growth, HourGrowth, ImageSharing, Sharing, Stats};
pub use store::{Store, id_on};
pub use tags::check_tag;
pub use tuning::Tuning;
pub use writer::Writer;
pub use writers::RunsAtWork;
