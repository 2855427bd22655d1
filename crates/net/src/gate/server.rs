//! Runs a gate as a process, between the sockets of the NICs' filters and its controller.

use super::{Answer, GateNic, NICS_MAX, Order, Queue};
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
/// How long a controller may take to read an answer; they are short.
const ANSWER_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);

/// Runs a gate for the controller at the other end of `control`, until both that and the VM have
/// ended; or, where the gate holds, until the controller has. A byte is written to `bell` when the
/// first frame of an epoch is held.
pub fn serve_gate(control: UnixStream, bell: OwnedFd) -> Result<()> {
    // Who does not hear it looks by himself.
    rustix::io::ioctl_fionbio(&bell, true).map_err(Error::io("prepare the bell"))?;
    control
        .set_write_timeout(Some(ANSWER_TIMEOUT))
        .map_err(Error::io("prepare the control connection"))?;
    Gate {
        control: Some(control),
        bell,
        input: Messages::default(),
        nics: Vec::new(),
        queue: Queue::new(0),
        born: Instant::now(),
    }
    .run()
}

/// One socket of a NIC: QEMU connects once.
enum End {
    Waiting(UnixListener),
    Connected(UnixStream),
    Gone,
}

impl End {
    fn listen(path: &std::path::Path) -> Result<Self> {
        let listener =
            UnixListener::bind(path).map_err(Error::io(format!("listen at {}", path.display())))?;
        listener.set_nonblocking(true).map_err(Error::io(format!("prepare {}", path.display())))?;
        Ok(Self::Waiting(listener))
    }

    /// Lets QEMU in, where it waits.
    fn greet(&mut self) {
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
    from_guest: End,
    to_network: End,
    deframer: Deframer,
    /// The frame that is being written, and how much of it was.
    writing: Option<(Frame, usize)>,
}

struct Gate {
    control: Option<UnixStream>,
    bell: OwnedFd,
    input: Messages,
    nics: Vec<Nic>,
    queue: Queue,
    born: Instant,
}

/// Which descriptor of the poll it was.
#[derive(Clone, Copy)]
enum Who {
    Control,
    From(usize),
    To(usize),
}

impl Gate {
    fn run(mut self) -> Result<()> {
        loop {
            // Held frames end with who could have released them.
            let guest_there =
                self.nics.iter().any(|nic| matches!(nic.from_guest, End::Connected(_)));
            if self.control.is_none() && !(self.queue.is_open() && guest_there) {
                return Ok(());
            }
            let ready = self.wait()?;
            for who in ready {
                match who {
                    Who::Control => self.hear(),
                    Who::From(nic) => self.take(nic),
                    Who::To(nic) => self.greet_network(nic),
                }
            }
            self.obey()?;
            self.write();
        }
    }

    fn wait(&self) -> Result<Vec<Who>> {
        let (mut fds, mut whose) = (Vec::new(), Vec::new());
        if let Some(control) = &self.control {
            fds.push(PollFd::new(control, PollFlags::IN));
            whose.push(Who::Control);
        }
        for (number, nic) in self.nics.iter().enumerate() {
            match &nic.from_guest {
                End::Waiting(listener) => fds.push(PollFd::new(listener, PollFlags::IN)),
                End::Connected(stream) => fds.push(PollFd::new(stream, PollFlags::IN)),
                End::Gone => {}
            }
            if !matches!(nic.from_guest, End::Gone) {
                whose.push(Who::From(number));
            }
            match &nic.to_network {
                End::Waiting(listener) => fds.push(PollFd::new(listener, PollFlags::IN)),
                End::Connected(stream) => {
                    let wanted =
                        if nic.writing.is_some() { PollFlags::OUT } else { PollFlags::empty() };
                    fds.push(PollFd::new(stream, wanted));
                }
                End::Gone => {}
            }
            if !matches!(nic.to_network, End::Gone) {
                whose.push(Who::To(number));
            }
        }
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(Error::io("wait for the VM's network")(e)),
        }
        let is_ready = |(fd, who): (&PollFd<'_>, Who)| (!fd.revents().is_empty()).then_some(who);
        Ok(fds.iter().zip(whose).filter_map(is_ready).collect())
    }

