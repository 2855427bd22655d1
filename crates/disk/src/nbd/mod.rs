//! The NBD server: fixed newstyle negotiation, simple and structured replies, over a unix socket.
//!
//! ```text
//!   listener ──▶ connection ──greeting, options──▶ an export is chosen ──▶ requests ──▶ DISC, or the client is gone
//!                a thread each                                             │ answered in order, replies gathered
//!                                                                          ├ flushes: a second thread, out of order
//!                                                                          └ slow reads: a few threads, out of order
//! ```
//!
//! Requests are served by the thread that reads them, one after the other: with the page cache
//! behind it that is as fast as the socket. Only what waits for the medium goes to others, so that
//! the rest goes on meanwhile: flushes and FUA, and reads of what is not in the page cache, or of
//! qcow2 and layers, which may be. Replies are gathered until the client has nothing more to say.
//!
//! Invariants: a length is checked before anything is allocated or done for it; every request is
//! answered or the connection ends; a request beyond the bounds of the protocol ends the
//! connection. All connections to an export see one disk, and a flush on one covers what the others
//! were told is done: so several connections are advertised as possible.
//!
//! Left out: TLS (the socket is a file with permissions), resizing, extended headers.

mod affinity;
pub mod client;
mod connection;
mod handshake;
mod input;
mod output;
mod slow;
mod transmission;
pub(crate) mod wire;

use crate::{Disk, Error, Result};
use affinity::Affinity;
use keyframe_locks::IgnorePoison;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How many clients there can be at once.
pub const CLIENTS_MAX: usize = 64;
/// How often the listener looks whether it is to end.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A disk under the name that clients ask for.
#[derive(Clone)]
pub struct Export {
    /// Its name.
    pub name: String,
    /// The disk.
    pub disk: Arc<Disk>,
}

/// Counters of all connections.
#[derive(Debug, Default)]
pub struct Traffic {
    /// Clients connected now.
    pub clients: AtomicUsize,
    /// Clients that have ever chosen an export.
    pub served: AtomicU64,
    /// Requests answered.
    pub requests: AtomicU64,
    /// Bytes read by clients.
    pub read_bytes: AtomicU64,
    /// Bytes written by clients.
    pub written_bytes: AtomicU64,
    /// Bytes made zero by clients.
    pub zeroed_bytes: AtomicU64,
    /// Bytes discarded by clients.
    pub discarded_bytes: AtomicU64,
    /// Flushes, FUA included.
    pub flushes: AtomicU64,
}

/// A server: its socket, its threads.
pub struct Server {
    path: PathBuf,
    shared: Arc<Shared>,
    listener: Option<std::thread::JoinHandle<()>>,
}

pub(crate) struct Shared {
    pub exports: Vec<Export>,
    pub traffic: Traffic,
    pub affinity: Affinity,
    ending: AtomicBool,
    connections: Mutex<Vec<(u64, UnixStream)>>,
}

impl Server {
    /// Serves `exports` on a new socket at `path`.
    pub fn start(path: &Path, exports: Vec<Export>) -> Result<Self> {
        let name = path.display().to_string();
        let listener = UnixListener::bind(path).map_err(Error::io(&name, "listen on"))?;
        listener.set_nonblocking(true).map_err(Error::io(&name, "listen on"))?;
        let shared = Arc::new(Shared::new(exports));
        let for_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("nbd-listen".into())
            .spawn(move || for_thread.listen(&listener))
            .map_err(Error::io(name, "start the thread of"))?;
        Ok(Self { path: path.into(), shared, listener: Some(thread) })
    }

    /// What went over it.
    pub fn traffic(&self) -> &Traffic {
        &self.shared.traffic
    }

    /// Where requests are answered.
    pub fn affinity(&self) -> &Affinity {
        &self.shared.affinity
    }

    /// Takes no more clients, ends the connections, and waits until their requests are done.
    pub fn end(mut self) {
        self.finish();
    }

    fn finish(&mut self) {
        self.shared.ending.store(true, Ordering::Release);
        let _ = std::fs::remove_file(&self.path);
        if let Some(thread) = self.listener.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.finish();
    }
}

impl Shared {
    fn new(exports: Vec<Export>) -> Self {
        let (ending, connections) = (AtomicBool::new(false), Mutex::default());
        Self {
            exports,
            traffic: Traffic::default(),
            affinity: Affinity::default(),
            ending,
            connections,
        }
    }

    fn listen(self: &Arc<Self>, listener: &UnixListener) {
        let mut threads: Vec<std::thread::JoinHandle<()>> = Vec::new();
        let mut number = 0u64;
        while !self.ending.load(Ordering::Acquire) {
            wait(listener);
            threads.retain(|thread| !thread.is_finished());
            let Ok((stream, _)) = listener.accept() else { continue };
            if threads.len() >= CLIENTS_MAX || stream.set_nonblocking(false).is_err() {
                continue;
            }
            number += 1;
            let Ok(handle) = stream.try_clone() else { continue };
            self.connections.lock().ignore_poison().push((number, handle));
            let (shared, id) = (Arc::clone(self), number);
            let thread = std::thread::Builder::new().name("nbd-client".into()).spawn(move || {
                shared.traffic.clients.fetch_add(1, Ordering::AcqRel);
                // A client that breaks the protocol, or goes away, ends its own connection alone.
                let _ = connection::serve(&shared, stream);
                shared.traffic.clients.fetch_sub(1, Ordering::AcqRel);
                shared.forget(id);
            });
            match thread {
                Ok(thread) => threads.push(thread),
                Err(_) => self.forget(number),
            }
        }
        for (_, stream) in self.connections.lock().ignore_poison().drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        for thread in threads {
            let _ = thread.join();
        }
    }

    fn forget(&self, id: u64) {
        self.connections.lock().ignore_poison().retain(|(other, _)| *other != id);
    }
}

/// Serves one client until it leaves, for the fuzzers.
pub(crate) fn serve_one(exports: Vec<Export>, stream: UnixStream) {
    let _ = connection::serve(&Arc::new(Shared::new(exports)), stream);
}

/// Waits a while for a client.
fn wait(listener: &UnixListener) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let limit = Timespec { tv_sec: 0, tv_nsec: LOOK_EVERY.subsec_nanos().into() };
    if poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&limit)).is_err() {
        std::thread::sleep(LOOK_EVERY);
    }
}
