//! What one server feeds:
//! `cargo run --release -p keyframe-serve --example throughput -- [MIB] [SECONDS]`. A pack of noise
//! is read over the loopback interface by 1, 4 and 16 clients, each without a cache, in one process
//! with the server; prints bytes a second, and the processor time of all of it.

use keyframe_serve::{Server, ServerIdentity, ServerOptions};
use keyframe_store::Store;
use keyframe_store_backend::{Backend, ReadFile, ServedBackend};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const PACK: &str = "packs/00000001.pack";
const READ_BYTES: usize = 1 << 20;

fn main() {
    let mut args = std::env::args().skip(1).filter_map(|arg| arg.parse::<u64>().ok());
    let (mib, seconds) = (args.next().unwrap_or(256), args.next().unwrap_or(5));
    let dir = tempfile::tempdir().expect("a directory");
    let place = dir.path().join("store");
    Store::init(&place).expect("a store");
    noise(&place.join(PACK), mib);
    let listen = "127.0.0.1:0".parse().expect("an address");
    let identity = ServerIdentity::fresh().expect("a certificate");
    let options =
        ServerOptions { listen, token: None, identity, connections_max: 64, writers_lease: None };
    let server = Server::bind(&place, options).expect("a server");
    let url = format!("kf://{}?fingerprint={}", server.address(), server.fingerprint());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!("{cores} cores, a pack of {mib} MiB, {seconds} s each");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| server.run(&stop).expect("it serves"));
        for clients in [1, 4, 16] {
            let (before, began) = (cpu(), Instant::now());
            let read = measure(&url, clients, Duration::from_secs(seconds));
            let (elapsed, used) = (began.elapsed().as_secs_f64(), cpu() - before);
            let rate = read as f64 / elapsed / 1e6;
            println!(
                "{clients:2} clients: {rate:6.0} MB/s together, {:.2} s of processor a GB",
                used / (read as f64 / 1e9)
            );
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// Bytes that so many clients read in that time.
fn measure(url: &str, clients: u64, time: Duration) -> u64 {
    let (read, end) = (AtomicU64::new(0), Instant::now() + time);
    std::thread::scope(|scope| {
        for client in 0..clients {
            let read = &read;
            scope.spawn(move || {
                let mut buffer = vec![0; READ_BYTES];
                while Instant::now() < end {
                    // Anew each round: what is in memory is not fetched again.
                    let file = open(url);
                    let pieces = file.len_bytes().expect("its length") / READ_BYTES as u64;
                    for piece in (0..pieces).map(|piece| (piece + client * 7) % pieces) {
                        file.read_at(piece * READ_BYTES as u64, &mut buffer).expect("a read");
                        read.fetch_add(READ_BYTES as u64, Ordering::Relaxed);
                        if Instant::now() > end {
                            return;
                        }
                    }
                }
            });
        }
    });
    read.into_inner()
}

fn open(url: &str) -> Arc<dyn ReadFile> {
    ServedBackend::open_in(Path::new(url), &|_| None)
        .and_then(|served| served.open(PACK))
        .expect("the pack")
}

/// Bytes that no compression makes fewer.
fn noise(path: &Path, mib: u64) {
    let mut file = std::fs::File::create(path).expect("a pack");
    for number in 0..mib {
        let mut block = vec![0; 1 << 20];
        blake3::Hasher::new().update(&number.to_le_bytes()).finalize_xof().fill(&mut block);
        file.write_all(&block).expect("write the pack");
    }
}

/// Seconds of processor time of this process.
fn cpu() -> f64 {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    used.tv_sec as f64 + used.tv_nsec as f64 / 1e9
}
