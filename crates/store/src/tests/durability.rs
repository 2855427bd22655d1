//! Checkpoints that are not synced one by one. The death of the process costs none of them. After
//! power loss the remaining ones are intact.

use super::*;
use std::time::Duration;

const PAGES: u64 = 14;

fn tuning(durability: Durability) -> Tuning {
    Tuning { durability, ..TINY }
}

/// Seals `images`, and leaves all as a killed engine does.
pub fn killed_after(
    medium: &FaultyBackend,
    durability: Durability,
    images: &[Image],
) -> Vec<(CheckpointId, Image)> {
    let store = on(medium).unwrap();
    let mut writer = store.lock_writer_tuned("test", tuning(durability)).unwrap();
    let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
    let mut old = vec![0; PAGES as usize];
    let mut sealed = Vec::new();
    for image in images {
        put_changes(&mut run, &old, image).unwrap();
        sealed.push((seal(&mut run, PAGES).unwrap().id, image.clone()));
        old.clone_from(image);
    }
    drop(writer);
    drop(run);
    sealed
}

/// True if a mark says that something may not be durable.
pub fn has_mark(medium: &FaultyBackend) -> bool {
    medium.files().keys().any(|name| name.ends_with("unsynced"))
}

fn images(seed: u64) -> Vec<Image> {
    crash::script(seed).concat()
}

/// Whatever is listed is right, and nothing is damaged.
fn assert_whole(medium: &FaultyBackend, known: &[(CheckpointId, Image)], context: &str) -> usize {
    let store = on(medium).unwrap();
    let sealed = store.checkpoints().unwrap().sealed;
    for checkpoint in &sealed {
        let image = known.iter().find(|(id, _)| *id == checkpoint.id).map(|(_, image)| image);
        assert_image(
            &store,
            checkpoint.id,
            image.unwrap_or_else(|| panic!("{context}: {} is unknown", checkpoint.id)),
        );
    }
    let report = check(&store);
    assert!(report.is_clean(), "{context}: {report:#?}");
    sealed.len()
}

#[test]
pub fn after_power_loss_the_next_writer_keeps_intact_checkpoints_and_quarantines_the_others() {
    let mut lost = 0;
    for seed in 0..60 {
        let medium = FaultyBackend::default();
        init_on(&medium).unwrap();
        let durability =
            if seed % 2 == 0 { Durability::Never } else { Durability::Every(Duration::ZERO) };
        let known = killed_after(&medium, durability, &images(seed));
        // The process died, and the machine did not.
        assert_eq!(assert_whole(&medium, &known, "killed"), known.len());
        let medium = medium.after_power_loss(seed);
        let store = on(&medium).unwrap();
        let writer = store.lock_writer_tuned("test", TINY).unwrap();
        let torn = writer.torn().len();
        drop(writer);
        let left = assert_whole(&medium, &known, &format!("seed {seed}"));
        assert!(torn + left <= known.len());
        if durability != Durability::Never {
            assert_eq!((torn, left), (0, known.len()), "seed {seed}: all were synced");
        }
        lost += known.len() - left;
        assert!(!has_mark(&medium));
        // Gone on with, also where records were lost that the store believed to have.
        let more = killed_after(&medium, Durability::Checkpoint, &images(seed));
        // Numbers that no process has seen since may be used again.
        let kept = known.into_iter().filter(|(id, _)| !more.iter().any(|(again, _)| again == id));
        let all: Vec<_> = kept.chain(more.iter().cloned()).collect();
        assert_whole(&medium.after_power_loss(seed), &all, &format!("seed {seed}, gone on with"));
    }
    assert!(lost > 20, "power loss took {lost} checkpoints only: nothing was tested");
}

