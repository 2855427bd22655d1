//! Requests to a checkpoint server: several under way on a connection, connections kept, all of it
//! tried again where that can help.
//!
//! ```text
//!   requests ─▶ a connection of the pool ─▶ up to 32 under way ─▶ answers, in order ─▶ the connection goes back
//!      ▲              └─ broken: those without an answer again, on a new one, after 0.05, 0.1, ... 1 s
//!      └──────────────┘   until nothing has come for 8 s; 1 s where this process never met the server; at once where
//!                         the one before waited in vain
//! ```
//!
//! Nothing that is asked changes anything, so that it does not matter how often it is.

use super::link::{self, Broken, Link};
use super::place::Place;
use super::wire::{Answer, Code, Request};
use super::{FETCHED, io_error};
use crate::backend::Refusal;
use crate::{Error, Result};
use rustls::ClientConfig;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Requests under way on one connection; so few that they fit into any socket's buffer while nobody
/// reads.
const UNDER_WAY_MAX: usize = 32;
/// Connections that are kept while nobody uses them.
const IDLE_MAX: usize = 8;
const PATIENCE: Duration = Duration::from_secs(8);
const PATIENCE_AT_FIRST: Duration = Duration::from_secs(1);
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// A checkpoint server, as this process reaches it.
#[derive(Debug)]
pub struct Client {
    pub place: Place,
    config: OnceLock<Arc<ClientConfig>>,
    idle: Mutex<Vec<Link>>,
    /// The store that it serves, once it has said so.
    store: OnceLock<[u8; 16]>,
    has_met: AtomicBool,
    /// It was waited for in vain: who asks next does not wait again, until it answers.
    is_gone: AtomicBool,
    patience: Duration,
}

impl Client {
    pub fn new(place: Place) -> Self {
        Self {
            place,
            config: OnceLock::new(),
            idle: Mutex::default(),
            store: OnceLock::new(),
            has_met: AtomicBool::new(false),
            is_gone: AtomicBool::new(false),
            patience: PATIENCE,
        }
    }

