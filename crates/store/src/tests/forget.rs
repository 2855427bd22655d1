//! Forgetting checkpoints: the others are intact at every instant.

use super::*;
use std::collections::BTreeSet;

const PAGES: u64 = 20;

/// A store of one run with `count` checkpoints, each fifth page of which differs from the one
/// before; what each holds.
pub fn store_of(medium: &FaultyBackend, count: u64) -> BTreeMap<CheckpointId, Image> {
    init_on(medium).unwrap();
    let mut known = BTreeMap::new();
    add_run(medium, count, &mut known);
    known
}

/// Another run behind what is there.
pub fn add_run(medium: &FaultyBackend, count: u64, known: &mut BTreeMap<CheckpointId, Image>) {
    let mut writer = on(medium).unwrap().lock_writer_tuned("test", TINY).unwrap();
    let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
    let mut old = vec![0; PAGES as usize];
    let first = known.len() as u64 * 1000;
    for epoch in 0..count {
        let image = next_image(&old, first + epoch);
        put_changes(&mut run, &old, &image).unwrap();
        known.insert(seal(&mut run, PAGES).unwrap().id, image.clone());
        old = image;
    }
    run.finish().unwrap();
}

/// Some pages new, one zero, one that another page had before.
pub fn next_image(old: &[u64], epoch: u64) -> Image {
    let mut image = old.to_vec();
    let pages = image.len();
    for step in 0..4 {
        image[((epoch * 7 + step * 5) as usize) % pages] = 1 + epoch * 10 + step;
    }
    image[(epoch as usize * 3) % pages] = 0;
    image[(epoch as usize * 11 + 1) % pages] = old[(epoch as usize + 2) % pages];
    image
}

fn ids(numbers: impl IntoIterator<Item = u64>) -> BTreeSet<CheckpointId> {
    numbers.into_iter().map(CheckpointId).collect()
}

#[test]
fn a_forgotten_checkpoint_is_gone_with_its_tags_and_the_others_are_intact() {
    let medium = FaultyBackend::default();
    let known = store_of(&medium, 12);
    let store = on(&medium).unwrap();
    let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
    writer.set_tag("boot", CheckpointId(1)).unwrap();
    writer.set_tag("later", CheckpointId(7)).unwrap();
    store.load(CheckpointId(1)).unwrap().keep_working_set(&[PageIndex(3)]).unwrap();
    let gone = ids([1, 2, 5, 6, 99]);
    store.forget(&gone).unwrap();
    assert!(matches!(store.resolve("boot"), Err(Error::UnknownCheckpoint { .. })));
    assert_eq!(store.resolve("later").unwrap(), CheckpointId(7));
    assert!(!medium.files().keys().any(|name| name.starts_with("worksets/")));
    for (id, image) in &known {
        if gone.contains(id) {
            assert!(matches!(store.load(*id), Err(Error::UnknownCheckpoint { .. })));
        } else {
            assert_image(&store, *id, image);
        }
    }
    assert_clean(&store);
    // Each run builds upon its newest.
    let mut other = on(&medium).unwrap().lock_writer_tuned("test", TINY).unwrap();
    let mut runs =
        [&mut writer, &mut other].map(|writer| writer.begin_run("vm", &layout(PAGES)).unwrap());
    for (run, id) in runs.iter_mut().zip([13, 14]) {
        assert_eq!(seal(run, PAGES).unwrap().id, CheckpointId(id));
    }
    for newest in [13, 14] {
        let refused = store.forget(&ids([3, newest]));
        assert!(matches!(refused, Err(Error::InUse { id, .. }) if id.0 == newest), "{refused:?}");
    }
    assert_image(&store, CheckpointId(3), &known[&CheckpointId(3)]);
    drop((runs, writer, other));
    store.forget(&ids([12, 14])).unwrap();
    assert_clean(&store);
    // Its number is not used again.
    let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
    let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
    assert_eq!(seal(&mut run, PAGES).unwrap().id, CheckpointId(15));
}

