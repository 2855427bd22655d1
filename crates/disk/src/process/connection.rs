//! The connection to one process that serves disks: requests, and their responses in order.

use super::client::CutAnswers;
use super::{DiskRequest, DiskResponse, DiskSpec, frame};
use crate::{DiskEpoch, Error, Result};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The time limit of opening: a long journal is read as a whole.
pub(super) const OPEN_TIMEOUT: Duration = Duration::from_mins(2);

/// The process, and the connection to it.
pub(super) struct Connection {
    /// The process.
    pub child: Child,
    control: UnixStream,
    disks: usize,
    begun: CutRequest,
}

/// The state of a cut that was requested without waiting for it.
enum CutRequest {
    Nothing,
    Sent,
    /// Another request had to wait for the responses first.
    Answered(CutAnswers),
}

impl Connection {
    /// Starts the process as `command`, and has it serve `specs` on `listener`, which is bound to
    /// `socket`. The process numbers its epochs from `epochs_after` plus 1 on. Returns the
    /// connection, and the size of each disk in bytes.
    ///
    /// Errors: [`Error::Io`] if the process cannot be started; [`Error::Server`] or
    /// [`Error::ServerFull`] if a disk cannot be opened; [`Error::ServerEnded`].
    pub fn start(
        command: &mut Command,
        (socket, listener): (&Path, &UnixListener),
        specs: &[DiskSpec],
        epochs_after: DiskEpoch,
    ) -> Result<(Self, Vec<u64>)> {
        let name = command.get_program().to_string_lossy().into_owned();
        let (control, theirs) =
            UnixStream::pair().map_err(Error::io(&name, "make a connection to"))?;
        // Ctrl-C must not end the server together with the engine.
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).process_group(0);
        let child = command.spawn().map_err(Error::io(&name, "start"))?;
        // `command` holds a copy of the server's end. It must be closed, so that the engine sees
        // the server end.
        command.stdin(Stdio::null());
        let mut new = Self { child, control, disks: specs.len(), begun: CutRequest::Nothing };
        let (socket, specs) = (socket.into(), specs.to_vec());
        let request = DiskRequest::Open { socket, specs, epochs_after };
        let opened = new
            .send(&request, OPEN_TIMEOUT)
            .and_then(|()| frame::send_listener(&new.control, listener))
            .and_then(|()| new.receive());
        match opened {
            Ok(DiskResponse::Opened { disk_bytes }) if disk_bytes.len() == new.disks => {
                Ok((new, disk_bytes))
            }
            other => {
                new.kill();
                Err(other.map_or_else(|error| error, |response| unexpected(&response)))
            }
        }
    }

    /// Kills the process and waits for its end. Writes that it has acknowledged stay in the page
    /// cache.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Returns the epochs of `response`, the response to a cut: one for each disk. Error:
    /// [`Error::Protocol`] if it is another response.
    pub fn epochs(&self, response: DiskResponse) -> Result<Vec<DiskEpoch>> {
        match response {
            DiskResponse::Cut { epochs } if epochs.len() == self.disks => Ok(epochs),
            other => Err(unexpected(&other)),
        }
    }

    /// Records that a cut and its sync were requested, and that their responses are to come.
    pub fn set_cut_begun(&mut self) {
        self.begun = CutRequest::Sent;
    }

    /// Waits for the responses to the cut and its sync that were requested, and returns them.
    /// Returns `None` if none was requested.
    pub fn take_cut(&mut self) -> Option<CutAnswers> {
        self.wait_for_cut();
        match std::mem::replace(&mut self.begun, CutRequest::Nothing) {
            CutRequest::Answered(answers) => Some(answers),
            CutRequest::Nothing | CutRequest::Sent => None,
        }
    }

    fn wait_for_cut(&mut self) {
        if matches!(self.begun, CutRequest::Sent) {
            let epochs = self.receive().and_then(|response| self.epochs(response));
            let settled = self.receive().and_then(is_done);
            self.begun = CutRequest::Answered((epochs, settled));
        }
    }

    /// Sends a request, waits at most `timeout` for its response, and returns it. Errors:
    /// [`Error::Server`] or [`Error::ServerFull`] if the server answers with an error;
    /// [`Error::ServerEnded`] if it has ended or does not answer in time, upon which it is killed.
    pub fn ask(&mut self, request: &DiskRequest, timeout: Duration) -> Result<DiskResponse> {
        self.wait_for_cut();
        self.send(request, timeout)?;
        self.receive()
    }

    /// Sends a request, and sets the time limit of its response to `timeout`. Error:
    /// [`Error::ServerEnded`] if the server does not take the request, upon which it is killed.
    pub fn send(&mut self, request: &DiskRequest, timeout: Duration) -> Result<()> {
        let limit = |e| Error::io("the process that serves the disks", "bound the wait for")(e);
        self.control.set_read_timeout(Some(timeout)).map_err(limit)?;
        self.control.set_write_timeout(Some(timeout)).map_err(limit)?;
        frame::send(&self.control, request).map_err(|error| self.lost(&error))
    }

    fn receive(&mut self) -> Result<DiskResponse> {
        frame::receive(&self.control).map_err(|error| self.lost(&error)).and_then(answer)
    }

    /// A late response would be taken for the response to the next request, and a server without
    /// its engine can take part in no checkpoint. So it is ended, and its supervisor starts
    /// another.
    fn lost(&mut self, _: &Error) -> Error {
        let _ = self.control.shutdown(std::net::Shutdown::Both);
        let _ = self.child.kill();
        Error::ServerEnded
    }
}

/// Returns the response that was received. Errors: [`Error::Server`] or [`Error::ServerFull`] if
/// the server answers with an error; [`Error::ServerEnded`] if it has closed the connection.
pub(super) fn answer(received: Option<DiskResponse>) -> Result<DiskResponse> {
    match received {
        Some(DiskResponse::Failed { problem, disk_full: true, .. }) => {
            Err(Error::ServerFull { problem })
        }
        Some(DiskResponse::Failed { problem, fix, disk_full: false }) => {
            Err(Error::Server { problem, fix })
        }
        Some(response) => Ok(response),
        None => Err(Error::ServerEnded),
    }
}

/// Checks that `response` is the one to a request that returns nothing. Error: [`Error::Protocol`]
/// if it is another one.
pub(super) fn is_done(response: DiskResponse) -> Result<()> {
    match response {
        DiskResponse::Done => Ok(()),
        other => Err(unexpected(&other)),
    }
}

/// Returns the error for `response`, which does not belong to its request.
pub(super) fn unexpected(response: &DiskResponse) -> Error {
    let mut response = format!("{response:?}");
    response.truncate(response.floor_char_boundary(100));
    Error::protocol("the process that serves the disks", format!("it answered {response}"))
}
