//! What recompression leaves of a stream of pages, and what it costs:
//! `cargo run --release -p keyframe-store --example recompress [MIB] [DIR]`. The stream is that of
//! `keyframe-bench store`, which does the same beside its peers (docs/design/benchmarks.md).

use keyframe_bench_feed::{ChangedWords, Stream};
use keyframe_store::{PruneOptions, SealRequest, Store};
use keyframe_units::{BlockKind, PAGE_BYTES, Page, PageIndex, PageRange, RamBlock, RamLayout};
use std::path::Path;
use std::time::Instant;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const SECONDS: usize = 9;

/// Files of the packs and the maps.
fn size_mib(dir: &Path) -> Outcome<f64> {
    let mut bytes = 0;
    for folder in ["packs", "maps"] {
        for file in std::fs::read_dir(dir.join(folder))? {
            bytes += file?.metadata()?.len();
        }
    }
    Ok(bytes as f64 / 1_048_576.0)
}

/// Reads every page of the newest checkpoint and compares it; seconds, the best of three.
fn read(store: &Store, image: &[Page]) -> Outcome<f64> {
    let newest = store.ids()?.last().copied().ok_or("no checkpoint")?;
    let mut best = f64::MAX;
    for _ in 0..3 {
        let started = Instant::now();
        let loaded = store.load(newest)?;
        let mut wrong = 0;
        loaded.read_pages(
            PageRange::new(PageIndex(0), image.len() as u64),
            &mut |page, content| {
                wrong += usize::from(image.get(page.0 as usize) != Some(content));
                Ok::<_, keyframe_store::Error>(())
            },
        )?;
        if wrong > 0 {
            return Err(format!("{wrong} pages are not what was put").into());
        }
        best = best.min(started.elapsed().as_secs_f64());
    }
    Ok(best)
}

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let mib: u64 = arguments.next().map_or(Ok(256), |mib| mib.parse())?;
    let place = arguments.next().map_or_else(std::env::temp_dir, Into::into);
    let dir = tempfile::tempdir_in(place)?;
    let pages = (mib << 20) / PAGE_BYTES as u64;
    let mut stream = Stream::new(pages, SECONDS, ChangedWords::Few);
    let bytes = mib << 20;
    let block = RamBlock {
        name: "ram".into(),
        kind: BlockKind::Backend,
        used_bytes: bytes,
        total_bytes: bytes,
    };
    let ram = RamLayout::new(vec![block])?;
    let store = Store::init(&dir.path().join("store"))?;
    let mut writer = store.lock_writer("example")?;
    let mut run = writer.begin_run("vm", &ram)?;
    let image: Vec<_> = (0..).map(PageIndex).zip(&stream.image).collect();
    let seconds = stream.seconds.iter().map(|s| s.pages.iter().copied().zip(&s.contents).collect());
    for (at, dirty) in std::iter::once(image).chain(seconds).enumerate() {
        let started = Instant::now();
        for some in dirty.chunks(8192) {
            run.put_pages(some, &mut |_, _| ())?;
        }
        run.seal(SealRequest::of_pages(&ram, "example"))?;
        let rate = (dirty.len() * PAGE_BYTES) as f64 / started.elapsed().as_secs_f64() / 1e6;
        println!(
            "checkpoint {at}: {} pages, {rate:.0} MB/s, {:.1} MiB",
            dirty.len(),
            size_mib(store.path())?
        );
    }
    run.finish()?;
    drop(writer);
    let distinct_mib = stream.distinct_bytes() as f64 / 1_048_576.0;
    (0..SECONDS).for_each(|second| stream.apply(second));
    println!("read: {:.3} s", read(&store, &stream.image)?);
    let started = Instant::now();
    let all = PruneOptions { recompress_bytes: u64::MAX, ..PruneOptions::default() };
    let report = store.prune(&all, &mut |_| {})?;
    println!(
        "recompressed {} packs in {:.1} s: {:.1} MiB",
        report.recompressed_packs,
        started.elapsed().as_secs_f64(),
        size_mib(store.path())?
    );
    println!("read: {:.3} s", read(&Store::open(store.path())?, &stream.image)?);
    println!("distinct pages that are not zero: {distinct_mib:.1} MiB");
    Ok(())
}
