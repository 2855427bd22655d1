//! The controller's handle of a switch that runs in another process.

use crate::in_flight::{InFlight, PortId};
use crate::switch::Ports;
use crate::wire::{Messages, Request, Response, encode};
use crate::{Error, Result};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The longest wait for an answer, beyond the time that the request itself allows.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest wait for its start.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// How long it may take to end, once no VM is connected.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// The control of a switch. When it is dropped while the switch is held, the switch releases by
/// itself; a switch that was started from here goes on until its last VM has gone.
pub struct Remote {
    stream: UnixStream,
    input: Messages,
    child: Option<Child>,
    /// An answer is owed or garbled: nothing that comes can be matched to a question.
    lost: bool,
}

impl Remote {
    /// Starts a switch as `command`, which calls [`crate::serve`] with its standard input, and
    /// waits until it answers.
    pub fn spawn(command: &mut Command) -> Result<Self> {
        let (ours, theirs) =
            UnixStream::pair().map_err(Error::io("create a control connection"))?;
        command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null());
        // Ctrl-C is not to end it together with the engine.
        command.process_group(0);
        let operation = format!("start the switch ({})", command.get_program().to_string_lossy());
        let child = command.spawn().map_err(Error::io(operation))?;
        // Our copy of its end is closed with the command's, or we would never see it end.
        command.stdin(Stdio::null());
        let mut remote =
            Self { stream: ours, input: Messages::default(), child: Some(child), lost: false };
        if let Err(e) = remote.ask(&Request::Ports, &[], START_TIMEOUT) {
            if let Some(child) = &mut remote.child {
                let _ = child.kill();
                let _ = child.wait();
            }
            return Err(e);
        }
        Ok(remote)
    }

    /// Takes control of the switch that listens at `path`. Error: [`Error::Busy`] where another
    /// process has it.
    pub fn connect(path: &Path) -> Result<Self> {
        let operation = format!("connect to the switch's control socket {}", path.display());
        Self::over(UnixStream::connect(path).map_err(Error::io(operation))?)
    }

    /// Takes control through a connection, and waits until the switch answers.
    pub fn over(stream: UnixStream) -> Result<Self> {
        let mut remote = Self { stream, input: Messages::default(), child: None, lost: false };
        remote.ports()?;
        Ok(remote)
    }

    /// The switch's process, where it was started from here.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// [`crate::Switch::listen`].
    pub fn listen(&mut self, path: &Path) -> Result<()> {
        let text = path.to_str().ok_or_else(|| Error::Listen {
            path: path.display().to_string(),
            problem: "the path is no UTF-8 text".into(),
        })?;
        self.done(&Request::Listen { path: text.into() }, &[], ANSWER_TIMEOUT)
    }

    /// [`crate::Switch::hold`].
    pub fn hold(&mut self, limit: Duration) -> Result<()> {
        self.done(&Request::Hold { limit_ms: limit.as_millis() as u64 }, &[], ANSWER_TIMEOUT)
    }

    /// [`crate::Switch::quiesce`].
    pub fn quiesce(&mut self, timeout: Duration) -> Result<()> {
        let request = Request::Quiesce { timeout_ms: timeout.as_millis() as u64 };
        self.done(&request, &[], ANSWER_TIMEOUT.saturating_add(timeout))
    }

    /// [`crate::Switch::collect`].
    pub fn collect(&mut self) -> Result<InFlight> {
        match self.ask(&Request::Collect, &[], ANSWER_TIMEOUT)? {
            (Response::InFlight, bytes) => InFlight::decode(&bytes),
            _ => Err(self.unexpected()),
        }
    }

    /// [`crate::Switch::release`].
    pub fn release(&mut self) -> Result<()> {
        self.done(&Request::Release, &[], ANSWER_TIMEOUT)
    }

    /// [`crate::Switch::restore`].
    pub fn restore(&mut self, in_flight: &InFlight, stand_ins: &[(PortId, PortId)]) -> Result<()> {
        let request = Request::Restore { stand_ins: stand_ins.to_vec() };
        self.done(&request, &in_flight.encode()?, ANSWER_TIMEOUT)
    }

    /// [`crate::Switch::ports`].
    pub fn ports(&mut self) -> Result<Ports> {
        match self.ask(&Request::Ports, &[], ANSWER_TIMEOUT)? {
            (Response::Ports(ports), _) => Ok(ports),
            _ => Err(self.unexpected()),
        }
    }

    /// Lets go of the switch. One that was started from here ends as soon as no VM is connected;
    /// its end is waited for briefly, and true where it came.
    pub fn end(self) -> Result<bool> {
        drop(self.stream);
        let Some(mut child) = self.child else { return Ok(false) };
        let deadline = Instant::now() + END_TIMEOUT;
        loop {
            let operation = format!("wait for the switch (pid {})", child.id());
            if child.try_wait().map_err(Error::io(operation))?.is_some() {
                return Ok(true);
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn done(&mut self, request: &Request, bytes: &[u8], timeout: Duration) -> Result<()> {
        match self.ask(request, bytes, timeout)? {
            (Response::Done, _) => Ok(()),
            _ => Err(self.unexpected()),
        }
    }

    fn unexpected(&mut self) -> Error {
        self.lost = true;
        Error::control("it gave the answer to another question")
    }

    fn ask(
        &mut self,
        request: &Request,
        bytes: &[u8],
        timeout: Duration,
    ) -> Result<(Response, Vec<u8>)> {
        if self.lost {
            return Err(Error::control("an earlier answer was lost"));
        }
        let message = encode(request, bytes)?;
        self.lost = true;
        let answered = self.exchange(&message, timeout);
        self.lost = answered.is_err();
        match answered? {
            (Response::Failed(error), _) => Err(error),
            answer => Ok(answer),
        }
    }

    fn exchange(&mut self, message: &[u8], timeout: Duration) -> Result<(Response, Vec<u8>)> {
        let deadline = Instant::now() + timeout.min(Duration::from_hours(1));
        self.stream.set_write_timeout(Some(ANSWER_TIMEOUT)).map_err(Error::io("set a timeout"))?;
        // A switch that has another controller has said so, and does not read.
        let written = self.stream.write_all(message).map_err(Error::io("write to the switch"));
        let mut chunk = vec![0; 64 << 10];
        loop {
            if let Some(answer) = self.input.next()? {
                return Ok(answer);
            }
            let left =
                deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            self.stream.set_read_timeout(Some(left)).map_err(Error::io("set a timeout"))?;
            match self.stream.read(&mut chunk) {
                Ok(0) => {
                    written?;
                    return Err(Error::control("the switch has ended"));
                }
                Ok(len) => self.input.push(chunk.get(..len).unwrap_or_default()),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    if Instant::now() >= deadline {
                        return Err(Error::control(format!(
                            "no answer within {} ms",
                            timeout.as_millis()
                        )));
                    }
                }
                Err(e) => {
                    written?;
                    return Err(Error::io("read from the switch")(e));
                }
            }
        }
    }
}
