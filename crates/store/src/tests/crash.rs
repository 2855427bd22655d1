//! Power loss and process death at every operation, and failing syncs.

use super::*;
use keyframe_store_backend::testing::SeededRandom;

const PAGES: u64 = 14;

/// What a test knows of a store: the checkpoints whose seal returned, and the image that a seal was
/// at work on.
#[derive(Default)]
pub struct Known {
    pub sealed: BTreeMap<CheckpointId, Image>,
    pub in_progress: Option<Image>,
}

/// Sessions of images to seal one after the other, from a seed: some pages change, some repeat,
/// some become zero.
pub fn script(seed: u64) -> Vec<Vec<Image>> {
    let mut chance = SeededRandom(seed);
    let mut image = vec![0; PAGES as usize];
    let mut epoch = |_| {
        for page in &mut image {
            if chance.next_u64().is_multiple_of(2) {
                *page = chance.next_u64() % 30;
            }
        }
        image.clone()
    };
    (0..2).map(|_| (0..5).map(&mut epoch).collect()).collect()
}

/// Opens the store and plays sessions. `mend` hears each error of a put or seal and says whether to
/// abandon and try again; an error at the end of a session is its to judge too.
pub fn play(
    medium: &FaultyBackend,
    sessions: &[Vec<Image>],
    known: &mut Known,
    mend: &mut dyn FnMut(&Error, &Known) -> bool,
) -> Result<()> {
    play_on(&on(medium)?, sessions, known, mend)
}

/// The same on a store that is open.
pub fn play_on(
    store: &Store,
    sessions: &[Vec<Image>],
    known: &mut Known,
    mend: &mut dyn FnMut(&Error, &Known) -> bool,
) -> Result<()> {
    for session in sessions {
        let mut writer = match store.lock_writer_tuned("test", TINY) {
            Err(error) if mend(&error, known) => store.lock_writer_tuned("test", TINY)?,
            other => other?,
        };
        let mut run = writer.begin_run("vm", &layout(PAGES))?;
        let mut old = vec![0; PAGES as usize];
        for image in session {
            known.in_progress = Some(image.clone());
            loop {
                let sealed =
                    put_changes(&mut run, &old, image).and_then(|()| seal(&mut run, PAGES));
                match sealed {
                    Ok(sealed) => {
                        known.sealed.insert(sealed.id, image.clone());
                        break;
                    }
                    Err(error) if mend(&error, known) => {
                        assert!(matches!(seal(&mut run, PAGES), Err(Error::Broken { .. })));
                        assert!(matches!(run.put_zero(PageIndex(0)), Err(Error::Broken { .. })));
                        run.abandon();
                    }
                    Err(error) => return Err(error),
                }
            }
            known.in_progress = None;
            old.clone_from(image);
        }
        if let Err(error) = run.finish()
            && !mend(&error, known)
        {
            return Err(error);
        }
    }
    Ok(())
}

/// What was sealed is there and right; what else is there is the one in progress, and as right;
/// nothing is damaged.
pub fn assert_known(medium: &FaultyBackend, known: &Known, context: &str) {
    let store = on(medium).unwrap();
    let mut strangers = 0;
    for sealed in store.checkpoints().unwrap().sealed {
        let image = known.sealed.get(&sealed.id).unwrap_or_else(|| {
            strangers += 1;
            known
                .in_progress
                .as_ref()
                .unwrap_or_else(|| panic!("{context}: unknown checkpoint {}", sealed.id))
        });
        assert_image(&store, sealed.id, image);
    }
    assert!(strangers <= 1, "{context}: {strangers} checkpoints that no writer sealed");
    for id in known.sealed.keys() {
        assert!(store.load(*id).is_ok(), "{context}: checkpoint {id} is gone");
    }
    let report = check(&store);
    assert!(report.is_clean(), "{context}: {report:#?}");
}

fn crashed_at(operation: u64, sessions: &[Vec<Image>]) -> (FaultyBackend, Known) {
    let medium = FaultyBackend::default();
    init_on(&medium).unwrap();
    medium.crash_at(operation);
    let mut known = Known::default();
    let result = play(&medium, sessions, &mut known, &mut |_, _| false);
    assert_eq!(result.is_err(), medium.has_crashed());
    (medium, known)
}

/// A new writer on what a crash left: everything known stays, new checkpoints come on top.
/// Puts everything again, which shows a reference to a missing record.
fn go_on(medium: &FaultyBackend, mut known: Known, sessions: &[Vec<Image>], context: &str) {
    assert_known(medium, &known, context);
    let ids = on(medium).unwrap().inner().checkpoint_ids().unwrap();
    if let (Some(image), Some(id)) = (known.in_progress.take(), ids.last()) {
        known.sealed.entry(*id).or_insert(image);
    }
    let before = known.sealed.len();
    let files = medium.files();
    play(medium, sessions, &mut known, &mut |_, _| false).unwrap();
    assert_eq!(known.sealed.len(), before + sessions.iter().map(Vec::len).sum::<usize>());
    let now = medium.files();
    for (name, bytes) in files.iter().filter(|(name, _)| !name.starts_with("tmp/")) {
        assert!(now.get(name) == Some(bytes), "{context}: {name} was changed by the next writer");
    }
    assert_known(medium, &known, context);
    // Whatever was sealed on top must not lean on what was never durable.
    assert_known(&medium.after_power_loss(1), &known, &format!("{context}, then power loss"));
}

