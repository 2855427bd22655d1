//! Measures what the store does with each page, alone:
//! `cargo run --release -p keyframe-store --example hashes [MIB]`. On one thread, all in turns,
//! best of nine; what the store's choice rests on (docs/design/encoding.md).

use keyframe_units::PAGE_BYTES;
use std::hint::black_box;
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128};

const TURNS: usize = 9;

fn best(work: &mut dyn FnMut()) -> Duration {
    let time = |_| {
        let started = Instant::now();
        work();
        started.elapsed()
    };
    (0..TURNS).map(time).min().unwrap_or_default()
}

/// Words of a few hundred values: pages that compress to about a half.
fn pages(mib: usize) -> Vec<u8> {
    let mut state = 7u64;
    let words = (0..mib << 17).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (0x7fff_0000_0000 | ((state % 300) * 0x9e37_79b9) & 0xffff_fff8).to_le_bytes()
    });
    words.collect()
}

fn main() {
    let mib = std::env::args().nth(1).and_then(|mib| mib.parse().ok()).unwrap_or(64);
    let all = pages(mib);
    let pages = all.as_chunks::<PAGE_BYTES>().0;
    let mut copy = vec![0; all.len()];
    let mut coded = vec![0; 2 * PAGE_BYTES];
    let key = [7; 32];
    let rows: [(&str, &mut dyn FnMut()); 5] = [
        ("memcpy", &mut || {
            for (from, to) in pages.iter().zip(copy.as_chunks_mut::<PAGE_BYTES>().0) {
                *to = *from;
            }
            black_box(&copy);
        }),
        ("XXH3-64 with a seed (a record's check)", &mut || {
            for page in pages {
                let _ = black_box(xxh3_64_with_seed(page, 1));
            }
        }),
        ("XXH3-128 (no guard against a guest)", &mut || {
            for page in pages {
                let _ = black_box(xxh3_128(page));
            }
        }),
        ("BLAKE3, keyed (a page's identity)", &mut || {
            for page in pages {
                let _ = black_box(blake3::keyed_hash(&key, page));
            }
        }),
        ("LZ4, acceleration 6", &mut || {
            for page in pages {
                let fast = Some(lz4::block::CompressionMode::FAST(6));
                let _ = black_box(lz4::block::compress_to_buffer(page, fast, false, &mut coded));
            }
        }),
    ];
    for (name, work) in rows {
        let time = best(work);
        let gb_per_s = all.len() as f64 / time.as_secs_f64() / 1e9;
        println!(
            "{name:<40} {gb_per_s:6.2} GB/s {:8.2} us/page",
            time.as_secs_f64() * 1e6 / pages.len() as f64
        );
    }
}
