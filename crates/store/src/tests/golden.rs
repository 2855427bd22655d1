//! The golden stores under `tests/golden`: stores of format version 1 that every later build must
//! read. `make_golden` makes them.

use super::*;
use crate::{BaseMeta, BlockContent, DiskMeta, DiskState, PutOutcome, Writer};
use keyframe_store_format::testing::lines;
use std::path::PathBuf;

const PAGES: u64 = 100;
const SECONDS: u64 = 9;
const BLOCKS: u64 = 20;
/// Blocks of the disk that hold the contents of RAM, shifted by three sectors.
const SHIFTED: u64 = 3;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn plain() -> Store {
    Store::open(&golden("v1")).unwrap()
}

fn encrypted() -> Store {
    Store::open_with(&golden("v1-encrypted"), &|_| Ok(Some(encrypted::secret()))).unwrap()
}

/// The RAM at a second: a page with some counters, one that drifts away from its first content,
/// one of which a compressible quarter changes each second, one that stays, one of pointers; and
/// pages that have lines in common.
fn image_at(second: u64) -> BTreeMap<u64, Page> {
    let mut table = noise(8);
    table[1024..2048].fill(second as u8);
    let counters = [false, true].map(|drifts| deltas::counting(second, drifts));
    let changing = vec![counters[0], counters[1], table, content(5), pointers(second)];
    (0..).zip(changing.into_iter().chain((5..PAGES).map(lines))).collect()
}

/// A page of pointers into one heap, which is stored as its words. Some of them change each second.
fn pointers(second: u64) -> Page {
    let mut page = ZERO_PAGE;
    for (at, word) in (0..).zip(page.as_chunks_mut::<8>().0) {
        let value: u64 = match at % 8 {
            0..4 => 0x7f12_3400_0000 + (at * 0x9e37_79b9 + second * (at & 32)) % (1 << 20) * 16,
            4 => 0xffff_ffff_8100_0000 + at * 64,
            5 => at + second,
            _ => 0,
        };
        *word = value.to_le_bytes();
    }
    page
}

/// Page `n` of a file whose sectors all differ; and block `n` of a disk with the same file three
/// sectors further on, with one sector of its own and one of zeros.
fn shifted(n: u64) -> (Page, Page) {
    let sector = |at: u64| content(1001 + 2 * at);
    let (mut page, mut block) = (ZERO_PAGE, ZERO_PAGE);
    for part in 0..8 {
        let range = part as usize * 512..(part as usize + 1) * 512;
        page[range.clone()].copy_from_slice(&sector(n * 8 + part)[..512]);
        let other = match part {
            7 => ZERO_PAGE,
            6 => content(2),
            _ => sector(n * 8 + part + 3),
        };
        block[range].copy_from_slice(&other[..512]);
    }
    (page, block)
}

fn disk() -> DiskMeta {
    DiskMeta {
        name: "d".into(),
        disk_bytes: BLOCKS * PAGE_BYTES as u64,
        base: BaseMeta::blank(),
        ..DiskMeta::default()
    }
}

fn passphrase() -> crate::Secret {
    crate::Secret::Passphrase(zeroize::Zeroizing::new("the passphrase of a golden store".into()))
}

