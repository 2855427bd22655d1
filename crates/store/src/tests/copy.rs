//! Copies into another store: exact, made once, and on a medium that fails.

use super::forget::{add_run, store_of};
use super::*;
use std::collections::BTreeSet;

fn all(store: &Store) -> BTreeSet<CheckpointId> {
    store.ids().unwrap().into_iter().collect()
}

fn copy(from: &Store, to: &Store) -> Result<crate::CopyReport> {
    from.copy_tuned(to, &all(from), TINY, &mut |_| {})
}

/// The copies in `target` hold what their origins held.
fn assert_copies(target: &Store, origin: &Store, known: &BTreeMap<CheckpointId, Image>) -> usize {
    let listed = target.checkpoints().unwrap();
    assert!(listed.unreadable.is_empty(), "{:?}", listed.unreadable);
    let mut origins = BTreeSet::new();
    for sealed in &listed.sealed {
        let of = sealed.meta.origin.clone().expect("an origin");
        assert_eq!(of.store, origin.id());
        assert_image(target, sealed.id, &known[&of.checkpoint]);
        assert!(origins.insert(of.checkpoint), "{} was copied twice", of.checkpoint);
    }
    origins.len()
}

#[test]
fn a_copy_equals_its_origin_and_is_made_once_by_any_way() {
    let medium = FaultyBackend::default();
    let mut known = store_of(&medium, 7);
    add_run(&medium, 5, &mut known);
    let store = on(&medium).unwrap();
    store.set_tag("a", CheckpointId(3)).unwrap();
    store.set_tag("taken", CheckpointId(4)).unwrap();
    store.pin(CheckpointId(9)).unwrap();
    let targets = [FaultyBackend::default(), FaultyBackend::default()];
    let [second, third] = targets.each_ref().map(|medium| init_on(medium).unwrap());
    let some: BTreeSet<_> = [2, 9].map(CheckpointId).into();
    let first = store.copy_tuned(&second, &some, TINY, &mut |_| {}).unwrap();
    assert_eq!(first.copied.len(), 2);
    second.set_tag("taken", first.copied[0].to).unwrap();
    let report = copy(&store, &second).unwrap();
    assert_eq!((report.copied.len(), report.known.len()), (10, 2));
    assert_eq!(report.tags_left, ["taken"]);
    assert_eq!(assert_copies(&second, &store, &known), 12);
    let to = |id| report.copied.iter().chain(&report.known).find(|c| c.from == id).unwrap().to;
    assert_eq!(second.resolve("a").unwrap(), to(CheckpointId(3)));
    assert_eq!(second.resolve("taken").unwrap(), first.copied[0].to);
    assert!(second.sealed(to(CheckpointId(9))).unwrap().is_pinned());
    // By way of another one, and back: it is the same checkpoint.
    assert_eq!(copy(&second, &third).unwrap().copied.len(), 12);
    assert_eq!(assert_copies(&third, &store, &known), 12);
    for (from, to) in [(&store, &third), (&third, &store), (&third, &second)] {
        let again = copy(from, to).unwrap();
        assert_eq!((again.copied.len(), again.known.len(), again.read_pages), (0, 12, 0));
    }
    assert!(matches!(copy(&store, &store), Err(Error::SameStore { .. })));
    for store in [&store, &second, &third] {
        assert_clean(store);
    }
}

#[test]
fn copies_name_existing_parents_and_damage_affects_only_its_checkpoints() {
    let medium = FaultyBackend::default();
    let mut known = store_of(&medium, 4);
    let store = on(&medium).unwrap();
    let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
    let mut run = writer.begin_run("vm", &layout(20)).unwrap();
    run.put_page(PageIndex(1), &content(777)).unwrap();
    let child = SealRequest { parent: Some(CheckpointId(2)), ..request(&layout(20)) };
    let child = run.seal(child).unwrap().id;
    known.insert(child, (0..20).map(|page| if page == 1 { 777 } else { 0 }).collect());
    run.finish().unwrap();
    drop(writer);
    // The first has some other number there.
    let target = init_on(&FaultyBackend::default()).unwrap();
    let only: BTreeSet<_> = [2, child.0].map(CheckpointId).into();
    let report = store.copy_tuned(&target, &only, TINY, &mut |_| {}).unwrap();
    let parent = target.sealed(report.copied[1].to).unwrap().meta.parent;
    assert_eq!(parent, Some(report.copied[0].to));
    let alone = init_on(&FaultyBackend::default()).unwrap();
    let report = store.copy_tuned(&alone, &BTreeSet::from([child]), TINY, &mut |_| {}).unwrap();
    assert_eq!(alone.sealed(report.copied[0].to).unwrap().meta.parent, None);

    let name = "maps/0000000003.map";
    let mut map = medium.files()[name].clone();
    map[100] ^= 1;
    medium.overwrite(name, Some(map));
    let hurt = check(&on(&medium).unwrap()).hurt_checkpoints();
    let rest = init_on(&FaultyBackend::default()).unwrap();
    let report = copy(&on(&medium).unwrap(), &rest).unwrap();
    let left: BTreeSet<_> = report.damaged.iter().map(|left| left.from).collect();
    assert!(!hurt.is_empty() && left == hurt, "{left:?} and {hurt:?}");
    assert_eq!(assert_copies(&rest, &store, &known), known.len() - hurt.len());
    assert_clean(&rest);
}

#[test]
fn a_crash_at_any_operation_costs_at_most_the_checkpoint_in_progress() {
    let medium = FaultyBackend::default();
    let known = store_of(&medium, 5);
    let store = on(&medium).unwrap();
    let base = FaultyBackend::default();
    init_on(&base).unwrap();
    let mut seen = BTreeSet::new();
    for operation in 1.. {
        let target = base.copy();
        target.crash_at(operation);
        let done = copy(&store, &on(&target).unwrap()).is_ok();
        let after = target.after_power_loss(operation * 31);
        let there = on(&after).unwrap();
        assert_clean(&there);
        let sealed = assert_copies(&there, &store, &known);
        seen.insert(sealed);
        // The same command goes on behind that.
        let report = copy(&store, &there).unwrap();
        assert_eq!(
            (report.known.len(), report.copied.len()),
            (sealed, 5 - sealed),
            "at {operation}"
        );
        assert_eq!(assert_copies(&there, &store, &known), 5);
        assert_clean(&there);
        if done {
            assert!(operation > 20, "only {operation} operations");
            break;
        }
    }
    assert_eq!(seen.len(), 6, "{seen:?}");
}
