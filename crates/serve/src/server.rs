//! The server: it listens, gives each connection a thread, and ends when it is told to.

use crate::connection::Common;
use crate::files::{Refusal, ServedFiles};
use crate::remote_writers::{RemoteWriterOptions, RemoteWriters};
use crate::{Error, Result, ServerIdentity};
use keyframe_locks::IgnorePoison;
use keyframe_store_backend as backend;
use keyframe_store_backend::served::wire::RefusalCode;
use keyframe_store_backend::served::{Fingerprint, show_fingerprint};
use keyframe_tls::server_config;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;
use std::collections::HashMap;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use zeroize::Zeroizing;

/// How often the server looks whether it should end.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// Connections that are closed end in that time.
const END_MAX: Duration = Duration::from_secs(5);
/// The time between two searches for idle open files.
const TIDY_EVERY: Duration = Duration::from_secs(60);

/// The options of a checkpoint server.
#[derive(Debug)]
pub struct ServerOptions {
    /// The address to listen on. With port 0 the system chooses a free port.
    pub listen: SocketAddr,
    /// The token that clients must send; `None` if any client may read the store.
    pub token: Option<Zeroizing<Vec<u8>>>,
    /// The certificate by which clients recognize the server, and its key.
    pub identity: ServerIdentity,
    /// The largest number of open connections. The server closes further ones at once.
    pub connections_max: usize,
    /// The lease of remote writers; `None` if the server accepts no checkpoints.
    pub writers_lease: Option<Duration>,
}

/// The counts of a checkpoint server since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ServerReport {
    /// The number of bytes of answers, without TLS around them.
    pub bytes_sent: u64,
    /// The number of requests that were answered, greetings among them.
    pub requests: u64,
    /// The number of connections that clients made, refused ones included.
    pub connections: u64,
    /// The number of connections that the server refused: the client's token was wrong, too many
    /// connections were open, or the host lacked the resources for one more.
    pub refused: u64,
}

/// The counters that all connections of a server share. [`ServerReport`] describes each of them.
#[derive(Debug, Default)]
pub struct ServerCounts {
    /// See [`ServerReport::bytes_sent`].
    pub bytes_sent: AtomicU64,
    /// See [`ServerReport::requests`].
    pub requests: AtomicU64,
    /// See [`ServerReport::connections`].
    pub connections: AtomicU64,
    /// See [`ServerReport::refused`].
    pub refused: AtomicU64,
}

/// A checkpoint server that listens.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    fingerprint: Fingerprint,
    connections_max: usize,
    common: Arc<Common>,
    open: Arc<Mutex<HashMap<u64, TcpStream>>>,
}

impl Server {
    /// Binds a server for the store at `place`: a directory, or in object storage.
    ///
    /// Errors: [`Error::Open`] if other machines could reach the server without a token;
    /// [`Error::OpenToWriters`] and [`Error::NoDirectory`] if it cannot accept checkpoints;
    /// [`Error::Store`] if there is no store; [`Error::Certificate`] if the certificate does not
    /// match its key; [`Error::Io`] if the server cannot listen.
    pub fn bind(place: &Path, options: ServerOptions) -> Result<Self> {
        let ServerOptions { listen, token, identity, connections_max, writers_lease } = options;
        if !listen.ip().is_loopback() && token.is_none() {
            return Err(Error::Open(listen));
        }
        if writers_lease.is_some() {
            if token.is_none() {
                return Err(Error::OpenToWriters);
            }
            if backend::is_remote(place) || backend::is_read_only(place) {
                return Err(Error::NoDirectory(place.to_owned()));
            }
        }
        let files = backend::open(place).map_err(keyframe_store::Error::from)?;
        let store = keyframe_store::id_on(&*files, place)?;
        let fingerprint = identity.fingerprint();
        let tls = server_config(identity.tls, None).map_err(|e| Error::Certificate {
            object: "the certificate".into(),
            problem: e.to_string(),
        })?;
        let failed = |source| Error::Io { object: listen.to_string(), operation: "listen", source };
        let listener = TcpListener::bind(listen).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let token = token.map(|token| blake3::hash(&token));
        let (mut files, counts) = (ServedFiles::new(files, store), ServerCounts::default());
        if let Some(lease) = writers_lease {
            files = files.with_writers(Arc::new(RemoteWriters::new(of_directory(place, lease))));
        }
        let common = Arc::new(Common { files, tls, token, counts });
        Ok(Self { listener, address, fingerprint, connections_max, common, open: Arc::default() })
    }

