//! Runs a [`Switch`] as a process, for one controller at a time.
//!
//! ```text
//!   started by an engine:  the control connection is given; ends when it has ended and no VM is connected any more
//!   started by a user:     controllers connect to a socket, one at a time; ends when it is told to
//!
//!   a controller that ends while the switch is held ──▶ released, and on it goes
//! ```
//!
//! Invariant: no controller, however it dies or misbehaves, stops the guests' network for longer
//! than a hold may last.

use crate::listener::LanListener;
use crate::switch::{FOREIGN_TOKENS, Quiesce, Switch};
use crate::wire::{Messages, Request, Response, encode};
use crate::{Error, InFlight, Result};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const LISTENER: u64 = FOREIGN_TOKENS;
const STOP: u64 = FOREIGN_TOKENS + 1;
const CONTROLLER: u64 = FOREIGN_TOKENS + 2;
const READ_BYTES: usize = 16 << 10;
/// How often a quiesce is looked at.
const LOOK_EVERY: Duration = Duration::from_micros(100);

/// Runs a switch for the engine at the other end of `control`, until that has ended and no VM is
/// connected.
pub fn serve(control: UnixStream) -> Result<()> {
    let switch = Switch::new()?;
    let mut server = Server { switch, controller: None, listener: None, stop: None };
    server.admit(control)?;
    server.run()
}

/// Runs `switch` until `stop` can be read, for controllers that connect at `control`, where that is
/// given.
pub fn serve_until(switch: Switch, control: Option<&Path>, stop: OwnedFd) -> Result<()> {
    let listener = control.map(LanListener::bind).transpose()?;
    if let (Some(listener), Some(path)) = (&listener, control) {
        // Who controls it can stop the network of every VM.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
            .map_err(Error::io(format!("make {} its owner's", path.display())))?;
        switch.watch(listener, LISTENER)?;
    }
    switch.watch(&stop, STOP)?;
    Server { switch, controller: None, listener, stop: Some(stop) }.run()
}

struct Server {
    switch: Switch,
    controller: Option<Controller>,
    listener: Option<LanListener>,
    stop: Option<OwnedFd>,
}

struct Controller {
    stream: UnixStream,
    input: Messages,
    /// What it has yet to be sent, and how much of that it was.
    output: (Vec<u8>, usize),
    quiesce: Option<Quiesce>,
}

impl Server {
    fn run(&mut self) -> Result<()> {
        loop {
            let lasts = self.stop.is_some() || self.controller.is_some() || !self.switch.is_empty();
            if !lasts {
                return Ok(());
            }
            let busy = self.controller.as_ref().is_some_and(|c| c.quiesce.is_some());
            for token in self.switch.turn(busy.then_some(LOOK_EVERY))? {
                match token {
                    STOP => return Ok(()),
                    LISTENER => self.greet()?,
                    _ => self.hear(),
                }
            }
            self.settle();
            self.serve_controller();
        }
    }

