//! The disks of a dead engine's rollback, for the *heir*: the process that ends the rollback in the
//! engine's place.
//!
//! ```text
//!   engine ── stage ─▶ server listens on heir.sock beside its own socket
//!   engine gone ─▶ the heir: staging ─▶ exchange ─▶ dismiss        one short connection each
//! ```
//!
//! The server answers an heir only after it has read the last request of the engine. So an exchange
//! that the engine has sent is done by then, and no other one comes.

use super::connection::{answer, is_done, unexpected};
use super::server::{Serving, failed};
use super::{DiskRequest, DiskResponse, frame};
use crate::{Error, Result};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long the server may take to answer: after the engine's end it first syncs the disks.
const ANSWER_TIMEOUT: Duration = Duration::from_mins(2);
/// How long an heir may take to ask.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
const SOCKET: &str = "heir.sock";
const OBJECT: &str = "the socket of the process that serves the disks";

/// Which disks a server serves during a rollback.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Staging {
    /// Whether disks are staged: open and not served.
    pub is_staged: bool,
    /// The overlays of the disks that are served.
    pub served: Vec<PathBuf>,
    /// The number of bytes written to the served disks since they were opened or cut.
    pub written_bytes: u64,
}

/// A connection to a server whose engine has died.
#[derive(Debug)]
pub struct DiskHeir(UnixStream);

impl DiskHeir {
    /// Connects to the server of the disks on `socket`. Error: it has ended, or has no staged
    /// disks.
    pub fn connect(socket: &Path) -> Result<Self> {
        let path = path_beside(socket);
        let name = || path.display().to_string();
        let stream = UnixStream::connect(&path).map_err(Error::io(name(), "connect to"))?;
        let limit = |e| Error::io(name(), "bound the wait for")(e);
        stream.set_read_timeout(Some(ANSWER_TIMEOUT)).map_err(limit)?;
        stream.set_write_timeout(Some(ANSWER_TIMEOUT)).map_err(limit)?;
        Ok(Self(stream))
    }

    /// Returns which disks are served. Error: the server does not answer.
    pub fn staging(&self) -> Result<Staging> {
        match self.ask(&DiskRequest::Staging)? {
            DiskResponse::Staging { is_staged, served, written_bytes } => {
                Ok(Staging { is_staged, served, written_bytes })
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Serves the staged disks, and stages those that were served. The VM must be paused. Error: no
    /// disks are staged; the server does not answer.
    pub fn exchange(&self) -> Result<()> {
        self.ask(&DiskRequest::Exchange).and_then(is_done)
    }

    /// Closes the staged disks, and unlocks their overlays. Error: the server does not answer.
    pub fn dismiss(&self) -> Result<()> {
        self.ask(&DiskRequest::Dismiss).and_then(is_done)
    }

    fn ask(&self, request: &DiskRequest) -> Result<DiskResponse> {
        frame::send(&self.0, request)?;
        answer(frame::receive(&self.0)?)
    }
}

fn path_beside(socket: &Path) -> PathBuf {
    socket.with_file_name(SOCKET)
}

/// The socket on which a server waits for an heir. Its file is removed when it is dropped.
pub(super) struct HeirSocket {
    listener: UnixListener,
    path: PathBuf,
}

impl HeirSocket {
    /// Listens beside `socket`. Error: the socket cannot be made.
    pub fn beside(socket: &Path) -> Result<Self> {
        let path = path_beside(socket);
        // A server that was killed has left its file.
        let _ = std::fs::remove_file(&path);
        let name = || path.display().to_string();
        let listener = UnixListener::bind(&path).map_err(Error::io(name(), "listen on"))?;
        listener.set_nonblocking(true).map_err(Error::io(name(), "prepare"))?;
        Ok(Self { listener, path })
    }

    /// Returns an heir that has connected, if there is one.
    pub fn accept(&self) -> Option<UnixStream> {
        let (stream, _) = self.listener.accept().ok()?;
        stream.set_nonblocking(false).ok()?;
        stream.set_read_timeout(Some(REQUEST_TIMEOUT)).ok()?;
        stream.set_write_timeout(Some(REQUEST_TIMEOUT)).ok()?;
        Some(stream)
    }
}

impl Drop for HeirSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Serving<'_> {
    /// Answers an heir until it disconnects.
    pub(super) fn answer_heir(&mut self, heir: &UnixStream) {
        while let Ok(Some(request)) = frame::receive::<DiskRequest>(heir) {
            let answer = match request {
                DiskRequest::Staging | DiskRequest::Exchange | DiskRequest::Dismiss => {
                    self.handle_request(&request)
                }
                _ => Err(Error::protocol(OBJECT, "only an engine may ask for this")),
            };
            if frame::send(heir, &answer.unwrap_or_else(|e| failed(&e))).is_err() {
                return;
            }
        }
    }
}
