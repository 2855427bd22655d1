//! The controller's handle of a gate that runs in another process.

use super::{Answer, GateLook, GateNic, Order};
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

/// The control of a gate. Dropped while the gate holds, what it holds never passes; while it is
/// open, it goes on for as long as the VM is connected.
pub struct GateRemote {
    stream: UnixStream,
    input: Messages,
    child: Child,
    bell: PipeReader,
}

impl GateRemote {
    /// Starts a gate as `command`, which calls [`super::serve_gate`] with its standard input and
    /// output. It listens for `nics`, and is open.
    pub fn spawn(command: &mut Command, nics: &[GateNic]) -> Result<Self> {
        let (ours, theirs) =
            UnixStream::pair().map_err(Error::io("create a control connection"))?;
        let (bell, rings) = std::io::pipe().map_err(Error::io("create a pipe"))?;
        command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::from(rings));
        // Ctrl-C is not to end it together with the engine.
        command.process_group(0);
        let operation = format!("start the gate ({})", command.get_program().to_string_lossy());
        let child = command.spawn().map_err(Error::io(operation))?;
        // Our copies of its ends are closed with the command's, or we would never see it end.
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let mut remote = Self { stream: ours, input: Messages::default(), child, bell };
        let listening = remote.ask(&Order::Listen { nics: nics.to_vec() }, START_TIMEOUT);
        if let Err(error) = listening {
            let _ = remote.child.kill();
            let _ = remote.child.wait();
            return Err(error);
        }
        Ok(remote)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Some byte comes when the first frame of an epoch is held; it ends with the gate.
    pub fn bell(&self) -> Result<PipeReader> {
        self.bell.try_clone().map_err(Error::io("take the gate's bell"))
    }

    /// From here on frames are held; those that came before pass.
    pub fn hold(&mut self) -> Result<()> {
        self.ask(&Order::Hold, ANSWER_TIMEOUT).map(drop)
    }

    /// All frames pass.
    pub fn open(&mut self) -> Result<()> {
        self.ask(&Order::Open, ANSWER_TIMEOUT).map(drop)
    }

    /// While the VM stands: the number of the epoch that ends. What the guest has sent belongs to
    /// it or to those before.
    pub fn cut(&mut self) -> Result<u64> {
        match self.ask(&Order::Cut, ANSWER_TIMEOUT)? {
            Answer::Cut { epoch } => Ok(epoch),
            _ => Err(Error::control("it gave the answer to another question")),
        }
    }

    /// Frames of epochs up to `epoch`, as [`Self::cut`] numbers them, pass.
    pub fn release(&mut self, epoch: u64) -> Result<()> {
        self.ask(&Order::Release { epoch }, ANSWER_TIMEOUT).map(drop)
    }

    /// How it is.
    pub fn look(&mut self) -> Result<GateLook> {
        match self.ask(&Order::Look, ANSWER_TIMEOUT)? {
            Answer::Look(look) => Ok(look),
            _ => Err(Error::control("it gave the answer to another question")),
        }
    }

    /// Lets go of it and waits briefly for its end.
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

    fn ask(&mut self, order: &Order, timeout: Duration) -> Result<Answer> {
        let message = encode(order, &[])?;
        let answered = self.exchange(&message, timeout);
        if answered.is_err() {
            // A late answer would be taken for the next one's.
            let _ = self.stream.shutdown(std::net::Shutdown::Both);
        }
        match answered? {
            Answer::Failed { problem } => Err(Error::control(problem)),
            answer => Ok(answer),
        }
    }

    fn exchange(&mut self, message: &[u8], timeout: Duration) -> Result<Answer> {
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
