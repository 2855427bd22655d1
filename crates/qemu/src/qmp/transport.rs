//! Lines of JSON over a unix socket: written and read with a deadline, without blocking calls.
//!
//! A reader sleeps in `poll` and does not spin. On a host with few cores a spinning reader of
//! raised priority takes the core that QEMU's main loop needs for the answer, which then comes a
//! millisecond or two later.

use crate::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use serde_json::Value;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// The longest accepted line. QEMU's own are a few KiB; `query-qmp-schema` is 200 KiB.
const LINE_BYTES_MAX: usize = 16 << 20;
/// How long to wait between two attempts to connect.
const RETRY_EVERY: Duration = Duration::from_millis(2);

/// A connection to the socket of QEMU's monitor.
pub struct Transport {
    socket: OwnedFd,
    name: String,
    /// Received bytes. `..scanned` has no newline.
    buffer: Vec<u8>,
    scanned: usize,
    /// True if the beginning of the first line may be missing.
    mid_line: bool,
}

impl Transport {
    /// Connects to the socket at `path`. If it does not exist yet, tries again for at most `wait`.
    /// An error of `alive`, which is called between two attempts, ends them.
    pub fn connect(
        path: &Path,
        wait: Duration,
        alive: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Self> {
        let operation = || format!("connect to QEMU's monitor {}", path.display());
        let address = SocketAddrUnix::new(path).map_err(Error::io(operation()))?;
        let deadline = Instant::now() + wait;
        loop {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let socket =
                rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
                    .map_err(Error::io(operation()))?;
            match rustix::net::connect(&socket, &address) {
                Ok(()) => return Ok(Self::over(socket, path.display().to_string())),
                // The socket is not there yet, or no process listens yet, or its queue is full
                // (EAGAIN).
                Err(Errno::NOENT | Errno::CONNREFUSED | Errno::AGAIN | Errno::INTR)
                    if Instant::now() < deadline => {}
                Err(e) => return Err(Error::io(operation())(e)),
            }
            alive()?;
            std::thread::sleep(RETRY_EVERY);
        }
    }

    /// Creates a transport over a connected, non-blocking socket. Errors call it `name`.
    pub fn over(socket: OwnedFd, name: String) -> Self {
        Self { socket, name, buffer: Vec::new(), scanned: 0, mid_line: false }
    }

    /// Takes over the socket of a process that has ended and may have read half a line.
    pub fn taken_over(socket: OwnedFd, name: String) -> Self {
        Self { mid_line: true, ..Self::over(socket, name) }
    }

    /// Returns a second descriptor of the socket, for another process. Error: [`Error::Io`] if this
    /// process has no free descriptor.
    pub fn duplicate(&self) -> Result<OwnedFd> {
        rustix::io::fcntl_dupfd_cloexec(&self.socket, 3)
            .map_err(Error::io(format!("duplicate the connection to QEMU's monitor {}", self.name)))
    }

    /// Returns the name that errors use for the transport.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sends `message` as one line, with the descriptor `passed` if there is one. Errors call it
    /// `operation`. Error: the monitor is closed, or does not take the line within `timeout`.
    pub fn send(
        &mut self,
        message: &Value,
        passed: Option<BorrowedFd<'_>>,
        operation: &str,
        timeout: Duration,
    ) -> Result<()> {
        let mut passed = passed;
        let mut line = message.to_string().into_bytes();
        line.push(b'\n');
        let started = Instant::now();
        let mut left = line.as_slice();
        while !left.is_empty() {
            match send_some(&self.socket, left, passed) {
                Ok(sent) => {
                    left = left.get(sent..).unwrap_or_default();
                    // It went with the first byte.
                    passed = None;
                }
                Err(Errno::AGAIN) => self.sleep(PollFlags::OUT, started, timeout, operation)?,
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(self.gone(operation)),
                Err(e) => {
                    return Err(Error::io(format!(
                        "write to QEMU's monitor {} ({operation})",
                        self.name
                    ))(e));
                }
            }
        }
        Ok(())
    }

    /// Returns the message of the next line, waiting for at most `timeout`. Error: the time has
    /// passed, the monitor is closed, or the line is malformed.
    pub fn receive(&mut self, operation: &str, timeout: Duration) -> Result<Value> {
        let started = Instant::now();
        loop {
            if let Some(message) = self.receive_now(operation)? {
                return Ok(message);
            }
            self.sleep(PollFlags::IN, started, timeout, operation)?;
        }
    }

    /// Returns the message of the next line; `None` if no whole line has arrived. Error: the
    /// monitor is closed, or the line is malformed.
    pub fn receive_now(&mut self, operation: &str) -> Result<Option<Value>> {
        loop {
            let fresh = self.buffer.get(self.scanned..).unwrap_or_default();
            if let Some(at) = fresh.iter().position(|b| *b == b'\n') {
                let end = self.scanned + at;
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                self.scanned = 0;
                let parsed = self.parse(&line, operation);
                if std::mem::take(&mut self.mid_line) && parsed.is_err() {
                    continue;
                }
                return parsed.map(Some);
            }
            self.scanned = self.buffer.len();
            if self.buffer.len() > LINE_BYTES_MAX {
                return Err(
                    self.protocol(operation, format!("a line of more than {LINE_BYTES_MAX} bytes"))
                );
            }
            let mut chunk = [0u8; 16 << 10];
            match rustix::net::recv(&self.socket, &mut chunk[..], RecvFlags::empty()) {
                Ok((0, _)) | Err(Errno::CONNRESET) => return Err(self.gone(operation)),
                Ok((len, _)) => self.buffer.extend_from_slice(chunk.get(..len).unwrap_or_default()),
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(e) => {
                    return Err(Error::io(format!(
                        "read from QEMU's monitor {} ({operation})",
                        self.name
                    ))(e));
                }
            }
        }
    }

    /// Returns the error for an answer that cannot be understood.
    pub fn protocol(&self, operation: &str, problem: String) -> Error {
        Error::Protocol { monitor: self.name.clone(), operation: operation.into(), problem }
    }

    fn parse(&self, line: &[u8], operation: &str) -> Result<Value> {
        serde_json::from_slice(line).map_err(|e| {
            let start: String = String::from_utf8_lossy(line).chars().take(80).collect();
            self.protocol(operation, format!("a line that is no JSON ({e}): {start:?}"))
        })
    }

    fn gone(&self, operation: &str) -> Error {
        Error::Gone { monitor: self.name.clone(), operation: operation.into() }
    }

    fn sleep(
        &self,
        flags: PollFlags,
        started: Instant,
        timeout: Duration,
        operation: &str,
    ) -> Result<()> {
        let left = timeout.saturating_sub(started.elapsed());
        if left.is_zero() {
            let waited_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
            return Err(Error::Timeout {
                monitor: self.name.clone(),
                operation: operation.into(),
                waited_ms,
            });
        }
        let limit =
            Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&self.socket, flags)], Some(&limit)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(Error::io(format!("wait for QEMU's monitor {}", self.name))(e)),
        }
    }
}

/// Sends as many of `bytes` as the socket accepts.
fn send_some(
    socket: &OwnedFd,
    bytes: &[u8],
    passed: Option<BorrowedFd<'_>>,
) -> Result<usize, Errno> {
    let Some(fd) = passed else { return rustix::net::send(socket, bytes, SendFlags::NOSIGNAL) };
    let fds = [fd];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    // The space was made for it.
    let _ = ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)
}

impl AsFd for Transport {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
