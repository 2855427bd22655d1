//! How a store adapts to the size of its medium, so that a prune can work on a full one.
//!
//! ```text
//!   medium  │ maps, packs of at most a 64th of the medium ... │ free │ reserve: two packs │
//!                                      a run writes up to here ┘      └ a prune copies into it
//! ```
//!
//! A prune removes a pack after it has copied what is needed of it. So a prune makes progress if
//! the free space holds one pack.

use crate::files::StoreFiles;
use crate::tuning::Tuning;
use crate::{Error, Result};
use keyframe_store_backend::Space;
use keyframe_units::human_bytes;
use std::io;

/// The fraction of the medium that a pack may take.
const PACK_PART: u64 = 64;
/// No medium is so small that its packs are smaller.
const PACK_BYTES_MIN: u64 = 1 << 20;
/// The fraction of the medium that is kept free at most.
const RESERVE_PART: u64 = 16;

/// Returns `tuning` with a size of packs that suits a medium of the size `space`; `None` for a
/// medium of unknown size, with which `tuning` stays as it is.
pub fn fit(tuning: Tuning, space: Option<Space>) -> Tuning {
    let Some(space) = space else { return tuning };
    let pack_bytes_max = (space.total_bytes / PACK_PART).max(PACK_BYTES_MIN);
    Tuning { pack_bytes_max: tuning.pack_bytes_max.min(pack_bytes_max), ..tuning }
}

/// Returns the number of bytes of the medium that a run leaves free, so that a prune has space to
/// copy; 0 if the size `space` of the medium is not known.
pub fn reserve_bytes(tuning: &Tuning, space: Option<Space>) -> u64 {
    let Some(space) = space else { return 0 };
    tuning.pack_bytes_max.saturating_mul(2).min(space.total_bytes / RESERVE_PART)
}

/// Checks that `reserve_bytes` bytes would still be free after `more_bytes` bytes were written.
/// Error: that of a full disk.
pub fn check_reserve(files: &StoreFiles, more_bytes: u64, reserve_bytes: u64) -> Result<()> {
    let Some(space) = files.space().filter(|_| reserve_bytes > 0) else { return Ok(()) };
    if space.free_bytes >= more_bytes.saturating_add(reserve_bytes) {
        return Ok(());
    }
    let problem = format!(
        "No space left: {} are free, and {} must stay free for a prune",
        human_bytes(space.free_bytes),
        human_bytes(reserve_bytes)
    );
    Err(Error::Io {
        object: files.describe(keyframe_store_backend::layout::PACKS),
        operation: "write into",
        source: io::Error::new(io::ErrorKind::StorageFull, problem),
    })
}

/// Returns the number of bytes that a prune may copy in one round.
pub fn round_bytes_max(files: &StoreFiles) -> u64 {
    // The other half is for the index of the copies and for maps.
    files.space().map_or(u64::MAX, |space| space.free_bytes / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(total_bytes: u64) -> Space {
        Space { total_bytes, free_bytes: 0 }
    }

    #[test]
    fn packs_and_the_reserve_suit_the_medium() {
        let of = |space| {
            let tuning = fit(Tuning::default(), space);
            (tuning.pack_bytes_max, reserve_bytes(&tuning, space))
        };
        assert_eq!(of(None), (256 << 20, 0));
        assert_eq!(of(Some(space(1 << 40))), (256 << 20, 512 << 20));
        assert_eq!(of(Some(space(1 << 30))), (16 << 20, 32 << 20));
        assert_eq!(of(Some(space(16 << 20))), (1 << 20, 1 << 20));
        let small = Tuning { pack_bytes_max: 4096, ..Tuning::default() };
        assert_eq!(fit(small, Some(space(1 << 30))).pack_bytes_max, 4096);
    }
}
