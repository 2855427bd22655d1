//! Several writers of one store: what they share, and that none holds up another. All interleavings
//! with faults are in the simulation of a fleet.

use super::*;
use crate::{PruneOptions, PruneStep, Writer};
use keyframe_store_backend::testing::SeededRandom;
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::Duration;

const PAGES: u64 = 40;

/// A pack takes all that a test writes.
const ROOMY: Tuning = Tuning { pack_bytes_max: 1 << 30, ..TINY };

fn begin(medium: &FaultyBackend, tuning: Tuning) -> (Writer, Run) {
    let mut writer = on(&medium.process()).unwrap().lock_writer_tuned("test", tuning).unwrap();
    let run = writer.begin_run("vm", &layout(PAGES)).unwrap();
    (writer, run)
}

fn image(first: u64) -> Image {
    (0..PAGES).map(|page| first + 2 * page).collect()
}

fn seal_image(run: &mut Run, old: &[u64], new: &[u64]) -> Sealed {
    put_changes(run, old, new).unwrap();
    seal(run, PAGES).unwrap()
}

#[test]
fn a_writer_stores_nothing_again_that_others_have_sealed_in_their_open_packs() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let blank = vec![0; PAGES as usize];
    let (_first, mut a) = begin(&medium, ROOMY);
    let before = seal_image(&mut a, &blank, &image(101));
    let (_second, mut b) = begin(&medium, ROOMY);
    let same = seal_image(&mut b, &blank, &image(101));
    assert_eq!((same.meta.counts.stored_pages, same.meta.counts.dedup_pages), (0, PAGES));
    // What is sealed while both are at work is found too, what is only put is not.
    let later = seal_image(&mut a, &image(101), &image(301));
    put_changes(&mut a, &image(301), &image(501)).unwrap();
    let found = seal_image(&mut b, &image(101), &image(301));
    assert_eq!((found.meta.counts.stored_pages, found.meta.counts.dedup_pages), (0, PAGES));
    let own = seal_image(&mut b, &image(301), &image(501));
    assert_eq!(own.meta.counts.stored_pages, PAGES);
    assert_eq!([before.id, same.id, later.id, found.id, own.id].map(|id| id.0), [1, 2, 3, 4, 5]);
    for (id, first) in [(1, 101), (2, 101), (3, 301), (4, 301), (5, 501)] {
        assert_image(&store, CheckpointId(id), &image(first));
        assert_image(&on(&medium.after_power_loss(id)).unwrap(), CheckpointId(id), &image(first));
    }
    assert_clean(&store);
}

/// A writer that syncs nothing creates packs whose entries in their folder may not survive. Another
/// one refers to these packs, and to nothing else.
#[test]
fn a_durable_checkpoint_does_not_lose_a_pack_of_a_writer_that_does_not_sync() {
    let blank = vec![0; PAGES as usize];
    let never = Tuning { durability: Durability::Never, ..TINY };
    for seed in 0..40 {
        let medium = FaultyBackend::default();
        init_on(&medium).unwrap();
        let begins_first = seed % 2 == 0;
        let early = begins_first.then(|| begin(&medium, TINY));
        let (_relaxed, mut a) = begin(&medium, never);
        // Noise: several packs are closed.
        seal_image(&mut a, &blank, &image(101));
        let (_durable, mut b) = early.unwrap_or_else(|| begin(&medium, TINY));
        let mut part = image(101);
        // The last records are in the pack that is open.
        part.truncate(PAGES as usize / 2);
        part.resize(PAGES as usize, 0);
        let sealed = seal_image(&mut b, &blank, &part);
        assert_eq!(sealed.meta.counts.stored_pages, 0, "the second writer has a pack of its own");
        let after = medium.after_power_loss(seed);
        assert_image(&on(&after).unwrap(), sealed.id, &part);
        drop(on(&after).unwrap().lock_writer_tuned("test", TINY).unwrap());
        assert_image(&on(&after).unwrap(), sealed.id, &part);
    }
}

