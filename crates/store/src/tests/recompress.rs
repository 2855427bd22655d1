//! Recompression: checkpoints stay as they were before, during and after it, and if it is
//! interrupted. The store becomes smaller.

use super::forget::{add_run, store_of};
use super::*;
use crate::{PruneOptions, PruneReport};
use keyframe_store_backend::layout;
use keyframe_store_format::pack::DICTIONARY_CHECK_BYTES;
use keyframe_store_format::page_ref::PACK_HEADER_BYTES;
use keyframe_store_format::testing::lines;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const PAGES: u64 = 140;

fn recompress(store: &Store) -> Result<PruneReport> {
    recompress_tuned(store, TINY)
}

pub fn recompress_tuned(store: &Store, tuning: Tuning) -> Result<PruneReport> {
    let options = PruneOptions { recompress_bytes: u64::MAX, ..PruneOptions::default() };
    store.prune_tuned(&options, tuning, &mut |_| {})
}

fn assert_kept(medium: &FaultyBackend, known: &BTreeMap<CheckpointId, Image>, context: &str) {
    let store = on(medium).unwrap();
    assert_intact(&store, known, context);
}

/// What page `page` holds after so many seconds: mostly what pages have in common; one in four
/// changes a little.
fn page_at(page: u64, second: u64) -> Page {
    let mut content = lines(page);
    if page.is_multiple_of(4) {
        content[8..16].copy_from_slice(&(second * 1000 + page).to_le_bytes());
    }
    content
}

/// Puts what changes in a second and seals it.
fn tick(run: &mut Run, second: u64, first: bool) -> CheckpointId {
    for page in (0..PAGES).filter(|page| first || page.is_multiple_of(4)) {
        run.put_page(PageIndex(page), &page_at(page, second)).unwrap();
    }
    seal(run, PAGES).unwrap().id
}

pub fn ticks(store: &Store, seconds: std::ops::Range<u64>, known: &mut Vec<(CheckpointId, u64)>) {
    ticks_tuned(store, seconds, known, deltas::ROOMY);
}

fn ticks_tuned(
    store: &Store,
    seconds: std::ops::Range<u64>,
    known: &mut Vec<(CheckpointId, u64)>,
    tuning: Tuning,
) {
    let mut writer = store.lock_writer_tuned("test", tuning).unwrap();
    let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
    for second in seconds.clone() {
        known.push((tick(&mut run, second, second == seconds.start), second));
    }
    run.finish().unwrap();
}

pub fn assert_ticked(store: &Store, known: &[(CheckpointId, u64)]) {
    for (id, second) in known {
        let image = read_image(&store.load(*id).unwrap()).unwrap();
        let expected: BTreeMap<u64, Page> =
            (0..PAGES).map(|page| (page, page_at(page, *second))).collect();
        assert!(image == expected, "second {second}");
    }
    assert_clean(store);
}

pub fn dense_packs(store: &Store) -> usize {
    let numbers = store.inner().pack_numbers().unwrap();
    numbers.iter().filter(|number| store.inner().open_pack(**number).unwrap().is_dense()).count()
}

#[test]
pub fn a_recompressed_store_is_smaller_and_can_be_written() {
    let medium = FaultyBackend::default();
    init_on(&medium).unwrap();
    let mut known = Vec::new();
    ticks(&on(&medium).unwrap(), 0..5, &mut known);
    let before = medium.used_bytes();
    let report = recompress_tuned(&on(&medium).unwrap(), deltas::ROOMY).unwrap();
    assert!(report.recompressed_packs > 0 && report.postponed_packs == 0, "{report:?}");
    assert!(medium.used_bytes() * 3 < before * 2, "{} of {before}", medium.used_bytes());
    assert_ticked(&on(&medium).unwrap(), &known);
    let store = on(&medium).unwrap();
    assert!(dense_packs(&store) > 0 && deltas::kinds(&store)[&'D'] > 50);
    // Once.
    let files = medium.files();
    let again = recompress_tuned(&store, deltas::ROOMY).unwrap();
    assert!(medium.files() == files && again.recompressed_packs == 0, "{again:?}");
    // What is there is known.
    let before = medium.used_bytes();
    ticks(&on(&medium).unwrap(), 5..8, &mut known);
    assert!(
        medium.used_bytes() < before + 35 * 4200 + 2 * 35 * 100 + 4000,
        "{}",
        medium.used_bytes()
    );
    assert_ticked(&on(&medium).unwrap(), &known);
    // A plain prune leaves dense what is.
    store.forget(&known[..7].iter().map(|(id, _)| *id).collect()).unwrap();
    let options = PruneOptions { max_unused: 0.0, ..PruneOptions::default() };
    store.prune_tuned(&options, deltas::ROOMY, &mut |_| {}).unwrap();
    assert_ticked(&on(&medium).unwrap(), &known[7..]);
    assert!(dense_packs(&store) > 0);
    recompress_tuned(&store, deltas::ROOMY).unwrap();
    assert_ticked(&on(&medium).unwrap(), &known[7..]);
}

