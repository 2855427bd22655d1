//! A relay that makes a way between hosts longer: TCP, each byte later by so much, in either
//! direction.
//!
//! ```text
//!   one end ──▶ read ─▶ (due, bytes) ... ─▶ write ──▶ other end          and back
//! ```
//!
//! The kernels of test machines have no `netem`. What a relay leaves out is loss and reordering.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

const CHUNK_BYTES: usize = 64 << 10;
/// Under way at a time: more than a link of 10 Gbit/s has in 20 ms.
const CHUNKS_MAX: usize = 1024;

type Late = (Instant, Vec<u8>);

/// Accepts on `at` until `is_over`, and passes on to `to`; what goes on between two ends, ends when
/// they do. All that it does is in the caller's network namespace.
pub fn relay(
    at: SocketAddr,
    to: SocketAddr,
    delay: Duration,
    is_over: &AtomicBool,
) -> std::io::Result<()> {
    let listener = TcpListener::bind(at)?;
    listener.set_nonblocking(true)?;
    while !is_over.load(Ordering::Relaxed) {
        let Ok((from, _)) = listener.accept() else {
            std::thread::sleep(Duration::from_millis(5));
            continue;
        };
        from.set_nonblocking(false)?;
        // An end that is not there is one that closes.
        let Ok(to) = TcpStream::connect_timeout(&to, Duration::from_secs(2)) else { continue };
        let (Ok(from_again), Ok(to_again)) = (from.try_clone(), to.try_clone()) else { continue };
        pass(from, to, delay);
        pass(to_again, from_again, delay);
    }
    Ok(())
}

/// One direction.
fn pass(from: TcpStream, to: TcpStream, delay: Duration) {
    let _ = (from.set_nodelay(true), to.set_nodelay(true));
    let (later, due) = sync_channel(CHUNKS_MAX);
    std::thread::spawn(move || take(from, &later, delay));
    std::thread::spawn(move || give(to, &due));
}

fn take(mut from: TcpStream, later: &SyncSender<Late>, delay: Duration) {
    let mut buffer = vec![0; CHUNK_BYTES];
    while let Ok(count) = from.read(&mut buffer) {
        if count == 0 || later.send((Instant::now() + delay, buffer[..count].to_vec())).is_err() {
            break;
        }
    }
}

fn give(mut to: TcpStream, due: &Receiver<Late>) {
    while let Ok((at, bytes)) = due.recv() {
        std::thread::sleep(at.saturating_duration_since(Instant::now()));
        if to.write_all(&bytes).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}
