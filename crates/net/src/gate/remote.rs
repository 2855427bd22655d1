//! The controller's handle to a gate that runs in another process.

use super::{GateNic, GateRequest, GateResponse, GateStatus};
use crate::wire::{Messages, encode};
use crate::{Error, Result};
use std::io::{ErrorKind, PipeReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
const START_TIMEOUT: Duration = Duration::from_secs(30);
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// Controls a gate. If the handle is dropped while the gate holds, the held frames never pass. If
/// it is dropped while the gate is open, the gate goes on for as long as the VM is connected.
pub struct GateRemote {
    stream: UnixStream,
    input: Messages,
    child: Child,
    bell: PipeReader,
}

impl GateRemote {
    /// Starts a gate as `command`, which must call [`super::serve_gate`] with its standard input as
    /// the control connection and its standard output as the bell. The gate listens for `nics` and
    /// is open.
    ///
    /// Errors: the process cannot be started or does not answer in time.
    pub fn spawn(command: &mut Command, nics: &[GateNic]) -> Result<Self> {
        let (ours, theirs) =
            UnixStream::pair().map_err(Error::io("create a control connection"))?;
        let (bell, rings) = std::io::pipe().map_err(Error::io("create a pipe"))?;
        command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::from(rings));
        // Ctrl-C must not end the gate together with the engine.
        command.process_group(0);
        let operation = format!("start the gate ({})", command.get_program().to_string_lossy());
        let child = command.spawn().map_err(Error::io(operation))?;
        // `command` owns copies of the gate's ends. They are closed with it, so that this process
        // sees the gate end.
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let mut remote = Self { stream: ours, input: Messages::default(), child, bell };
        let listening = remote.ask(&GateRequest::Listen { nics: nics.to_vec() }, START_TIMEOUT);
        if let Err(error) = listening {
            let _ = remote.child.kill();
            let _ = remote.child.wait();
            return Err(error);
        }
        Ok(remote)
    }

    /// Returns the id of the gate's process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns a pipe on which a byte arrives when the first frame of an epoch is held. It ends
    /// with the gate. Error: the descriptor cannot be copied.
    pub fn bell(&self) -> Result<PipeReader> {
        self.bell.try_clone().map_err(Error::io("take the gate's bell"))
    }

    /// Holds all frames from now on. Frames that came before still pass. Errors: the gate has ended
    /// or does not answer.
    pub fn hold(&mut self) -> Result<()> {
        self.ask(&GateRequest::Hold, ANSWER_TIMEOUT).map(drop)
    }

    /// Lets all frames pass. Errors: the gate has ended or does not answer.
    pub fn open(&mut self) -> Result<()> {
        self.ask(&GateRequest::Open, ANSWER_TIMEOUT).map(drop)
    }

    /// Ends the current epoch and returns its number. To be called while the VM is paused: all
    /// frames that the guest has sent belong to this epoch or an earlier one. Errors: the gate has
    /// ended or does not answer.
    pub fn cut(&mut self) -> Result<u64> {
        match self.ask(&GateRequest::Cut, ANSWER_TIMEOUT)? {
            GateResponse::Cut { epoch } => Ok(epoch),
            _ => Err(Error::control("the gate's answer does not match the request")),
        }
    }

    /// Lets the frames of epochs up to `epoch` pass, as [`Self::cut`] numbers them. Errors: `epoch`
    /// has not been cut; the gate has ended or does not answer.
    pub fn release(&mut self, epoch: u64) -> Result<()> {
        self.ask(&GateRequest::Release { epoch }, ANSWER_TIMEOUT).map(drop)
    }

    /// Returns the gate's state. Errors: the gate has ended or does not answer.
    pub fn status(&mut self) -> Result<GateStatus> {
        match self.ask(&GateRequest::Look, ANSWER_TIMEOUT)? {
            GateResponse::Look(look) => Ok(look),
            _ => Err(Error::control("the gate's answer does not match the request")),
        }
    }

    /// Closes the control connection, and waits briefly for the end of the gate's process.
    pub fn end(self) {
        let Self { stream, mut child, .. } = self;
        drop(stream);
        let deadline = Instant::now() + END_TIMEOUT;
        while Instant::now() < deadline {
            if !matches!(child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn ask(&mut self, request: &GateRequest, timeout: Duration) -> Result<GateResponse> {
        let message = encode(request, &[])?;
        let answered = self.exchange(&message, timeout);
        if answered.is_err() {
            // A late answer would be taken for the answer to the next request.
            let _ = self.stream.shutdown(std::net::Shutdown::Both);
        }
        match answered? {
            GateResponse::Failed { problem } => Err(Error::control(problem)),
            answer => Ok(answer),
        }
    }

    fn exchange(&mut self, message: &[u8], timeout: Duration) -> Result<GateResponse> {
        let deadline = Instant::now() + timeout;
        self.stream.set_write_timeout(Some(timeout)).map_err(Error::io("set a timeout"))?;
        self.stream.write_all(message).map_err(Error::io("write to the gate"))?;
        let mut chunk = [0; 4096];
        loop {
            if let Some((answer, _)) = self.input.next()? {
                return Ok(answer);
            }
            let left =
                deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            self.stream.set_read_timeout(Some(left)).map_err(Error::io("set a timeout"))?;
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(Error::control("the gate has ended")),
                Ok(len) => self.input.push(chunk.get(..len).unwrap_or_default()),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) if Instant::now() >= deadline => {
                    return Err(Error::control(format!(
                        "no answer within {} ms",
                        timeout.as_millis()
                    )));
                }
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(e) => return Err(Error::io("read from the gate")(e)),
            }
        }
    }
}