#[test]
pub fn a_run_continues_with_deltas_on_recompressed_records() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut known = Vec::new();
    ticks(&store, 0..1, &mut known);
    let mut writer = store.lock_writer_tuned("test", deltas::ROOMY).unwrap();
    let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
    known.push((tick(&mut run, 0, true), 0));
    let mut second = 0;
    let options = PruneOptions { recompress_bytes: u64::MAX, ..PruneOptions::default() };
    let other = on(&medium).unwrap();
    let report = other.prune_tuned(&options, deltas::ROOMY, &mut |progress| {
        if progress.step == crate::PruneStep::Waiting {
            second += 1;
            known.push((tick(&mut run, second, false), second));
        }
    });
    assert_eq!(report.unwrap().recompressed_packs, 1);
    assert!(second > 0 && dense_packs(&other) == 1);
    let before = medium.used_bytes();
    known.push((tick(&mut run, second + 1, false), second + 1));
    assert!(medium.used_bytes() < before + 35 * 100 + 2000, "{} on {before}", medium.used_bytes());
    run.finish().unwrap();
    drop(writer);
    assert_ticked(&other, &known);
}

#[test]
pub fn a_crash_at_any_operation_costs_nothing_but_work() {
    let base = FaultyBackend::default();
    let mut known = store_of(&base, 5);
    add_run(&base, 2, &mut known);
    let whole = base.copy();
    recompress(&on(&whole).unwrap()).unwrap();
    for operation in 1.. {
        let medium = base.copy();
        medium.crash_at(operation);
        let done = recompress(&on(&medium).unwrap()).is_ok();
        assert_eq!(done, !medium.has_crashed());
        if done {
            assert!(operation > 40, "only {operation} operations");
            break;
        }
        for after in
            [medium.copy(), medium.after_power_loss(operation), medium.after_power_loss(!operation)]
        {
            let context = format!("crash at operation {operation}");
            assert_kept(&after, &known, &context);
            recompress(&on(&after).unwrap()).unwrap();
            let mut more = known.clone();
            add_run(&after, 1, &mut more);
            assert_kept(&after, &more, &format!("{context}, then recompressed"));
        }
    }
}

#[test]
pub fn a_failed_sync_and_a_full_disk_cost_nothing_but_work() {
    let base = FaultyBackend::default();
    let known = store_of(&base, 5);
    for sync in 1.. {
        let medium = base.copy();
        medium.fail_sync_at(sync);
        let result = recompress(&on(&medium).unwrap());
        assert_kept(&medium.after_power_loss(sync), &known, &format!("sync {sync}: {result:?}"));
        if medium.syncs() < sync {
            assert!(result.is_ok() && sync > 10, "only {sync} syncs: {result:?}");
            break;
        }
    }
    for room in (0..40_000).step_by(997) {
        let medium = base.copy();
        medium.limit(Some(base.used_bytes() + room));
        let result = recompress(&on(&medium).unwrap());
        assert!(result.as_ref().map_or_else(Error::is_disk_full, |_| true), "{result:?}");
        assert_kept(&medium, &known, &format!("room for {room}: {result:?}"));
    }
}

#[test]
pub fn readers_keep_loaded_checkpoints_and_can_load_others_during_a_prune() {
    let medium = FaultyBackend::default();
    let known = store_of(&medium, 8);
    let store = on(&medium).unwrap();
    let loaded: Vec<_> = known.keys().map(|id| on(&medium).unwrap().load(*id).unwrap()).collect();
    let mut during = Vec::new();
    let mut look = |_| during.push(on(&medium).unwrap().load(CheckpointId(5)).unwrap());
    let options = PruneOptions { recompress_bytes: u64::MAX, ..PruneOptions::default() };
    store.prune_tuned(&options, TINY, &mut look).unwrap();
    assert!(during.len() > 3);
    for loaded in loaded.iter().chain(&during) {
        let image = known[&loaded.id].iter();
        let expected = (0u64..).zip(image).filter(|(_, n)| **n != 0).map(|(p, n)| (p, content(*n)));
        assert!(read_image(loaded).unwrap() == expected.collect(), "checkpoint {}", loaded.id);
    }
}

#[test]
fn no_more_than_was_asked_for_is_recompressed_at_a_time() {
    let medium = FaultyBackend::default();
    let known = store_of(&medium, 12);
    let store = on(&medium).unwrap();
    let packs = store.inner().pack_numbers().unwrap().len() as u64;
    let one = PruneOptions { recompress_bytes: 1, max_unused: 1.0, ..PruneOptions::default() };
    let mut turns = 0;
    while store.prune_tuned(&one, TINY, &mut |_| {}).unwrap().recompressed_packs == 1 {
        turns += 1;
        assert_kept(&medium, &known, "one more");
    }
    assert!(turns > 2 && turns <= packs, "{turns} of {packs}");
}

