//! The deduplicating checkpoint store: sealed checkpoints of VMs on disk, in format versions 1 to 8
//! (2 has disks, 3 composed blocks of them, 4 deltas, 5 is encrypted, 6 packs with a dictionary, 7
//! and 8 pages as their words).
//!
//! ```text
//!   STORE/
//!     store.json                    identity, format version, the secret key of the page hashes
//!     lock                          held by the one writer
//!     packs/00000001.pack           page contents, each once, compressed; append only
//!     maps/0000000012.map           which page is where: what changed since an older checkpoint of the run
//!     checkpoints/0000000012.ckpt   meta and device state; there under this name, the checkpoint is sealed
//!     tags/NAME                     names for checkpoints
//!     disks/NAME.1/DISK/             what a run has written to a disk (the disk crate's)
//!     worksets/0000000012.wset      which pages a restored VM touched first: advice
//!     tmp/                          files being written
//!
//!   Store ──lock_writer──▶ Writer ──begin_run──▶ Run ──put_page*, seal──▶ Sealed        (one writer)
//!     ├────load──────────▶ Loaded ──read_pages──▶ pages                                  (any number of readers)
//!     └────forget, prune                                                                 (beside all of them)
//! ```
//!
//! Invariants: a sealed checkpoint is complete, verifiable and immutable; an unsealed one is
//! invisible; a crash at any instant loses at most the checkpoint in progress. Every byte on disk
//! is covered by a checksum. A guest cannot construct two pages that the store takes for one.
//!
//! The bytes are described in `docs/formats/store.md`. Not here: when to take a checkpoint, what a
//! page's number means (see `keyframe-units`).

mod assemble;
mod bases;
mod chain;
mod check;
mod checkpoint;
mod codec;
mod composed;
mod config;
mod copy;
mod delta;
mod derived;
mod dictionary;
mod diff;
mod disk_map;
mod disks;
mod durability;
mod envelope;
mod error;
mod files;
mod fill;
mod forget;
#[doc(hidden)]
pub mod fuzzing;
mod hold;
mod identity;
mod index;
mod loaded;
mod local;
mod map_run;
mod meta;
mod pack_file;
mod pack_writer;
mod page_map;
mod parallel;
mod prune;
mod record;
mod retention;
mod run;
mod secret;
mod sectors;
mod stats;
mod store;
mod tags;
#[cfg(test)]
mod tests;
mod unlock;
mod worksets;
mod writer;

/// The backends, under the names that other crates use.
pub mod backend {
    pub use keyframe_store_backend::UnlockOutcome as Unlocked;
    pub use keyframe_store_backend::*;
    /// Stores behind a checkpoint server.
    pub mod served {
        pub use keyframe_store_backend::served::*;
        pub use keyframe_store_backend::served::{
            FetchStats as Fetched, TOKEN_VARIABLE as TOKEN, fetch_stats as fetched,
        };
    }
}

use keyframe_pages::words;

pub use check::{CheckOptions, CheckProgress, CheckReport, Damage, Lost, RepairReport, SetAside};
pub use copy::{Copied, CopyProgress, CopyReport, NotCopied};
pub use diff::{Diff, RegionDiff};
pub use disks::{
    BLANK, BaseFile, BaseMeta, BlockContent, Breakdown, DiskCounts, DiskMeta, Found, LoadedDisks,
    SectorCounts, Sectors,
};
pub use durability::{Durability, TornCheckpoint};
pub use error::{Error, Result};
pub use index::IndexUse;
pub use keyframe_units::CheckpointId;
pub use loaded::{Loaded, Unmapped};
pub use local::{state_folder, store_of as store_of_folder};
pub use meta::{
    Counts, MachineMeta, MemberMeta, Meta, Origin, PausePhases, Recorded, Sealed, Timing,
};
pub use prune::{PruneOptions, PruneProgress, PruneReport, PruneStep};
pub use retention::{Moment, Reason, Retention, Verdict};
pub use run::{DiskState, Put, Run, SealRequest};
pub use secret::{Secret, SecretKind};
pub use stats::{Added, Growth, Hour, ImageSharing, Sharing, Stats};
pub use store::{Listing, Store, id_on};
pub use tags::check_tag;
pub use writer::{Tuning, Writer};

pub use config::FORMAT_VERSION;
