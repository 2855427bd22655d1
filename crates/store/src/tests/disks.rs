//! Disks in checkpoints, against a naive model: one content number for each block, or nothing if it
//! was never written.

use super::*;
use crate::{BaseMeta, BlockContent, DiskMeta, DiskState};
use proptest::prelude::*;

const RAM_PAGES: u64 = 8;
const BLOCKS: [u64; 2] = [50, 30];

/// Both disks' blocks, one behind the other.
type Disks = Vec<Option<u64>>;

fn disk_metas() -> Vec<DiskMeta> {
    let disk = |(n, blocks): (usize, &u64)| DiskMeta {
        name: format!("d{n}"),
        // The last block is a part of one.
        disk_bytes: blocks * PAGE_BYTES as u64 - 512,
        base: BaseMeta { path: "/base".into(), format: "raw".into(), files: Vec::new() },
        ..DiskMeta::default()
    };
    BLOCKS.iter().enumerate().map(disk).collect()
}

fn place(at: u64) -> (usize, u64) {
    if at < BLOCKS[0] { (0, at) } else { (1, at - BLOCKS[0]) }
}

fn assert_disks(store: &Store, id: CheckpointId, expected: &Disks) {
    let loaded = store.load_disks(id).unwrap();
    let mut known = 0;
    for (at, want) in (0u64..).zip(expected) {
        let (disk, block) = place(at);
        let number = PageIndex(loaded.meta.blocks_of(disk).unwrap().first.0 + block);
        let mut page = [7; PAGE_BYTES];
        let found = loaded.read_block(number, &mut page).unwrap();
        match want {
            None => assert_eq!(found, BlockContent::Base, "block {at} of checkpoint {id}"),
            Some(0) => assert_eq!(found, BlockContent::Zero, "block {at} of checkpoint {id}"),
            Some(n) => {
                assert!(found == BlockContent::Data && page == content(*n), "block {at} of {id}");
            }
        }
        known += u64::from(want.is_some());
        let next = (number.0..).zip(&expected[at as usize..]).find(|(_, c)| c.is_some());
        assert_eq!(loaded.next_block(number), next.map(|(n, _)| PageIndex(n)));
    }
    assert_eq!(loaded.known_blocks(), known);
}