/// Checks the images, the disk, the kinds of records and the tag of a golden store.
fn assert_golden(store: &Store) {
    let sealed = store.checkpoints().unwrap().sealed;
    assert_eq!(sealed.len() as u64, SECONDS + 1);
    for (second, sealed) in (0..SECONDS).zip(&sealed) {
        let ram = read_image(&store.load(sealed.id).unwrap()).unwrap();
        assert!(ram == image_at(second), "second {second}");
        assert_eq!((sealed.meta.epoch.0, sealed.meta.vm.as_str()), (second, "golden"));
    }
    let last = sealed.last().unwrap();
    let ram = read_image(&store.load(last.id).unwrap()).unwrap();
    assert!((0..=SHIFTED).all(|n| ram[&n] == shifted(n).0));
    let loaded = store.load_disks(last.id).unwrap();
    let blocks = loaded.meta.blocks_of(0).unwrap();
    assert_eq!((blocks.first.0, blocks.len_pages), (PAGES, BLOCKS));
    for block in 0..BLOCKS {
        let mut page = ZERO_PAGE;
        let found = loaded.read_block(PageIndex(PAGES + block), &mut page).unwrap();
        match block {
            0..SHIFTED => assert!(page == shifted(block).1, "block {block}"),
            SHIFTED => assert!(page == noise(77)),
            4..8 => assert_eq!(found, BlockContent::Zero, "block {block}"),
            _ => assert_eq!(found, BlockContent::Base, "block {block}"),
        }
    }
    let counts = last.meta.disks[0].counts;
    assert_eq!((counts.composed_blocks, counts.stored_blocks), (SHIFTED, SHIFTED + 1));
    assert_eq!(counts.sectors.against_ram_part_sectors, 6 * SHIFTED);
    assert_eq!(store.resolve("golden").unwrap(), last.id);
    assert_eq!(last.tags, ["golden"]);
    let kinds = deltas::kinds(store);
    assert!(kinds[&'P'] >= 4 && kinds[&'D'] >= 20, "{kinds:?}");
    assert_eq!((kinds[&'C'], kinds[&'B']), (SHIFTED as usize, 1), "{kinds:?}");
    assert!(recompress::dense_packs(store) > 0);
    assert!(check(store).is_clean());
}

#[test]
fn the_golden_store_loads() {
    let store = plain();
    assert_golden(&store);
    // Every codec occurs.
    let packs = std::fs::read_dir(store.path().join("packs")).unwrap();
    let mut codecs = BTreeMap::new();
    for pack in packs {
        count_codecs(&pack.unwrap().path(), &mut codecs);
    }
    assert!((0..4).all(|codec| codecs.contains_key(&codec)), "{codecs:?}");
}

/// Counts the records of a closed pack by their codec.
fn count_codecs(path: &Path, codecs: &mut BTreeMap<u8, u32>) {
    let bytes = std::fs::read(path).unwrap();
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    assert_eq!(bytes[8], 1, "the version of {}", path.display());
    let end = word(bytes.len() - 48);
    let mut at = if bytes[12] == 1 { 80 + word(40) } else { 64 };
    while at < end {
        *codecs.entry(bytes[at + 9]).or_default() += 1;
        at += 28 + usize::from(u16::from_le_bytes([bytes[at + 10], bytes[at + 11]]));
    }
}

#[test]
fn the_encrypted_golden_store_loads() {
    let store = encrypted();
    assert!(store.is_encrypted());
    assert_golden(&store);
    assert!(matches!(Store::open(&golden("v1-encrypted")), Err(Error::KeyNeeded { .. })));
}

/// The key that is derived from a passphrase must stay the same.
#[test]
fn a_passphrase_opens_the_golden_lock() {
    let path = golden("v1-encrypted/passphrase.json");
    let ask = |_| Ok(Some(passphrase()));
    let config =
        Config::decode(&std::fs::read(path).unwrap(), "x").unwrap().unlock(&ask, "x").unwrap();
    assert!(config.encryption.is_some());
}

