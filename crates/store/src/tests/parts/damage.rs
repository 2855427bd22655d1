//! Damage of composed blocks: found, and attributed to the right checkpoints.

use super::*;
use keyframe_store_format::codec::PageCompressor;
use keyframe_store_format::composed::{Composition, PagePart};
use keyframe_store_format::derived::Derivation;
use keyframe_store_format::record::append_record;
use std::collections::BTreeSet;

/// The blocks of two runs, each by the first sector of the file that it holds.
const SUBJECT: [[(u64, u64); 2]; 2] = [[(0, 3), (1, 11)], [(0, 5), (2, 6)]];

/// A store with plain records in one pack, composed ones in others, of which the last stays
/// unfinished.
fn subject() -> (FaultyBackend, BTreeMap<CheckpointId, Vec<Option<Page>>>) {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut truth = BTreeMap::new();
    let mut writer =
        store.lock_writer_tuned("test", Tuning { pack_bytes_max: 9000, ..TINY }).unwrap();
    for (number, written) in SUBJECT.into_iter().enumerate() {
        let mut run = begin(&mut writer);
        let mut blocks = vec![None; BLOCKS as usize];
        for page in 0..3 {
            run.put_page(PageIndex(page), &file_page(page * 8)).unwrap();
        }
        for (block, first) in written {
            run.put_block(0, block, &file_page(first)).unwrap();
            blocks[block as usize] = Some(file_page(first));
            truth.insert(seal(&mut run, RAM_PAGES).unwrap().id, blocks.clone());
        }
        if number == 0 {
            run.finish().unwrap();
        }
    }
    (medium, truth)
}

/// Writes all of these blocks again and checks that they come back. Returns the checkpoint.
fn write_again(store: &Store) -> CheckpointId {
    let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
    let mut run = begin(&mut writer);
    let blocks: Vec<Page> = SUBJECT.iter().flatten().map(|(_, first)| file_page(*first)).collect();
    for (block, page) in (0..).zip(&blocks) {
        run.put_block(0, block, page).unwrap();
    }
    let id = seal(&mut run, RAM_PAGES).unwrap().id;
    run.finish().unwrap();
    let back = read_blocks(store, id).unwrap();
    assert!(back.iter().flatten().eq(&blocks), "what was written again is not there");
    id
}

fn lost(
    medium: &FaultyBackend,
    truth: &BTreeMap<CheckpointId, Vec<Option<Page>>>,
) -> BTreeSet<CheckpointId> {
    let Ok(store) = on(medium) else { return truth.keys().copied().collect() };
    let is_lost = |(id, blocks): &(&CheckpointId, &Vec<Option<Page>>)| {
        let read =
            store.load(**id).and_then(|ram| Ok((read_image(&ram)?, read_blocks(&store, **id)?)));
        match read {
            Ok((ram, disk)) => {
                assert!(
                    disk == **blocks,
                    "the disk of {id} was read without an error and is wrong"
                );
                assert!(
                    (0..3).all(|page| ram[&page] == file_page(page * 8)),
                    "RAM of {id} is wrong"
                );
                false
            }
            Err(Error::Damaged { .. } | Error::UnknownCheckpoint { .. }) => true,
            Err(other) => panic!("checkpoint {id}: {other}"),
        }
    };
    truth.iter().filter(is_lost).map(|(id, _)| *id).collect()
}

fn assert_found(
    medium: &FaultyBackend,
    truth: &BTreeMap<CheckpointId, Vec<Option<Page>>>,
    what: &str,
) {
    let Ok(store) = on(medium) else { return };
    let report = check(&store);
    assert_eq!(report.hurt_checkpoints(), lost(medium, truth), "{what}: {report:#?}");
}

#[test]
fn a_check_finds_every_flipped_bit_of_composed_records_and_names_the_right_checkpoints() {
    let (medium, truth) = subject();
    let kinds: Vec<RecordKind> = records(&medium).iter().map(|(_, kind)| *kind).collect();
    assert_eq!(kinds.iter().filter(|kind| **kind == RecordKind::Composed).count(), 4, "{kinds:?}");
    assert!(lost(&medium, &truth).is_empty());
    let baseline = check(&on(&medium).unwrap());
    assert!(baseline.is_clean(), "{baseline:#?}");
    for (name, bytes) in medium.files().into_iter().filter(|(name, _)| name.starts_with("packs/")) {
        for at in (0..bytes.len()).filter(|at| *at < 200 || at % 31 == 0 || *at + 700 > bytes.len())
        {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << (at % 8);
            medium.overwrite(&name, Some(flipped));
            assert_found(&medium, &truth, &format!("{name}, byte {at}"));
            let report = check(&on(&medium).unwrap());
            assert!(
                !report.is_clean() || report.notes != baseline.notes,
                "{name}, byte {at}: not noticed"
            );
        }
        for len in (0..bytes.len()).step_by(397) {
            medium.overwrite(&name, Some(bytes[..len].to_vec()));
            assert_found(&medium, &truth, &format!("{name} cut to {len} bytes"));
        }
        medium.overwrite(&name, None);
        assert_found(&medium, &truth, &format!("{name} is gone"));
        // Where the pack that others refer to is gone, a check that reads no pages sees that too.
        let quick = on(&medium).unwrap().check(&CheckOptions::default(), &mut |_| {}).unwrap();
        assert_eq!(quick.hurt_checkpoints(), lost(&medium, &truth), "{name} is gone: {quick:#?}");
        medium.overwrite(&name, Some(bytes));
    }
}

