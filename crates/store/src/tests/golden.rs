//! Stores of every format version ever written must still load. The files are under `tests/golden`;
//! the one of the present version was made by `make_golden`, which is run by hand when the format
//! changes.

use super::*;

const EPOCHS: u64 = 20;
const PAGES: u64 = 24;

fn golden(version: u32) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/v{version}"))
}

fn image(epoch: u64) -> Image {
    (0..PAGES)
        .map(|page| {
            if (page + epoch).is_multiple_of(6) {
                0
            } else {
                2 + 2 * (page % 4) + (epoch / (page + 1)) % 3
            }
        })
        .collect()
}

fn open(version: u32, path: &Path) -> Store {
    let ask = |_| Ok((version == 5).then(encrypted::secret));
    Store::open_with(path, &ask).unwrap()
}

#[test]
fn a_store_of_version_1_still_loads() {
    let store = Store::open(&golden(1)).unwrap();
    let sealed = store.checkpoints().unwrap().sealed;
    assert_eq!(sealed.len() as u64, EPOCHS + 1);
    for epoch in 0..EPOCHS {
        assert_image(&store, sealed[epoch as usize].id, &image(epoch));
        assert_eq!(sealed[epoch as usize].meta.epoch.0, epoch);
    }
    assert_image(&store, CheckpointId(EPOCHS + 1), &image(3));
    assert_eq!(
        (sealed[3].tags.join(","), store.resolve("golden").unwrap()),
        ("golden".into(), CheckpointId(4))
    );
    let meta = &sealed[4].meta;
    assert_eq!((meta.vm.as_str(), meta.reason.as_str()), ("golden", "interval"));
    assert_eq!((meta.timing.pause.device_state, meta.machine.user_command.len()), (4, 2));
    let report = check(&store);
    assert!(report.is_clean() && report.notes.len() == 1, "{report:#?}");
}

/// Block `block` of the golden disk at an epoch: nothing before it was written, then zeros, then
/// data.
fn block_at(block: u64, epoch: u64) -> Option<u64> {
    match epoch.checked_sub(block % 5) {
        None => None,
        Some(since) if block % 4 == 1 => (since > 3).then_some(0),
        Some(since) => Some(2 + 2 * ((block + since / 4) % 3)),
    }
}

const BLOCKS: u64 = 20;

#[test]
fn a_store_of_version_2_still_loads() {
    let store = Store::open(&golden(2)).unwrap();
    let sealed = store.checkpoints().unwrap().sealed;
    assert_eq!(sealed.len() as u64, EPOCHS);
    for epoch in 0..EPOCHS {
        let id = sealed[epoch as usize].id;
        assert_image(&store, id, &image(epoch));
        let loaded = store.load_disks(id).unwrap();
        let blocks = loaded.meta.blocks_of(0).unwrap();
        assert_eq!((blocks.first.0, blocks.len_pages), (PAGES, BLOCKS));
        for block in 0..BLOCKS {
            let mut page = ZERO_PAGE;
            let found = loaded.read_block(PageIndex(PAGES + block), &mut page).unwrap();
            match block_at(block, epoch) {
                None => assert_eq!(found, crate::BlockContent::Base, "block {block} at {epoch}"),
                Some(0) => assert_eq!(found, crate::BlockContent::Zero, "block {block} at {epoch}"),
                Some(n) => assert_eq!(page, content(n), "block {block} at {epoch}"),
            }
        }
    }
    let disk = &sealed[4].meta.disks[0];
    assert_eq!((disk.name.as_str(), disk.base.path.as_str()), ("d", "/images/base.qcow2"));
    assert_eq!((disk.base.files.len(), disk.base.files[0].modified_ns), (1, 5));
    assert!(disk.counts.written_blocks > 0);
    assert!(check(&store).is_clean());
}

/// Of a file of sectors that all differ: page `n` of it in RAM, and what block `n` of a disk has of
/// it, three sectors further on, with a sector of its own and one of zeros.
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

const SHIFTED: u64 = 3;