#[test]
pub fn a_writer_that_ends_well_leaves_all_durable() {
    for durability in [Durability::Never, Durability::Every(Duration::from_secs(3600))] {
        let medium = FaultyBackend::default();
        let store = init_on(&medium).unwrap();
        let mut writer = store.lock_writer_tuned("test", tuning(durability)).unwrap();
        let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
        let begun = medium.syncs();
        run.put_page(PageIndex(1), &content(3)).unwrap();
        let id = seal(&mut run, PAGES).unwrap().id;
        assert_eq!(medium.syncs(), begun, "a seal waited for a sync");
        run.finish().unwrap();
        drop(writer);
        assert!(medium.syncs() > begun, "nothing was synced at the end");
        let medium = medium.after_power_loss(5);
        let mut image = vec![0; PAGES as usize];
        image[1] = 3;
        assert_whole(&medium, &[(id, image)], "ended well");
        assert!(!has_mark(&medium));
    }
}

/// What a writer that was killed had appended and not synced is in memory alone. The next one syncs
/// it; where that fails, the pages may be lost although they can be read, and a second sync does
/// not say so.
#[test]
fn an_unfinished_pack_whose_sync_failed_is_not_used() {
    let image: Image = (1..=PAGES).collect();
    for seed in 0..20 {
        let medium = FaultyBackend::default();
        let store = init_on(&medium).unwrap();
        let mut run =
            store.lock_writer_tuned("test", TINY).unwrap().begin_run("vm", &layout(PAGES)).unwrap();
        put_changes(&mut run, &[0; PAGES as usize], &image).unwrap();
        drop(run);
        // Every sync of the first that takes the store over fails once, and none of the second.
        let next = medium.copy_with_same_durability();
        let mut failed = 0;
        for sync in 1.. {
            let medium = next.copy_with_same_durability();
            medium.fail_sync_at(sync);
            let store = on(&medium).unwrap();
            let Err(error) = store.lock_writer_tuned("test", TINY) else { break };
            assert!(matches!(error, Error::Io { .. }), "{error}");
            failed += 1;
            let known = killed_after(&medium, Durability::Checkpoint, std::slice::from_ref(&image));
            assert_eq!(
                assert_whole(&medium.after_power_loss(seed), &known, &format!("sync {sync}")),
                1
            );
        }
        assert!(failed > 1, "no sync of what was found");
    }
}

#[test]
fn checkpoints_of_a_failed_sync_stay_in_doubt_until_the_next_boot() {
    let (mut lost, mut doubted) = (0, 0);
    for seed in 0..40 {
        let medium = FaultyBackend::default();
        init_on(&medium).unwrap();
        let old = killed_after(&medium, Durability::Never, &images(seed));
        let medium = medium.copy_with_same_durability();
        medium.fail_sync_at(1 + seed % 8);
        let store = on(&medium).unwrap();
        let failed = store.lock_writer_tuned("test", TINY).err();
        let writer = store.lock_writer_tuned("test", TINY).unwrap();
        doubted += writer.in_doubt().iter().len();
        assert!(failed.is_some() || writer.in_doubt().is_none());
        let vouched = writer.in_doubt().is_none();
        drop(writer);
        // No checkpoint builds on them, at any durability.
        let new = killed_after(&medium, Durability::Checkpoint, &images(seed));
        killed_after(&medium, Durability::Never, &images(seed)[..1]);
        let medium = medium.after_power_loss(seed);
        let writer = on(&medium).unwrap().lock_writer_tuned("test", TINY).unwrap();
        assert!(writer.in_doubt().is_none(), "what is there was read from the medium");
        lost += writer.torn().len();
        drop(writer);
        let there = on(&medium).unwrap().ids().unwrap();
        assert!(
            new.iter().all(|(id, _)| there.contains(id)),
            "seed {seed}: a durable checkpoint is gone"
        );
        assert!(
            !vouched || old.iter().all(|(id, _)| there.contains(id)),
            "seed {seed}: vouched for, and gone"
        );
        let last = images(seed)[0].clone();
        let mut known: Vec<_> = old.into_iter().chain(new).collect();
        known.extend(
            there.last().filter(|id| known.iter().all(|(k, _)| k != *id)).map(|id| (*id, last)),
        );
        assert_whole(&medium, &known, &format!("seed {seed}"));
    }
    assert!(lost > 0 && doubted > 4, "{lost} lost, {doubted} in doubt: nothing was tested");
}

