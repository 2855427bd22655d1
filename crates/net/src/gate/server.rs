//! Runs a gate as a process, between the sockets of the NICs' filters and its controller.

use super::{GateNic, GateQueue, GateRequest, GateResponse, NICS_MAX};
use crate::frame::{Deframer, Frame};
use crate::wire::{Messages, encode};
use crate::{Error, Result};
use keyframe_units::elapsed_ns;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Instant;

const READ_BYTES: usize = 64 << 10;
/// The longest time until a controller has read an answer. Answers are short.
const ANSWER_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);

/// Runs a gate on the calling thread, for the controller at the other end of `control`. A holding
/// gate ends when its controller has ended; an open gate ends when both the controller and the VM
/// have. The gate writes a byte to `bell` when it holds the first frame of an epoch.
///
/// Errors: the sockets cannot be prepared or polled.
pub fn serve_gate(control: UnixStream, bell: OwnedFd) -> Result<()> {
    // If nothing reads the bell, a full pipe must not block the gate.
    rustix::io::ioctl_fionbio(&bell, true).map_err(Error::io("prepare the bell"))?;
    control
        .set_write_timeout(Some(ANSWER_TIMEOUT))
        .map_err(Error::io("prepare the control connection"))?;
    Gate {
        control: Some(control),
        bell,
        input: Messages::default(),
        nics: Vec::new(),
        queue: GateQueue::new(0),
        born: Instant::now(),
    }
    .run()
}

/// One socket of a NIC. QEMU connects to it once.
enum FilterSocket {
    Waiting(UnixListener),
    Connected(UnixStream),
    Gone,
}

impl FilterSocket {
    fn listen(path: &std::path::Path) -> Result<Self> {
        let listener =
            UnixListener::bind(path).map_err(Error::io(format!("listen at {}", path.display())))?;
        listener.set_nonblocking(true).map_err(Error::io(format!("prepare {}", path.display())))?;
        Ok(Self::Waiting(listener))
    }

    /// Accepts QEMU's connection if one waits.
    fn accept(&mut self) {
        let Self::Waiting(listener) = self else { return };
        if let Ok((stream, _)) = listener.accept() {
            *self = if stream.set_nonblocking(true).is_ok() {
                Self::Connected(stream)
            } else {
                Self::Gone
            };
        }
    }
}

struct Nic {
    from_guest: FilterSocket,
    to_network: FilterSocket,
    deframer: Deframer,
    /// The frame that is being written, and the number of bytes already written.
    writing: Option<(Frame, usize)>,
}

struct Gate {
    control: Option<UnixStream>,
    bell: OwnedFd,
    input: Messages,
    nics: Vec<Nic>,
    queue: GateQueue,
    born: Instant,
}

/// The descriptor of a poll result.
#[derive(Clone, Copy)]
enum PollSource {
    Control,
    Guest(usize),
    Network(usize),
}

impl Gate {
    fn run(mut self) -> Result<()> {
        loop {
            // After the controller has gone, held frames can never be released.
            let guest_there =
                self.nics.iter().any(|nic| matches!(nic.from_guest, FilterSocket::Connected(_)));
            if self.control.is_none() && !(self.queue.is_open() && guest_there) {
                return Ok(());
            }
            let ready = self.wait()?;
            for source in ready {
                match source {
                    PollSource::Control => self.read_control(),
                    PollSource::Guest(nic) => self.read_guest(nic),
                    PollSource::Network(nic) => self.poll_network(nic),
                }
            }
            self.handle_requests()?;
            self.write();
        }
    }

    fn wait(&self) -> Result<Vec<PollSource>> {
        let (mut fds, mut sources) = (Vec::new(), Vec::new());
        if let Some(control) = &self.control {
            fds.push(PollFd::new(control, PollFlags::IN));
            sources.push(PollSource::Control);
        }
        for (number, nic) in self.nics.iter().enumerate() {
            match &nic.from_guest {
                FilterSocket::Waiting(listener) => fds.push(PollFd::new(listener, PollFlags::IN)),
                FilterSocket::Connected(stream) => fds.push(PollFd::new(stream, PollFlags::IN)),
                FilterSocket::Gone => {}
            }
            if !matches!(nic.from_guest, FilterSocket::Gone) {
                sources.push(PollSource::Guest(number));
            }
            match &nic.to_network {
                FilterSocket::Waiting(listener) => fds.push(PollFd::new(listener, PollFlags::IN)),
                FilterSocket::Connected(stream) => {
                    let wanted =
                        if nic.writing.is_some() { PollFlags::OUT } else { PollFlags::empty() };
                    fds.push(PollFd::new(stream, wanted));
                }
                FilterSocket::Gone => {}
            }
            if !matches!(nic.to_network, FilterSocket::Gone) {
                sources.push(PollSource::Network(number));
            }
        }
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(Error::io("wait for the VM's network")(e)),
        }
        let is_ready =
            |(fd, source): (&PollFd<'_>, PollSource)| (!fd.revents().is_empty()).then_some(source);
        Ok(fds.iter().zip(sources).filter_map(is_ready).collect())
    }

