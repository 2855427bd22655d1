//! Measures how fast pages go in, on one thread:
//! `cargo run --release -p keyframe-store --example ingest [MIB]`. The stream of
//! `keyframe-bench store`: an image and nine seconds; best of five turns.

use keyframe_bench_feed::{ChangedWords, Stream};
use keyframe_store::{SealRequest, Store};
use keyframe_units::{BlockKind, PageIndex, RamBlock, RamLayout};
use std::time::Instant;

const TURNS: usize = 5;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mib: u64 = std::env::args().nth(1).and_then(|mib| mib.parse().ok()).unwrap_or(256);
    let (mut image_s, mut steady_s, mut stored) = (f64::MAX, f64::MAX, 0);
    let bytes = mib << 20;
    let block = RamBlock {
        name: "pc.ram".into(),
        kind: BlockKind::Backend,
        used_bytes: bytes,
        total_bytes: bytes,
    };
    let ram = RamLayout::new(vec![block])?;
    let mut steady_bytes = 0;
    for _ in 0..TURNS {
        let mut stream = Stream::new(mib << 8, 9, ChangedWords::Few);
        let dir =
            std::path::PathBuf::from(format!("/dev/shm/keyframe-ingest.{}", std::process::id()));
        let store = Store::init(&dir)?;
        let mut writer = store.lock_writer("ingest")?;
        let started = Instant::now();
        let mut run = writer.begin_run("bench", &ram)?;
        let image: Vec<_> = (0..).map(PageIndex).zip(&stream.image).collect();
        run.put_pages(&image, &mut |_, _| ())?;
        run.seal(SealRequest::of_pages(&ram, "interval"))?;
        image_s = image_s.min(started.elapsed().as_secs_f64());
        let mut all = 0.0;
        steady_bytes = 0;
        for second in 0..stream.seconds.len() {
            let pages: Vec<_> = stream.seconds[second]
                .pages
                .iter()
                .copied()
                .zip(&stream.seconds[second].contents)
                .collect();
            let started = Instant::now();
            run.put_pages(&pages, &mut |_, _| ())?;
            run.seal(SealRequest::of_pages(&ram, "interval"))?;
            all += started.elapsed().as_secs_f64();
            steady_bytes += pages.len() * 4096;
            drop(pages);
            stream.apply(second);
        }
        steady_s = steady_s.min(all);
        run.finish()?;
        drop(writer);
        stored = walk(&dir)?;
        std::fs::remove_dir_all(&dir)?;
    }
    let (image, steady) = (bytes as f64 / image_s / 1e6, steady_bytes as f64 / steady_s / 1e6);
    println!(
        "image {image:.0} MB/s, steady {steady:.0} MB/s, stored {:.1} MiB",
        stored as f64 / 1_048_576.0
    );
    Ok(())
}

fn walk(dir: &std::path::Path) -> std::io::Result<u64> {
    let mut sum = 0;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let meta = entry.metadata()?;
        sum += if meta.is_dir() { walk(&entry.path())? } else { meta.len() };
    }
    Ok(sum)
}
