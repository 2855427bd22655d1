//! Requests to a checkpoint server: pipelined on pooled connections, and retried.
//!
//! ```text
//!   requests ─▶ a pooled connection ─▶ up to 32 in flight ─▶ answers in order ─▶ back to the pool
//!                      └─ broken: unanswered requests go to a new one after 0.05, 0.1, ... 1 s
//! ```
//!
//! Retries end if no answer has come for 8 s; for 1 s if this process never reached the server; at
//! once if an earlier request waited in vain. Repeating a request is safe: it only reads, or it has a
//! number that the server carries out once (`writer`).

use super::address::ServerAddress;
use super::connection::{self, ANCHOR_BYTES, ClientTls, Connection, ConnectionError};
use super::wire::{Answer, RefusalCode, Request};
use super::{FETCH_COUNTERS, io_error};
use crate::RemoteFailure;
use crate::{Error, Result};
use keyframe_locks::IgnorePoison;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Requests in flight on one connection. They fit into any socket buffer, so sending never blocks
/// while the server waits for the client to read.
const UNDER_WAY_MAX: usize = 32;
/// The most idle connections in the pool.
const IDLE_MAX: usize = 8;
const PATIENCE: Duration = Duration::from_secs(8);
const PATIENCE_AT_FIRST: Duration = Duration::from_secs(1);
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// A client of a checkpoint server, with the connections of this process to it.
#[derive(Debug)]
pub struct ServeClient {
    /// The address of the server.
    pub address: ServerAddress,
    tls: OnceLock<ClientTls>,
    idle: Mutex<Vec<Connection>>,
    /// The id of the store that it serves, once known.
    store: OnceLock<[u8; 16]>,
    has_met: AtomicBool,
    /// A request waited in vain: the next ones fail at once, until the server answers again.
    is_gone: AtomicBool,
    patience: Duration,
    /// Whether the leases of writers are renewed on a thread.
    pub renews_leases: bool,
    /// A server in this process, in place of one at the address.
    #[cfg(any(test, feature = "testing"))]
    direct: Option<std::sync::Arc<dyn super::DirectServer>>,
}

impl ServeClient {
    /// Makes a client of the server at `address`. It does not connect yet.
    pub fn new(address: ServerAddress) -> Self {
        Self {
            address,
            tls: OnceLock::new(),
            idle: Mutex::default(),
            store: OnceLock::new(),
            has_met: AtomicBool::new(false),
            is_gone: AtomicBool::new(false),
            patience: PATIENCE,
            renews_leases: true,
            #[cfg(any(test, feature = "testing"))]
            direct: None,
        }
    }

    /// Makes a client of a server in this process.
    #[cfg(any(test, feature = "testing"))]
    pub fn of_direct(
        address: ServerAddress,
        server: std::sync::Arc<dyn super::DirectServer>,
    ) -> Self {
        Self { direct: Some(server), renews_leases: false, ..Self::new(address) }
    }

    /// Passes requests to the server in this process, if it is one.
    #[cfg(any(test, feature = "testing"))]
    fn ask_directly(
        &self,
        operation: &'static str,
        requests: &[Request],
        sink: &mut dyn FnMut(usize, Answer) -> Result<()>,
    ) -> Option<Result<()>> {
        let server = self.direct.as_ref()?;
        let mut each = requests.iter().enumerate();
        Some(each.try_for_each(|(number, request)| {
            let answer = server.answer(request).map_err(|e| self.unreached(operation, &e))?;
            sink(number, answer)
        }))
    }

