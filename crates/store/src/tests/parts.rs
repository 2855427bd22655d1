//! Blocks of disks that are put together from sectors of RAM and of other blocks: exact, counted,
//! checked, and refused where they are not what a writer makes.

use super::*;
use crate::codec::PageCompressor;
use crate::composed::{Composition, PART_BYTES, PARTS, Part};
use crate::derived::Derivation;
use crate::identity::PageRef;
use crate::record::{Kind, Record, append_record};
use crate::{BaseMeta, BlockContent, DiskMeta, DiskState, Put, SectorCounts, Writer};
use proptest::prelude::*;
use std::collections::BTreeSet;

const RAM_PAGES: u64 = 12;
const BLOCKS: u64 = 16;

/// The content of a page: one number for each sector.
type Numbers = [u64; PARTS];

/// The page of such numbers: 0 is zeros, odd ones are noise, even ones compress.
fn mixed(numbers: Numbers) -> Page {
    let mut page = ZERO_PAGE;
    for (sector, number) in page.as_chunks_mut::<PART_BYTES>().0.iter_mut().zip(numbers) {
        let page = if number % 2 == 1 { noise(number) } else { content(number) };
        sector.copy_from_slice(&page[..PART_BYTES]);
    }
    page
}

/// A page of a file whose sectors count up, from sector `first` on.
fn file_page(first: u64) -> Page {
    let mut sectors = [0; PARTS];
    (first..).map(|n| 1001 + 2 * n).zip(&mut sectors).for_each(|(n, sector)| *sector = n);
    mixed(sectors)
}

fn disk() -> DiskMeta {
    let base = BaseMeta { path: "/base".into(), format: "raw".into(), files: Vec::new() };
    DiskMeta {
        name: "d".into(),
        disk_bytes: BLOCKS * PAGE_BYTES as u64,
        base,
        ..DiskMeta::default()
    }
}

fn begin(writer: &mut Writer) -> Run {
    writer.begin_run_with("vm", &layout(RAM_PAGES), vec![disk()], DiskState::default()).unwrap()
}

/// What the store gives back for the blocks of a checkpoint's disk.
fn read_blocks(store: &Store, id: CheckpointId) -> Result<Vec<Option<Page>>> {
    let loaded = store.load_disks(id)?;
    let first = loaded.meta.blocks_of(0).unwrap().first.0;
    let block = |block| {
        let mut page = ZERO_PAGE;
        let found = loaded.read_block(PageIndex(first + block), &mut page)?;
        Ok((found != BlockContent::Base).then_some(page))
    };
    (0..BLOCKS).map(block).collect()
}

/// The records of the store's packs, in order.
fn records(medium: &FaultyBackend) -> Vec<(PageRef, Kind)> {
    let mut found = Vec::new();
    for (name, bytes) in medium.files() {
        let Some(number) =
            name.strip_prefix("packs/").and_then(keyframe_store_backend::layout::parse_pack)
        else {
            continue;
        };
        let mut at = crate::record::PACK_HEADER_BYTES;
        while let Ok(record) = Record::parse(&bytes[at..], PageRef::new(number, at as u64)) {
            found.push((PageRef::new(number, at as u64), record.kind));
            at += record.len_bytes();
        }
    }
    found
}

/// A file of 11 pages in RAM, and the same on disk, shifted by `shift` sectors.
fn shifted(run: &mut Run, shift: u64) -> Vec<Page> {
    for page in 0..11 {
        run.put_page(PageIndex(page), &file_page(page * 8)).unwrap();
    }
    let blocks: Vec<Page> = (0..10).map(|block| file_page(block * 8 + shift)).collect();
    for (block, page) in (0..).zip(&blocks) {
        run.put_block(0, block, page).unwrap();
    }
    blocks
}