/// Every part of a pack's head, and what lies behind it.
#[test]
fn damage_of_a_head_is_found_attributed_and_repaired_if_possible() {
    let medium = FaultyBackend::default();
    init_on(&medium).unwrap();
    let mut known = Vec::new();
    ticks(&on(&medium).unwrap(), 0..2, &mut known);
    recompress_tuned(&on(&medium).unwrap(), deltas::ROOMY).unwrap();
    let numbers = on(&medium).unwrap().inner().pack_numbers().unwrap();
    let name = layout::pack(numbers[0]);
    let bytes = medium.files()[&name].clone();
    let first = on(&medium).unwrap().inner().open_pack(numbers[0]).unwrap().first as usize;
    assert!(first > PACK_HEADER_BYTES + DICTIONARY_CHECK_BYTES + 500, "no dictionary: {first}");
    let flipped = |at: usize| {
        let (medium, mut bytes) = (medium.copy(), bytes.clone());
        bytes[at] ^= 4;
        medium.overwrite(&name, Some(bytes));
        medium
    };
    for at in [3, 42, 63] {
        let medium = flipped(at);
        assert!(!check(&on(&medium).unwrap()).is_clean(), "byte {at}");
        let report = on(&medium).unwrap().repair(&mut |_| {}).unwrap();
        assert!(
            report.lost.is_empty() && report.rebuilt == [name.clone()],
            "byte {at}: {report:#?}"
        );
        assert_ticked(&on(&medium).unwrap(), &known);
    }
    for at in (PACK_HEADER_BYTES..first).step_by(487) {
        let medium = flipped(at);
        let store = on(&medium).unwrap();
        for read_data in [false, true] {
            let report = store.check(&CheckOptions { read_data }, &mut |_| {}).unwrap();
            assert_eq!(report.hurt_checkpoints().len(), known.len(), "byte {at}: {report:#?}");
        }
        assert!(matches!(read_image(&store.load(known[0].0).unwrap()), Err(Error::Damaged { .. })));
        let report = store.repair(&mut |_| {}).unwrap();
        assert_eq!(report.lost.len(), known.len(), "byte {at}: {report:#?}");
        assert_clean(&on(&medium).unwrap());
    }
}

/// Packs of a dozen pages, so that a recompression is many rounds.
const SMALL: Tuning = Tuning { pack_bytes_max: 24_000, ..TINY };
const KILLED_STORE: &str = "KEYFRAME_TEST_RECOMPRESS";

/// The process that another test kills: recompresses the store that the variable names.
#[test]
#[ignore = "a role of another test"]
fn the_process_that_is_killed() {
    let Some(path) = std::env::var_os(KILLED_STORE) else { return };
    recompress_tuned(&Store::open(Path::new(&path)).unwrap(), SMALL).unwrap();
}

/// How far a recompression is, as its store shows it.
#[derive(Clone, Copy, Debug)]
enum Seen {
    NewPack(u64),
    Moves,
    /// One of the old packs is gone.
    Removed,
}

fn is_seen(seen: Seen, path: &Path, old: &[u32]) -> bool {
    let has = |number: u32| path.join(layout::pack(number)).exists();
    match seen {
        Seen::NewPack(count) => (1..=count).all(|n| has(old[old.len() - 1] + n as u32)),
        Seen::Moves => path.join("moves").exists(),
        Seen::Removed => old.iter().any(|number| !has(*number)),
    }
}

#[test]
fn a_killed_recompression_costs_nothing_and_the_next_one_continues() {
    let dir = tempfile::tempdir().unwrap();
    let (path, mut known, mut killed) = (dir.path().join("store"), Vec::new(), 0);
    let made = Store::init(&path).unwrap();
    let points = [
        Seen::NewPack(1),
        Seen::Moves,
        Seen::Removed,
        Seen::NewPack(3),
        Seen::Removed,
        Seen::NewPack(2),
    ];
    for (turn, seen) in (0..).zip(points) {
        // Something new to recompress.
        ticks_tuned(&made, 10 * turn..10 * turn + 10, &mut known, SMALL);
        let old = made.inner().pack_numbers().unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "tests::recompress::the_process_that_is_killed"])
            .env(KILLED_STORE, &path)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let limit = Instant::now() + Duration::from_secs(60);
        while !is_seen(seen, &path, &old) && child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < limit, "it neither ends nor comes to {seen:?}");
        }
        child.kill().unwrap();
        killed += usize::from(!child.wait().unwrap().success());
        assert_ticked(&Store::open(&path).unwrap(), &known);
    }
    assert!(killed > 3, "killed {killed} times only: the others came to their end before");
    let store = Store::open(&path).unwrap();
    recompress_tuned(&store, SMALL).unwrap();
    assert_ticked(&Store::open(&path).unwrap(), &known);
    let packs = store.inner().pack_numbers().unwrap();
    assert_eq!(dense_packs(&store), packs.len(), "some are left");
}
