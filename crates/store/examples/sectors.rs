//! Measures what looking for the sectors of disk blocks costs and saves:
//! `cargo run --release -p keyframe-store --example sectors [MIB]`. All figures of a table are of
//! one run of the program, in turns, so that they can be compared.
//!
//! ```text
//!   RAM    | file: MIB of pages, a third of them noise, the others text |
//!   disk   | the same file, shifted by three sectors | a file in 1 KiB blocks, scattered | one that RAM does not have |
//! ```

use keyframe_store::{
    BaseMeta, DiskMeta, DiskState, Error, MachineMeta, Result, Run, SealRequest, Store, Timing,
    Tuning,
};
use keyframe_units::{BlockKind, PAGE_BYTES, Page, PageIndex, RamBlock, RamLayout};
use std::time::{Duration, Instant};

const SECTOR: usize = 512;
const TURNS: usize = 5;

fn mix(seed: u64) -> u64 {
    let z = (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (seed >> 29))
        .wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^ (z >> 32)
}

/// A file of `mib` MiB; every third 32 KiB are noise, the others words that repeat, no two pages
/// alike.
fn file(mib: usize, salt: u64) -> Vec<u8> {
    let mut bytes = vec![0; mib << 20];
    for (at, word) in (0u64..).zip(bytes.as_chunks_mut::<8>().0) {
        let random = mix(at ^ salt << 40);
        let noise = (at >> 12).is_multiple_of(3);
        let text = mix(random % 40).to_le_bytes().map(|byte| b'a' + byte % 26);
        *word = if noise { random.to_le_bytes() } else { text };
    }
    bytes
}

/// The blocks of `file` from byte `shift` on.
fn shifted(file: &[u8], shift: usize) -> Vec<Page> {
    file.get(shift..).unwrap_or_default().as_chunks::<PAGE_BYTES>().0.to_vec()
}

/// Its parts of `part` bytes in another order.
fn scattered(file: &[u8], part: usize) -> Vec<Page> {
    let parts = file.len() / part;
    let order = (0..parts).map(|n| (n * 7919 + 13) % parts);
    let bytes: Vec<u8> = order.flat_map(|n| &file[n * part..(n + 1) * part]).copied().collect();
    shifted(&bytes, 0)
}

/// Blocks of which `known` of eight sectors are the file's, the others new.
fn partly(file: &[u8], known: usize, salt: u64) -> Vec<Page> {
    let other = self::file(file.len() >> 20, salt);
    let mut blocks = shifted(&other, 0);
    for (block, from) in
        blocks.iter_mut().zip(file.get(SECTOR * 3..).unwrap_or_default().chunks(PAGE_BYTES))
    {
        let len = (known * SECTOR).min(from.len());
        block[..len].copy_from_slice(&from[..len]);
    }
    blocks
}

fn layout(pages: usize) -> RamLayout {
    let bytes = (pages * PAGE_BYTES) as u64;
    let block = RamBlock {
        name: "ram".into(),
        kind: BlockKind::Backend,
        used_bytes: bytes,
        total_bytes: bytes,
    };
    RamLayout::new(vec![block]).expect("a layout")
}

fn seal(run: &mut Run, ram: &RamLayout) -> Result<keyframe_store::Sealed> {
    run.seal(SealRequest {
        taken_at: jiff::Timestamp::UNIX_EPOCH,
        since_boot: None,
        reason: "measure".into(),
        parent: None,
        ram: ram.clone(),
        machine: MachineMeta::default(),
        members: Vec::new(),
        timing: Timing::default(),
        device_state: b"",
        tag: None,
    })
}

struct Measured {
    ram: Duration,
    disk: Duration,
    read: Duration,
    stored_bytes: u64,
    composed_blocks: u64,
}

