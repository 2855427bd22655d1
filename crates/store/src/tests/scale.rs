//! Maps at the size of a 64 GiB guest with a checkpoint each second: their bytes follow the dirty
//! pages, and a reader reads few of them.
//!
//! Uses the writer's rule ([`Chain`]) and files ([`MapRun`]), with references that a pack would
//! have, and without pages. docs/design/scale.md calculates a whole day.

use super::*;
use crate::chain::{Chain, Changes};
use keyframe_store_backend::testing::SeededRandom;
use keyframe_store_format::disk_map::DiskMap;
use keyframe_store_format::identity::StoreId;
use keyframe_store_format::map_run::{MapHeader, MapRun};
use keyframe_store_format::page_map::PageMap;
use keyframe_store_format::page_ref::PageRef;

const GUEST_PAGES: u64 = 16 << 20;
const DIRTY_PAGES: u64 = 20_000;
const BASE: u64 = 16;
const STORE: StoreId = StoreId([1; 16]);

/// What was written of a run.
struct Written {
    /// By number of the checkpoint: its map, the pages in it, and its chain.
    maps: Vec<(Vec<u8>, usize, Vec<u64>)>,
    /// The whole map at some of them.
    truth: BTreeMap<u64, PageMap>,
}

/// Pages that are written in a second: most of them in a hot set, the others anywhere.
fn dirty(space: u64, chance: &mut SeededRandom) -> Changes {
    let mut changed = Changes::none(space);
    while changed.pages.len() < DIRTY_PAGES {
        let anywhere = chance.next_u64().is_multiple_of(5);
        let page = if anywhere {
            chance.next_u64() % space
        } else {
            chance.next_u64() % 50_000 * (space / 50_000)
        };
        changed.pages.insert(PageIndex(page));
    }
    changed
}

/// As `Run` does it.
fn write(space: u64, checkpoints: u64, kept: &[u64]) -> Written {
    let (mut chain, mut chance) = (Chain::new(BASE, space), SeededRandom(space));
    let (mut now, mut place) = (PageMap::default(), PageRef::new(1, 64).0);
    let mut written = Written { maps: Vec::new(), truth: BTreeMap::new() };
    for k in 0..checkpoints {
        let mut changed = dirty(space, &mut chance);
        if k == 0 {
            // What was in use when the run began: a part of the guest, so that the test is cheap.
            for page in 0..200_000 {
                changed.pages.insert(PageIndex(page * (space / 200_000)));
            }
        }
        for page in changed.pages.iter() {
            now.set(page, PageRef(place));
            place += 60 + chance.next_u64() % 3000;
        }
        let plan = chain.plan(&changed, now.nonzero_pages());
        let header = MapHeader {
            id: k + 1,
            parent: plan.below.first().copied(),
            run: [2; 16],
            space_pages: space,
        };
        let map = match &plan.changed {
            None => MapRun::new(header, now.iter()),
            Some(changed) => {
                MapRun::new(header, changed.pages.iter().map(|page| (page, now.get(page))))
            }
        };
        let mut ids = vec![k + 1];
        ids.extend(plan.below);
        written.maps.push((map.encode(STORE), map.refs().len(), ids.clone()));
        chain.commit(&ids, &changed);
        if kept.contains(&k) {
            written.truth.insert(k, now.clone());
        }
    }
    written
}

/// One, and the digits of the number.
fn maps_max(k: u64) -> usize {
    let digits =
        std::iter::successors(Some(k), |rest| Some(rest / BASE)).take_while(|rest| *rest > 0);
    1 + digits.map(|rest| (rest % BASE) as usize).sum::<usize>()
}

#[test]
fn maps_of_a_64_gib_guest_follow_its_dirty_pages_and_are_read_in_few_steps() {
    let kept = [15, 16, 271];
    let big = write(GUEST_PAGES, 272, &kept);
    let mut levels = BTreeMap::<u32, (u64, u64, u64)>::new();
    for (k, (bytes, pages, chain)) in (1u64..).zip(&big.maps[1..]) {
        assert!(bytes.len() < pages * 8 + 300, "map {k}: {} bytes for {pages} pages", bytes.len());
        assert!(chain.len() <= maps_max(k), "{k} reads {} maps", chain.len());
        let level = (1..6).take_while(|level| k.is_multiple_of(BASE.pow(*level))).count() as u32;
        let sum = levels.entry(level).or_default();
        *sum = (sum.0 + 1, sum.1 + *pages as u64, sum.2 + bytes.len() as u64);
        // A level's map says each page once, however often it was written.
        assert!(*pages as u64 <= DIRTY_PAGES * BASE.pow(level));
    }
    for (level, (maps, pages, bytes)) in &levels {
        println!(
            "level {level}: {maps} maps, {} pages and {} bytes each",
            pages / maps,
            bytes / maps
        );
    }
    for k in kept {
        let (mut found, mut disks) = (PageMap::default(), DiskMap::default());
        let chain = &big.maps[k as usize].2;
        for id in chain.iter().rev() {
            MapRun::decode(&big.maps[*id as usize - 1].0, STORE, *id, "m").unwrap().apply(
                GUEST_PAGES,
                &mut found,
                &mut disks,
            );
        }
        assert!(found.iter().eq(big.truth[&k].iter()), "checkpoint {k}");
    }
}

#[test]
fn maps_do_not_grow_with_ram() {
    let bytes = |space| -> usize {
        write(space, 18, &[]).maps[1..].iter().map(|(bytes, ..)| bytes.len()).sum()
    };
    let (big, small) = (bytes(GUEST_PAGES), bytes(GUEST_PAGES / 16));
    assert!(big < small * 3 / 2, "{big} bytes of maps with 64 GiB, {small} with 4 GiB");
    // Nothing was written: nothing but the header is there.
    let header = MapHeader { id: 2, parent: Some(1), run: [0; 16], space_pages: GUEST_PAGES };
    assert!(MapRun::new(header, std::iter::empty()).encode(STORE).len() < 200);
}

/// The rule alone, over a day.
#[test]
fn each_checkpoint_of_a_day_is_read_from_few_maps() {
    let mut chain = Chain::new(BASE, 64);
    let (mut most, mut all) = (0, 0);
    for k in 0..86_400 {
        let mut changed = Changes::none(64);
        changed.pages.insert(PageIndex(k % 64));
        let mut ids = vec![k + 1];
        ids.extend(chain.plan(&changed, u64::MAX).below);
        chain.commit(&ids, &changed);
        assert!(ids.len() <= maps_max(k), "checkpoint {k} reads {} maps", ids.len());
        most = most.max(ids.len());
        all += ids.len();
    }
    // Five digits; the first of them is 1 at most.
    assert!(
        most <= 2 + 4 * 15 && all / 86_400 <= 34,
        "{most} maps at most, {} on average",
        all / 86_400
    );
}
