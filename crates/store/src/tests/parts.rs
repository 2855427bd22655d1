//! Composed blocks: made from sectors of RAM and of other blocks. They come back exactly and are
//! counted.

mod damage;

use super::*;
use crate::{BaseMeta, BlockContent, DiskMeta, DiskState, PutOutcome, SectorCounts, Writer};
use keyframe_store_format::composed::{PART_BYTES, PARTS};
use keyframe_store_format::page_ref::PageRef;
use keyframe_store_format::record::{Record, RecordKind};
use proptest::prelude::*;

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
fn records(medium: &FaultyBackend) -> Vec<(PageRef, RecordKind)> {
    let mut found = Vec::new();
    for (name, bytes) in medium.files() {
        let Some(number) =
            name.strip_prefix("packs/").and_then(keyframe_store_backend::layout::parse_pack)
        else {
            continue;
        };
        let mut at = keyframe_store_format::page_ref::PACK_HEADER_BYTES;
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
    assert_eq!(run.put_page(PageIndex(0), &file_page(0)).unwrap(), PutOutcome::Dedup);
    assert_eq!(run.put_page(PageIndex(1), &file_page(8)).unwrap(), PutOutcome::Dedup);
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
fn blocks_with_few_known_sectors_are_stored_plain() {
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
            assert!(records(&medium).iter().any(|(_, kind)| *kind == RecordKind::Composed));
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
