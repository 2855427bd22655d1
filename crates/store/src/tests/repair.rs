//! Damage of every kind of file, then a repair: intact checkpoints stay as they were, lost ones are
//! listed.

use super::damage::{lost, subject};
use super::unreliable::{BadReads, Unreliable};
use super::*;
use crate::RepairReport;
use std::collections::BTreeSet;

fn repair(medium: &FaultyBackend) -> Result<RepairReport> {
    on(medium)?.repair(&mut |_| {})
}

/// Repairs, and holds what is left against the truth.
fn assert_repairs(
    medium: &FaultyBackend,
    truth: &BTreeMap<CheckpointId, Image>,
    what: &str,
) -> RepairReport {
    let there: BTreeSet<CheckpointId> = on(medium).unwrap().ids().unwrap().into_iter().collect();
    let unreadable = lost(medium, truth);
    let report = repair(medium).unwrap_or_else(|e| panic!("{what}: {e}"));
    let store = on(medium).unwrap();
    let after = check(&store);
    assert!(after.is_clean(), "{what}: {after:#?}\n{report:#?}");
    let left: BTreeSet<CheckpointId> = store.ids().unwrap().into_iter().collect();
    for id in &left {
        assert_image(&store, *id, &truth[id]);
    }
    for (id, image) in truth.iter().filter(|(id, _)| there.contains(id) && !unreadable.contains(id))
    {
        assert!(image_is(&store, *id, image).unwrap(), "{what}: checkpoint {id}");
    }
    let listed: BTreeSet<CheckpointId> = report.lost.iter().map(|lost| lost.id).collect();
    assert_eq!(listed, &there - &left, "{what}: {report:#?}");
    // All that was taken out is in quarantine; a second repair has nothing to do.
    for aside in &report.set_aside {
        assert!(
            aside.to.as_ref().is_none_or(|to| medium.files().contains_key(to)),
            "{what}: {aside:?}"
        );
    }
    let files = medium.files();
    let again = repair(medium).unwrap();
    assert!(again.after.is_none() && again.set_aside.is_empty(), "{what}: {again:#?}");
    let mut now = medium.files();
    now.retain(|name, _| files.contains_key(name));
    assert!(now == files, "{what}: a second repair changed files");
    report
}

#[test]
fn flipped_bits_are_repaired_or_listed() {
    let (medium, truth) = subject();
    let (mut repaired, mut saved, mut rebuilt, mut relinked, mut lost) = (0, 0, 0, 0, 0);
    for (name, bytes) in medium.files() {
        // A step that is no multiple of any record's length: bytes of every kind come.
        let step = if name.starts_with("packs/") { 11 } else { 17 };
        for at in (0..bytes.len()).step_by(step) {
            let medium = medium.copy();
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << (at % 8);
            medium.overwrite(&name, Some(flipped));
            if on(&medium).is_err() {
                continue;
            }
            let report = assert_repairs(&medium, &truth, &format!("{name}, byte {at}"));
            repaired += usize::from(report.after.is_some());
            saved += report.saved_records;
            rebuilt += report.rebuilt.len();
            relinked += report.relinked_records;
            lost += report.lost.len();
        }
    }
    assert!(
        repaired > 300 && saved > 100 && rebuilt > 10 && lost > 100,
        "{repaired} {saved} {rebuilt} {lost}"
    );
    println!(
        "{repaired} repaired, {saved} records saved, {rebuilt} rebuilt, {relinked} relinked, {lost} lost"
    );
}

#[test]
fn cut_and_missing_files_are_repaired_or_listed() {
    let (medium, truth) = subject();
    for (name, bytes) in medium.files().into_iter().filter(|(name, _)| name.contains('/')) {
        for len in [None, Some(0), Some(10), Some(bytes.len() / 2), Some(bytes.len() - 1)] {
            let medium = medium.copy();
            medium.overwrite(&name, len.map(|len| bytes[..len].to_vec()));
            assert_repairs(&medium, &truth, &format!("{name} cut to {len:?}"));
        }
    }
}

const FIRST_PACK: &str = "packs/00000001.pack";

/// A store in which a later pack has content of the first pack again.
fn twins() -> (FaultyBackend, BTreeMap<CheckpointId, Image>) {
    let (medium, mut truth) = subject();
    // A writer that cannot read a pack stores its content again.
    let whole = medium.files()[FIRST_PACK].clone();
    let mut hidden = whole.clone();
    hidden[50] ^= 1;
    medium.overwrite(FIRST_PACK, Some(hidden));
    let mut writer = on(&medium).unwrap().lock_writer_tuned("test", TINY).unwrap();
    let mut run = writer.begin_run("vm", &layout(8)).unwrap();
    let images: BTreeSet<u64> = truth.values().flatten().copied().collect();
    let image: Vec<u64> = images.into_iter().filter(|n| *n > 0).take(8).collect();
    put_changes(&mut run, &[0; 8], &image).unwrap();
    truth.insert(seal(&mut run, 8).unwrap().id, image);
    run.finish().unwrap();
    medium.overwrite(FIRST_PACK, Some(whole));
    (medium, truth)
}