    fn hear(&mut self) {
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

    /// Takes in all that the guest has sent on a NIC by now.
    fn take(&mut self, number: usize) {
        let now_ns = elapsed_ns(self.born);
        let Some(nic) = self.nics.get_mut(number) else { return };
        nic.from_guest.greet();
        let mut chunk = vec![0; READ_BYTES];
        while let End::Connected(stream) = &nic.from_guest {
            let mut frames = Vec::new();
            match rustix::net::recv(stream, &mut chunk[..], RecvFlags::DONTWAIT) {
                Ok((_, len)) if len > 0 => {
                    // A stream that cannot be understood any more is none.
                    if nic.deframer.push(chunk.get(..len).unwrap_or_default(), &mut frames).is_err()
                    {
                        nic.from_guest = End::Gone;
                    }
                }
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => {}
                Ok(_) | Err(_) => nic.from_guest = End::Gone,
            }
            for frame in frames {
                if self.queue.take(number, frame, now_ns) {
                    let _ = rustix::io::write(&self.bell, &[0]);
                }
            }
        }
    }

    fn greet_network(&mut self, number: usize) {
        let Some(nic) = self.nics.get_mut(number) else { return };
        nic.to_network.greet();
        // It sends nothing; its end is seen here too.
        let mut byte = [0; 64];
        if let End::Connected(stream) = &nic.to_network {
            match rustix::net::recv(stream, &mut byte[..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => nic.to_network = End::Gone,
                Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
                Err(_) => nic.to_network = End::Gone,
            }
        }
    }

    fn obey(&mut self) -> Result<()> {
        while self.control.is_some() {
            let answer = match self.input.next::<Order>() {
                Ok(Some((order, _))) => self.carry_out(order),
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

    fn carry_out(&mut self, order: Order) -> Answer {
        match order {
            Order::Listen { nics } => {
                return self.listen(&nics).map_or_else(|e| failed(&e), |()| Answer::Done);
            }
            Order::Hold => {
                self.take_all();
                // What came before was let pass: it goes on, as far as it can.
                self.write();
                self.queue.hold();
            }
            Order::Open => self.queue.open(),
            Order::Cut => {
                self.take_all();
                return Answer::Cut { epoch: self.queue.cut() };
            }
            Order::Release { epoch } => {
                if let Err(problem) = self.queue.release(epoch) {
                    return Answer::Failed { problem };
                }
            }
            Order::Look => {
                self.take_all();
                let now_ns = elapsed_ns(self.born);
                return Answer::Look(self.queue.look(now_ns));
            }
        }
        self.write();
        Answer::Done
    }

    fn take_all(&mut self) {
        (0..self.nics.len()).for_each(|nic| self.take(nic));
    }

    fn listen(&mut self, nics: &[GateNic]) -> Result<()> {
        if !self.nics.is_empty() || nics.len() > NICS_MAX {
            return Err(Error::control(format!("{} NICs, behind {}", nics.len(), self.nics.len())));
        }
        let ends = |nic: &GateNic| {
            Ok(Nic {
                from_guest: End::listen(&nic.from_guest)?,
                to_network: End::listen(&nic.to_network)?,
                deframer: Deframer::default(),
                writing: None,
            })
        };
        self.nics = nics.iter().map(ends).collect::<Result<_>>()?;
        self.queue = Queue::new(nics.len());
        Ok(())
    }

    /// Writes what may pass, as far as it is taken.
    fn write(&mut self) {
        for (number, nic) in self.nics.iter_mut().enumerate() {
            loop {
                if nic.writing.is_none() {
                    let End::Connected(_) = &nic.to_network else { break };
                    nic.writing = self.queue.pass(number).map(|frame| (frame, 0));
                }
                let (Some((frame, done)), End::Connected(stream)) =
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
                    Err(_) => (nic.to_network, nic.writing) = (End::Gone, None),
                }
            }
        }
    }
}

fn failed(error: &Error) -> Answer {
    let source =
        std::error::Error::source(error).map_or_else(String::new, |source| format!(": {source}"));
    Answer::Failed { problem: format!("{error}{source}") }
}
