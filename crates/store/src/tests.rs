//! The store as a whole, against a naive model and on a medium that fails.
//!
//! The model of a run is one content number for each page; [`content`] makes the page of a number.
//! Every test ends in [`assert_image`]: the store returns what was put.

mod beside;
mod copy;
mod crash;
mod damage;
mod deltas;
mod diff;
mod direct_server;
mod disks;
mod durability;
mod encrypted;
mod follow;
mod forget;
mod full_disk;
mod golden;
mod index;
mod lock;
mod observed;
mod oracle;
mod parts;
mod prune;
mod recompress;
mod repair;
mod s3;
mod scale;
mod served;
mod served_writers;
mod simulation;
mod stats;
mod unreliable;
mod writers;

use crate::config::Config;
use crate::{
    CheckOptions, CheckReport, Durability, Error, LoadedCheckpoint, Result, Run, SealRequest,
    Sealed, Store, Tuning,
};
use jiff::Timestamp;
use keyframe_store_backend::Backend;
use keyframe_store_backend::testing::FaultyBackend;
use keyframe_store_format::testing::noise;
use keyframe_units::{
    BlockKind, CheckpointId, PAGE_BYTES, Page, PageIndex, PageRange, RamBlock, RamLayout, ZERO_PAGE,
};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// One content number per page; 0 is a page of zeros.
pub(crate) type Image = Vec<u64>;

/// Small limits, so that small tests cross them: packs of a few records, three chain levels in a
/// few epochs.
pub(crate) const TINY: Tuning = Tuning {
    pack_bytes_max: 20_000,
    buffer_bytes: 6_000,
    chain_base: 3,
    sector_index_bytes: 1 << 16,
    sector_parts_min: 1,
    base_bytes: 5 * 5000,
    index_bytes: 1 << 20,
    encode_threads: 1,
    durability: Durability::Checkpoint,
};

/// The page of a content number: odd ones are noise, even ones compress; every fourth below 100 is
/// like its neighbours but for some words.
pub(crate) fn content(number: u64) -> Page {
    match number {
        0 => ZERO_PAGE,
        similar if similar % 4 == 3 && (11..100).contains(&similar) => {
            let mut page = noise(similar / 32);
            let own = noise(similar);
            for (at, line) in page.chunks_mut(64).enumerate() {
                let len = if at as u64 % 9 == similar % 9 { similar as usize % 32 } else { 0 };
                line[..len].copy_from_slice(&own[..len]);
            }
            page
        }
        odd if odd % 2 == 1 => noise(odd),
        even => {
            let mut page = [even as u8; PAGE_BYTES];
            page[..40].copy_from_slice(&noise(even)[..40]);
            page
        }
    }
}

pub(crate) fn layout(pages: u64) -> RamLayout {
    let bytes = pages * PAGE_BYTES as u64;
    let block = RamBlock {
        name: "ram".into(),
        kind: BlockKind::Backend,
        used_bytes: bytes,
        total_bytes: bytes,
    };
    RamLayout::new(vec![block]).unwrap()
}

fn request(ram: &RamLayout) -> SealRequest<'static> {
    SealRequest {
        taken_at: Timestamp::from_second(1_700_000_000).unwrap(),
        device_state: b"the devices, the devices, the devices, the devices",
        ..SealRequest::of_pages(ram, "test")
    }
}

pub(crate) fn seal(run: &mut Run, pages: u64) -> Result<Sealed> {
    run.seal(request(&layout(pages)))
}

/// Puts the pages where `new` differs from `old`.
pub(crate) fn put_changes(run: &mut Run, old: &[u64], new: &[u64]) -> Result<()> {
    for (page, (old, new)) in (0..).zip(old.iter().zip(new)) {
        if old != new {
            run.put_page(PageIndex(page), &content(*new))?;
        }
    }
    Ok(())
}

/// A run of `images` into `store`, in several packs, all of whose checkpoints `reader` reads after
/// each.
pub(crate) fn run_beside(store: &Store, reader: &Store, images: &[Image]) -> Vec<CheckpointId> {
    let mut writer =
        store.lock_writer_tuned("test", Tuning { pack_bytes_max: 90_000, ..TINY }).unwrap();
    let mut run = writer.begin_run("vm", &layout(images[0].len() as u64)).unwrap();
    let (mut old, mut ids) = (vec![0; images[0].len()], Vec::new());
    for image in images {
        put_changes(&mut run, &old, image).unwrap();
        ids.push(seal(&mut run, image.len() as u64).unwrap().id);
        old.clone_from(image);
        for (id, image) in ids.iter().zip(images) {
            assert_image(reader, *id, image);
        }
    }
    run.finish().unwrap();
    ids
}

