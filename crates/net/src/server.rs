//! Runs a [`Switch`] as a process, for one controller at a time.
//!
//! ```text
//!   started by an engine:  the control connection is inherited; the switch ends when that
//!                          connection has ended and no VM is connected any more
//!   started by a user:     controllers connect to a socket, one at a time; the switch ends when
//!                          its process receives SIGINT or SIGTERM
//!
//!   a controller ends while the switch is held ──▶ the switch releases and goes on
//! ```
//!
//! Invariant: no controller stops the guests' network for longer than a hold may last, even if it
//! dies or misbehaves.

use crate::listener::LanListener;
use crate::switch::{FOREIGN_TOKENS, PendingQuiesce, Switch};
use crate::wire::{Messages, SwitchRequest, SwitchResponse, encode};
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
/// The interval at which a quiesce is checked.
const LOOK_EVERY: Duration = Duration::from_micros(100);

/// Runs a switch on the calling thread, for the engine at the other end of `control`. Returns when
/// that connection has ended and no VM is connected. Errors: the sockets cannot be prepared or
/// polled.
pub fn serve(control: UnixStream) -> Result<()> {
    let switch = Switch::new()?;
    let mut server = Server { switch, controller: None, listener: None, stop: None };
    server.admit(control)?;
    server.run()
}

/// Runs `switch` on the calling thread until `stop` can be read. Controllers connect to the socket
/// `control`, if one is given. Errors: the socket cannot be created; the sockets cannot be polled.
pub fn serve_until(switch: Switch, control: Option<&Path>, stop: OwnedFd) -> Result<()> {
    let listener = control.map(LanListener::bind).transpose()?;
    if let (Some(listener), Some(path)) = (&listener, control) {
        // A controller can stop the network of every VM, so only the owner may connect.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
            .map_err(Error::io(format!("restrict {} to its owner", path.display())))?;
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
    /// The bytes to send, and the number of bytes already sent.
    output: (Vec<u8>, usize),
    quiesce: Option<PendingQuiesce>,
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
                    LISTENER => self.accept()?,
                    _ => self.read_controller(),
                }
            }
            self.answer_quiesce();
            self.serve_controller();
        }
    }

    /// Accepts a waiting controller, or answers that another process controls the switch.
    fn accept(&mut self) -> Result<()> {
        let Some(stream) = self.listener.as_ref().and_then(LanListener::accept) else {
            return Ok(());
        };
        if self.controller.is_none() {
            return self.admit(stream);
        }
        let busy = encode(&SwitchResponse::Failed(Error::Busy), &[])?;
        // A rejected controller that does not read its answer needs no action.
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

    /// Reads the controller's messages.
    fn read_controller(&mut self) {
        let Some(controller) = &mut self.controller else { return };
        let mut chunk = [0; READ_BYTES];
        match rustix::net::recv(&controller.stream, &mut chunk[..], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => self.drop_controller(),
            Ok((_, len)) => {
                controller.input.push(chunk.get(..len).unwrap_or_default());
                // The controller sends requests without waiting for answers.
                if controller.input.is_too_much() {
                    self.drop_controller();
                }
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => self.drop_controller(),
        }
    }

    /// Drops the controller and releases the switch.
    fn drop_controller(&mut self) {
        self.controller = None;
        self.switch.release();
    }

    /// Answers a quiesce that has ended.
    fn answer_quiesce(&mut self) {
        let Some(quiesce) = self.controller.as_ref().and_then(|c| c.quiesce) else { return };
        let Some(result) = self.switch.settled(quiesce) else { return };
        if let Some(controller) = &mut self.controller {
            controller.quiesce = None;
        }
        self.answer(&result.map_or_else(SwitchResponse::Failed, |()| SwitchResponse::Done), &[]);
    }

    /// Handles the controller's requests, and sends the answers.
    fn serve_controller(&mut self) {
        while let Some(controller) = &mut self.controller
            && controller.quiesce.is_none()
            && controller.output.0.is_empty()
        {
            match controller.input.next::<SwitchRequest>() {
                Ok(Some((request, bytes))) => self.handle_request(request, &bytes),
                Ok(None) => return,
                // The rest of an invalid stream cannot be parsed, so the connection ends.
                Err(_) => self.drop_controller(),
            }
        }
        self.flush();
    }

    fn handle_request(&mut self, request: SwitchRequest, bytes: &[u8]) {
        match self.execute(request, bytes) {
            Ok(Some((response, bytes))) => self.answer(&response, &bytes),
            // `answer_quiesce` answers a quiesce later.
            Ok(None) => {}
            Err(e) => self.answer(&SwitchResponse::Failed(e), &[]),
        }
    }

    fn execute(
        &mut self,
        request: SwitchRequest,
        bytes: &[u8],
    ) -> Result<Option<(SwitchResponse, Vec<u8>)>> {
        let switch = &mut self.switch;
        let response = match request {
            SwitchRequest::Hold { limit_ms } => {
                switch.hold(Duration::from_millis(limit_ms));
                SwitchResponse::Done
            }
            SwitchRequest::Quiesce { timeout_ms } => {
                let quiesce = switch.begin_quiesce(Duration::from_millis(timeout_ms))?;
                if let Some(controller) = &mut self.controller {
                    controller.quiesce = Some(quiesce);
                }
                return Ok(None);
            }
            SwitchRequest::Collect => {
                return Ok(Some((SwitchResponse::InFlight, switch.collect()?.encode()?)));
            }
            SwitchRequest::Release => {
                switch.release();
                SwitchResponse::Done
            }
            SwitchRequest::Ports => SwitchResponse::Ports(switch.ports()),
            SwitchRequest::Restore { stand_ins } => {
                switch.restore(&InFlight::decode(bytes)?, &stand_ins)?;
                SwitchResponse::Done
            }
            SwitchRequest::Listen { path } => {
                switch.listen(Path::new(&path))?;
                SwitchResponse::Done
            }
        };
        Ok(Some((response, Vec::new())))
    }

    fn answer(&mut self, response: &SwitchResponse, bytes: &[u8]) {
        match (encode(response, bytes), &mut self.controller) {
            (Ok(message), Some(controller)) => {
                controller.output = (message, 0);
                self.flush();
            }
            // The controller would wait for an answer that never comes.
            (Err(_), _) => self.drop_controller(),
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
                    // `flush` runs again when the socket has room.
                    if self.switch.watch_writable(&*stream, CONTROLLER, true).is_err() {
                        self.drop_controller();
                    }
                    return;
                }
                Err(_) => return self.drop_controller(),
            }
        }
        if !bytes.is_empty() {
            *bytes = Vec::new();
            *sent = 0;
            if self.switch.watch_writable(&*stream, CONTROLLER, false).is_err() {
                self.drop_controller();
            }
        }
    }
}