    /// Returns the address on which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the SHA-256 of the server's certificate, in hexadecimal digits. A client can
    /// recognize the server by it.
    pub fn fingerprint(&self) -> String {
        show_fingerprint(&self.fingerprint)
    }

    /// Returns the counts so far.
    pub fn report(&self) -> ServerReport {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let ServerCounts { bytes_sent, requests, connections, refused } = &self.common.counts;
        ServerReport {
            bytes_sent: of(bytes_sent),
            requests: of(requests),
            connections: of(connections),
            refused: of(refused),
        }
    }

    /// Serves clients until `stop` is true. Then closes all connections and returns the counts.
    /// Error: [`Error::Io`] if the listening socket cannot be polled.
    pub fn run(&self, stop: &AtomicBool) -> Result<ServerReport> {
        let failed = |source| Error::Io {
            object: self.address.to_string(),
            operation: "accept connections",
            source,
        };
        let mut tidied = Instant::now();
        let mut number = 0;
        while !stop.load(Ordering::Relaxed) {
            match poll(&mut [PollFd::new(&self.listener, PollFlags::IN)], Some(&LOOK)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(failed(error.into())),
            }
            match self.listener.accept() {
                Ok((socket, _)) => {
                    number += 1;
                    self.begin(number, socket);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // No more descriptors, or a connection that went again: neither ends the others.
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
            if let Ok(writers) = self.common.files.writers() {
                writers.expire();
            }
            if tidied.elapsed() > TIDY_EVERY {
                self.common.files.tidy();
                tidied = Instant::now();
            }
        }
        self.end();
        Ok(self.report())
    }

    fn open(&self) -> std::sync::MutexGuard<'_, HashMap<u64, TcpStream>> {
        self.open.lock().ignore_poison()
    }

    fn begin(&self, number: u64, socket: TcpStream) {
        let counts = &self.common.counts;
        counts.connections.fetch_add(1, Ordering::Relaxed);
        let is_blocking = socket.set_nonblocking(false).is_ok();
        let (Ok(again), true, true) =
            (socket.try_clone(), is_blocking, self.open().len() < self.connections_max)
        else {
            counts.refused.fetch_add(1, Ordering::Relaxed);
            return;
        };
        self.open().insert(number, again);
        let done = Done { number, open: self.open.clone() };
        let common = self.common.clone();
        let serving = std::thread::Builder::new().name("connection".into()).spawn(move || {
            let _done = done;
            // How a client ends is its own affair.
            let _ = common.serve(socket);
        });
        if serving.is_err() {
            // Its closure is gone, and the connection with it.
            counts.refused.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Closes all connections, and waits until their threads have ended.
    fn end(&self) {
        for socket in self.open().values() {
            let _ = socket.shutdown(Shutdown::Both);
        }
        let began = Instant::now();
        while !self.open().is_empty() && began.elapsed() < END_MAX {
            std::thread::sleep(Duration::from_millis(5));
        }
        if let Ok(writers) = self.common.files.writers() {
            writers.end_all();
        }
    }
}

/// The remote writers of the store in the directory `place`.
fn of_directory(place: &Path, lease: Duration) -> RemoteWriterOptions {
    let (to_open, to_settle) = (place.to_owned(), place.to_owned());
    let began = Instant::now();
    RemoteWriterOptions {
        lease,
        open: Box::new(move || Ok(backend::open(&to_open)?)),
        settle: Box::new(move |files, slot| {
            let settled = keyframe_store::settle_for(files.clone(), &to_settle, slot);
            let torn = settled.map_err(|error| {
                let fix = error.fix().map(|fix| format!("; {fix}")).unwrap_or_default();
                Refusal(RefusalCode::Failed, format!("the store cannot be settled: {error}{fix}"))
            })?;
            Ok(torn.into_iter().map(|torn| (torn.id.0, torn.problem)).collect())
        }),
        clock: Box::new(move || u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX)),
    }
}

/// Takes a connection off the list when its thread ends, however that does.
struct Done {
    number: u64,
    open: Arc<Mutex<HashMap<u64, TcpStream>>>,
}

impl Drop for Done {
    fn drop(&mut self) {
        self.open.lock().ignore_poison().remove(&self.number);
    }
}
