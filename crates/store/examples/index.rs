//! The index of deduplication: what it takes for each page, how fast pages are found in memory and
//! in spills, and how long the store takes to open.
//!
//! `cargo run --release -p keyframe-store --example index [PAGES [MEMORY_MIB [CHECKPOINTS]]]`;
//! figures for docs/design/index.md. Pages are small when compressed, so that little but hash and
//! index is measured.

use jiff::Timestamp;
use keyframe_store::{Durability, IndexUse, Run, SealRequest, Store, Tuning};
use keyframe_units::{BlockKind, PAGE_BYTES, Page, PageIndex, RamBlock, RamLayout};
use std::error::Error;
use std::time::Instant;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const BATCH_PAGES: u64 = 64;

fn argument(at: usize, default: u64) -> Result<u64> {
    Ok(std::env::args().nth(at).map_or(Ok(default), |n| n.parse())?)
}

fn request(ram: &RamLayout) -> Result<SealRequest<'static>> {
    let taken_at = Timestamp::from_second(1_700_000_000)?;
    Ok(SealRequest { taken_at, ..SealRequest::of_pages(ram, "interval") })
}

/// Puts the pages with these numbers, and says how fast.
fn put(run: &mut Run, what: &str, pages: u64, number: &dyn Fn(u64) -> u64) -> Result<()> {
    let mut batch: Vec<Page> = vec![[7; PAGE_BYTES]; BATCH_PAGES as usize];
    let (began, began_ms) = (Instant::now(), processor_ms()?);
    let (mut before_ms, mut longest_ms) = (began_ms, 0.0_f64);
    for from in (0..pages).step_by(BATCH_PAGES as usize) {
        for (at, page) in (from..pages).zip(&mut batch) {
            page[..8].copy_from_slice(&number(at).to_le_bytes());
        }
        let all: Vec<(PageIndex, &Page)> =
            (from..pages).zip(&batch).map(|(at, page)| (PageIndex(at), page)).collect();
        run.put_pages(&all, &mut |_, _| {})?;
        let now_ms = processor_ms()?;
        longest_ms = longest_ms.max(now_ms - before_ms);
        before_ms = now_ms;
    }
    let (ms, wall_s) = (processor_ms()? - began_ms, began.elapsed().as_secs_f64());
    let bytes_per_s = (pages * PAGE_BYTES as u64) as f64 / (ms / 1000.0);
    println!(
        "{what}: {pages} pages, {:.2} us of a processor a page, {:.2} GB/s, {:.2} M pages/s; {wall_s:.1} s",
        ms * 1000.0 / pages as f64,
        bytes_per_s / 1e9,
        pages as f64 / ms / 1000.0
    );
    let usage = run.index_use()?;
    println!("  longest batch {longest_ms:.0} ms; {}", describe(usage));
    Ok(())
}

fn describe(usage: IndexUse) -> String {
    let entries = (usage.entries + usage.spilled_entries).max(1);
    format!("{usage:?}, {:.1} bytes a page", usage.memory_bytes as f64 / entries as f64)
}

/// What this thread had of a processor.
fn processor_ms() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let ns: u64 = text.split(' ').next().unwrap_or_default().parse()?;
    Ok(ns as f64 / 1e6)
}

fn resident_mib() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/self/statm")?;
    Ok(text.split(' ').nth(1).unwrap_or_default().parse::<u64>()? * 4096 / (1 << 20))
}

fn main() -> Result<()> {
    let (pages, memory_mib, checkpoints) =
        (argument(1, 1 << 20)?, argument(2, 256)?, argument(3, 100)?);
    let dir = tempfile::tempdir()?;
    let place = dir.path().join("s");
    let store = Store::init(&place)?;
    let index_bytes = (memory_mib as usize) << 20;
    let tuning =
        Tuning { index_bytes, base_bytes: 0, durability: Durability::Never, ..Tuning::default() };
    let bytes = pages * PAGE_BYTES as u64;
    let ram = RamLayout::new(vec![RamBlock {
        name: "ram".into(),
        kind: BlockKind::Backend,
        used_bytes: bytes,
        total_bytes: bytes,
    }])?;
    let mut writer = store.lock_writer_tuned("example", tuning)?;
    let mut run = writer.begin_run("vm", &ram)?;
    put(&mut run, "new", pages, &|at| at + 1)?;
    run.seal(request(&ram)?)?;
    let some = pages.min(1 << 20);
    put(&mut run, "known, the newest", some, &|at| pages - some + at + 1)?;
    put(&mut run, "known, from the oldest on", some, &|at| at + 1)?;
    run.abandon();
    for _ in 1..checkpoints {
        run.seal(request(&ram)?)?;
    }
    run.finish()?;
    drop(writer);
    println!("resident: {} MiB", resident_mib()?);
    let open = |way: &str| -> Result<()> {
        let began = Instant::now();
        let writer = Store::open(&place)?.lock_writer_tuned("example", tuning)?;
        let ms = began.elapsed().as_secs_f64() * 1000.0;
        println!("writer, {way}: {ms:.0} ms; {}", describe(writer.index_use().unwrap_or_default()));
        Ok(())
    };
    open("with the index saved")?;
    open("the same again")?;
    for _ in 0..3 {
        let began = Instant::now();
        let store = Store::open(&place)?;
        let opened_ms = began.elapsed().as_secs_f64() * 1000.0;
        let began = Instant::now();
        let listed = store.checkpoints()?.sealed.len();
        let listed_ms = began.elapsed().as_secs_f64() * 1000.0;
        println!("reader: {opened_ms:.2} ms; {listed} checkpoints listed: {listed_ms:.0} ms");
    }
    let mut writer = store.lock_writer_tuned("example", tuning)?;
    let mut run = writer.begin_run("vm", &ram)?;
    put(&mut run, "known, by the next run", some, &|at| (at * 7919) % pages + 1)?;
    put(&mut run, "and once more", some, &|at| (at * 7919) % pages + 1)?;
    run.finish()?;
    drop(writer);
    if place.join("index").exists() {
        std::fs::remove_dir_all(place.join("index"))?;
    }
    open("with the index lost")
}