#[derive(Clone, Debug)]
enum Op {
    Data(u64, u64),
    Zeros(u64, u64),
    Page(u64, u64),
    Seal,
    Abandon,
    /// A new run of the same disks.
    Anew,
    /// The disks of a checkpoint, one of the last.
    TakeOver(u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0u64..80, 1u64..9).prop_map(|(b, n)| Op::Data(b, n)),
        2 => (0u64..80, 1u64..40).prop_map(|(b, n)| Op::Zeros(b, n)),
        2 => (0u64..RAM_PAGES, 0u64..9).prop_map(|(p, n)| Op::Page(p, n)),
        3 => Just(Op::Seal),
        1 => Just(Op::Abandon),
        1 => Just(Op::Anew),
        2 => (0u64..4).prop_map(Op::TakeOver),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Each checkpoint gives back RAM and disks as they were put, over maps of several levels and
    /// checkpoints given up.
    #[test]
    fn disks_come_back(ops in prop::collection::vec(op(), 1..120)) {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::init(&dir.path().join("s")).unwrap();
        let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
        let mut run = writer.begin_run_with("vm", &layout(RAM_PAGES), disk_metas(), DiskState::default()).unwrap();
        let (mut ram, mut disks) = (vec![0; RAM_PAGES as usize], vec![None; 80]);
        let (mut sealed_ram, mut sealed_disks) = (ram.clone(), disks.clone());
        let mut sealed = Vec::new();
        for op in ops {
            match op {
                Op::Data(at, n) => {
                    let (disk, block) = place(at);
                    run.put_block(disk, block, &content(n)).unwrap();
                    disks[at as usize] = Some(n);
                }
                Op::Zeros(at, n) => {
                    let (disk, block) = place(at);
                    let n = n.min(BLOCKS[disk] - block);
                    run.put_zero_blocks(disk, block, n).unwrap();
                    disks[at as usize..(at + n) as usize].fill(Some(0));
                }
                Op::Page(page, n) => {
                    run.put_page(PageIndex(page), &content(n)).unwrap();
                    ram[page as usize] = n;
                }
                Op::Seal => {
                    let id = seal(&mut run, RAM_PAGES).unwrap().id;
                    sealed.push((id, ram.clone(), disks.clone()));
                    (sealed_ram, sealed_disks) = (ram.clone(), disks.clone());
                }
                Op::Anew => {
                    let state = run.disk_state();
                    run.finish().unwrap();
                    run = writer.begin_run_with("vm", &layout(RAM_PAGES), disk_metas(), state).unwrap();
                    (ram, disks) = (vec![0; RAM_PAGES as usize], sealed_disks.clone());
                    sealed_ram = ram.clone();
                }
                Op::TakeOver(back) => {
                    let of = sealed.len().checked_sub(1 + back as usize).and_then(|at| sealed.get(at));
                    if let Some((id, _, then)) = of {
                        run.put_disks_of(*id).unwrap();
                        disks.clone_from(then);
                    }
                }
                Op::Abandon => {
                    run.abandon();
                    (ram, disks) = (sealed_ram.clone(), sealed_disks.clone());
                }
            }
        }
        run.finish().unwrap();
        for (id, ram, disks) in &sealed {
            assert_image(&store, *id, ram);
            assert_disks(&store, *id, disks);
        }
        assert_clean(&store);
        // And in another store, some after the others.
        let target = init_on(&FaultyBackend::default()).unwrap();
        let ids = |odd: u64| sealed.iter().map(|(id, ..)| *id).filter(|id| id.0 % 3 > odd).collect();
        let mut copies = BTreeMap::new();
        for part in [1, 0] {
            let report = store.copy_tuned(&target, &ids(part), TINY, &mut |_| {}).unwrap();
            copies.extend(report.copied.iter().chain(&report.known).map(|copied| (copied.from, copied.to)));
        }
        for (id, ram, disks) in sealed.iter().filter(|(id, ..)| id.0 % 3 > 0) {
            assert_image(&target, copies[id], ram);
            assert_disks(&target, copies[id], disks);
        }
        prop_assert_eq!(target.ids().unwrap().len(), copies.len());
        assert_clean(&target);
    }
}

#[test]
fn blocks_are_found_in_ram_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::init(&dir.path().join("s")).unwrap();
    let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
    let mut run = writer
        .begin_run_with("vm", &layout(RAM_PAGES), disk_metas(), DiskState::default())
        .unwrap();
    run.put_page(PageIndex(0), &content(5)).unwrap();
    assert_eq!(run.put_block(1, 3, &content(5)).unwrap(), crate::PutOutcome::Dedup);
    run.put_block(1, 4, &content(7)).unwrap();
    run.put_zero_blocks(1, 10, 20).unwrap();
    let counts = seal(&mut run, RAM_PAGES).unwrap().meta.disks[1].counts;
    assert_eq!(
        (counts.written_blocks, counts.dedup_blocks, counts.stored_blocks, counts.zero_blocks),
        (22, 1, 1, 20)
    );
    assert_eq!(run.put_block(1, 4, &content(7)).unwrap(), crate::PutOutcome::Unchanged);
    let counts = seal(&mut run, RAM_PAGES).unwrap().meta.disks[1].counts;
    assert_eq!((counts.written_blocks, counts.unchanged_blocks), (1, 1));
    assert!(matches!(
        run.put_block(1, 30, &content(1)),
        Err(Error::BlockOutside { disk: 1, block: 30, .. })
    ));
    assert!(matches!(run.put_zero_blocks(0, 40, 11), Err(Error::BlockOutside { .. })));
    assert!(
        run.put_block(2, 0, &content(1)).is_err() && run.put_zero_blocks(0, u64::MAX, 2).is_err()
    );
}