/// One checkpoint of `pages` and, where there are any, `blocks`.
fn measure(pages: &[Page], blocks: Option<&[Page]>, tuning: Tuning) -> Result<Measured> {
    let dir = tempfile::tempdir().expect("a directory");
    let store = Store::init(&dir.path().join("s"))?;
    let mut writer = store.lock_writer_tuned("measure", tuning)?;
    let ram = layout(pages.len());
    let disk = |blocks: &[Page]| DiskMeta {
        name: "d".into(),
        disk_bytes: (blocks.len() * PAGE_BYTES) as u64,
        base: BaseMeta::blank(),
        ..DiskMeta::default()
    };
    let disks = blocks.iter().map(|blocks| disk(blocks)).collect();
    let mut run = writer.begin_run_with("vm", &ram, disks, DiskState::default())?;
    let start = Instant::now();
    for (index, page) in (0..).zip(pages) {
        run.put_page(PageIndex(index), page)?;
    }
    let ram_time = start.elapsed();
    let start = Instant::now();
    for (index, block) in (0..).zip(blocks.unwrap_or_default()) {
        run.put_block(0, index, block)?;
    }
    let disk_time = start.elapsed();
    let sealed = seal(&mut run, &ram)?;
    run.finish()?;
    let counts = sealed.meta.disks.first().map(|disk| disk.counts).unwrap_or_default();
    let loaded = store.load_disks(sealed.id)?;
    let start = Instant::now();
    let mut page = [0; PAGE_BYTES];
    for (index, block) in (pages.len() as u64..).zip(blocks.unwrap_or_default()) {
        loaded.read_block(PageIndex(index), &mut page)?;
        assert!(page == *block, "block {index} is not what was put");
    }
    let (stored_bytes, composed_blocks) = (counts.stored_bytes, counts.composed_blocks);
    Ok(Measured {
        ram: ram_time,
        disk: disk_time,
        read: start.elapsed(),
        stored_bytes,
        composed_blocks,
    })
}

/// The least time of several turns, by each figure; the rest is the same in all.
fn best(all: &[Measured]) -> Option<Measured> {
    let least = |of: fn(&Measured) -> Duration| all.iter().map(of).min().unwrap_or_default();
    let (ram, disk, read) = (least(|m| m.ram), least(|m| m.disk), least(|m| m.read));
    let Measured { stored_bytes, composed_blocks, .. } = *all.first()?;
    Some(Measured { ram, disk, read, stored_bytes, composed_blocks })
}

fn mb_per_s(pages: usize, time: Duration) -> f64 {
    (pages * PAGE_BYTES) as f64 / 1e6 / time.as_secs_f64().max(1e-9)
}

/// Measures each subject in turns and prints a line for each.
fn table(pages: &[Page], subjects: &[(String, Option<&[Page]>, Tuning)]) -> Result<()> {
    let mut all: Vec<Vec<Measured>> = subjects.iter().map(|_| Vec::new()).collect();
    for _ in 0..TURNS {
        for ((_, blocks, tuning), results) in subjects.iter().zip(&mut all) {
            results.push(measure(pages, *blocks, *tuning)?);
        }
    }
    println!(
        "{:44} {:>9} {:>9} {:>9} {:>8} {:>9}",
        "", "RAM MB/s", "disk MB/s", "read MB/s", "stored", "composed"
    );
    for ((name, blocks, _), results) in subjects.iter().zip(&all) {
        let Some(m) = best(results) else { continue };
        let count = blocks.map_or(0, <[Page]>::len);
        println!(
            "{name:44} {:9.0} {:9.0} {:9.0} {:7.1}% {:9}",
            mb_per_s(pages.len(), m.ram),
            mb_per_s(count, m.disk),
            mb_per_s(count, m.read),
            100.0 * m.stored_bytes as f64 / ((count * PAGE_BYTES) as f64).max(1.0),
            m.composed_blocks
        );
    }
    println!();
    Ok(())
}

fn main() -> Result<(), Error> {
    let mib = std::env::args().nth(1).and_then(|word| word.parse().ok()).unwrap_or(64);
    let file = file(mib, 1);
    let pages = shifted(&file, 0);
    let off = Tuning { sector_index_bytes: 0, ..Tuning::default() };
    let on = Tuning::default();
    let kinds = [
        ("shifted by 3 sectors", shifted(&file, 3 * SECTOR)),
        ("in 1 KiB blocks, scattered", scattered(&file, 1024)),
        ("in 512 byte blocks, scattered", scattered(&file, SECTOR)),
        ("as in RAM", pages.clone()),
        ("unknown to RAM", shifted(&self::file(mib, 2), 0)),
    ];
    println!("{mib} MiB in RAM and on disk; stored: of the disk's bytes\n");
    let mut subjects = vec![("no disk".to_string(), None, on)];
    for (name, blocks) in &kinds {
        subjects.push((format!("{name}, sectors not looked for"), Some(blocks.as_slice()), off));
        subjects.push((name.to_string(), Some(blocks.as_slice()), on));
    }
    table(&pages, &subjects)?;
    println!(
        "blocks of which so many sectors are known to RAM, put together from at least one, and not at all\n"
    );
    let partly: Vec<(usize, Vec<Page>)> =
        (1..=8).map(|known| (known, partly(&file, known, 9))).collect();
    let mut subjects = Vec::new();
    for (known, blocks) in &partly {
        let one = Tuning { sector_parts_min: 1, ..on };
        subjects.push((format!("{known} known"), Some(blocks.as_slice()), one));
        subjects.push((format!("{known} known, stored as they are"), Some(blocks.as_slice()), off));
    }
    table(&pages, &subjects)
}