pub(crate) fn on(medium: &FaultyBackend) -> Result<Store> {
    on_backend(Arc::new(medium.clone()))
}

fn on_backend(backend: Arc<dyn Backend>) -> Result<Store> {
    Store::open_on_with(backend, Path::new("memory"), &|_| Ok(Some(encrypted::secret())))
}

pub(crate) fn init_on(medium: &FaultyBackend) -> Result<Store> {
    let config = Config::fresh(encrypted::is_asked().then(encrypted::secret).as_ref())?;
    Store::init_as(Arc::new(medium.clone()), Path::new("memory"), config)
}

/// What the store gives back for a checkpoint: the content of each page that is not zero.
/// More are not read in two ways.
const FILLED_PAGES_MAX: u64 = 1 << 16;

fn read_image(loaded: &LoadedCheckpoint) -> Result<BTreeMap<u64, Page>> {
    let mut pages = BTreeMap::new();
    let all = PageRange::new(PageIndex(0), loaded.meta.ram.len_pages());
    loaded.read_pages(all, &mut |page, content| {
        assert_ne!(*content, ZERO_PAGE, "a page of zeros was stored");
        assert!(pages.insert(page.0, *content).is_none(), "page {} came twice", page.0);
        Ok::<_, Error>(())
    })?;
    fill_image(loaded, &pages)?;
    Ok(pages)
}

/// The other way to read it, which must find the same.
fn fill_image(loaded: &LoadedCheckpoint, pages: &BTreeMap<u64, Page>) -> Result<()> {
    let len_pages = loaded.meta.ram.len_pages();
    if len_pages > FILLED_PAGES_MAX {
        return Ok(());
    }
    let mut out = vec![[0x5a; PAGE_BYTES]; len_pages as usize];
    loaded.read_into(PageIndex(0), &mut out)?;
    for (page, content) in (0..).zip(&out) {
        assert!(
            pages.get(&page).unwrap_or(&ZERO_PAGE) == content,
            "page {page} is another one in place"
        );
    }
    Ok(())
}

/// How many records there are of each kind in the store of a checkpoint.
pub(crate) fn kinds_of(loaded: &LoadedCheckpoint) -> BTreeMap<char, usize> {
    deltas::kinds_in(&loaded.inner)
}

fn image_is(store: &Store, id: CheckpointId, image: &[u64]) -> Result<bool> {
    let loaded = store.load(id)?;
    let expected = (0u64..).zip(image).filter(|(_, n)| **n != 0).map(|(p, n)| (p, content(*n)));
    Ok(read_image(&loaded)? == expected.collect()
        && loaded.device_state == request(&layout(1)).device_state)
}

/// Asserts that each of `known` is what was put.
fn assert_images<'a>(
    store: &Store,
    known: impl IntoIterator<Item = (&'a CheckpointId, &'a Image)>,
    context: &str,
) {
    for (id, image) in known {
        let is_same = image_is(store, *id, image);
        let is_same = is_same.unwrap_or_else(|e| panic!("{context}: {id}: {e}"));
        assert!(is_same, "{context}: {id} is not what was put");
    }
}

/// Asserts that each of `known` is what was put, and that the check of the store finds nothing.
fn assert_intact(store: &Store, known: &BTreeMap<CheckpointId, Image>, context: &str) {
    assert_images(store, known, context);
    let report = check(store);
    assert!(report.is_clean(), "{context}: {report:#?}");
}

pub(crate) fn assert_image(store: &Store, id: CheckpointId, image: &[u64]) {
    match image_is(store, id, image) {
        Ok(same) => assert!(same, "checkpoint {id} is not what was put"),
        Err(error) => panic!("checkpoint {id}: {error}"),
    }
}

fn check(store: &Store) -> CheckReport {
    store.check(&CheckOptions { read_data: true }, &mut |_| {}).unwrap()
}

fn assert_clean(store: &Store) {
    let report = check(store);
    assert!(report.is_clean(), "{report:#?}");
    assert!(store.check(&CheckOptions::default(), &mut |_| {}).unwrap().is_clean());
}
