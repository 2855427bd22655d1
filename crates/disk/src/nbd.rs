//! The NBD server: fixed newstyle negotiation, simple and structured replies, over a unix socket.
//!
//! ```text
//!   listener ──▶ connection ──greeting, options──▶ export ──▶ requests ──▶ disconnect
//!                a thread each                               │ in order, replies gathered
//!                                                            ├ flushes: a second thread, unordered
//!                                                            └ slow reads: more threads, unordered
//! ```
//!
//! The thread that reads requests serves them, one after the other: an answer from the page cache
//! takes no longer than its way through the socket. Only requests that may wait for the medium go
//! to other threads, so that the rest goes on: flushes and FUA writes, reads of data that is not in
//! the page cache, and reads of qcow2 and layers. Replies are gathered until no more requests wait.
//!
//! Invariants: a length is checked before memory is allocated or work is done for it. Every request
//! is answered, or the connection ends. A request that breaks the protocol ends the connection. All
//! connections to an export see one disk, and a flush on one covers all writes that were
//! acknowledged on the others, so the server advertises that several connections are possible.
//!
//! Left out: TLS (permissions protect the socket's file), resizing, extended headers.

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

/// The largest number of clients that are connected at once.
pub const CLIENTS_MAX: usize = 64;
/// How often the listener checks whether it must end.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A disk, with the name that clients ask for.
#[derive(Clone)]
pub struct NbdExport {
    /// The export's name, by which clients choose it.
    pub name: String,
    /// The disk that is exported.
    pub disk: Arc<Disk>,
}

/// Counters of all connections of a server.
#[derive(Debug, Default)]
pub struct Traffic {
    /// The number of clients that are connected now, also of those that negotiate.
    pub clients: AtomicUsize,
    /// The number of clients that have chosen an export since the start.
    pub served: AtomicU64,
    /// The number of requests that were received, except disconnects. Failed ones count too.
    pub requests: AtomicU64,
    /// The number of bytes that clients have requested to read.
    pub read_bytes: AtomicU64,
    /// The number of bytes that clients have requested to write.
    pub written_bytes: AtomicU64,
    /// The number of bytes that clients have requested to make zero.
    pub zeroed_bytes: AtomicU64,
    /// The number of bytes that clients have requested to discard.
    pub discarded_bytes: AtomicU64,
    /// The number of flushes that clients have requested, including requests with FUA (force unit
    /// access).
    pub flushes: AtomicU64,
}

/// An NBD server: a socket and its threads.
pub struct NbdServer {
    path: PathBuf,
    shared: Arc<Shared>,
    listener: Option<std::thread::JoinHandle<()>>,
}

pub(crate) struct Shared {
    /// The exports that clients can choose.
    pub exports: Vec<NbdExport>,
    /// The counters of all connections.
    pub traffic: Traffic,
    /// The processor core on which requests are answered.
    pub affinity: Affinity,
    ending: AtomicBool,
    connections: Mutex<Vec<(u64, UnixStream)>>,
}

impl NbdServer {
    /// Starts a server of `exports` on a new unix socket at `path`. Error: [`Error::Io`] if a file
    /// exists at `path`, or if the socket or the thread cannot be created.
    pub fn start(path: &Path, exports: Vec<NbdExport>) -> Result<Self> {
        let listener = UnixListener::bind(path);
        let listener = listener.map_err(Error::io(path.display().to_string(), "listen on"))?;
        Self::serve(path, listener, exports)
    }

    /// Starts a server of `exports` on `listener`, a unix socket that is bound to `path` already.
    /// The file at `path` is removed when the server ends. Error: [`Error::Io`] if the socket
    /// cannot be used or the thread cannot be started.
    pub fn serve(path: &Path, listener: UnixListener, exports: Vec<NbdExport>) -> Result<Self> {
        let name = path.display().to_string();
        listener.set_nonblocking(true).map_err(Error::io(&name, "listen on"))?;
        let shared = Arc::new(Shared::new(exports));
        let for_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("nbd-listen".into())
            .spawn(move || for_thread.listen(&listener))
            .map_err(Error::io(name, "start the thread of"))?;
        Ok(Self { path: path.into(), shared, listener: Some(thread) })
    }

    /// Returns the counters of all connections.
    pub fn traffic(&self) -> &Traffic {
        &self.shared.traffic
    }

    /// Returns the setting of the processor core on which requests are answered, so that the caller
    /// can change it.
    pub fn affinity(&self) -> &Affinity {
        &self.shared.affinity
    }

    /// Accepts no more clients, closes the connections, waits until their requests are done, and
    /// removes the socket's file. Dropping the server does the same. The disks are not synced.
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

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.finish();
    }
}

impl Shared {
    fn new(exports: Vec<NbdExport>) -> Self {
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
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) => {
                    if error.kind() != std::io::ErrorKind::WouldBlock {
                        // The client still waits, for example for a descriptor to be free.
                        std::thread::sleep(LOOK_EVERY);
                    }
                    continue;
                }
            };
            if threads.len() >= CLIENTS_MAX || stream.set_nonblocking(false).is_err() {
                continue;
            }
            number += 1;
            let Ok(handle) = stream.try_clone() else { continue };
            self.connections.lock().ignore_poison().push((number, handle));
            let (shared, id) = (Arc::clone(self), number);
            let thread = std::thread::Builder::new().name("nbd-client".into()).spawn(move || {
                shared.traffic.clients.fetch_add(1, Ordering::AcqRel);
                // A client that breaks the protocol or disconnects ends only its own connection.
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

/// Serves one client until it disconnects. For the fuzzers.
pub(crate) fn serve_one(exports: Vec<NbdExport>, stream: UnixStream) {
    let _ = connection::serve(&Arc::new(Shared::new(exports)), stream);
}

/// Waits up to [`LOOK_EVERY`] for a client.
fn wait(listener: &UnixListener) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let limit = Timespec { tv_sec: 0, tv_nsec: LOOK_EVERY.subsec_nanos().into() };
    if poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&limit)).is_err() {
        std::thread::sleep(LOOK_EVERY);
    }
}