#[test]
fn a_file_shifted_against_its_page_cache_costs_next_to_nothing() {
    for shift in 1..8 {
        let medium = FaultyBackend::default();
        let store = init_on(&medium).unwrap();
        // With a table so large that no sector meets a full bucket.
        let mut writer = store.lock_writer("test").unwrap();
        let mut run = begin(&mut writer);
        let blocks = shifted(&mut run, shift);
        let sealed = seal(&mut run, RAM_PAGES).unwrap();
        let counts = sealed.meta.disks[0].counts;
        assert_eq!(
            (counts.stored_blocks, counts.composed_blocks, counts.dedup_blocks),
            (10, 10, 0)
        );
        // The header, the two masks, two records, eight parts.
        assert_eq!(counts.stored_bytes, 10 * (28 + 3 + 16 + 8));
        assert_eq!(
            counts.sectors,
            SectorCounts { against_ram_part_sectors: 80, ..SectorCounts::default() }
        );
        let back = read_blocks(&store, sealed.id).unwrap();
        assert!(
            back.iter().zip(&blocks).all(|(is, want)| *is == Some(*want)),
            "shifted by {shift}"
        );
        run.finish().unwrap();
        assert_clean(&store);
    }
}

#[test]
fn sectors_are_found_in_blocks_and_in_what_earlier_writers_stored() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut writer = store.lock_writer("test").unwrap();
    let mut run = begin(&mut writer);
    run.put_block(0, 0, &file_page(0)).unwrap();
    run.put_block(0, 1, &file_page(8)).unwrap();
    run.put_block(0, 2, &file_page(4)).unwrap();
    let counts = seal(&mut run, RAM_PAGES).unwrap().meta.disks[0].counts;
    assert_eq!(
        (counts.sectors.against_disk_part_sectors, counts.sectors.not_deduplicated_sectors),
        (8, 16)
    );
    drop((run, writer));
    // The next writer knows the sectors of what its own run has put: here RAM, as a whole found in
    // blocks of the disk.
    let mut writer = store.lock_writer("test").unwrap();
    let mut run = begin(&mut writer);
    assert_eq!(run.put_page(PageIndex(0), &file_page(0)).unwrap(), Put::Dedup);
    assert_eq!(run.put_page(PageIndex(1), &file_page(8)).unwrap(), Put::Dedup);
    run.put_block(0, 0, &file_page(5)).unwrap();
    run.put_block(0, 1, &file_page(4)).unwrap();
    let sealed = seal(&mut run, RAM_PAGES).unwrap();
    assert_eq!((sealed.meta.counts.dedup_pages, sealed.meta.counts.dedup_disk_pages), (2, 2));
    let counts = sealed.meta.disks[0].counts;
    let sectors = SectorCounts {
        against_disk_part_sectors: 8,
        against_disk_whole_sectors: 8,
        ..SectorCounts::default()
    };
    assert_eq!((counts.composed_blocks, counts.dedup_blocks, counts.sectors), (1, 1, sectors));
    let back = read_blocks(&store, sealed.id).unwrap();
    assert_eq!(back[..2], [Some(file_page(5)), Some(file_page(4))]);
    run.finish().unwrap();
    assert_clean(&store);
    let stats = store.stats().unwrap();
    assert_eq!((stats.dedup_disk_pages, stats.disk_sectors.against_disk.parts.sectors), (2, 16));
    assert_eq!(stats.disk_sectors.against_disk.whole.bytes, 4096);
}

#[test]
fn what_does_not_pay_is_stored_as_it_is() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut writer =
        store.lock_writer_tuned("test", Tuning { sector_parts_min: 3, ..TINY }).unwrap();
    let mut run = begin(&mut writer);
    run.put_page(PageIndex(0), &mixed([1, 3, 5, 7, 9, 11, 13, 15])).unwrap();
    let (mut page, mut block) = (mixed([2, 0, 0, 0, 0, 0, 4, 6]), ZERO_PAGE);
    page[512..1024].fill(7);
    block[..1536].fill(7);
    run.put_page(PageIndex(1), &page).unwrap();
    // Too few; and enough, but so well compressed that references save nothing.
    run.put_block(0, 0, &mixed([1, 3, 0, 21, 23, 25, 27, 29])).unwrap();
    run.put_block(0, 1, &block).unwrap();
    run.put_block(0, 2, &mixed([1, 3, 5, 31, 33, 35, 37, 39])).unwrap();
    let counts = seal(&mut run, RAM_PAGES).unwrap().meta.disks[0].counts;
    let expected = SectorCounts {
        zero_sectors: 1 + 5,
        not_deduplicated_sectors: 7 + 3 + 5,
        against_ram_part_sectors: 3,
        ..SectorCounts::default()
    };
    assert_eq!((counts.composed_blocks, counts.sectors), (1, expected));
    // Without memory for it none is looked for.
    drop((run, writer));
    let mut writer =
        store.lock_writer_tuned("test", Tuning { sector_index_bytes: 0, ..TINY }).unwrap();
    let mut run = begin(&mut writer);
    shifted(&mut run, 3);
    assert_eq!(seal(&mut run, RAM_PAGES).unwrap().meta.disks[0].counts.composed_blocks, 0);
}