#[test]
fn a_crash_at_any_operation_loses_at_most_the_checkpoint_in_progress() {
    crash_at_every(1);
}

/// Crashes at every operation, or at every so many.
pub fn crash_at_every(step: u64) {
    let sessions = script(7);
    let mut operation = 1;
    loop {
        let (medium, known) = crashed_at(operation, &sessions);
        if !medium.has_crashed() {
            assert!(operation > 150, "only {operation} operations: the script exercises little");
            assert_eq!(known.sealed.len(), 10);
            break;
        }
        let context = format!("process death at operation {operation}");
        go_on(
            &medium.copy(),
            Known { sealed: known.sealed.clone(), in_progress: known.in_progress.clone() },
            &sessions[..1],
            &context,
        );
        for seed in 0..3 {
            let context = format!("power loss at operation {operation}, seed {seed}");
            let known =
                Known { sealed: known.sealed.clone(), in_progress: known.in_progress.clone() };
            go_on(
                &medium.after_power_loss(seed * 1000 + operation),
                known,
                &sessions[..1],
                &context,
            );
        }
        operation += step;
    }
}

#[test]
fn a_second_crash_during_recovery_is_no_worse() {
    let sessions = script(8);
    for first in (5..180).step_by(13) {
        let (medium, known) = crashed_at(first, &sessions);
        for second in 1..30 {
            // The process dies, its successor loses power: what it read from memory may never have
            // reached the medium.
            let again = medium.copy_with_same_durability();
            again.crash_at(second);
            let mut known =
                Known { sealed: known.sealed.clone(), in_progress: known.in_progress.clone() };
            let ids = on(&again).unwrap().inner().checkpoint_ids().unwrap();
            if let (Some(image), Some(id)) = (known.in_progress.take(), ids.last()) {
                known.sealed.entry(*id).or_insert(image);
            }
            let _ = play(&again, &sessions[1..], &mut known, &mut |_, _| false);
            let context = format!("death at operation {first}, then power loss at {second}");
            let lost = again.after_power_loss(first * 100 + second);
            // A checkpoint that the first writer did not get to acknowledge may go again with the
            // power.
            let there = on(&lost).unwrap().inner().checkpoint_ids().unwrap();
            let acknowledged = crashed_at(first, &sessions).1.sealed;
            let may_go =
                |id: &CheckpointId| !acknowledged.contains_key(id) && Some(id) == ids.last();
            known.sealed.retain(|id, _| there.contains(id) || !may_go(id));
            assert_known(&lost, &known, &context);
        }
    }
}

#[test]
pub fn a_crash_while_a_store_is_made_leaves_none_or_a_whole_one() {
    for operation in 1..8 {
        for seed in 0..8 {
            let medium = FaultyBackend::default();
            medium.crash_at(operation);
            let made = init_on(&medium).is_ok();
            match on(&medium.after_power_loss(seed)) {
                Ok(store) => assert_clean(&store),
                Err(error) => assert!(!made && matches!(error, Error::NoStore { .. }), "{error}"),
            }
        }
    }
}

/// A writer that died between the rename and the sync of the directory leaves a checkpoint that can
/// be seen and is not durable. Once another writer has started, it is.
#[test]
fn a_checkpoint_that_a_writer_has_seen_stays_after_power_loss() {
    let sessions = script(10);
    let mut found_early = 0;
    for operation in 1..180 {
        let (medium, known) = crashed_at(operation, &sessions);
        let next = medium.copy_with_same_durability();
        let store = on(&next).unwrap();
        let seen = store.inner().checkpoint_ids().unwrap();
        found_early += usize::from(seen.len() > known.sealed.len());
        drop(store.lock_writer_tuned("test", TINY).unwrap());
        for seed in 0..6 {
            let after = on(&next.after_power_loss(seed)).unwrap().inner().checkpoint_ids().unwrap();
            assert_eq!(after, seen, "death at operation {operation}, seed {seed}");
        }
    }
    assert!(found_early > 0, "no crash fell between the rename and the sync");
}

#[test]
pub fn a_failed_sync_costs_a_retry_and_nothing_else() {
    let sessions = script(9);
    for sync in 1.. {
        let medium = FaultyBackend::default();
        init_on(&medium).unwrap();
        medium.fail_sync_at(sync);
        let (mut known, mut failures) = (Known::default(), 0);
        let result = play(&medium, &sessions, &mut known, &mut |_, _| {
            failures += 1;
            failures == 1
        });
        result.unwrap_or_else(|e| panic!("sync {sync}: {e}"));
        assert_eq!(known.sealed.len(), 10, "sync {sync}");
        for seed in 0..4 {
            assert_known(
                &medium.after_power_loss(seed),
                &known,
                &format!("sync {sync} failed, seed {seed}"),
            );
        }
        if medium.syncs() < sync {
            assert!(sync > 60, "only {sync} syncs");
            break;
        }
    }
}