/// Writes another composition in the place of that of the record at `at`, as a writer would that
/// errs: all checks hold.
fn recompose(medium: &FaultyBackend, at: PageRef, change: impl FnOnce(&mut [PagePart; PARTS])) {
    let name = keyframe_store_backend::layout::pack(at.pack());
    let mut bytes = medium.files()[&name].clone();
    let offset = at.offset() as usize;
    let record = Record::parse(&bytes[offset..], at).unwrap();
    let mut page = ZERO_PAGE;
    let Ok(Derivation::Parts(Composition(mut parts))) = record.derivation(&mut page) else {
        panic!("not composed")
    };
    change(&mut parts);
    let mut payload = Vec::new();
    let codec = Composition(parts).encode(&page, &mut PageCompressor::new(), &mut payload);
    let (hash, len) = (record.hash, record.len_bytes());
    let mut new = Vec::new();
    append_record(&mut new, at, hash, RecordKind::Composed, (codec, &payload));
    assert_eq!(new.len(), len, "the records behind it stay where they are");
    bytes[offset..offset + len].copy_from_slice(&new);
    medium.overwrite(&name, Some(bytes));
}

/// All references of the record go to other records, in the same order.
fn refer_to(parts: &mut [PagePart; PARTS], to: [PageRef; 2]) {
    let old = Composition(*parts).records();
    assert_eq!(old.len(), 2);
    for part in parts {
        if let PagePart::Of(record, _) = part {
            *record = to[usize::from(*record == old[1])];
        }
    }
}

#[test]
fn chains_circles_and_references_to_nowhere_are_reported_as_damage() {
    let (medium, truth) = subject();
    let all = records(&medium);
    let composed: Vec<PageRef> =
        all.iter().filter(|(_, k)| *k == RecordKind::Composed).map(|(at, _)| *at).collect();
    let plain: Vec<PageRef> =
        all.iter().filter(|(_, k)| *k == RecordKind::Page).map(|(at, _)| *at).collect();
    let files = medium.files();
    let beyond = PageRef::new(plain[0].pack(), (1 << 39) - 1);
    // One in the pack that is closed, one in that which is not.
    for victim in [composed[1], composed[3]] {
        let cases = [
            ("a chain", [plain[0], composed[0]]),
            ("itself", [plain[0], victim]),
            ("behind it", [plain[0], PageRef(victim.0 + 1000)]),
            ("a pack that is not there", [plain[0], PageRef::new(200, 64)]),
            ("a place where no record begins", [plain[0], PageRef(plain[1].0 + 1)]),
            ("beyond the end", [plain[0], beyond]),
            ("no pack", [PageRef(64), plain[0]]),
            ("other pages than it should", [plain[0], plain[1]]),
        ];
        for (what, to) in cases {
            let before = medium.files();
            recompose(&medium, victim, |parts| refer_to(parts, to));
            if medium.files() == before {
                // It did refer to those.
                recompose(&medium, victim, |parts| refer_to(parts, [plain[1], plain[2]]));
            }
            let lost = lost(&medium, &truth);
            assert_eq!(lost.len(), 1, "{what}: {lost:?}");
            assert_found(&medium, &truth, what);
            // The next writer is not led astray either.
            let store = on(&medium).unwrap();
            write_again(&store);
            assert_eq!(check(&store).hurt_checkpoints(), lost, "{what}");
            for (name, _) in medium.files() {
                medium.overwrite(&name, files.get(&name).cloned());
            }
        }
    }
    assert!(lost(&medium, &truth).is_empty());
}

#[test]
fn blocks_that_refer_to_a_missing_pack_are_stored_again() {
    let (medium, _) = subject();
    medium.overwrite("packs/00000001.pack", None);
    let store = on(&medium).unwrap();
    let hurt = check(&store).hurt_checkpoints();
    assert_eq!(hurt.len(), 4);
    let id = write_again(&store);
    assert!(!hurt.contains(&id));
    assert_eq!(check(&store).hurt_checkpoints(), hurt);
}

/// Only composed blocks refer to the pages, no map does. A check that reads no pages must read the
/// composed blocks.
#[test]
fn a_check_without_pages_finds_missing_references_of_composed_blocks() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
    let mut run = begin(&mut writer);
    shifted(&mut run, 2);
    for page in 0..11 {
        run.put_zero(PageIndex(page)).unwrap();
    }
    let id = seal(&mut run, RAM_PAGES).unwrap().id;
    run.finish().unwrap();
    drop(writer);
    let first_composed =
        records(&medium).into_iter().find(|(_, kind)| *kind == RecordKind::Composed).unwrap().0;
    assert!(first_composed.pack() > 1);
    let quick = |medium: &FaultyBackend| {
        let report = on(medium).unwrap().check(&CheckOptions::default(), &mut |_| {}).unwrap();
        report.hurt_checkpoints().into_iter().collect::<Vec<_>>()
    };
    assert_eq!(quick(&medium), []);
    medium.overwrite("packs/00000001.pack", None);
    assert_eq!(quick(&medium), [id]);
    assert!(read_blocks(&on(&medium).unwrap(), id).is_err());
}
