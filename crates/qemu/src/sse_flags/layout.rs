//! Where a QEMU binary keeps the registers and the SSE flags of a virtual CPU in its memory.
//!
//! ```text
//!   offset 0: 16 general registers, (16 more) rip │ ... │ flags (u16) ... MXCSR (u32) │ ... │ vendor ... model
//! ```
//!
//! The distances depend on QEMU's version and compiler. [`CpuLayout::of_trials`] derives them from
//! what the trial has seen. A file in the cache remembers them for each binary.

use super::firmware::CERTAIN;
use super::search::CpuNames;
use crate::binary_cache;
use memchr::memmem;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The directory of the files, in the cache.
const DIRECTORY: &str = "cpu-layouts";
/// The format of the files.
const VERSION: u32 = 1;
/// Upper bound of the distances in bytes.
pub(super) const DISTANCE_MAX: usize = 64 << 10;
/// The words after the first register between which the instruction pointer lies: after the 16
/// general registers, or after the 32 of newer processors.
const RIP_WORDS: std::ops::RangeInclusive<usize> = 16..=48;
/// The exception flags in MXCSR.
const MXCSR_FLAGS: u32 = 0x3f;

/// Distances in bytes from a virtual CPU's first register, and the meaning of its flags.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CpuLayout {
    version: u32,
    /// Distance of the instruction pointer.
    pub rip: usize,
    /// Distance of MXCSR.
    mxcsr: usize,
    /// Distance of the flags, 16 bits.
    flags: usize,
    /// The flags of MXCSR for which each bit of the flags stands.
    meaning: [u8; 16],
    /// The distance of the vendor's name, in bytes from the first register.
    pub vendor: usize,
    /// The distance of the model's name, in bytes from the first register.
    pub model: usize,
}

/// A virtual CPU after a known division.
pub(super) struct Trial {
    /// The memory from its first register on.
    pub memory: Vec<u8>,
    /// MXCSR with all flags, as QEMU's monitor shows it, which then is also in memory.
    pub mxcsr: u32,
    /// The instruction pointer.
    pub rip: u64,
}

impl CpuLayout {
    /// Derives the layout from `trials`, one for each division of the firmware, and the names of
    /// their CPU model. Returns `None` if not exactly one place agrees with all trials.
    pub fn of_trials(trials: &[Trial], names: &CpuNames) -> Option<Self> {
        let len = trials.iter().map(|trial| trial.memory.len()).min()?.min(DISTANCE_MAX);
        let first = trials.first()?.memory.get(..len)?;
        let mxcsr = only((0..len).step_by(4).filter(|at| {
            trials.iter().all(|trial| u32_at(&trial.memory, *at) == Some(trial.mxcsr))
        }))?;
        let found = (0..len).step_by(2).filter(|at| !(mxcsr..mxcsr + 4).contains(at));
        let (flags, meaning) = only(found.filter_map(|at| Some((at, meaning_of(trials, at)?))))?;
        let rip = RIP_WORDS
            .map(|word| word * 8)
            .find(|at| trials.iter().all(|trial| u64_at(&trial.memory, *at) == Some(trial.rip)))?;
        let vendor = only(memmem::find_iter(first, &names.vendor))?;
        let model = only(memmem::find_iter(first, &names.model))?;
        Some(Self { version: VERSION, rip, mxcsr, flags, meaning, vendor, model })
    }

    /// Returns the layout of the binary with the BLAKE3 hash `binary`, if the cache has it.
    pub fn load(cache: &Path, binary: &str) -> Option<Self> {
        let layout: Self = binary_cache::load(cache, DIRECTORY, binary)?;
        let distances = [layout.rip, layout.mxcsr, layout.flags, layout.vendor, layout.model];
        let is_known = layout.version == VERSION && distances.iter().all(|d| *d < DISTANCE_MAX);
        is_known.then_some(layout)
    }

    /// Writes the layout to the cache. If the cache cannot be written, the next start needs another
    /// trial.
    pub fn store(&self, cache: &Path, binary: &str) {
        binary_cache::store(cache, DIRECTORY, binary, self);
    }

    /// Returns the number of bytes from the first register to the last that [`CpuLayout::flags`]
    /// needs.
    pub fn len_bytes(&self) -> usize {
        (self.rip + 8).max(self.mxcsr + 4).max(self.flags + 2)
    }

    /// Returns MXCSR from `memory`, that of a CPU from its first register on. Flags may be missing
    /// in it. Returns `None` if `memory` is too short.
    pub fn mxcsr(&self, memory: &[u8]) -> Option<u32> {
        u32_at(memory, self.mxcsr)
    }

    /// Returns the flags that are beside MXCSR in `memory`, that of a CPU from its first register
    /// on, as bits of MXCSR. Returns `None` if `memory` is too short.
    pub fn flags(&self, memory: &[u8]) -> Option<u32> {
        Some(translate(u16_at(memory, self.flags)?, &self.meaning))
    }
}

/// The meaning of each bit of the flags at `at`; `None` if `at` cannot be their place.
fn meaning_of(trials: &[Trial], at: usize) -> Option<[u8; 16]> {
    let mut meaning = [0; 16];
    let mut known = 0u16;
    for (number, trial) in trials.iter().enumerate() {
        let raised = u16_at(&trial.memory, at)?;
        let new = raised & !known;
        // The first division raises nothing; the next ones raise a flag of their own.
        if (number == 0 && raised != 0) || ((1..CERTAIN).contains(&number) && new == 0) {
            return None;
        }
        let rest = (trial.mxcsr & MXCSR_FLAGS) & !translate(raised & known, &meaning);
        for bit in (0..16).filter(|bit| new >> bit & 1 != 0) {
            meaning[bit] = rest as u8;
        }
        known |= new;
    }
    let agrees = |trial: &Trial| {
        u16_at(&trial.memory, at).map(|raised| translate(raised, &meaning))
            == Some(trial.mxcsr & MXCSR_FLAGS)
    };
    trials.iter().all(agrees).then_some(meaning)
}

fn translate(raised: u16, meaning: &[u8; 16]) -> u32 {
    let set = meaning.iter().enumerate().filter(|(bit, _)| raised >> bit & 1 != 0);
    set.fold(0, |all, (_, flags)| all | u32::from(*flags))
}

/// The only element; `None` if there is none, or more than one.
fn only<T>(mut found: impl Iterator<Item = T>) -> Option<T> {
    let first = found.next();
    if found.next().is_some() { None } else { first }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|field| u16::from_le_bytes(*field))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|field| u32::from_le_bytes(*field))
}

/// The `u64` at `at`; `None` after the end.
pub(super) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|field| u64::from_le_bytes(*field))
}