    /// Lets in whoever has connected, or tells that another one is here.
    fn greet(&mut self) -> Result<()> {
        let Some(stream) = self.listener.as_ref().and_then(LanListener::accept) else {
            return Ok(());
        };
        if self.controller.is_none() {
            return self.admit(stream);
        }
        let busy = encode(&Response::Failed(Error::Busy), &[])?;
        // Whether it hears that is its own affair.
        let _ = rustix::net::send(&stream, &busy, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        Ok(())
    }

    fn admit(&mut self, stream: UnixStream) -> Result<()> {
        stream.set_nonblocking(true).map_err(Error::io("prepare the control connection"))?;
        self.switch.watch(&stream, CONTROLLER)?;
        let output = (Vec::new(), 0);
        self.controller =
            Some(Controller { stream, input: Messages::default(), output, quiesce: None });
        Ok(())
    }

    /// Reads what the controller says.
    fn hear(&mut self) {
        let Some(controller) = &mut self.controller else { return };
        let mut chunk = [0; READ_BYTES];
        match rustix::net::recv(&controller.stream, &mut chunk[..], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => self.dismiss(),
            Ok((_, len)) => {
                controller.input.push(chunk.get(..len).unwrap_or_default());
                // It asks without waiting for answers.
                if controller.input.is_too_much() {
                    self.dismiss();
                }
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => self.dismiss(),
        }
    }

    /// The controller is gone: the guests go on as if it had never been.
    fn dismiss(&mut self) {
        self.controller = None;
        self.switch.release();
    }

    /// Answers a quiesce that has ended.
    fn settle(&mut self) {
        let Some(quiesce) = self.controller.as_ref().and_then(|c| c.quiesce) else { return };
        let Some(result) = self.switch.settled(quiesce) else { return };
        if let Some(controller) = &mut self.controller {
            controller.quiesce = None;
        }
        self.answer(&result.map_or_else(Response::Failed, |()| Response::Done), &[]);
    }

    /// Obeys what was asked, and sends what is to be sent.
    fn serve_controller(&mut self) {
        while let Some(controller) = &mut self.controller
            && controller.quiesce.is_none()
            && controller.output.0.is_empty()
        {
            match controller.input.next::<Request>() {
                Ok(Some((request, bytes))) => self.obey(request, &bytes),
                Ok(None) => return,
                // Whoever cannot be understood is no controller.
                Err(_) => self.dismiss(),
            }
        }
        self.flush();
    }

    fn obey(&mut self, request: Request, bytes: &[u8]) {
        match self.carry_out(request, bytes) {
            Ok(Some((response, bytes))) => self.answer(&response, &bytes),
            // It is answered later.
            Ok(None) => {}
            Err(e) => self.answer(&Response::Failed(e), &[]),
        }
    }

    fn carry_out(&mut self, request: Request, bytes: &[u8]) -> Result<Option<(Response, Vec<u8>)>> {
        let switch = &mut self.switch;
        let response = match request {
            Request::Hold { limit_ms } => {
                switch.hold(Duration::from_millis(limit_ms));
                Response::Done
            }
            Request::Quiesce { timeout_ms } => {
                let quiesce = switch.begin_quiesce(Duration::from_millis(timeout_ms))?;
                if let Some(controller) = &mut self.controller {
                    controller.quiesce = Some(quiesce);
                }
                return Ok(None);
            }
            Request::Collect => return Ok(Some((Response::InFlight, switch.collect()?.encode()?))),
            Request::Release => {
                switch.release();
                Response::Done
            }
            Request::Ports => Response::Ports(switch.ports()),
            Request::Restore { stand_ins } => {
                switch.restore(&InFlight::decode(bytes)?, &stand_ins)?;
                Response::Done
            }
            Request::Listen { path } => {
                switch.listen(Path::new(&path))?;
                Response::Done
            }
        };
        Ok(Some((response, Vec::new())))
    }

    fn answer(&mut self, response: &Response, bytes: &[u8]) {
        match (encode(response, bytes), &mut self.controller) {
            (Ok(message), Some(controller)) => {
                controller.output = (message, 0);
                self.flush();
            }
            // It would wait for an answer that never comes.
            (Err(_), _) => self.dismiss(),
            (Ok(_), None) => {}
        }
    }

    fn flush(&mut self) {
        let Some(Controller { stream, output: (bytes, sent), .. }) = &mut self.controller else {
            return;
        };
        while let Some(left) = bytes.get(*sent..).filter(|left| !left.is_empty()) {
            match rustix::net::send(&*stream, left, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(len) => *sent += len,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    // Goes on when it can be written to.
                    if self.switch.watch_writable(&*stream, CONTROLLER, true).is_err() {
                        self.dismiss();
                    }
                    return;
                }
                Err(_) => return self.dismiss(),
            }
        }
        if !bytes.is_empty() {
            *bytes = Vec::new();
            *sent = 0;
            if self.switch.watch_writable(&*stream, CONTROLLER, false).is_err() {
                self.dismiss();
            }
        }
    }
}