#[test]
fn a_store_of_version_3_still_loads() {
    let store = Store::open(&golden(3)).unwrap();
    let sealed = store.checkpoints().unwrap().sealed;
    assert_eq!(sealed.len(), 2);
    for (epoch, sealed) in (0..).zip(&sealed) {
        let ram = read_image(&store.load(sealed.id).unwrap()).unwrap();
        assert!((0..=SHIFTED).all(|n| ram[&n] == shifted(n).0));
        // A page of RAM that is a composed record.
        assert_eq!(ram.get(&(SHIFTED + 1)).copied(), (epoch == 1).then(|| shifted(1).1));
        let loaded = store.load_disks(sealed.id).unwrap();
        let read = |n: u64| {
            let mut page = ZERO_PAGE;
            let found = loaded.read_block(PageIndex(PAGES + n), &mut page).unwrap();
            (found == crate::BlockContent::Data).then_some(page)
        };
        assert!((0..SHIFTED).all(|n| read(n) == Some(shifted(n).1)));
        assert_eq!(read(SHIFTED), (epoch == 1).then(|| content(5)));
    }
    let counts = sealed[0].meta.disks[0].counts;
    let s = counts.sectors;
    assert_eq!(
        (counts.composed_blocks, counts.dedup_blocks, s.zero_sectors),
        (SHIFTED, 0, SHIFTED)
    );
    assert_eq!((s.against_ram_part_sectors, s.not_deduplicated_sectors), (6 * SHIFTED, SHIFTED));
    let second = &sealed[1].meta;
    assert_eq!((second.disks[0].counts.stored_blocks, second.counts.dedup_disk_pages), (1, 1));
    let report = check(&store);
    assert!(report.is_clean(), "{report:#?}");
}

/// A copy of a golden store that can be written to, as far as there is one.
fn copied(version: u32) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for folder in ["", "packs", "maps", "checkpoints", "tags", "tmp", "worksets"] {
        let to = dir.path().join(folder);
        std::fs::create_dir_all(&to).unwrap();
        let Ok(entries) = std::fs::read_dir(golden(version).join(folder)) else { continue };
        for file in
            entries.map(|entry| entry.unwrap()).filter(|entry| entry.file_type().unwrap().is_file())
        {
            std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
    }
    dir
}

/// A writer of today goes on with a store of any version: sectors are found in what that holds,
/// which stays as it is.
#[test]
fn stores_of_all_versions_are_gone_on_with() {
    for version in (1..=5).chain([7]) {
        let dir = copied(version);
        let store = open(version, dir.path());
        let old: Vec<_> = store.ids().unwrap();
        let images: Vec<_> =
            old.iter().map(|id| read_image(&store.load(*id).unwrap()).unwrap()).collect();
        let disk = crate::DiskMeta {
            name: "d".into(),
            disk_bytes: BLOCKS * PAGE_BYTES as u64,
            base: crate::BaseMeta::blank(),
            ..crate::DiskMeta::default()
        };
        let mut writer = store.lock_writer("test").unwrap();
        let state = crate::DiskState::default();
        let mut run = writer.begin_run_with("golden", &layout(PAGES), vec![disk], state).unwrap();
        // What the old store holds, again in RAM; then a block with parts of it, and noise that is
        // new.
        let last = images.last().unwrap();
        for (page, content) in last {
            assert_eq!(run.put_page(PageIndex(*page), content).unwrap(), crate::Put::Dedup);
        }
        let mut block = content(909);
        // Sectors are looked for in plain records; of what hardly compresses, or references would
        // save nothing.
        let is_mixed = |page: &&Page| page[512..1024] != page[1024..1536];
        let known = if version >= 4 { &last[&3] } else { last.values().find(is_mixed).unwrap() };
        block[512..2048].copy_from_slice(&known[..1536]);
        block[2560..3584].copy_from_slice(&known[..1024]);
        run.put_block(0, 0, &block).unwrap();
        let sealed = seal(&mut run, PAGES).unwrap();
        run.finish().unwrap();
        let counts = sealed.meta.disks[0].counts;
        assert_eq!(
            (counts.composed_blocks, counts.sectors.not_deduplicated_sectors),
            (1, 3),
            "version {version}"
        );
        let mut page = ZERO_PAGE;
        store.load_disks(sealed.id).unwrap().read_block(PageIndex(PAGES), &mut page).unwrap();
        assert!(page == block, "version {version}");
        for (id, image) in old.iter().zip(&images) {
            assert!(
                read_image(&store.load(*id).unwrap()).unwrap() == *image,
                "version {version}, {id}"
            );
        }
        assert!(check(&store).is_clean());
        drop(writer);
        recompress::recompress_tuned(&store, deltas::ROOMY).unwrap();
        let store = open(version, dir.path());
        for (id, image) in old.iter().zip(&images) {
            assert!(
                read_image(&store.load(*id).unwrap()).unwrap() == *image,
                "recompressed {version}, {id}"
            );
        }
        assert!(check(&store).is_clean() && recompress::dense_packs(&store) > 0);
    }
}