#[test]
fn a_huge_disk_made_zero_costs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::init(&dir.path().join("s")).unwrap();
    let mut writer = store.lock_writer("test").unwrap();
    let huge = DiskMeta { disk_bytes: 2 << 40, ..disk_metas().remove(0) };
    let blocks = huge.blocks();
    let mut run =
        writer.begin_run_with("vm", &layout(RAM_PAGES), vec![huge], DiskState::default()).unwrap();
    for _ in 0..3 {
        run.put_zero_blocks(0, 0, blocks).unwrap();
        run.put_block(0, blocks / 2, &content(9)).unwrap();
        let sealed = seal(&mut run, RAM_PAGES).unwrap();
        assert!(sealed.meta.counts.map_bytes < 400, "{}", sealed.meta.counts.map_bytes);
        assert_eq!(store.load_disks(sealed.id).unwrap().known_blocks(), blocks);
    }
    let mut beyond = disk_metas();
    beyond[0].disk_bytes = u64::MAX;
    drop(run);
    assert!(matches!(
        writer.begin_run_with("vm", &layout(RAM_PAGES), beyond, DiskState::default()),
        Err(Error::DisksTooLarge)
    ));
}

#[test]
fn a_bad_record_of_a_disk_hurts_the_checkpoints_that_hold_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::init(&dir.path().join("s")).unwrap();
    let mut writer = store.lock_writer("test").unwrap();
    let mut run = writer
        .begin_run_with("vm", &layout(RAM_PAGES), disk_metas(), DiskState::default())
        .unwrap();
    seal(&mut run, RAM_PAGES).unwrap();
    run.put_block(0, 1, &content(11)).unwrap();
    let hurt = seal(&mut run, RAM_PAGES).unwrap().id;
    run.put_block(0, 1, &content(13)).unwrap();
    seal(&mut run, RAM_PAGES).unwrap();
    run.finish().unwrap();
    drop(writer);
    let pack = dir.path().join("s/packs/00000001.pack");
    let mut bytes = std::fs::read(&pack).unwrap();
    let at = bytes
        .windows(64)
        .position(|w| *w == content(11)[100..164])
        .expect("noise is stored as it is");
    bytes[at] ^= 1;
    std::fs::write(&pack, bytes).unwrap();
    let hurts = check(&Store::open(&dir.path().join("s")).unwrap()).hurt_checkpoints();
    assert_eq!(hurts.into_iter().collect::<Vec<_>>(), [hurt]);
}

#[test]
fn a_base_is_that_of_the_checkpoint_that_it_was_set_for() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::init(&dir.path().join("s")).unwrap();
    let mut writer = store.lock_writer("test").unwrap();
    let mut run = writer
        .begin_run_with("vm", &layout(RAM_PAGES), disk_metas(), DiskState::default())
        .unwrap();
    let first = seal(&mut run, RAM_PAGES).unwrap().id;
    run.set_base(1, BaseMeta::blank()).unwrap();
    assert!(matches!(run.set_base(2, BaseMeta::blank()), Err(Error::BlockOutside { disk: 2, .. })));
    let second = seal(&mut run, RAM_PAGES).unwrap().id;
    let blank = |id| {
        store.sealed(id).unwrap().meta.disks.iter().map(|d| d.base.is_blank()).collect::<Vec<_>>()
    };
    assert_eq!((blank(first), blank(second)), (vec![false, false], vec![false, true]));
}

/// RAM is plugged in or out, and the next run goes on with the same disks: their blocks follow the RAM.
#[test]
fn disks_stay_the_same_if_ram_grows_or_shrinks() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
    let begin = |writer: &mut crate::Writer, pages: u64, state| {
        writer.begin_run_with("vm", &layout(pages), disk_metas(), state).unwrap()
    };
    let mut disks: Disks = vec![None; 80];
    let mut run = begin(&mut writer, RAM_PAGES, DiskState::default());
    for (block, number) in [(0, 101), (49, 103), (50, 105), (79, 107)] {
        let (disk, at) = place(block);
        run.put_block(disk, at, &content(number)).unwrap();
        disks[block as usize] = Some(number);
    }
    run.put_zero_blocks(0, 20, 5).unwrap();
    disks[20..25].fill(Some(0));
    let first = seal(&mut run, RAM_PAGES).unwrap().id;
    for pages in [RAM_PAGES + 5, RAM_PAGES - 3] {
        let state = run.disk_state();
        run.finish().unwrap();
        run = begin(&mut writer, pages, state);
        let sealed = seal(&mut run, pages).unwrap().id;
        assert_disks(&store, sealed, &disks);
        // The same from a checkpoint with other RAM.
        run.put_disks_of(first).unwrap();
        let again = seal(&mut run, pages).unwrap().id;
        assert_disks(&store, again, &disks);
    }
    run.finish().unwrap();
    assert_clean(&store);
}