#[test]
fn a_sync_that_fails_within_a_run_is_reported_and_remembered() {
    let (mut failures, mut lost) = (0, 0);
    for sync in 3..60 {
        let medium = FaultyBackend::default();
        let store = init_on(&medium).unwrap();
        let mut writer =
            store.lock_writer_tuned("test", tuning(Durability::Every(Duration::ZERO))).unwrap();
        let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
        medium.fail_sync_at(medium.syncs() + sync - 2);
        let (mut old, mut safe, mut known) = (vec![0; PAGES as usize], Vec::new(), Vec::new());
        let mut is_told = false;
        for image in images(sync) {
            match put_changes(&mut run, &old, &image).and_then(|()| seal(&mut run, PAGES)) {
                Ok(sealed) => known.push((sealed.id, image.clone())),
                Err(error) => {
                    assert!(matches!(error, Error::Io { .. }), "{error}");
                    is_told = true;
                    run.abandon();
                    // Puts everything again, as an engine does.
                    put_changes(&mut run, &[u64::MAX; PAGES as usize], &image).unwrap();
                    known.push((seal(&mut run, PAGES).unwrap().id, image.clone()));
                }
            }
            if !is_told {
                safe.clone_from(&known);
            }
            old = image;
        }
        is_told |= run.finish().is_err();
        drop(writer);
        failures += usize::from(is_told);
        let after = medium.after_power_loss(sync);
        let torn = on(&after).unwrap().lock_writer_tuned("test", TINY).unwrap().torn().len();
        lost += torn;
        let store = on(&after).unwrap();
        for sealed in store.checkpoints().unwrap().sealed {
            if let Some((id, image)) = known.iter().find(|(id, _)| *id == sealed.id) {
                assert_image(&store, *id, image);
            }
        }
        assert_clean(&store);
        let there = store.ids().unwrap();
        assert!(
            safe.iter().all(|(id, _)| there.contains(id)),
            "sync {sync}: what was synced before is gone"
        );
        assert!(is_told || torn == 0, "sync {sync}: lost without a word");
    }
    assert!(failures > 10 && lost > 0, "{failures} failures, {lost} lost: nothing was tested");
}

/// Packs are synced when they are closed, also where no checkpoint waits for it. Where that fails,
/// a later sync, by whomever, says nothing.
#[test]
fn no_checkpoint_relies_on_a_pack_that_could_not_be_synced_when_it_was_closed() {
    let (mut failures, mut lost) = (0, 0);
    for durability in [Durability::Never, Durability::Every(Duration::ZERO)] {
        for seed in 0..30 {
            let medium = FaultyBackend::default();
            let store = init_on(&medium).unwrap();
            let mut writer = store.lock_writer_tuned("test", tuning(durability)).unwrap();
            let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
            let (mut old, mut known) = (vec![0; PAGES as usize], Vec::new());
            for image in images(seed) {
                put_changes(&mut run, &old, &image).unwrap();
                known.push((seal(&mut run, PAGES).unwrap().id, image.clone()));
                old = image;
            }
            medium.fail_sync_at(medium.syncs() + 1 + seed % 5);
            failures += usize::from(run.finish().is_err());
            drop(writer);
            medium.calm();
            // The machine did not go down; the next one finds nothing wrong, and has the same
            // pages.
            let new = killed_after(&medium, Durability::Checkpoint, &images(seed));
            let medium = medium.after_power_loss(seed);
            let writer = on(&medium).unwrap().lock_writer_tuned("test", TINY).unwrap();
            lost += writer.torn().len();
            drop(writer);
            let store = on(&medium).unwrap();
            let there = store.ids().unwrap();
            assert!(
                new.iter().all(|(id, _)| there.contains(id)),
                "seed {seed}: a durable checkpoint is gone"
            );
            for (id, image) in known.iter().chain(&new).filter(|(id, _)| there.contains(id)) {
                assert_image(&store, *id, image);
            }
        }
    }
    assert!(failures > 10 && lost > 0, "{failures} failures, {lost} lost: nothing was tested");
}
