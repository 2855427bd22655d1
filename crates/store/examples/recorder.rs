//! What a flight recorder's prune costs: a run of a 1 GiB guest with 20,000 dirty pages a
//! checkpoint, all of them kept but the oldest fifth.
//!
//! `cargo run --release -p keyframe-store --example recorder [CHECKPOINTS]`; figures for
//! docs/design/flight-recorder.md.

use jiff::Timestamp;
use keyframe_store::{PruneOptions, SealRequest, Store};
use keyframe_units::{BlockKind, PAGE_BYTES, Page, PageIndex, RamBlock, RamLayout};
use std::error::Error;
use std::time::Instant;

const PAGES: u64 = 1 << 18;
const DIRTY_PAGES: u64 = 20_000;

/// A page of its own that compresses well: the packs are not what is measured.
fn page(number: u64) -> Page {
    let mut page = [7; PAGE_BYTES];
    page[..8].copy_from_slice(&number.to_le_bytes());
    page
}

fn request(ram: &RamLayout, second: u64) -> Result<SealRequest<'static>, Box<dyn Error>> {
    let taken_at = Timestamp::from_second(1_700_000_000 + i64::try_from(second)?)?;
    Ok(SealRequest { taken_at, ..SealRequest::of_pages(ram, "interval") })
}

/// What this thread had of a processor.
fn processor_ms() -> Result<f64, Box<dyn Error>> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let ns: u64 = text.split(' ').next().unwrap_or_default().parse()?;
    Ok(ns as f64 / 1e6)
}

fn main() -> Result<(), Box<dyn Error>> {
    let checkpoints: u64 = std::env::args().nth(1).map_or(Ok(300), |n| n.parse())?;
    let dir = tempfile::tempdir()?;
    let store = Store::init(&dir.path().join("s"))?;
    let bytes = PAGES * PAGE_BYTES as u64;
    let block = RamBlock {
        name: "ram".into(),
        kind: BlockKind::Backend,
        used_bytes: bytes,
        total_bytes: bytes,
    };
    let ram = RamLayout::new(vec![block])?;
    let mut writer = store.lock_writer("example")?;
    let mut run = writer.begin_run("vm", &ram)?;
    let began = Instant::now();
    let (mut state, mut content) = (0x2545_F491_4F6C_DD1D_u64, 0);
    for second in 0..checkpoints {
        for _ in 0..DIRTY_PAGES {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            content += 1;
            run.put_page(PageIndex(state % PAGES), &page(content))?;
        }
        run.seal(request(&ram, second)?)?;
    }
    run.finish()?;
    drop(writer);
    println!("{checkpoints} checkpoints in {:.1} s", began.elapsed().as_secs_f64());
    let ids = store.ids()?;
    store.forget(&ids.iter().copied().take(ids.len() / 5).collect())?;
    for (dry_run, max_unused) in [(true, 0.25), (false, 0.0)] {
        let options = PruneOptions { max_unused, dry_run, ..PruneOptions::default() };
        let began_ms = processor_ms()?;
        let report = store.prune(&options, &mut |_| {})?;
        let ms = processor_ms()? - began_ms;
        let each_ms = ms / (checkpoints - checkpoints / 5) as f64;
        println!(
            "prune, at most {max_unused} unused, dry {dry_run}: {ms:.0} ms of a processor, {each_ms:.2} ms for each checkpoint that is kept"
        );
        println!("  {report:?}");
    }
    Ok(())
}
