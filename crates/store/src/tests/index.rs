//! Deduplication over an index that lies in files: by the next writer, and across a prune.

use super::*;
use crate::PruneOptions;
use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

const PAGES: u64 = 3000;
/// The least there is: a few hundred entries in memory.
const SMALL: Tuning = Tuning { index_bytes: 0, pack_bytes_max: 60_000, ..TINY };

fn image(from: u64) -> Image {
    // Even ones: small when compressed, each of its own.
    (0..PAGES).map(|page| 1000 + 2 * (from + page)).collect()
}

/// Before the first checkpoint.
fn blank() -> Image {
    vec![0; PAGES as usize]
}

fn sealed(run: &mut Run, old: &[u64], new: &[u64]) -> CheckpointId {
    put_changes(run, old, new).unwrap();
    seal(run, PAGES).unwrap().id
}

/// A run of one checkpoint.
fn add(store: &Store, image: &[u64]) -> CheckpointId {
    let mut writer = store.lock_writer_tuned("test", SMALL).unwrap();
    let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
    let id = sealed(&mut run, &blank(), image);
    run.finish().unwrap();
    id
}

fn pack_bytes(store: &Store) -> u64 {
    let files = fs::read_dir(store.path().join("packs")).unwrap();
    files.map(|file| file.unwrap().metadata().unwrap().len()).sum()
}

fn spills(store: &Store) -> usize {
    fs::read_dir(store.path().join("index")).map_or(0, Iterator::count)
}

fn prune(store: &Store) -> crate::PruneReport {
    let options = PruneOptions {
        max_unused: 0.0,
        dry_run: false,
        wait: Duration::from_mins(2),
        recompress_bytes: 0,
    };
    store.prune_tuned(&options, SMALL, &mut |_| {}).unwrap()
}

#[test]
fn pages_of_an_earlier_run_are_found_in_its_spills() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::init(&dir.path().join("s")).unwrap();
    let first = add(&store, &image(0));
    let before = pack_bytes(&store);
    assert!(spills(&store) > 0);
    let writer = store.lock_writer_tuned("test", SMALL).unwrap();
    let usage = writer.index_use().unwrap();
    // The last of them were too few to be worth a file.
    assert!(usage.entries < 200 && usage.entries + usage.spilled_entries == PAGES, "{usage:?}");
    drop(writer);
    let again = add(&store, &image(0));
    assert_eq!(pack_bytes(&store), before);
    // Half of them new ones: these alone are stored.
    let half = add(&store, &image(PAGES / 2));
    assert!(pack_bytes(&store) < before + before * 11 / 20, "{before} {}", pack_bytes(&store));
    // Without the files the packs are read.
    fs::remove_dir_all(store.path().join("index")).unwrap();
    let before = pack_bytes(&store);
    let last = add(&store, &image(PAGES / 4));
    assert_eq!(pack_bytes(&store), before);
    for (id, from) in [(first, 0), (again, 0), (half, PAGES / 2), (last, PAGES / 4)] {
        assert_image(&store, id, &image(from));
    }
    assert_clean(&store);
}

#[test]
fn records_that_a_prune_removed_are_not_found_in_a_spill() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::init(&dir.path().join("s")).unwrap();
    let first = add(&store, &image(0));
    let second = add(&store, &image(PAGES));
    store.forget(&BTreeSet::from([first])).unwrap();
    let report = prune(&store);
    assert!(report.removed_packs + report.rewritten_packs > 0 && spills(&store) > 0, "{report:?}");
    let before = pack_bytes(&store);
    let third = add(&store, &image(0));
    assert!(pack_bytes(&store) > before + before / 2);
    let fourth = add(&store, &image(PAGES));
    assert_image(&store, second, &image(PAGES));
    assert_image(&store, third, &image(0));
    assert_image(&store, fourth, &image(PAGES));
    assert_clean(&store);
}

#[test]
fn a_run_follows_a_prune_at_the_same_time_also_in_its_spills() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::init(&dir.path().join("s")).unwrap();
    let old = add(&store, &image(0));
    add(&store, &image(PAGES));
    let mut writer = store.lock_writer_tuned("test", SMALL).unwrap();
    let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
    let mut known = vec![(sealed(&mut run, &blank(), &image(PAGES)), PAGES)];
    assert!(run.index_use().unwrap().spilled_entries > 0);
    store.forget(&BTreeSet::from([old])).unwrap();
    let pruning = std::thread::spawn({
        let store = store.clone();
        move || prune(&store)
    });
    // What was removed comes again, page by page, while it is being removed, and after.
    let (mut at, mut before) = (PAGES, image(PAGES));
    let deadline = Instant::now() + Duration::from_mins(2);
    for round in 0.. {
        if pruning.is_finished() && round > 3 {
            break;
        }
        assert!(Instant::now() < deadline, "the prune does not end");
        at = if round % 2 == 0 { PAGES / 2 } else { PAGES };
        known.push((sealed(&mut run, &before, &image(at)), at));
        before = image(at);
        std::thread::sleep(Duration::from_millis(5));
    }
    let report = pruning.join().unwrap();
    assert!(
        report.removed_packs + report.rewritten_packs > 0 && report.postponed_packs == 0,
        "{report:?}"
    );
    known.push((sealed(&mut run, &before, &image(0)), 0));
    run.finish().unwrap();
    drop(writer);
    assert_ne!(at, 0);
    for (id, from) in known {
        assert_image(&store, id, &image(from));
    }
    assert_clean(&store);
}
