//! The controller's handle to a switch that runs in another process.

use crate::in_flight::{InFlight, StandInPort};
use crate::switch::SwitchPorts;
use crate::wire::{Messages, SwitchRequest, SwitchResponse, encode};
use crate::{Error, Result};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The longest wait for an answer, in addition to the time that the request itself allows.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest wait for the switch to start.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// The longest wait for the switch to end, if no VM is connected.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// Controls a switch in another process. If the handle is dropped while the switch is held, the
/// switch releases by itself. A switch that [`Self::spawn`] started goes on until its last VM
/// disconnects.
pub struct SwitchRemote {
    stream: UnixStream,
    input: Messages,
    child: Option<Child>,
    /// An answer is missing or invalid, so later answers cannot be matched to requests.
    lost: bool,
}

impl SwitchRemote {
    /// Starts a switch as `command`, which must call [`crate::serve`] with its standard input.
    /// Waits until the switch answers. Errors: the process cannot be started or does not answer in
    /// time.
    pub fn spawn(command: &mut Command) -> Result<Self> {
        let (ours, theirs) =
            UnixStream::pair().map_err(Error::io("create a control connection"))?;
        command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null());
        // Ctrl-C must not end the switch together with the engine.
        command.process_group(0);
        let operation = format!("start the switch ({})", command.get_program().to_string_lossy());
        let child = command.spawn().map_err(Error::io(operation))?;
        // `command` owns a copy of the switch's end. It is closed with it, so that this process
        // sees the switch end.
        command.stdin(Stdio::null());
        let mut remote =
            Self { stream: ours, input: Messages::default(), child: Some(child), lost: false };
        if let Err(e) = remote.ask(&SwitchRequest::Ports, &[], START_TIMEOUT) {
            if let Some(child) = &mut remote.child {
                let _ = child.kill();
                let _ = child.wait();
            }
            return Err(e);
        }
        Ok(remote)
    }

    /// Takes control of the switch whose control socket is at `path`. Errors: [`Error::Busy`] if
    /// another process controls it; there is no such socket.
    pub fn connect(path: &Path) -> Result<Self> {
        let operation = format!("connect to the switch's control socket {}", path.display());
        Self::over(UnixStream::connect(path).map_err(Error::io(operation))?)
    }

    /// Takes control through a connection, and waits until the switch answers. Errors:
    /// [`Error::Busy`] if another process controls the switch; no answer in time.
    pub fn over(stream: UnixStream) -> Result<Self> {
        let mut remote = Self { stream, input: Messages::default(), child: None, lost: false };
        remote.ports()?;
        Ok(remote)
    }

    /// Returns true if the switch does not answer any more, and will not: its process has ended, or
    /// an answer is missing.
    pub fn is_lost(&mut self) -> bool {
        let has_ended = |child: &mut Child| !matches!(child.try_wait(), Ok(None));
        self.lost || self.child.as_mut().is_some_and(has_ended)
    }

    /// Returns the id of the switch's process, if [`Self::spawn`] started it.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Adds a LAN, as [`crate::Switch::listen`]. Errors: those of that function; the switch does
    /// not answer.
    pub fn listen(&mut self, path: &Path) -> Result<()> {
        let text = path.to_str().ok_or_else(|| Error::Listen {
            path: path.display().to_string(),
            problem: "the path is not UTF-8".into(),
        })?;
        self.done(&SwitchRequest::Listen { path: text.into() }, &[], ANSWER_TIMEOUT)
    }

    /// Stops delivery for at most `limit`, as [`crate::Switch::hold`]. Errors: those of that
    /// function; the switch does not answer.
    pub fn hold(&mut self, limit: Duration) -> Result<()> {
        self.done(&SwitchRequest::Hold { limit_ms: limit.as_millis() as u64 }, &[], ANSWER_TIMEOUT)
    }

    /// Waits at most `timeout` until all packets are taken, as [`crate::Switch::quiesce`]. Errors:
    /// those of that function; the switch does not answer.
    pub fn quiesce(&mut self, timeout: Duration) -> Result<()> {
        let request = SwitchRequest::Quiesce { timeout_ms: timeout.as_millis() as u64 };
        self.done(&request, &[], ANSWER_TIMEOUT.saturating_add(timeout))
    }

    /// Returns the packets in flight, as [`crate::Switch::collect`]. Errors: those of that
    /// function; the switch does not answer.
    pub fn collect(&mut self) -> Result<InFlight> {
        match self.ask(&SwitchRequest::Collect, &[], ANSWER_TIMEOUT)? {
            (SwitchResponse::InFlight, bytes) => InFlight::decode(&bytes),
            _ => Err(self.unexpected()),
        }
    }

    /// Ends the hold, as [`crate::Switch::release`]. Error: the switch does not answer.
    pub fn release(&mut self) -> Result<()> {
        self.done(&SwitchRequest::Release, &[], ANSWER_TIMEOUT)
    }

    /// Queues packets of a checkpoint, as [`crate::Switch::restore`]. `stand_ins` names the present
    /// port of each recorded one. Errors: those of that function; the switch does not answer.
    pub fn restore(&mut self, in_flight: &InFlight, stand_ins: &[StandInPort]) -> Result<()> {
        let request = SwitchRequest::Restore { stand_ins: stand_ins.to_vec() };
        self.done(&request, &in_flight.encode()?, ANSWER_TIMEOUT)
    }

    /// Returns the connections, as [`crate::Switch::ports`]. Error: the switch does not answer.
    pub fn ports(&mut self) -> Result<SwitchPorts> {
        match self.ask(&SwitchRequest::Ports, &[], ANSWER_TIMEOUT)? {
            (SwitchResponse::Ports(ports), _) => Ok(ports),
            _ => Err(self.unexpected()),
        }
    }

    /// Closes the control connection. A switch that [`Self::spawn`] started ends as soon as no VM
    /// is connected; this function waits briefly for that. Returns true if the switch has ended.
    /// Error: the switch does not answer.
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

    fn done(&mut self, request: &SwitchRequest, bytes: &[u8], timeout: Duration) -> Result<()> {
        match self.ask(request, bytes, timeout)? {
            (SwitchResponse::Done, _) => Ok(()),
            _ => Err(self.unexpected()),
        }
    }

    fn unexpected(&mut self) -> Error {
        self.lost = true;
        Error::control("the switch's answer does not match the request")
    }

    fn ask(
        &mut self,
        request: &SwitchRequest,
        bytes: &[u8],
        timeout: Duration,
    ) -> Result<(SwitchResponse, Vec<u8>)> {
        if self.lost {
            return Err(Error::control("an earlier answer was lost"));
        }
        let message = encode(request, bytes)?;
        self.lost = true;
        let answered = self.exchange(&message, timeout);
        self.lost = answered.is_err();
        match answered? {
            (SwitchResponse::Failed(error), _) => Err(error),
            answer => Ok(answer),
        }
    }

    fn exchange(&mut self, message: &[u8], timeout: Duration) -> Result<(SwitchResponse, Vec<u8>)> {
        let deadline = Instant::now() + timeout.min(Duration::from_hours(1));
        self.stream.set_write_timeout(Some(ANSWER_TIMEOUT)).map_err(Error::io("set a timeout"))?;
        // A switch that has another controller has answered so, and does not read.
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
