//! Counts the bytes that deduplication and zstd -1 leave of the pages alone: of each page, and of each
//! page or its difference to the page before. Both are references for the size of a store.

use keyframe_bench_feed::{Error, Job, StoreMeasurement, Result, key_of};
use keyframe_units::{PAGE_BYTES, Page, ZERO_PAGE};
use rustc_hash::FxHashSet;
use xxhash_rust::xxh3::xxh3_128;
use zstd::bulk::Compressor;

const LEVEL: i32 = 1;

/// Counts the bytes of a job's stream: `stored_bytes` without differences, `image_stored_bytes` with
/// them.
pub fn count(job: &Job) -> Result<StoreMeasurement> {
    let mut stream = job.source.stream()?;
    let mut counter = Counter {
        zstd: Compressor::new(LEVEL).map_err(|e| Error::failed("begin to compress", e))?,
        buffer: vec![0; zstd::zstd_safe::compress_bound(PAGE_BYTES)],
        seen: FxHashSet::default(),
        plain_bytes: 0,
        delta_bytes: 0,
    };
    for page in &stream.image {
        counter.add(page, None)?;
    }
    for second in 0..stream.seconds.len() {
        for (page, content) in
            stream.seconds[second].pages.iter().zip(&stream.seconds[second].contents)
        {
            counter.add(content, Some(&stream.image[page.0 as usize]))?;
        }
        stream.apply(second);
    }
    Ok(StoreMeasurement {
        stored_bytes: counter.plain_bytes,
        image_stored_bytes: counter.delta_bytes,
        distinct_bytes: (counter.seen.len() * PAGE_BYTES) as u64,
        ..StoreMeasurement::default()
    })
}

struct Counter {
    zstd: Compressor<'static>,
    buffer: Vec<u8>,
    seen: FxHashSet<[u8; 17]>,
    plain_bytes: u64,
    delta_bytes: u64,
}

impl Counter {
    fn add(&mut self, page: &Page, before: Option<&Page>) -> Result<()> {
        if *page == ZERO_PAGE || !self.seen.insert(key_of(xxh3_128(page))) {
            return Ok(());
        }
        let plain = self.compressed(page)?;
        let delta = match before {
            Some(before) => {
                let difference: Page = std::array::from_fn(|at| page[at] ^ before[at]);
                self.compressed(&difference)?.min(plain)
            }
            None => plain,
        };
        self.plain_bytes += plain;
        self.delta_bytes += delta;
        Ok(())
    }

    /// Returns the compressed length in bytes, at most that of a page.
    fn compressed(&mut self, page: &Page) -> Result<u64> {
        let len = self.zstd.compress_to_buffer(page, &mut self.buffer[..]);
        Ok(len.map_err(|e| Error::failed("compress a page", e))?.min(PAGE_BYTES) as u64)
    }
}
