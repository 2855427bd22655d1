//! Deltas: pages that change a little. Their size, and their content.

use super::*;
use crate::open_store::OpenStore;
use crate::{PruneOptions, PutOutcome};
use keyframe_store_backend::layout;
use keyframe_store_format::page_ref::PACK_HEADER_BYTES;
use keyframe_store_format::record::RecordKind;
use keyframe_units::PageSet;
use proptest::prelude::*;

const PAGES: u64 = 12;

/// Room for the bases of all pages.
pub const ROOMY: Tuning = Tuning { base_bytes: 1 << 20, pack_bytes_max: 1 << 30, ..TINY };

/// How many records there are of each kind.
pub fn kinds(store: &Store) -> BTreeMap<char, usize> {
    kinds_in(store.inner())
}

pub fn kinds_in(inner: &OpenStore) -> BTreeMap<char, usize> {
    let mut counts = BTreeMap::new();
    for file in inner.backend.list(layout::PACKS).unwrap() {
        // The writer of a pack without a header died.
        let Ok(pack) = inner.open_pack(layout::parse_pack(&file).unwrap()) else { continue };
        let end = pack.file.len_bytes().unwrap();
        pack.walk(inner, pack.first, end, &mut |entry| {
            // A record with a missing reference is not needed.
            let Ok(entry) = entry else { return };
            let letter = match entry.kind() {
                RecordKind::Page => 'P',
                RecordKind::Block => 'B',
                RecordKind::Composed => 'C',
                RecordKind::Delta => 'D',
            };
            *counts.entry(letter).or_default() += 1;
        });
    }
    counts
}

/// The page after so many seconds: some counters run, and from `drifts` on they leave their old
/// values behind.
pub fn counting(seconds: u64, drifts: bool) -> Page {
    let mut page = noise(7);
    for at in 0..seconds * 40 {
        if drifts {
            page[(at * 97 % 4096) as usize] ^= 0x5a;
        }
    }
    page[..8].copy_from_slice(&seconds.to_le_bytes());
    page[2000..2008].copy_from_slice(&(seconds * 7919).to_le_bytes());
    page
}

fn stored(put: PutOutcome) -> u64 {
    match put {
        PutOutcome::Stored { bytes } => bytes,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_page_that_keeps_changing_a_few_words_costs_tens_of_bytes() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut writer = store.lock_writer_tuned("test", ROOMY).unwrap();
    let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
    let mut ids = Vec::new();
    for second in 0..50 {
        let bytes = stored(run.put_page(PageIndex(3), &counting(second, false)).unwrap());
        assert!(
            if second == 0 { bytes > 4096 } else { bytes < 80 },
            "{bytes} bytes in second {second}"
        );
        ids.push(seal(&mut run, PAGES).unwrap().id);
    }
    // What it was before is known.
    assert_eq!(run.put_page(PageIndex(4), &counting(17, false)).unwrap(), PutOutcome::Dedup);
    run.finish().unwrap();
    for (second, id) in (0..).zip(&ids) {
        assert!(
            read_image(&store.load(*id).unwrap()).unwrap()[&3] == counting(second, false),
            "second {second}"
        );
    }
    assert_eq!(kinds(&store), BTreeMap::from([('P', 1), ('D', 49)]));
    assert_clean(&store);
}

#[test]
fn a_page_that_drifts_away_gets_a_new_base_now_and_then() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut writer = store.lock_writer_tuned("test", ROOMY).unwrap();
    let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
    let mut total = 0;
    for second in 0..60 {
        total += stored(run.put_page(PageIndex(3), &counting(second, true)).unwrap());
        let id = seal(&mut run, PAGES).unwrap().id;
        assert!(
            read_image(&store.load(id).unwrap()).unwrap()[&3] == counting(second, true),
            "second {second}"
        );
    }
    run.finish().unwrap();
    let kinds = kinds(&store);
    assert!(kinds[&'P'] > 3 && kinds[&'D'] > 30, "{kinds:?}");
    assert!(total < 60 * 4096 / 3, "{total} bytes");
}

#[test]
fn the_next_run_makes_deltas_on_records_of_the_previous_one() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    for session in 0..4u64 {
        let mut writer = store.lock_writer_tuned("test", ROOMY).unwrap();
        let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
        // Known from the second session on; a delta itself from the third on.
        run.put_page(PageIndex(3), &counting(session.saturating_sub(1), false)).unwrap();
        seal(&mut run, PAGES).unwrap();
        let put = run.put_page(PageIndex(3), &counting(session, false)).unwrap();
        assert!(session == 0 || stored(put) < 80, "{put:?} in session {session}");
        let id = seal(&mut run, PAGES).unwrap().id;
        assert!(read_image(&store.load(id).unwrap()).unwrap()[&3] == counting(session, false));
        // Left as a killed engine leaves it, now and then.
        if session % 2 == 0 {
            run.finish().unwrap();
        }
    }
    assert_eq!(kinds(&store), BTreeMap::from([('P', 1), ('D', 3)]));
    assert_clean(&store);
}