    /// Shortens the patience.
    #[cfg(any(test, feature = "testing"))]
    pub fn hasten(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Returns the name of the file `name` in messages.
    pub fn describe(&self, name: &str) -> String {
        format!("{}/{name}", self.address.name)
    }

    /// Returns the id of the served store. Connects to the server if the id is not known yet.
    /// Errors: the server refuses or cannot be reached.
    pub fn store(&self) -> Result<[u8; 16]> {
        if let Some(store) = self.store.get() {
            return Ok(*store);
        }
        self.ask("connect to", "", Request::State).map(drop)?;
        Ok(self.store.get().copied().unwrap_or_default())
    }

    /// Returns a hash of what the server must prove to be the one of the address: see
    /// [`ClientTls::anchor`].
    pub fn anchor(&self) -> [u8; ANCHOR_BYTES] {
        // After an error there is no connection, and nothing is received.
        self.tls().map(|tls| tls.anchor).unwrap_or_default()
    }

    /// How this client recognises the server; read at the first call.
    fn tls(&self) -> Result<&ClientTls, ConnectionError> {
        if let Some(tls) = self.tls.get() {
            return Ok(tls);
        }
        let made = connection::client_tls(&self.address)?;
        Ok(self.tls.get_or_init(|| made))
    }

    /// Sends one request and returns its answer. `operation` and `name` are for the text of an
    /// error. Errors: the server refuses, cannot be reached, or sends an invalid answer.
    pub fn ask(&self, operation: &'static str, name: &str, request: Request) -> Result<Answer> {
        match self.ask_answer(operation, name, request)? {
            Answer::Refused(code, said) => Err(self.refused(operation, name, code, &said)),
            answer => Ok(answer),
        }
    }

    /// Sends one request and returns its answer, also a refusal. Errors: the server cannot be
    /// reached, or sends an invalid answer.
    pub fn ask_answer(
        &self,
        operation: &'static str,
        name: &str,
        request: Request,
    ) -> Result<Answer> {
        let mut found = None;
        self.ask_all(operation, &[request], &mut |_, answer| {
            found = Some(answer);
            Ok(())
        })?;
        found.ok_or_else(|| self.strange(operation, name, "no answer"))
    }

    /// Sends many requests. Passes each answer to `sink` with the index of its request, in rising
    /// order. `operation` is for the text of an error. Errors: the server cannot be reached or
    /// sends an invalid answer; the first error of `sink`.
    pub fn ask_all(
        &self,
        operation: &'static str,
        requests: &[Request],
        sink: &mut dyn FnMut(usize, Answer) -> Result<()>,
    ) -> Result<()> {
        #[cfg(any(test, feature = "testing"))]
        if let Some(answered) = self.ask_directly(operation, requests, sink) {
            return answered;
        }
        let mut done = 0;
        let mut last_came = Instant::now();
        let mut pause = PAUSE_FIRST;
        loop {
            let before = done;
            let (broken, was_idle) = match self.take() {
                Ok((mut link, was_idle)) => match talk(&mut link, requests, &mut done, sink) {
                    Ok(Ok(())) => {
                        self.give_back(link);
                        return Ok(());
                    }
                    Ok(Err(error)) => return Err(error),
                    Err(error) => (ConnectionError::Retry(error), was_idle),
                },
                Err(broken) => (broken, false),
            };
            if done > before {
                (last_came, pause) = (Instant::now(), PAUSE_FIRST);
            }
            match broken {
                // The server has closed an idle connection, most likely. Then the other idle ones
                // are closed too.
                ConnectionError::Retry(_) if was_idle && done == before => {
                    self.idle.lock().ignore_poison().clear();
                }
                ConnectionError::Retry(error) => {
                    let has_met = self.has_met.load(Ordering::Relaxed);
                    let patience =
                        if has_met { self.patience } else { self.patience.min(PATIENCE_AT_FIRST) };
                    let is_gone = self.is_gone.load(Ordering::Relaxed);
                    if is_gone
                        || last_came.elapsed() + pause > patience
                        || error.kind() == io::ErrorKind::InvalidData
                    {
                        self.is_gone.store(true, Ordering::Relaxed);
                        return Err(self.unreached(operation, &error));
                    }
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(PAUSE_MAX);
                }
                ConnectionError::Fatal(kind, refusal) => {
                    return Err(io_error(self.address.name.clone(), operation, kind, refusal));
                }
            }
        }
    }

    /// A connection, and true if it comes from the pool.
    fn take(&self) -> Result<(Connection, bool), ConnectionError> {
        if let Some(link) = self.idle.lock().ignore_poison().pop() {
            return Ok((link, true));
        }
        let link = Connection::new(&self.address, &self.tls()?.config)?;
        if *self.store.get_or_init(|| link.store) != link.store {
            let problem = "the server serves another store than before".to_owned();
            let fix = Some("run the command again".into());
            return Err(ConnectionError::Fatal(
                io::ErrorKind::InvalidData,
                RemoteFailure { problem, fix },
            ));
        }
        self.has_met.store(true, Ordering::Relaxed);
        self.is_gone.store(false, Ordering::Relaxed);
        Ok((link, false))
    }

    fn give_back(&self, link: Connection) {
        let mut idle = self.idle.lock().ignore_poison();
        if idle.len() < IDLE_MAX {
            idle.push(link);
        }
    }

    /// Returns the error for a refusal with the code `code` and the text `said`.
    pub fn refused(
        &self,
        operation: &'static str,
        name: &str,
        code: RefusalCode,
        said: &str,
    ) -> Error {
        let object = self.describe(name);
        let (kind, fix) = match code {
            RefusalCode::NotFound => (io::ErrorKind::NotFound, None),
            RefusalCode::Ends => (io::ErrorKind::UnexpectedEof, None),
            RefusalCode::TooLong => return Error::damaged(object, said),
            RefusalCode::Token => {
                (io::ErrorKind::PermissionDenied, Some("check KEYFRAME_TOKEN".into()))
            }
            RefusalCode::Strange => (
                io::ErrorKind::InvalidInput,
                Some("use the same version of keyframe on both sides".into()),
            ),
            RefusalCode::Full => (
                io::ErrorKind::StorageFull,
                Some(
                    "free some space on the server's host; sealed checkpoints are unharmed".into(),
                ),
            ),
            RefusalCode::Exists => (io::ErrorKind::AlreadyExists, None),
            RefusalCode::Denied => {
                (io::ErrorKind::ReadOnlyFilesystem, Some(super::DENIED_FIX.into()))
            }
            RefusalCode::Busy | RefusalCode::Locked => {
                (io::ErrorKind::ResourceBusy, Some("try again later".into()))
            }
            RefusalCode::None | RefusalCode::Failed | RefusalCode::Ended => {
                (io::ErrorKind::Other, Some("check the store on the server: keyframe check".into()))
            }
        };
        io_error(object, operation, kind, RemoteFailure { problem: said.to_owned(), fix })
    }

    /// The error if no answer came.
    fn unreached(&self, operation: &'static str, error: &io::Error) -> Error {
        let kind = match error.kind() {
            // Such a kind would say that a file is missing or short, which is not known.
            io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof => {
                io::ErrorKind::ConnectionAborted
            }
            kind => kind,
        };
        let problem = format!("no answer from the checkpoint server: {error}");
        let fix = "check that keyframe serve runs there and that the network is up; a run goes on by \
                   itself, any other command has to be run again (everything received so far is \
                   cached)";
        io_error(
            self.address.name.clone(),
            operation,
            kind,
            RemoteFailure { problem, fix: Some(fix.into()) },
        )
    }

    /// Returns the error for an invalid answer.
    pub fn strange(&self, operation: &'static str, name: &str, problem: &str) -> Error {
        let problem = format!("invalid answer: {problem}");
        let fix = Some("use the same version of keyframe on both sides".into());
        io_error(
            self.describe(name),
            operation,
            io::ErrorKind::InvalidData,
            RemoteFailure { problem, fix },
        )
    }
}

/// Sends the requests from `done` on, several ahead of their answers.
fn talk(
    link: &mut Connection,
    requests: &[Request],
    done: &mut usize,
    sink: &mut dyn FnMut(usize, Answer) -> Result<()>,
) -> io::Result<Result<()>> {
    let mut sent = *done;
    while let Some(request) = requests.get(*done) {
        // Sends half of them at once: few large TLS records instead of many small ones.
        if sent - *done <= UNDER_WAY_MAX / 2 && sent < requests.len() {
            let until = (*done + UNDER_WAY_MAX).min(requests.len());
            link.send(requests.get(sent..until).unwrap_or_default())?;
            sent = until;
        }
        let (answer, came_bytes) = link.receive(request)?;
        FETCH_COUNTERS.count(came_bytes);
        if let Err(error) = sink(*done, answer) {
            // Answers may be in flight, so this connection cannot be used again.
            return Ok(Err(error));
        }
        *done += 1;
    }
    Ok(Ok(()))
}