const SECONDS: u64 = 9;

/// A page with some counters, one that drifts away from what it was, one of which a compressible
/// quarter is new each second, and one that stays.
fn ticking(second: u64) -> [Page; 4] {
    let mut table = noise(8);
    table[1024..2048].fill(second as u8);
    [deltas::counting(second, false), deltas::counting(second, true), table, content(5)]
}

#[test]
fn a_store_of_version_4_still_loads() {
    let store = Store::open(&golden(4)).unwrap();
    let sealed = store.checkpoints().unwrap().sealed;
    assert_eq!(sealed.len() as u64, SECONDS);
    for (second, sealed) in (0..).zip(&sealed) {
        let ram = read_image(&store.load(sealed.id).unwrap()).unwrap();
        assert!(
            (0u64..).zip(ticking(second)).all(|(page, content)| ram[&page] == content),
            "second {second}"
        );
    }
    let kinds = deltas::kinds(&store);
    assert!(kinds[&'P'] >= 4 && kinds[&'D'] >= 20, "{kinds:?}");
    assert!(check(&store).is_clean());
}

#[test]
fn a_store_of_version_6_still_loads() {
    let store = Store::open(&golden(6)).unwrap();
    let ids = store.ids().unwrap().into_iter();
    recompress::assert_ticked(&store, &ids.zip(recompress::GOLDEN_SECONDS).collect::<Vec<_>>());
    assert!(recompress::dense_packs(&store) > 0);
}

/// A page of pointers into one heap, which is stored as its words; some of them are others each
/// second.
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

/// The version of a pack, and how many of its records have each codec.
fn codecs_of(path: &Path) -> (u8, BTreeMap<u8, u32>) {
    let bytes = std::fs::read(path).unwrap();
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let end = word(bytes.len() - 48);
    let mut at = if bytes[8] == 8 { 80 + word(40) } else { 64 };
    let mut codecs = BTreeMap::new();
    while at < end {
        *codecs.entry(bytes[at + 9]).or_default() += 1;
        at += 28 + usize::from(u16::from_le_bytes([bytes[at + 10], bytes[at + 11]]));
    }
    (bytes[8], codecs)
}

#[test]
fn stores_of_versions_7_and_8_still_load() {
    for version in [7u8, 8] {
        let store = Store::open(&golden(version.into())).unwrap();
        let sealed = store.checkpoints().unwrap().sealed;
        assert_eq!(sealed.len() as u64, SECONDS);
        for (second, sealed) in (0..).zip(&sealed) {
            let ram = read_image(&store.load(sealed.id).unwrap()).unwrap();
            let pages = ticking(second).into_iter().chain([pointers(second)]);
            assert!(
                (0u64..).zip(pages).all(|(page, content)| ram[&page] == content),
                "second {second}"
            );
        }
        let packs = std::fs::read_dir(store.path().join("packs")).unwrap();
        let codecs: Vec<_> = packs.map(|file| codecs_of(&file.unwrap().path())).collect();
        assert!(
            codecs.iter().any(|(found, codecs)| *found == version && codecs[&3] > 0),
            "{codecs:?}"
        );
        assert!(check(&store).is_clean());
    }
}

/// As [`make_golden`], for packs of a run, and those packs once they were recompressed.
#[test]
#[ignore = "writes into the source tree"]
fn make_golden_words() {
    for version in [7, 8] {
        let store = Store::init(&golden(version)).unwrap();
        let mut writer = store.lock_writer_tuned("test", deltas::ROOMY).unwrap();
        let mut run = writer.begin_run("golden", &layout(PAGES)).unwrap();
        for second in 0..SECONDS {
            for (page, content) in (0..).zip(ticking(second).into_iter().chain([pointers(second)]))
            {
                run.put_page(PageIndex(page), &content).unwrap();
            }
            seal(&mut run, PAGES).unwrap();
        }
        run.finish().unwrap();
        drop(writer);
        if version == 8 {
            recompress::recompress_tuned(&store, deltas::ROOMY).unwrap();
        }
        for lock in ["lock", "prune.lock"] {
            let _ = std::fs::remove_file(store.path().join(lock));
        }
        for folder in ["tmp", "worksets", "tags"] {
            let _ = std::fs::remove_dir(store.path().join(folder));
        }
    }
}