    fn read_control(&mut self) {
        let Some(control) = &self.control else { return };
        let mut chunk = [0; 4096];
        match rustix::net::recv(control, &mut chunk[..], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => self.control = None,
            Ok((_, len)) => {
                self.input.push(chunk.get(..len).unwrap_or_default());
                if self.input.is_too_much() {
                    self.control = None;
                }
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => self.control = None,
        }
    }

    /// Reads all frames that the guest has sent on a NIC so far.
    fn read_guest(&mut self, number: usize) {
        let now_ns = elapsed_ns(self.born);
        let Some(nic) = self.nics.get_mut(number) else { return };
        nic.from_guest.accept();
        let mut chunk = vec![0; READ_BYTES];
        while let FilterSocket::Connected(stream) = &nic.from_guest {
            let mut frames = Vec::new();
            match rustix::net::recv(stream, &mut chunk[..], RecvFlags::DONTWAIT) {
                Ok((_, len)) if len > 0 => {
                    // The rest of a stream with an invalid length cannot be parsed, so the
                    // connection ends.
                    if nic.deframer.push(chunk.get(..len).unwrap_or_default(), &mut frames).is_err()
                    {
                        nic.from_guest = FilterSocket::Gone;
                    }
                }
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => {}
                Ok(_) | Err(_) => nic.from_guest = FilterSocket::Gone,
            }
            for frame in frames {
                if self.queue.push(number, frame, now_ns) {
                    let _ = rustix::io::write(&self.bell, &[0]);
                }
            }
        }
    }

    fn poll_network(&mut self, number: usize) {
        let Some(nic) = self.nics.get_mut(number) else { return };
        nic.to_network.accept();
        // This peer sends nothing. Reading detects its end.
        let mut byte = [0; 64];
        if let FilterSocket::Connected(stream) = &nic.to_network {
            match rustix::net::recv(stream, &mut byte[..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => nic.to_network = FilterSocket::Gone,
                Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
                Err(_) => nic.to_network = FilterSocket::Gone,
            }
        }
    }

    fn handle_requests(&mut self) -> Result<()> {
        while self.control.is_some() {
            let answer = match self.input.next::<GateRequest>() {
                Ok(Some((request, _))) => self.handle_request(request),
                Ok(None) => break,
                Err(_) => {
                    self.control = None;
                    break;
                }
            };
            let message = encode(&answer, &[])?;
            let Some(control) = &self.control else { break };
            let mut left = &message[..];
            while !left.is_empty() {
                match rustix::net::send(control, left, SendFlags::NOSIGNAL) {
                    Ok(len) => left = left.get(len..).unwrap_or_default(),
                    Err(Errno::INTR) => {}
                    Err(_) => {
                        self.control = None;
                        break;
                    }
                }
            }
        }
        Ok(())
    }

    fn handle_request(&mut self, request: GateRequest) -> GateResponse {
        match request {
            GateRequest::Listen { nics } => {
                return self.listen(&nics).map_or_else(|e| failed(&e), |()| GateResponse::Done);
            }
            GateRequest::Hold => {
                self.read_all_guests();
                // Frames from before the hold may pass: write them as far as the socket has room.
                self.write();
                self.queue.hold();
            }
            GateRequest::Open => self.queue.open(),
            GateRequest::Cut => {
                self.read_all_guests();
                return GateResponse::Cut { epoch: self.queue.cut() };
            }
            GateRequest::Release { epoch } => {
                if let Err(problem) = self.queue.release(epoch) {
                    return GateResponse::Failed { problem };
                }
            }
            GateRequest::Look => {
                self.read_all_guests();
                let now_ns = elapsed_ns(self.born);
                return GateResponse::Look(self.queue.status(now_ns));
            }
        }
        self.write();
        GateResponse::Done
    }

    fn read_all_guests(&mut self) {
        (0..self.nics.len()).for_each(|nic| self.read_guest(nic));
    }

    fn listen(&mut self, nics: &[GateNic]) -> Result<()> {
        if !self.nics.is_empty() || nics.len() > NICS_MAX {
            return Err(Error::control(format!(
                "{} NICs after {} that the gate has already",
                nics.len(),
                self.nics.len()
            )));
        }
        let ends = |nic: &GateNic| {
            Ok(Nic {
                from_guest: FilterSocket::listen(&nic.from_guest)?,
                to_network: FilterSocket::listen(&nic.to_network)?,
                deframer: Deframer::default(),
                writing: None,
            })
        };
        self.nics = nics.iter().map(ends).collect::<Result<_>>()?;
        self.queue = GateQueue::new(nics.len());
        Ok(())
    }

    /// Writes the frames that may pass, as far as the sockets have room.
    fn write(&mut self) {
        for (number, nic) in self.nics.iter_mut().enumerate() {
            loop {
                if nic.writing.is_none() {
                    let FilterSocket::Connected(_) = &nic.to_network else { break };
                    nic.writing = self.queue.pop_released(number).map(|frame| (frame, 0));
                }
                let (Some((frame, done)), FilterSocket::Connected(stream)) =
                    (&mut nic.writing, &nic.to_network)
                else {
                    break;
                };
                let left = frame.wire().get(*done..).unwrap_or_default();
                match rustix::net::send(stream, left, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                    Ok(len) => {
                        *done += len;
                        if *done >= frame.wire().len() {
                            nic.writing = None;
                        }
                    }
                    Err(Errno::AGAIN) => break,
                    Err(Errno::INTR) => {}
                    Err(_) => (nic.to_network, nic.writing) = (FilterSocket::Gone, None),
                }
            }
        }
    }
}

fn failed(error: &Error) -> GateResponse {
    let source =
        std::error::Error::source(error).map_or_else(String::new, |source| format!(": {source}"));
    GateResponse::Failed { problem: format!("{error}{source}") }
}