#[test]
fn a_delta_whose_base_was_damaged_is_an_error_and_is_not_relied_on_again() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut writer = store.lock_writer_tuned("test", ROOMY).unwrap();
    let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
    let mut ids = Vec::new();
    for second in 0..3 {
        run.put_page(PageIndex(3), &counting(second, false)).unwrap();
        ids.push(seal(&mut run, PAGES).unwrap().id);
    }
    run.finish().unwrap();
    drop(writer);
    let mut bytes = medium.files()["packs/00000001.pack"].clone();
    bytes[PACK_HEADER_BYTES + 1000] ^= 1;
    medium.overwrite("packs/00000001.pack", Some(bytes));
    let store = on(&medium).unwrap();
    for id in &ids {
        let error = read_image(&store.load(*id).unwrap()).unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }), "{error}");
    }
    assert!(!check(&store).is_clean());
    // The same content is stored again, and intact.
    let mut writer = store.lock_writer_tuned("test", ROOMY).unwrap();
    let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
    assert!(stored(run.put_page(PageIndex(3), &counting(2, false)).unwrap()) > 4096);
    let id = seal(&mut run, PAGES).unwrap().id;
    assert!(read_image(&store.load(id).unwrap()).unwrap()[&3] == counting(2, false));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Any number of threads, and any budget for bases, down to none.
    #[test]
    fn threads_and_budgets_change_nothing_in_what_comes_back(
        seconds in prop::collection::vec(prop::collection::vec((0..3000u64, 0u64..100), 0..2500), 1..5),
        encode_threads in 1usize..4, base_bytes in prop_oneof![Just(0usize), Just(40 << 10), Just(32 << 20)],
    ) {
        let medium = FaultyBackend::default();
        let store = init_on(&medium).unwrap();
        let tuning = Tuning { encode_threads, base_bytes, buffer_bytes: 100_000, ..ROOMY };
        let mut writer = store.lock_writer_tuned("test", tuning).unwrap();
        let mut run = writer.begin_run("vm", &layout(3000)).unwrap();
        let mut image: Image = vec![0; 3000];
        let mut sealed = Vec::new();
        for second in &seconds {
            let mut dirty = PageSet::new(3000);
            for (page, number) in second {
                dirty.insert(PageIndex(*page));
                image[*page as usize] = *number;
            }
            let pages: Vec<(PageIndex, Page)> =
                dirty.iter().map(|page| (page, content(image[page.0 as usize]))).collect();
            let pages: Vec<(PageIndex, &Page)> = pages.iter().map(|(page, content)| (*page, content)).collect();
            let mut told = 0;
            run.put_pages(&pages, &mut |_, _| told += 1).unwrap();
            prop_assert_eq!(told, pages.len());
            let sealed_now = seal(&mut run, 3000).unwrap();
            let counts = &sealed_now.meta.counts;
            prop_assert_eq!(counts.dirty_pages, pages.len() as u64);
            sealed.push((sealed_now.id, image.clone()));
        }
        run.finish().unwrap();
        for (id, image) in &sealed {
            assert_image(&store, *id, image);
        }
        assert_clean(&store);
    }
}

/// Each record is in a pack of its own; what deltas stand on no image shows any more.
#[test]
fn a_read_that_fails_once_costs_no_record_that_others_refer_to() {
    let page = |page: u64, second: u64| {
        let mut now = content(2 * page + 1);
        now[8..16].copy_from_slice(&second.to_le_bytes());
        now
    };
    let base = FaultyBackend::default();
    let store = init_on(&base).unwrap();
    let tuning = Tuning { pack_bytes_max: 1, ..ROOMY };
    let mut writer = store.lock_writer_tuned("test", tuning).unwrap();
    let mut run = writer.begin_run("vm", &layout(8)).unwrap();
    let mut last = CheckpointId(0);
    for second in 1..4 {
        for at in 0..8 {
            run.put_page(PageIndex(at), &page(at, second)).unwrap();
        }
        last = seal(&mut run, 8).unwrap().id;
    }
    // The process dies: the last delta is in a pack without an index, which a prune reads.
    drop((run, writer));
    assert!(kinds(&store).get(&'D').is_some_and(|n| *n >= 16));
    store.forget(&store.ids().unwrap().into_iter().filter(|id| *id != last).collect()).unwrap();
    let expected: BTreeMap<u64, Page> = (0..8).map(|at| (at, page(at, 3))).collect();
    let options = PruneOptions { max_unused: 0.0, ..PruneOptions::default() };
    let (mut read, mut cut_off) = (1, 0);
    loop {
        let medium = base.copy();
        let store = on(&medium).unwrap();
        let before = medium.reads();
        medium.fail_read_in(read);
        cut_off += u64::from(store.prune_tuned(&options, TINY, &mut |_| {}).is_err());
        let reads = medium.reads() - before;
        medium.calm();
        let store = on(&medium).unwrap();
        let image = store.load(last).and_then(|loaded| read_image(&loaded));
        assert!(image.unwrap_or_else(|e| panic!("read {read}: {e}")) == expected, "read {read}");
        assert_clean(&store);
        if reads < read {
            break;
        }
        read += 1;
    }
    assert!(read > 20 && cut_off > 5, "{read} reads, {cut_off} of them cut a prune off");
}