#[test]
fn an_encrypted_store_still_loads() {
    let store = open(5, &golden(5));
    assert!(store.is_encrypted());
    let sealed = store.checkpoints().unwrap().sealed;
    assert_eq!(sealed.len() as u64, SECONDS + 1);
    for (second, sealed) in (0..SECONDS).zip(&sealed) {
        let ram = read_image(&store.load(sealed.id).unwrap()).unwrap();
        assert!(
            (0u64..).zip(ticking(second)).all(|(page, content)| ram[&page] == content),
            "second {second}"
        );
    }
    // The last one has a disk with blocks that are put together from what is in RAM.
    let last = sealed.last().unwrap();
    let ram = read_image(&store.load(last.id).unwrap()).unwrap();
    assert!((0..=SHIFTED).all(|n| ram[&n] == shifted(n).0));
    let loaded = store.load_disks(last.id).unwrap();
    for block in 0..SHIFTED {
        let mut page = ZERO_PAGE;
        loaded.read_block(PageIndex(PAGES + block), &mut page).unwrap();
        assert!(page == shifted(block).1, "block {block}");
    }
    let kinds = deltas::kinds(&store);
    assert!(kinds[&'P'] >= 4 && kinds[&'D'] >= 20 && kinds[&'C'] == SHIFTED as usize, "{kinds:?}");
    assert_eq!(store.resolve("golden").unwrap(), last.id);
    assert!(check(&store).is_clean());
    assert!(matches!(Store::open(&golden(5)), Err(Error::KeyNeeded { .. })));
}

/// The keys of a store that a passphrase opens: what is derived of it must come out the same for
/// ever.
#[test]
fn a_passphrase_still_opens_what_it_locked() {
    let path = golden(5).join("passphrase.json");
    let ask = |_| Ok(Some(passphrase()));
    let config =
        Config::decode(&std::fs::read(path).unwrap(), "x").unwrap().unlock(&ask, "x").unwrap();
    assert!(config.encryption.is_some());
}

fn passphrase() -> crate::Secret {
    crate::Secret::Passphrase(zeroize::Zeroizing::new("the passphrase of a golden store".into()))
}

/// Puts what the golden stores of deltas hold: [`SECONDS`] checkpoints.
fn put_ticking(writer: &mut crate::Writer) {
    let mut run = writer.begin_run("golden", &layout(PAGES)).unwrap();
    for second in 0..SECONDS {
        for (page, content) in (0..).zip(ticking(second)) {
            run.put_page(PageIndex(page), &content).unwrap();
        }
        seal(&mut run, PAGES).unwrap();
    }
    run.finish().unwrap();
}

/// Makes the golden stores of the present versions, plain and encrypted, that are not there:
/// `cargo test -p keyframe-store make_golden -- --ignored`, after removing the old ones. Those of
/// earlier versions were made by the programs that wrote these.
#[test]
#[ignore = "writes into the source tree"]
fn make_golden() {
    for (version, secret) in [(4, None), (5, Some(encrypted::secret()))] {
        if golden(version).exists() {
            continue;
        }
        let store = Store::init_with(&golden(version), secret.as_ref()).unwrap();
        let mut writer = store.lock_writer_tuned("test", deltas::ROOMY).unwrap();
        put_ticking(&mut writer);
        if store.is_encrypted() {
            let disk = crate::DiskMeta {
                name: "d".into(),
                disk_bytes: BLOCKS * PAGE_BYTES as u64,
                base: crate::BaseMeta::blank(),
                ..crate::DiskMeta::default()
            };
            let state = crate::DiskState::default();
            let mut run =
                writer.begin_run_with("golden", &layout(PAGES), vec![disk], state).unwrap();
            for n in 0..=SHIFTED {
                run.put_page(PageIndex(n), &shifted(n).0).unwrap();
            }
            for n in 0..SHIFTED {
                run.put_block(0, n, &shifted(n).1).unwrap();
            }
            run.seal(SealRequest { tag: Some("golden"), ..request(&layout(PAGES)) }).unwrap();
            run.finish().unwrap();
            let locked = Config::fresh(Some(&passphrase())).unwrap().encode().unwrap();
            std::fs::write(golden(version).join("passphrase.json"), locked).unwrap();
        }
        drop(writer);
        std::fs::remove_file(store.path().join("lock")).unwrap();
        for folder in ["tmp", "worksets", "tags"] {
            let _ = std::fs::remove_dir(store.path().join(folder));
        }
    }
}
