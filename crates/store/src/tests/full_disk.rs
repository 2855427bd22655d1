//! A full disk, at any byte: sealed checkpoints stay, and once there is space the run goes on. A
//! prune frees space on it.

use super::crash::{Known, assert_known, play, script};
use super::*;
use crate::{PruneOptions, PruneStep, Writer};
use keyframe_store_backend::Backend;
use keyframe_store_backend::testing::SeededRandom;
use std::collections::BTreeSet;

#[test]
fn a_disk_full_at_any_byte_harms_nothing_and_the_run_goes_on_with_space() {
    // A step that is no divisor of any record length, so that all kinds of cuts occur.
    fill_at_every(211);
}

/// Has the disk full at every so many bytes.
pub fn fill_at_every(step: usize) {
    let sessions = script(11);
    let medium = FaultyBackend::default();
    init_on(&medium).unwrap();
    let least = medium.used_bytes();
    play(&medium, &sessions, &mut Known::default(), &mut |_, _| false).unwrap();
    let most = medium.used_bytes() + 5000;
    let mut never_full = 0;
    for capacity in (least..most).step_by(step) {
        let medium = FaultyBackend::default();
        init_on(&medium).unwrap();
        // The id is random, its length is not: every attempt meets the limit at the same place.
        medium.limit(Some(capacity));
        let (mut known, mut times) = (Known::default(), 0);
        play(&medium, &sessions, &mut known, &mut |error, so_far| {
            times += 1;
            assert!(error.is_disk_full(), "{capacity} bytes: {error}");
            let sealed = Known { sealed: so_far.sealed.clone(), in_progress: None };
            assert_known(&medium, &sealed, &format!("full at {capacity} bytes"));
            // The first retry meets the full disk again; then there is space.
            if times == 2 {
                medium.limit(None);
            }
            times <= 2
        })
        .unwrap_or_else(|e| panic!("{capacity} bytes: {e}"));
        assert_eq!(known.sealed.len(), 10);
        let report = check(&on(&medium).unwrap());
        assert!(
            !report.notes.iter().any(|n| n.contains("uses this map")),
            "{capacity} bytes: {report:#?}"
        );
        never_full += usize::from(times == 0);
        assert_known(&medium, &known, &format!("was full at {capacity} bytes"));
        assert_known(
            &medium.after_power_loss(capacity as u64),
            &known,
            &format!("was full at {capacity} bytes, then lost power"),
        );
    }
    assert!((1..60).contains(&never_full), "{never_full} of the capacities were never reached");
}

#[test]
fn a_tag_that_does_not_fit_leaves_the_checkpoint_sealed() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut writer = store.lock_writer("test").unwrap();
    let mut run = writer.begin_run("vm", &layout(2)).unwrap();
    let before = medium.used_bytes();
    seal(&mut run, 2).unwrap();
    let per_seal = medium.used_bytes() - before;
    // Enough for what the next seal writes, not for its tag. The second one has one more map in its
    // list.
    medium.limit(Some(medium.used_bytes() + per_seal + 10));
    let tagged = SealRequest { tag: Some("a-tag-of-some-length"), ..request(&layout(2)) };
    let error = run.seal(tagged.clone()).unwrap_err();
    assert!(
        error.is_disk_full() && matches!(error, Error::TagNotSet { id: CheckpointId(2), .. }),
        "{error}"
    );
    medium.limit(None);
    assert_eq!((store.checkpoints().unwrap().sealed.len(), run.epoch().0), (2, 2));
    assert_eq!(run.seal(tagged).unwrap().meta.map_chain, [3, 2, 1]);
    assert_clean(&store);
}

const PAGES: u64 = 40;
/// Twice the packs of [`TINY`].
const RESERVE_BYTES: u64 = 40_000;

/// A run that writes more than its medium holds.
struct Greedy {
    _writer: Writer,
    run: Run,
    /// The pages as they were last sealed, and as they are.
    sealed: Image,
    now: Image,
    known: BTreeMap<CheckpointId, Image>,
    chance: SeededRandom,
}