#[derive(Clone, Debug)]
enum Op {
    Page(u64, Numbers),
    Block(u64, Numbers),
    Seal,
    Abandon,
    Anew,
    Reopen,
}

fn op() -> impl Strategy<Value = Op> {
    // Few sectors, so that they meet again; often in rows, as files have them.
    let rows = (0u64..40).prop_map(|first| std::array::from_fn(|n| 41 + first + n as u64));
    let numbers = || prop_oneof![3 => rows.clone(), 1 => prop::array::uniform8(0u64..20)];
    prop_oneof![
        4 => (0..RAM_PAGES, numbers()).prop_map(|(page, n)| Op::Page(page, n)),
        6 => (0..BLOCKS, numbers()).prop_map(|(block, n)| Op::Block(block, n)),
        3 => Just(Op::Seal),
        1 => Just(Op::Abandon),
        1 => Just(Op::Anew),
        1 => Just(Op::Reopen),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    /// Each checkpoint gives back every byte, over runs, writers and packs that stay unfinished;
    /// every sector is counted once.
    #[test]
    fn every_sector_comes_back(ops in prop::collection::vec(op(), 1..120), forgetful in any::<bool>()) {
        let medium = FaultyBackend::default();
        let store = init_on(&medium).unwrap();
        let tuning = Tuning { sector_index_bytes: if forgetful { 4096 } else { 1 << 20 }, ..TINY };
        let blank = (vec![ZERO_PAGE; RAM_PAGES as usize], vec![None; BLOCKS as usize]);
        let (mut now, mut then, mut sealed) = (blank.clone(), blank.clone(), BTreeMap::new());
        let mut writer = store.lock_writer_tuned("test", tuning).unwrap();
        let mut run = begin(&mut writer);
        for op in ops {
            match op {
                Op::Page(page, n) => {
                    run.put_page(PageIndex(page), &mixed(n)).unwrap();
                    now.0[page as usize] = mixed(n);
                }
                Op::Block(block, n) => {
                    run.put_block(0, block, &mixed(n)).unwrap();
                    now.1[block as usize] = Some(mixed(n));
                }
                Op::Seal => {
                    let done = seal(&mut run, RAM_PAGES).unwrap();
                    let counts = done.meta.disks[0].counts;
                    let s = counts.sectors;
                    let sum = s.zero_sectors + s.unchanged_sectors + s.not_deduplicated_sectors
                        + s.against_disk_whole_sectors + s.against_disk_part_sectors
                        + s.against_ram_whole_sectors + s.against_ram_part_sectors;
                    prop_assert_eq!(sum, 8 * counts.written_blocks);
                    then = now.clone();
                    sealed.insert(done.id, now.clone());
                }
                Op::Abandon => {
                    run.abandon();
                    now = then.clone();
                }
                Op::Anew => {
                    run.finish().unwrap();
                    run = begin(&mut writer);
                    (now, then) = (blank.clone(), blank.clone());
                }
                Op::Reopen => {
                    drop((run, writer));
                    writer = store.lock_writer_tuned("test", tuning).unwrap();
                    run = begin(&mut writer);
                    (now, then) = (blank.clone(), blank.clone());
                }
            }
        }
        run.finish().unwrap();
        let store = on(&medium).unwrap();
        for (id, (ram, blocks)) in &sealed {
            let pages = read_image(&store.load(*id).unwrap()).unwrap();
            let expected = (0u64..).zip(ram).filter(|(_, page)| **page != ZERO_PAGE).map(|(n, page)| (n, *page));
            prop_assert!(pages == expected.collect(), "RAM of checkpoint {}", id);
            prop_assert!(&read_blocks(&store, *id).unwrap() == blocks, "disk of checkpoint {}", id);
        }
        assert_clean(&store);
    }
}

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

/// Writes all of these blocks again, and sees that they are there. Returns the checkpoint.
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

fn assert_told(
    medium: &FaultyBackend,
    truth: &BTreeMap<CheckpointId, Vec<Option<Page>>>,
    what: &str,
) {
    let Ok(store) = on(medium) else { return };
    let report = check(&store);
    assert_eq!(report.hurt_checkpoints(), lost(medium, truth), "{what}: {report:#?}");
}

#[test]
fn every_flipped_bit_of_composed_records_is_told_and_blamed_on_the_right_checkpoints() {
    let (medium, truth) = subject();
    let kinds: Vec<Kind> = records(&medium).iter().map(|(_, kind)| *kind).collect();
    assert_eq!(kinds.iter().filter(|kind| **kind == Kind::Composed).count(), 4, "{kinds:?}");
    assert!(lost(&medium, &truth).is_empty());
    let baseline = check(&on(&medium).unwrap());
    assert!(baseline.is_clean(), "{baseline:#?}");
    for (name, bytes) in medium.files().into_iter().filter(|(name, _)| name.starts_with("packs/")) {
        for at in (0..bytes.len()).filter(|at| *at < 200 || at % 31 == 0 || *at + 700 > bytes.len())
        {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << (at % 8);
            medium.overwrite(&name, Some(flipped));
            assert_told(&medium, &truth, &format!("{name}, byte {at}"));
            let report = check(&on(&medium).unwrap());
            assert!(
                !report.is_clean() || report.notes != baseline.notes,
                "{name}, byte {at}: not noticed"
            );
        }
        for len in (0..bytes.len()).step_by(397) {
            medium.overwrite(&name, Some(bytes[..len].to_vec()));
            assert_told(&medium, &truth, &format!("{name} cut to {len} bytes"));
        }
        medium.overwrite(&name, None);
        assert_told(&medium, &truth, &format!("{name} is gone"));
        // Where the pack that others refer to is gone, a check that reads no pages sees that too.
        let quick = on(&medium).unwrap().check(&CheckOptions::default(), &mut |_| {}).unwrap();
        assert_eq!(quick.hurt_checkpoints(), lost(&medium, &truth), "{name} is gone: {quick:#?}");
        medium.overwrite(&name, Some(bytes));
    }
}

/// Writes another composition in the place of that of the record at `at`, as a writer would that
/// errs: all checks hold.
fn recompose(medium: &FaultyBackend, at: PageRef, change: impl FnOnce(&mut [Part; PARTS])) {
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
    append_record(&mut new, at, hash, Kind::Composed, (codec, &payload));
    assert_eq!(new.len(), len, "the records behind it stay where they are");
    bytes[offset..offset + len].copy_from_slice(&new);
    medium.overwrite(&name, Some(bytes));
}

/// All references of the record go to other records, in the same order.
fn refer_to(parts: &mut [Part; PARTS], to: [PageRef; 2]) {
    let old = Composition(*parts).records();
    assert_eq!(old.len(), 2);
    for part in parts {
        if let Part::Of(record, _) = part {
            *record = to[usize::from(*record == old[1])];
        }
    }
}

#[test]
fn chains_circles_and_references_to_nowhere_are_damage_and_no_more() {
    let (medium, truth) = subject();
    let all = records(&medium);
    let composed: Vec<PageRef> =
        all.iter().filter(|(_, k)| *k == Kind::Composed).map(|(at, _)| *at).collect();
    let plain: Vec<PageRef> =
        all.iter().filter(|(_, k)| *k == Kind::Page).map(|(at, _)| *at).collect();
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
            assert_told(&medium, &truth, what);
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
fn what_stands_on_a_pack_that_is_gone_is_stored_anew() {
    let (medium, _) = subject();
    medium.overwrite("packs/00000001.pack", None);
    let store = on(&medium).unwrap();
    let hurt = check(&store).hurt_checkpoints();
    assert_eq!(hurt.len(), 4);
    let id = write_again(&store);
    assert!(!hurt.contains(&id));
    assert_eq!(check(&store).hurt_checkpoints(), hurt);
}

/// No map refers to the pages any more, only composed blocks do: a check that reads no pages must
/// look at those.
#[test]
fn a_check_that_reads_no_pages_sees_that_what_blocks_refer_to_is_gone() {
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
        records(&medium).into_iter().find(|(_, kind)| *kind == Kind::Composed).unwrap().0;
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

/// Pages and blocks of a session; blocks are shifted against the pages.
fn play(
    store: &Store,
    salt: u64,
    truth: &mut BTreeMap<CheckpointId, Vec<Option<Page>>>,
    retry: bool,
) -> Result<()> {
    let mut writer = match store.lock_writer_tuned("test", TINY) {
        Err(_) if retry => store.lock_writer_tuned("test", TINY)?,
        other => other?,
    };
    let mut run =
        writer.begin_run_with("vm", &layout(RAM_PAGES), vec![disk()], DiskState::default())?;
    let mut blocks = vec![None; BLOCKS as usize];
    for epoch in 0..4 {
        let put = |run: &mut Run, blocks: &mut Vec<Option<Page>>| {
            for page in 0..3 {
                run.put_page(PageIndex(page), &file_page(salt + epoch * 40 + page * 8))?;
            }
            for block in 0..3 {
                let page = file_page(salt + epoch * 40 + block * 8 + 3);
                run.put_block(0, epoch + block, &page)?;
                blocks[(epoch + block) as usize] = Some(page);
            }
            seal(run, RAM_PAGES)
        };
        let sealed = match put(&mut run, &mut blocks) {
            Err(_) if retry => {
                run.abandon();
                put(&mut run, &mut blocks)?
            }
            other => other?,
        };
        truth.insert(sealed.id, blocks.clone());
    }
    match run.finish() {
        Err(_) if retry => Ok(()),
        other => other,
    }
}

fn assert_sealed(
    medium: &FaultyBackend,
    truth: &BTreeMap<CheckpointId, Vec<Option<Page>>>,
    context: &str,
) {
    let store = on(medium).unwrap();
    for (id, blocks) in truth {
        let back =
            read_blocks(&store, *id).unwrap_or_else(|e| panic!("{context}: checkpoint {id}: {e}"));
        assert!(back == *blocks, "{context}: checkpoint {id}");
    }
    let report = check(&store);
    assert!(report.is_clean(), "{context}: {report:#?}");
}

#[test]
fn a_crash_at_any_operation_loses_no_sealed_block() {
    for operation in 1.. {
        let medium = FaultyBackend::default();
        let store = init_on(&medium).unwrap();
        medium.crash_at(operation);
        let mut truth = BTreeMap::new();
        let ended = play(&store, 0, &mut truth, false);
        if !medium.has_crashed() {
            assert!(operation > 50 && ended.is_ok(), "{operation}: {ended:?}");
            assert!(records(&medium).iter().any(|(_, kind)| *kind == Kind::Composed));
            break;
        }
        for seed in 0..3 {
            let after = medium.after_power_loss(seed * 1000 + operation);
            let context = format!("power loss at operation {operation}, seed {seed}");
            assert_sealed(&after, &truth, &context);
            // The same content again, and some more: nothing that is gone is referred to.
            let mut more = truth.clone();
            play(&on(&after).unwrap(), 0, &mut more, false).unwrap();
            play(&on(&after).unwrap(), 5, &mut more, false).unwrap();
            assert_sealed(&after.after_power_loss(1), &more, &context);
        }
    }
}

#[test]
fn a_failed_sync_leaves_no_reference_to_what_it_lost() {
    for sync in 1.. {
        let medium = FaultyBackend::default();
        let store = init_on(&medium).unwrap();
        medium.fail_sync_at(sync);
        let mut truth = BTreeMap::new();
        play(&store, 0, &mut truth, true).unwrap_or_else(|e| panic!("sync {sync}: {e}"));
        for seed in 0..3 {
            assert_sealed(
                &medium.after_power_loss(seed),
                &truth,
                &format!("sync {sync} failed, seed {seed}"),
            );
        }
        if medium.syncs() < sync {
            assert!(sync > 20, "only {sync} syncs");
            break;
        }
    }
}
