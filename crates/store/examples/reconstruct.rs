//! Measures how fast an image is read back:
//! `cargo run --release -p keyframe-store --example reconstruct [MIB]`. The stream of
//! `keyframe-bench store`: an image and nine seconds; the last checkpoint, warm, best of five
//! turns.

use keyframe_bench_feed::{ChangedWords, Stream};
use keyframe_store::{Error, LoadedCheckpoint, SealRequest, Store};
use keyframe_units::{BlockKind, PAGE_BYTES, PageIndex, PageRange, RamBlock, RamLayout, ZERO_PAGE};
use std::time::{Duration, Instant};

const TURNS: usize = 5;

fn best(work: &mut dyn FnMut()) -> Duration {
    let time = |_| {
        let started = Instant::now();
        work();
        started.elapsed()
    };
    (0..TURNS).map(time).min().unwrap_or_default()
}

/// A store of the stream; the last checkpoint, and what it holds.
fn subject(store: &Store, mib: u64) -> keyframe_store::Result<(LoadedCheckpoint, Stream)> {
    let mut stream = Stream::new(mib << 8, 9, ChangedWords::Few);
    let bytes = mib << 20;
    let block = RamBlock {
        name: "pc.ram".into(),
        kind: BlockKind::Backend,
        used_bytes: bytes,
        total_bytes: bytes,
    };
    let ram = RamLayout::new(vec![block]).unwrap_or_else(|e| panic!("{e}"));
    let mut writer = store.lock_writer("reconstruct")?;
    let mut run = writer.begin_run("bench", &ram)?;
    let image: Vec<_> = (0..).map(PageIndex).zip(&stream.image).collect();
    run.put_pages(&image, &mut |_, _| ())?;
    let mut id = run.seal(SealRequest::of_pages(&ram, "interval"))?.id;
    for second in 0..stream.seconds.len() {
        let pages: Vec<_> = stream.seconds[second]
            .pages
            .iter()
            .copied()
            .zip(&stream.seconds[second].contents)
            .collect();
        run.put_pages(&pages, &mut |_, _| ())?;
        id = run.seal(SealRequest::of_pages(&ram, "interval"))?.id;
        stream.apply(second);
    }
    run.finish()?;
    Ok((store.load(id)?, stream))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mib = std::env::args().nth(1).and_then(|mib| mib.parse().ok()).unwrap_or(256);
    let dir = std::env::temp_dir().join(format!("keyframe-reconstruct.{}", std::process::id()));
    let measured = measure(&Store::init(&dir)?, mib);
    std::fs::remove_dir_all(&dir)?;
    Ok(measured?)
}

fn measure(store: &Store, mib: u64) -> keyframe_store::Result<()> {
    let (loaded, stream) = subject(store, mib)?;
    let mut out = vec![ZERO_PAGE; stream.image.len()];
    let pages = stream.image.len() as f64;
    let say = |name: &str, time: Duration, of: Duration| {
        let (us, ratio) = (time.as_secs_f64() * 1e6 / pages, time.as_secs_f64() / of.as_secs_f64());
        let gb_per_s = pages * PAGE_BYTES as f64 / time.as_secs_f64() / 1e9;
        println!("{name:<24} {gb_per_s:6.2} GB/s {us:6.2} us/page {ratio:6.2} times memcpy");
    };
    let copy = best(&mut || {
        for (from, to) in stream.image.iter().zip(&mut out) {
            *to = *from;
        }
        std::hint::black_box(&out);
    });
    say("memcpy", copy, copy);
    let load = best(&mut || drop(std::hint::black_box(store.load(loaded.id))));
    say("load: its maps", load, copy);
    for (name, way) in
        [("read, one thread", 1), ("read, all cores", 2), ("read into, all cores", 3)]
    {
        out.fill(ZERO_PAGE);
        let all = PageRange::new(PageIndex(0), out.len() as u64);
        let mut failed = None;
        let time = best(&mut || {
            if way == 3 {
                failed = failed.take().or(loaded.read_into(PageIndex(0), &mut out).err());
                return;
            }
            let mut sink = |page: PageIndex, content: &keyframe_units::Page| {
                out[page.0 as usize] = *content;
                Ok::<_, Error>(())
            };
            let read = match way {
                1 => loaded.read_pages(all, &mut sink),
                _ => loaded.read_pages_by_all_cores(all, &mut sink),
            };
            failed = failed.take().or(read.err());
        });
        if let Some(error) = failed {
            return Err(error);
        }
        assert!(out == stream.image, "another image was read");
        say(name, time, copy);
    }
    Ok(())
}
