//! QEMU's stub of one VM, as a debugger left its predecessor.

use super::{Told, failed};
use crate::idling::Idling;
use crate::travel::Standing;
use keyframe_failure::Failure;
use keyframe_gdb::{GdbConnection, Received, StopReply, wait_for_either};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// How long QEMU may take to answer. It answers a VM that is being filled only when the pages are
/// there.
const ANSWER_WAIT: Duration = Duration::from_secs(60);

/// A VM that stands, and a connection to its stub.
pub struct Stub {
    pub standing: Standing,
    link: GdbConnection<UnixStream>,
    /// `thread:ID;`, as its replies name the processor.
    pub thread: String,
}

impl Stub {
    /// That of `standing`, told what its predecessor was told.
    pub(super) fn new(standing: Standing, told: &Told) -> Result<Self, Failure> {
        let link = standing.attach()?;
        let mut stub = Self { standing, link, thread: String::new() };
        if !told.supported.is_empty() {
            stub.ask(&told.supported)?;
        }
        // First: it drops all breakpoints.
        let why = stub.ask(b"?")?;
        stub.thread = StopReply::parse(&why).map(|reply| reply.thread).unwrap_or_default();
        if !told.thread.is_empty() {
            stub.ask(&told.thread)?;
        }
        for point in &told.points {
            stub.ask(&point.packet())?;
        }
        Ok(stub)
    }

    /// The answer to a packet.
    pub fn ask(&mut self, payload: &[u8]) -> Result<Vec<u8>, Failure> {
        self.link.send(payload).map_err(|e| failed(&e))?;
        self.answer()
    }

    /// The answer to a packet that was sent.
    pub fn answer(&mut self) -> Result<Vec<u8>, Failure> {
        match self.link.receive(ANSWER_WAIT).map_err(|e| failed(&e))? {
            Some(Received::Packet(answer)) => Ok(answer),
            Some(Received::Interrupt | Received::Closed) => Err(Failure::new("QEMU has ended")),
            None => Err(Failure::new(format!(
                "QEMU's stub has not answered for {} s",
                ANSWER_WAIT.as_secs()
            ))),
        }
    }

    /// Sends a packet that is answered when the VM stops.
    pub fn send(&mut self, payload: &[u8]) -> Result<(), Failure> {
        self.link.send(payload).map_err(|e| failed(&e))
    }

    /// What has come.
    pub fn receive(&mut self, wait: Duration) -> Result<Option<Received>, Failure> {
        self.link.receive(wait).map_err(|e| failed(&e))
    }

    /// Waits for either side to say something, a moment at most; a VM that runs on and does nothing
    /// is woken first.
    pub(super) fn wait(
        &mut self,
        gdb: &GdbConnection<TcpStream>,
        idling: &mut Idling,
    ) -> Result<(), Failure> {
        let (is_idle, wait) = idling.look();
        if is_idle {
            // Whether it is still there is told by its stub.
            let _ = self.icount();
        }
        wait_for_either(gdb, &self.link, wait).map_err(|e| failed(&e))
    }

    /// Of the VM that is to run on.
    pub(super) fn idling(&mut self) -> Idling {
        Idling::new(self.standing.replay.restored().vm().pid())
    }

    /// Has a VM that runs stop.
    pub fn interrupt(&mut self) -> Result<(), Failure> {
        self.link.interrupt().map_err(|e| failed(&e))
    }

    /// The instruction it stands before.
    pub fn icount(&mut self) -> Result<u64, Failure> {
        self.standing.icount()
    }

    /// Whether the guest has shut down: its log ends there.
    pub fn is_shut_down(&mut self) -> Result<bool, Failure> {
        let status =
            self.standing.replay.restored().vm().qmp().status().map_err(|e| Failure::qemu(&e))?;
        Ok(status == keyframe_qemu::RunStatus::Shutdown)
    }

    /// Its VM, without breakpoints.
    pub(super) fn release(mut self) -> Result<Standing, Failure> {
        self.ask(b"?")?;
        Ok(self.standing)
    }
}