/// Damages the first byte of a record of the first pack on which some checkpoint rests.
fn hurt_first_pack(medium: &FaultyBackend, truth: &BTreeMap<CheckpointId, Image>) {
    let whole = medium.files()[FIRST_PACK].clone();
    let hurts = |at: &usize| {
        let mut bad = whole.clone();
        bad[*at] ^= 1;
        medium.overwrite(FIRST_PACK, Some(bad));
        !lost(medium, truth).is_empty()
    };
    assert!((64..whole.len()).find(hurts).is_some());
}

/// The same content in two packs: where one is bad, the other stands for it, and nothing is lost.
#[test]
fn a_bad_page_is_replaced_by_the_same_elsewhere_and_numbers_are_not_used_again() {
    let (medium, truth) = twins();
    let store = on(&medium).unwrap();
    hurt_first_pack(&medium, &truth);
    let report = assert_repairs(&medium, &truth, "a twin");
    assert!(report.relinked_records > 0 && report.lost.is_empty(), "{report:#?}");
    assert!(medium.files().contains_key("quarantine/packs-00000001.pack"));

    // The newest one, with its map, is lost: its number is not used for another.
    let newest = *truth.keys().last().unwrap();
    for name in [format!("maps/{newest:010}.map"), format!("checkpoints/{newest:010}.ckpt")] {
        let mut bytes = medium.files()[&name].clone();
        bytes[70] ^= 1;
        medium.overwrite(&name, Some(bytes));
    }
    assert_repairs(&medium, &truth, "the newest");
    let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
    let mut run = writer.begin_run("vm", &layout(8)).unwrap();
    assert!(seal(&mut run, 8).unwrap().id > newest);
}

#[test]
fn a_crash_in_a_repair_costs_nothing_that_was_intact() {
    let (medium, truth) = subject();
    let pack = "packs/00000001.pack";
    let mut bytes = medium.files()[pack].clone();
    bytes[64 + 30] ^= 1;
    medium.overwrite(pack, Some(bytes));
    let unreadable = lost(&medium, &truth);
    for operation in 1.. {
        let medium = medium.copy();
        medium.crash_at(operation);
        let done = repair(&medium).is_ok();
        let after = medium.after_power_loss(operation * 7);
        assert!(lost(&after, &truth).is_subset(&unreadable), "crash at {operation}");
        repair(&after).unwrap();
        assert_clean(&on(&after).unwrap());
        assert!(
            lost(&after, &truth).is_subset(&unreadable),
            "repaired after a crash at {operation}"
        );
        if done {
            assert!(operation > 10, "only {operation} operations");
            return;
        }
    }
}

#[test]
fn a_store_in_use_is_not_repaired() {
    let (medium, _) = subject();
    let name = "tags/first";
    medium.overwrite(name, Some(b"x".to_vec()));
    let store = on(&medium).unwrap();
    let writer = store.lock_writer("a run").unwrap();
    assert!(matches!(repair(&medium), Err(Error::Locked { .. })));
    assert!(medium.files().contains_key(name));
    drop(writer);
    let report = repair(&medium).unwrap();
    assert_eq!((report.set_aside.len(), report.lost.len()), (1, 0));
}

/// A damaged tag, a damaged header of a pack, and a bad record that has a twin.
fn damage_that_hurts_nothing_for_good() -> (FaultyBackend, BTreeMap<CheckpointId, Image>) {
    let (medium, truth) = twins();
    hurt_first_pack(&medium, &truth);
    medium.overwrite("tags/first", Some(b"x".to_vec()));
    let mut bytes = medium.files()["packs/00000002.pack"].clone();
    bytes[20] ^= 1;
    medium.overwrite("packs/00000002.pack", Some(bytes));
    (medium, truth)
}

