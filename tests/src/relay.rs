//! A TCP relay that delays each byte, in both directions, as a long link does.
//!
//! ```text
//!   one end ──▶ read ─▶ (due, bytes) ... ─▶ write ──▶ other end          and back
//! ```
//!
//! The kernels of test machines have no `netem`. The relay imitates neither loss nor reordering.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

const CHUNK_BYTES: usize = 64 << 10;
/// How many chunks may be under way: more than a link of 10 Gbit/s carries in 20 ms.
const CHUNKS_MAX: usize = 1024;

/// Bytes, and when they may be written.
type Delayed = (Instant, Vec<u8>);

/// Accepts connections on `at` until `is_over` is true, and relays each to `to`. A connection that
/// exists then ends with its ends. Sockets are in the caller's network namespace.
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
        // If `to` does not accept, the client's connection closes.
        let Ok(to) = TcpStream::connect_timeout(&to, Duration::from_secs(2)) else { continue };
        let (Ok(from_again), Ok(to_again)) = (from.try_clone(), to.try_clone()) else { continue };
        relay_one_way(from, to, delay);
        relay_one_way(to_again, from_again, delay);
    }
    Ok(())
}

/// Relays one direction.
fn relay_one_way(from: TcpStream, to: TcpStream, delay: Duration) {
    let _ = (from.set_nodelay(true), to.set_nodelay(true));
    let (later, due) = sync_channel(CHUNKS_MAX);
    std::thread::spawn(move || read_into(&later, from, delay));
    std::thread::spawn(move || write_when_due(to, &due));
}

fn read_into(later: &SyncSender<Delayed>, mut from: TcpStream, delay: Duration) {
    let mut buffer = vec![0; CHUNK_BYTES];
    while let Ok(count) = from.read(&mut buffer) {
        if count == 0 || later.send((Instant::now() + delay, buffer[..count].to_vec())).is_err() {
            break;
        }
    }
}

fn write_when_due(mut to: TcpStream, due: &Receiver<Delayed>) {
    while let Ok((at, bytes)) = due.recv() {
        std::thread::sleep(at.saturating_duration_since(Instant::now()));
        if to.write_all(&bytes).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}