#[test]
fn a_writer_that_stands_still_postpones_a_prune_and_holds_up_no_other() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let blank = vec![0; PAGES as usize];
    let (_first, mut still) = begin(&medium, TINY);
    let (_second, mut works) = begin(&medium, TINY);
    let kept = seal_image(&mut still, &blank, &image(101));
    let gone = seal_image(&mut works, &blank, &image(301));
    let newest = seal_image(&mut works, &image(301), &image(501));
    store.forget(&BTreeSet::from([gone.id])).unwrap();
    let options =
        PruneOptions { max_unused: 0.0, wait: Duration::from_millis(5), ..PruneOptions::default() };
    let mut sealed = 0;
    let report = store.prune_tuned(&options, TINY, &mut |progress| {
        if progress.step == PruneStep::Waiting && sealed < 5 {
            seal(&mut works, PAGES).unwrap();
            sealed += 1;
        }
    });
    let report = report.unwrap();
    assert!(report.postponed_packs > 0 && sealed == 5, "{sealed} sealed; {report:#?}");
    assert_image(&store, newest.id, &image(501));
    // It comes back, late, and seals what it had not sealed.
    let late = seal_image(&mut still, &image(101), &image(301));
    let report = store.prune_tuned(&options, TINY, &mut |progress| {
        if progress.step == PruneStep::Waiting {
            still.follow_prune().unwrap();
            works.follow_prune().unwrap();
        }
    });
    let report = report.unwrap();
    assert!(report.postponed_packs == 0, "{report:#?}");
    for (id, first) in [(kept.id, 101), (newest.id, 501), (late.id, 301)] {
        assert_image(&store, id, &image(first));
    }
    assert_clean(&store);
}

#[test]
fn writers_prunes_and_copies_work_on_a_directory_at_the_same_time() {
    const SEALS: u64 = 25;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    Store::init(&path).unwrap();
    let (known, at_work) = (Mutex::new(BTreeMap::new()), Mutex::new(3));
    let write = |seed: u64| {
        let mut chance = SeededRandom(seed);
        let store = Store::open(&path).unwrap();
        let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
        let mut run = writer.begin_run(&format!("vm{seed}"), &layout(PAGES)).unwrap();
        let mut old = vec![0; PAGES as usize];
        for _ in 0..SEALS {
            let mut new = old.clone();
            for page in &mut new {
                if chance.next_u64().is_multiple_of(4) {
                    *page = 1 + chance.next_u64() % 60;
                }
            }
            let sealed = seal_image(&mut run, &old, &new);
            let known = known.lock().unwrap().insert(sealed.id, new.clone());
            assert!(known.is_none(), "{} was given twice", sealed.id);
            old = new;
        }
        run.finish().unwrap();
        *at_work.lock().unwrap() -= 1;
    };
    let is_on = || *at_work.lock().unwrap() > 0;
    std::thread::scope(|scope| {
        for seed in 1..=3 {
            scope.spawn(move || write(seed));
        }
        scope.spawn(|| {
            while is_on() {
                let store = Store::open(&path).unwrap();
                let all: Vec<CheckpointId> = known.lock().unwrap().keys().copied().collect();
                let gone: BTreeSet<CheckpointId> = all.into_iter().step_by(3).collect();
                match store.forget(&gone) {
                    Ok(()) => known.lock().unwrap().retain(|id, _| !gone.contains(id)),
                    // One of them is the newest of a run.
                    Err(Error::InUse { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
                let options = PruneOptions {
                    max_unused: 0.0,
                    wait: Duration::from_millis(100),
                    ..PruneOptions::default()
                };
                store.prune_tuned(&options, TINY, &mut |_| {}).unwrap();
            }
        });
    });
    let store = Store::open(&path).unwrap();
    assert_intact(&store, &known.into_inner().unwrap(), "after all");
    assert_eq!(std::fs::read_dir(path.join("tmp")).unwrap().count(), 0);
    // Two copies at once into a third store, of different checkpoints.
    let target = dir.path().join("t");
    Store::init(&target).unwrap();
    let ids = store.ids().unwrap();
    std::thread::scope(|scope| {
        for half in ids.chunks(ids.len().div_ceil(2)) {
            let (store, target) = (&store, &target);
            scope.spawn(move || {
                let to = Store::open(target).unwrap();
                store.copy_tuned(&to, &half.iter().copied().collect(), TINY, &mut |_| {}).unwrap();
            });
        }
    });
    let target = Store::open(&target).unwrap();
    assert_eq!(target.ids().unwrap().len(), ids.len());
    assert_clean(&target);
}
