//! All operations of a store on a medium with all faults, in an order that a seed decides.
//!
//! ```text
//!   seed ─▶ a run, with deltas and disks │ forget │ prune, also during a run │ copy │ check │ repair        one after the other,
//!             each with: nothing │ a crash at some operation │ a failing sync │ a full disk │ a short read     about eight
//!           after it: the same process │ the next one │ power loss ─▶ all facts are compared with the store
//!           at the end: a damaged byte of some file, repaired with crashes in between ─▶ all readable checkpoints stay readable
//! ```
//!
//! Invariant: a sealed checkpoint is never lost and never changes, except those that `forget`
//! removed and those that its durability leaves to power loss.
//!
//! `KEYFRAME_SEEDS` sets the number of seeds (200), `KEYFRAME_SEED` plays a single one, and
//! `KEYFRAME_SOAK_SECONDS` begins no seed after that time. Several seeds are played at the same
//! time. Each does the same every time, apart from the random key of the store.

mod fleet;
mod look;
mod world;

use super::*;
use keyframe_locks::IgnorePoison;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use world::World;

/// With so many all that is counted has come.
const SEEDS: u64 = 200;
/// Failing seeds that are looked for before the others are left out.
const FAILED_MAX: usize = 10;

/// How often things came, over all seeds.
type Tally = BTreeMap<&'static str, u64>;

/// What must have come for the seeds to have tested anything.
const MUST_COME: [&str; 18] = [
    "sealed",
    "seal failed",
    "forgotten",
    "forget cut off",
    "packs pruned",
    "pruned beside a run",
    "copied",
    "copy cut off",
    "deltas",
    "composed",
    "process death",
    "power loss",
    "taken by power loss",
    "full disk",
    "failed sync",
    "doubted",
    "short read",
    "repair cut off",
];

fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|e| panic!("{name}={text}: {e}")))
}

fn play(seed: u64) -> Tally {
    let mut world = World::new(seed);
    world.live();
    std::mem::take(&mut world.tally)
}

/// Plays seeds with `play` until all are played, or time is over. Returns the failed ones with their
/// output. `variable` plays a single one.
fn play_all(
    seeds: u64,
    deadline: Option<Instant>,
    variable: &str,
    play: &(dyn Fn(u64) -> Tally + Sync),
) -> (u64, BTreeSet<u64>, Tally) {
    let (next, ended) = (AtomicU64::new(0), AtomicBool::new(false));
    let (failed, tally) = (Mutex::new(BTreeSet::new()), Mutex::new(Tally::new()));
    let work = || {
        while !ended.load(Ordering::Relaxed) && deadline.is_none_or(|at| Instant::now() < at) {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds {
                return;
            }
            if let Ok(came) = catch_unwind(AssertUnwindSafe(|| play(seed))) {
                let mut tally = tally.lock().ignore_poison();
                for (what, times) in came {
                    *tally.entry(what).or_default() += times;
                }
            } else {
                eprintln!(
                    "seed {seed} failed: {variable}={seed} cargo test -p keyframe-store simulation"
                );
                let mut failed = failed.lock().ignore_poison();
                failed.insert(seed);
                ended.fetch_or(failed.len() >= FAILED_MAX, Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from).min(16) {
            scope.spawn(work);
        }
    });
    let unwrap = |failed: Mutex<_>| failed.into_inner().ignore_poison();
    (next.into_inner().min(seeds), unwrap(failed), tally.into_inner().ignore_poison())
}

/// Plays the seed that the environment variable `variable` names, or many. Asserts that none fails,
/// and that each of `must_come` has come.
fn play_seeds(variable: &str, must_come: &[&str], play: &(dyn Fn(u64) -> Tally + Sync)) {
    if let Some(seed) = from_environment(variable) {
        println!("seed {seed}: {:#?}", play(seed));
        return;
    }
    let seeds = from_environment("KEYFRAME_SEEDS").unwrap_or(SEEDS);
    let time = from_environment("KEYFRAME_SOAK_SECONDS").map(Duration::from_secs);
    let deadline = time.map(|time| Instant::now() + time);
    let (played, failed, tally) = play_all(seeds, deadline, variable, play);
    println!("{played} of {seeds} seeds: {tally:#?}");
    assert!(failed.is_empty(), "these seeds failed ({variable}=N plays one alone): {failed:?}");
    assert_eq!(played, seeds, "the time was over before all seeds were played");
    let missing: Vec<_> = must_come.iter().filter(|what| !tally.contains_key(**what)).collect();
    assert!(seeds < SEEDS || missing.is_empty(), "never came, so nothing was tested: {missing:?}");
}

/// Limits of a writer, by the numbers that `below` draws.
fn random_tuning(below: &mut dyn FnMut(u64) -> u64) -> Tuning {
    let durability = match below(6) {
        0..2 => Durability::Never,
        2 => Durability::Every(Duration::ZERO),
        _ => Durability::Checkpoint,
    };
    Tuning {
        pack_bytes_max: 5_000 + below(40_000),
        buffer_bytes: 2_000 + below(12_000) as usize,
        chain_base: 2 + below(4),
        base_bytes: [0, 5 * 5000, 1 << 20][below(3) as usize],
        durability,
        ..TINY
    }
}

#[test]
fn no_sealed_checkpoint_is_lost_or_changed_by_any_sequence_of_faults() {
    play_seeds("KEYFRAME_SEED", &MUST_COME, &play);
}