impl Greedy {
    fn on(medium: &FaultyBackend, seed: u64) -> Self {
        let mut writer = on(medium).unwrap().lock_writer_tuned("test", TINY).unwrap();
        let run = writer.begin_run("vm", &layout(PAGES)).unwrap();
        let (sealed, known) = (vec![0; PAGES as usize], BTreeMap::new());
        Self {
            _writer: writer,
            run,
            now: sealed.clone(),
            sealed,
            known,
            chance: SeededRandom(seed),
        }
    }

    /// Writes about two thirds of the pages, half of them with noise, and takes a checkpoint. False
    /// if there was no space for it: its pages go into the next one.
    fn take(&mut self) -> bool {
        for page in &mut self.now {
            if !self.chance.next_u64().is_multiple_of(3) {
                *page = 101 + self.chance.next_u64() % 1_000_000;
            }
        }
        let put = put_changes(&mut self.run, &self.sealed, &self.now);
        match put.and_then(|()| seal(&mut self.run, PAGES)) {
            Ok(sealed) => {
                self.sealed.clone_from(&self.now);
                self.known.insert(sealed.id, self.now.clone());
                true
            }
            Err(error) => {
                assert!(error.is_disk_full(), "{error}");
                self.run.abandon();
                false
            }
        }
    }
}

#[test]
fn a_run_leaves_space_in_which_a_prune_beside_it_copies() {
    let mut rewritten = 0;
    for seed in 0..30 {
        let medium = FaultyBackend::default();
        let store = init_on(&medium).unwrap();
        medium.limit_and_tell(700_000 + 9_001 * seed as usize);
        let free = || medium.space().unwrap().free_bytes;
        let mut guest = Greedy::on(&medium, seed);
        while guest.take() {}
        assert!(guest.known.len() >= 3, "seed {seed}");
        // Maps and the indexes of packs are not held back.
        assert!(free() >= RESERVE_BYTES * 3 / 4, "seed {seed}: {} bytes are free", free());
        let newest = *guest.known.keys().next_back().unwrap();
        let gone: BTreeSet<_> = guest.known.keys().copied().filter(|id| *id != newest).collect();
        store.forget(&gone).unwrap();
        guest.known.retain(|id, _| !gone.contains(id));
        let used = medium.used_bytes();
        let options = PruneOptions { max_unused: 0.0, ..PruneOptions::default() };
        let report = store.prune_tuned(&options, TINY, &mut |progress| match progress.step {
            PruneStep::Waiting => guest.run.follow_prune().unwrap(),
            // It fills the medium again and again, and leaves the reserve.
            _ => drop(guest.take()),
        });
        let report = report.unwrap_or_else(|e| panic!("seed {seed}: {e}; {} bytes free", free()));
        assert_eq!((report.postponed_packs, &report.damaged), (0, &Vec::new()), "seed {seed}");
        rewritten += report.rewritten_packs;
        assert!(report.removed_packs + report.rewritten_packs > 0, "seed {seed}: {used}");
        for (id, image) in &guest.known {
            assert_image(&store, *id, image);
        }
        // With space the run goes on, with all that it owes.
        medium.limit_and_tell(10_000_000);
        assert!(guest.take());
        for (id, image) in &guest.known {
            assert_image(&store, *id, image);
            assert_image(&on(&medium.after_power_loss(seed)).unwrap(), *id, image);
        }
        guest.run.finish().unwrap();
        assert_clean(&store);
    }
    assert!(rewritten > 30, "{rewritten} packs were copied");
}

#[test]
fn a_checkpoint_that_found_no_space_gives_back_what_it_took() {
    let medium = FaultyBackend::default();
    init_on(&medium).unwrap();
    medium.limit_and_tell(900_000);
    let mut guest = Greedy::on(&medium, 5);
    let mut before = medium.used_bytes();
    while guest.take() {
        before = medium.used_bytes();
    }
    for _ in 0..4 {
        // It takes more than one pack. The part of the pack in which the last sealed checkpoint
        // ends may have been closed.
        let more = medium.used_bytes().saturating_sub(before);
        assert!(more < 30_000, "{more} bytes are lost");
        assert!(!guest.take());
    }
    // A guest that writes less finds space.
    guest.now.clone_from(&guest.sealed);
    guest.now[0] = 5;
    let put = put_changes(&mut guest.run, &guest.sealed, &guest.now);
    put.and_then(|()| seal(&mut guest.run, PAGES)).unwrap();
    guest.run.finish().unwrap();
    assert_clean(&on(&medium).unwrap());
}