#[test]
fn a_crash_while_forgetting_leaves_whole_checkpoints_and_no_tag_of_none() {
    let base = FaultyBackend::default();
    let known = store_of(&base, 6);
    let mut writer = on(&base).unwrap().lock_writer("test").unwrap();
    writer.set_tag("a", CheckpointId(2)).unwrap();
    writer.set_tag("b", CheckpointId(2)).unwrap();
    drop(writer);
    for operation in 1.. {
        let medium = base.copy();
        medium.crash_at(operation);
        let forgot = on(&medium).unwrap().forget(&ids([2, 3])).is_ok();
        for seed in 0..4 {
            let after = medium.after_power_loss(seed * 100 + operation);
            let store = on(&after).unwrap();
            assert_clean(&store);
            let there = store.ids().unwrap();
            for (id, image) in known.iter().filter(|(id, _)| there.contains(id)) {
                assert_image(&store, *id, image);
            }
            assert!(there.len() == 4 || !forgot && there.len() >= 4, "{there:?}");
            assert!([1, 4, 5, 6].iter().all(|id| there.contains(&CheckpointId(*id))));
        }
        if forgot {
            assert!(operation > 6, "only {operation} operations");
            return;
        }
    }
}

/// The names that the first has removed were gone for the second, but not from the medium.
#[test]
fn power_loss_after_a_forget_that_completes_a_killed_one_brings_no_tag_back() {
    let base = FaultyBackend::default();
    store_of(&base, 4);
    let mut writer = on(&base).unwrap().lock_writer("test").unwrap();
    writer.set_tag("a", CheckpointId(2)).unwrap();
    drop(writer);
    let base = base.copy();
    for operation in 1.. {
        let first = base.copy();
        first.crash_at(operation);
        let is_done = on(&first).unwrap().forget(&ids([2])).is_ok();
        let second = first.copy_with_same_durability();
        on(&second).unwrap().forget(&ids([2])).unwrap();
        for seed in 0..6 {
            let store = on(&second.after_power_loss(seed * 100 + operation)).unwrap();
            assert_eq!(store.ids().unwrap(), [1, 3, 4].map(CheckpointId), "operation {operation}");
            assert_clean(&store);
        }
        if is_done {
            assert!(operation > 4, "only {operation} operations");
            return;
        }
    }
}

#[test]
fn a_pinned_checkpoint_goes_only_by_force_and_tags_move_and_go() {
    let medium = FaultyBackend::default();
    let known = store_of(&medium, 6);
    let store = on(&medium).unwrap();
    let _writer = store.lock_writer_tuned("test", TINY).unwrap();
    let id = CheckpointId;
    assert_eq!(store.set_tag("a", id(2)).unwrap(), None);
    assert_eq!(store.set_tag("a", id(3)).unwrap(), Some(id(2)));
    store.pin(id(2)).unwrap();
    for (tag, to) in [("pin.2", 3), ("12", 3), ("latest", 3)] {
        assert!(matches!(store.set_tag(tag, id(to)), Err(Error::InvalidTag { .. })), "{tag}");
        assert!(matches!(store.remove_tag(tag), Err(Error::InvalidTag { .. })), "{tag}");
    }
    assert!(matches!(store.set_tag("b", id(7)), Err(Error::UnknownCheckpoint { .. })));
    assert!(matches!(store.pin(id(7)), Err(Error::UnknownCheckpoint { .. })));
    let sealed = store.sealed(id(2)).unwrap();
    assert!(sealed.is_pinned() && sealed.names().next().is_none(), "{:?}", sealed.tags);
    // Neither rules nor a set that it is among take it; nothing of the set goes.
    let rules = crate::Retention { tags: Some(BTreeSet::new()), ..crate::Retention::default() };
    let moments: Vec<_> =
        store.checkpoints().unwrap().sealed.iter().map(crate::RetentionCandidate::from).collect();
    let verdicts = rules.judge(&moments, &BTreeSet::new());
    let kept: Vec<u64> = verdicts.iter().filter(|v| !v.kept.is_empty()).map(|v| v.id.0).collect();
    assert_eq!(kept, [2, 6]);
    let refused = store.forget(&ids([1, 2]));
    assert!(matches!(refused, Err(Error::Pinned { id: CheckpointId(2) })), "{refused:?}");
    assert_eq!(store.ids().unwrap().len(), 6);
    assert!(store.unpin(id(2)).unwrap() && !store.unpin(id(2)).unwrap());
    store.forget(&ids([2])).unwrap();
    store.pin(id(4)).unwrap();
    store.forget_even_pinned(&ids([4])).unwrap();
    assert_eq!(store.remove_tag("a").unwrap(), Some(id(3)));
    assert!(matches!(store.remove_tag("a"), Err(Error::UnknownTag { .. })));
    assert_eq!(store.tags().unwrap().len(), 0);
    for left in [1, 3, 5, 6] {
        assert_image(&store, id(left), &known[&id(left)]);
    }
    assert_clean(&store);
}