/// Deltas and their bases in a pack that also has a bad record, which no checkpoint needs.
fn deltas_beside_a_bad_record() -> (FaultyBackend, BTreeMap<CheckpointId, Image>) {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
    let mut run = writer.begin_run("vm", &layout(3)).unwrap();
    run.put_page(PageIndex(0), &content(102)).unwrap();
    let (mut old, mut truth) = (vec![0; 3], BTreeMap::new());
    for image in [[11, 1, 2], [15, 1, 2], [19, 1, 4]] {
        put_changes(&mut run, &old, &image).unwrap();
        truth.insert(seal(&mut run, 3).unwrap().id, image.to_vec());
        old = image.to_vec();
    }
    run.finish().unwrap();
    drop(writer);
    assert_eq!(deltas::kinds(&store).get(&'D'), Some(&2));
    let mut bytes = medium.files()[FIRST_PACK].clone();
    bytes[64 + 40] ^= 1;
    medium.overwrite(FIRST_PACK, Some(bytes));
    assert!(lost(&medium, &truth).is_empty());
    (medium, truth)
}

/// Repairs, and one read after the other times out; then repairs again. Returns the number of
/// reads.
fn repair_with_a_failed_read(
    damaged: &FaultyBackend,
    truth: &BTreeMap<CheckpointId, Image>,
) -> u64 {
    let whole = damaged.files()[FIRST_PACK].clone();
    for read in 1.. {
        let medium = damaged.copy();
        let unreliable = Unreliable::new(&medium, BadReads::TimedOut(read));
        let repaired = unreliable.open_store().and_then(|store| store.repair(&mut |_| {}));
        let context = format!("read {read}: {repaired:#?}");
        let is_due = unreliable.has_failed();
        assert!(repaired.map_or(is_due, |report| report.lost.is_empty()), "{context}");
        // The copies are whole, and the next repair completes what this one has begun.
        let again = repair(&medium).unwrap_or_else(|e| panic!("{context}\nthen {e}"));
        assert!(again.lost.is_empty(), "{context}\nthen {again:#?}");
        let store = on(&medium).unwrap();
        assert_clean(&store);
        for (id, image) in truth {
            let is_same =
                image_is(&store, *id, image).unwrap_or_else(|e| panic!("{context}\n{id}: {e}"));
            assert!(is_same, "{context}\n{id} is not what was put");
        }
        let files = medium.files();
        let mut copies =
            files.iter().filter(|(name, _)| name.starts_with("quarantine/packs-00000001"));
        assert!(copies.all(|(_, bytes)| *bytes == whole), "{context}\na copy is not the pack");
        if !is_due {
            return read - 1;
        }
    }
    unreachable!()
}

#[test]
fn a_read_that_times_out_shows_no_damage() {
    let (medium, truth) = damage_that_hurts_nothing_for_good();
    let report = repair(&medium.copy()).unwrap();
    assert!(report.rebuilt == ["packs/00000002.pack"] && report.lost.is_empty(), "{report:#?}");
    assert!(report.relinked_records > 0 && report.set_aside.len() == 2, "{report:#?}");
    let reads = repair_with_a_failed_read(&medium, &truth);
    assert!(reads > 200, "only {reads} reads");

    let (medium, truth) = deltas_beside_a_bad_record();
    let report = repair(&medium.copy()).unwrap();
    assert!(report.saved_records == 6 && report.lost.is_empty(), "{report:#?}");
    let reads = repair_with_a_failed_read(&medium, &truth);
    assert!(reads > 100, "only {reads} reads");
}

/// The kernel reads a file by pages of its cache. A bad sector costs the page that it lies in.
#[test]
fn a_bad_sector_costs_the_record_that_it_lies_in_and_its_page_of_the_copy() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
    let mut run = writer.begin_run("vm", &layout(4)).unwrap();
    put_changes(&mut run, &[0; 4], &[1, 3, 0, 0]).unwrap();
    let gone = seal(&mut run, 4).unwrap().id;
    put_changes(&mut run, &[1, 3, 0, 0], &[1, 0, 5, 7]).unwrap();
    let left = seal(&mut run, 4).unwrap().id;
    run.finish().unwrap();
    drop(writer);
    let whole = medium.files()[FIRST_PACK].clone();
    // In the second record of a page of noise.
    let bad = 64 + 4124 + 2000;
    let unreliable = Unreliable::new(&medium, BadReads::Sector(FIRST_PACK.into(), bad));
    let report = unreliable.open_store().unwrap().repair(&mut |_| {}).unwrap();
    let lost: Vec<_> = report.lost.iter().map(|lost| lost.id).collect();
    assert_eq!((lost, report.saved_records), (vec![gone], 3), "{report:#?}");
    let store = on(&medium).unwrap();
    assert_clean(&store);
    assert_image(&store, left, &[1, 0, 5, 7]);
    let mut expected = whole;
    expected[4096..8192].fill(0);
    assert!(medium.files()["quarantine/packs-00000001.pack"] == expected, "the copy");
}