/// A copy of a golden store that a test can write to.
fn copied(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for folder in ["", "packs", "maps", "checkpoints", "tags", "tmp", "worksets"] {
        let to = dir.path().join(folder);
        std::fs::create_dir_all(&to).unwrap();
        let Ok(entries) = std::fs::read_dir(golden(name).join(folder)) else { continue };
        for file in
            entries.map(|entry| entry.unwrap()).filter(|entry| entry.file_type().unwrap().is_file())
        {
            std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
    }
    dir
}

/// A writer finds pages and sectors in a golden store, whose checkpoints stay as they are; so does
/// a recompression.
#[test]
fn writers_continue_golden_stores() {
    for name in ["v1", "v1-encrypted"] {
        let dir = copied(name);
        let open = || {
            let ask = |_| Ok(Some(encrypted::secret()));
            Store::open_with(dir.path(), &ask).unwrap()
        };
        let store = open();
        let old: Vec<_> = store.ids().unwrap();
        let images: Vec<_> =
            old.iter().map(|id| read_image(&store.load(*id).unwrap()).unwrap()).collect();
        let mut writer = store.lock_writer("test").unwrap();
        let state = DiskState::default();
        let mut run = writer.begin_run_with("golden", &layout(PAGES), vec![disk()], state).unwrap();
        // The RAM of the golden store again; then a block with parts of a page and with noise.
        let ram = &images[0];
        for (page, content) in ram {
            assert_eq!(run.put_page(PageIndex(*page), content).unwrap(), PutOutcome::Dedup);
        }
        let mut block = content(909);
        block[512..2048].copy_from_slice(&ram[&3][..1536]);
        block[2560..3584].copy_from_slice(&ram[&3][..1024]);
        run.put_block(0, 0, &block).unwrap();
        let sealed = seal(&mut run, PAGES).unwrap();
        run.finish().unwrap();
        let counts = sealed.meta.disks[0].counts;
        assert_eq!(
            (counts.composed_blocks, counts.sectors.not_deduplicated_sectors),
            (1, 3),
            "{name}"
        );
        let mut page = ZERO_PAGE;
        store.load_disks(sealed.id).unwrap().read_block(PageIndex(PAGES), &mut page).unwrap();
        assert!(page == block, "{name}");
        let unchanged = |store: &Store| {
            for (id, image) in old.iter().zip(&images) {
                let now = read_image(&store.load(*id).unwrap()).unwrap();
                assert!(now == *image, "{name}, {id}");
            }
            assert!(check(store).is_clean());
        };
        unchanged(&store);
        drop(writer);
        recompress::recompress_tuned(&store, deltas::ROOMY).unwrap();
        let store = open();
        unchanged(&store);
        assert!(recompress::dense_packs(&store) > 0);
    }
}

fn put_seconds(writer: &mut Writer) {
    let mut run = writer.begin_run("golden", &layout(PAGES)).unwrap();
    let mut before = BTreeMap::new();
    for second in 0..SECONDS {
        let image = image_at(second);
        for (page, content) in &image {
            if before.get(page) != Some(content) {
                run.put_page(PageIndex(*page), content).unwrap();
            }
        }
        before = image;
        seal(&mut run, PAGES).unwrap();
    }
    run.finish().unwrap();
}

fn put_disk(writer: &mut Writer) {
    let state = DiskState::default();
    let mut run = writer.begin_run_with("golden", &layout(PAGES), vec![disk()], state).unwrap();
    for n in 0..=SHIFTED {
        run.put_page(PageIndex(n), &shifted(n).0).unwrap();
    }
    for n in 0..SHIFTED {
        run.put_block(0, n, &shifted(n).1).unwrap();
    }
    run.put_block(0, SHIFTED, &noise(77)).unwrap();
    run.put_zero_blocks(0, 4, 4).unwrap();
    run.seal(SealRequest { tag: Some("golden"), ..request(&layout(PAGES)) }).unwrap();
    run.finish().unwrap();
}

/// Makes the golden stores that are missing. After a change of the format, remove the old ones and
/// run `cargo test -p keyframe-store make_golden -- --ignored`.
#[test]
#[ignore = "writes into the source tree"]
fn make_golden() {
    for (name, secret) in [("v1", None), ("v1-encrypted", Some(encrypted::secret()))] {
        if golden(name).exists() {
            continue;
        }
        let store = Store::init_with(&golden(name), secret.as_ref()).unwrap();
        put_seconds(&mut store.lock_writer_tuned("test", deltas::ROOMY).unwrap());
        recompress::recompress_tuned(&store, deltas::ROOMY).unwrap();
        put_disk(&mut store.lock_writer_tuned("test", deltas::ROOMY).unwrap());
        if store.is_encrypted() {
            let locked = Config::fresh(Some(&passphrase())).unwrap().encode().unwrap();
            std::fs::write(golden(name).join("passphrase.json"), locked).unwrap();
        }
        for lock in ["lock", "prune.lock"] {
            let _ = std::fs::remove_file(store.path().join(lock));
        }
        for folder in ["tmp", "worksets", "index"] {
            let _ = std::fs::remove_dir_all(store.path().join(folder));
        }
    }
}