    /// Gives up sooner.
    #[cfg(test)]
    pub fn hasten(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// How messages call a file.
    pub fn describe(&self, name: &str) -> String {
        format!("{}/{name}", self.place.name)
    }

    /// The store that is served.
    pub fn store(&self) -> Result<[u8; 16]> {
        if let Some(store) = self.store.get() {
            return Ok(*store);
        }
        self.ask("connect to", "", Request::State).map(drop)?;
        Ok(self.store.get().copied().unwrap_or_default())
    }

    /// Asks one thing.
    pub fn ask(&self, operation: &'static str, name: &str, request: Request) -> Result<Answer> {
        let mut found = None;
        self.ask_all(operation, &[request], &mut |_, answer| {
            found = Some(answer);
            Ok(())
        })?;
        match found {
            Some(Answer::Refused(code, said)) => Err(self.refused(operation, name, code, &said)),
            Some(answer) => Ok(answer),
            None => Err(self.strange(operation, name, "no answer")),
        }
    }

    /// Asks many things at once; `sink` gets each answer with the number of its request, rising.
    /// Ends with the first error of `sink`.
    pub fn ask_all(
        &self,
        operation: &'static str,
        requests: &[Request],
        sink: &mut dyn FnMut(usize, Answer) -> Result<()>,
    ) -> Result<()> {
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
                    Err(error) => (Broken::Gone(error), was_idle),
                },
                Err(broken) => (broken, false),
            };
            if done > before {
                (last_came, pause) = (Instant::now(), PAUSE_FIRST);
            }
            match broken {
                // Closed while nobody used it, most likely: a new one will tell. The others are as
                // old.
                Broken::Gone(_) if was_idle && done == before => {
                    self.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
                }
                Broken::Gone(error) => {
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
                Broken::ForGood(kind, refusal) => {
                    return Err(io_error(self.place.name.clone(), operation, kind, refusal));
                }
            }
        }
    }

    /// A connection, and whether it is an old one.
    fn take(&self) -> Result<(Link, bool), Broken> {
        if let Some(link) = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop() {
            return Ok((link, true));
        }
        if self.config.get().is_none() {
            let made = link::config(&self.place)?;
            let _ = self.config.set(made);
        }
        // Set just now, if not before.
        let Some(config) = self.config.get() else {
            return Err(io::Error::from(io::ErrorKind::NotFound).into());
        };
        let link = Link::new(&self.place, config)?;
        if *self.store.get_or_init(|| link.store) != link.store {
            let problem = "it serves another store now than it did before".to_owned();
            let fix = Some("run the command again".into());
            return Err(Broken::ForGood(io::ErrorKind::InvalidData, Refusal { problem, fix }));
        }
        self.has_met.store(true, Ordering::Relaxed);
        self.is_gone.store(false, Ordering::Relaxed);
        Ok((link, false))
    }

    fn give_back(&self, link: Link) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < IDLE_MAX {
            idle.push(link);
        }
    }

    /// The error for an answer that says no.
    pub fn refused(&self, operation: &'static str, name: &str, code: Code, said: &str) -> Error {
        let object = self.describe(name);
        let (kind, fix) = match code {
            Code::NotFound => (io::ErrorKind::NotFound, None),
            Code::Ends => (io::ErrorKind::UnexpectedEof, None),
            Code::TooLong => return Error::damaged(object, said),
            Code::Token => (io::ErrorKind::PermissionDenied, Some("look at KEYFRAME_TOKEN".into())),
            Code::Strange => (
                io::ErrorKind::InvalidInput,
                Some("use the same version of keyframe on both sides".into()),
            ),
            Code::None | Code::Failed => (
                io::ErrorKind::Other,
                Some("look at the server's own store: keyframe check there".into()),
            ),
        };
        io_error(object, operation, kind, Refusal { problem: said.to_owned(), fix })
    }

    /// The error for an answer that never came.
    fn unreached(&self, operation: &'static str, error: &io::Error) -> Error {
        let kind = match error.kind() {
            // The kind says what became of a file, which is not known.
            io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof => {
                io::ErrorKind::ConnectionAborted
            }
            kind => kind,
        };
        let problem = format!("no answer from the checkpoint server: {error}");
        let fix = "see whether keyframe serve runs there and the network is up, and run the command again: what has come stays in the \
                   cache";
        io_error(
            self.place.name.clone(),
            operation,
            kind,
            Refusal { problem, fix: Some(fix.into()) },
        )
    }

    /// The error for an answer that makes no sense.
    pub fn strange(&self, operation: &'static str, name: &str, problem: &str) -> Error {
        let problem = format!("an answer that makes no sense: {problem}");
        let fix = Some("use the same version of keyframe on both sides".into());
        io_error(
            self.describe(name),
            operation,
            io::ErrorKind::InvalidData,
            Refusal { problem, fix },
        )
    }
}

/// Sends the requests from `done` on, a few ahead of their answers.
fn talk(
    link: &mut Link,
    requests: &[Request],
    done: &mut usize,
    sink: &mut dyn FnMut(usize, Answer) -> Result<()>,
) -> io::Result<Result<()>> {
    let mut sent = *done;
    while let Some(request) = requests.get(*done) {
        // Half of them at once: a few large records instead of many small ones.
        if sent - *done <= UNDER_WAY_MAX / 2 && sent < requests.len() {
            let until = (*done + UNDER_WAY_MAX).min(requests.len());
            link.send(requests.get(sent..until).unwrap_or_default())?;
            sent = until;
        }
        let (answer, came_bytes) = link.receive(request)?;
        FETCHED.count(came_bytes);
        if let Err(error) = sink(*done, answer) {
            // Answers may be on their way: nobody can use this connection any more.
            return Ok(Err(error));
        }
        *done += 1;
    }
    Ok(Ok(()))
}
