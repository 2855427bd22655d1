//! QEMU's stub of one VM, as a debugger left its predecessor.

use super::Told;
use crate::error::{Error, ReplayError, Result};
use crate::idling::Idling;
use crate::travel::Standing;
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
    pub(super) fn new(standing: Standing, told: &Told) -> Result<Self> {
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
    pub fn ask(&mut self, payload: &[u8]) -> Result<Vec<u8>> {
        self.link.send(payload)?;
        self.answer()
    }

    /// The answer to a packet that was sent.
    pub fn answer(&mut self) -> Result<Vec<u8>> {
        match self.link.receive(ANSWER_WAIT)? {
            Some(Received::Packet(answer)) => Ok(answer),
            Some(Received::Interrupt | Received::Closed) => Err(ReplayError::EndedInStub.into()),
            None => Err(ReplayError::StubSilent { seconds: ANSWER_WAIT.as_secs() }.into()),
        }
    }

    /// Sends a packet that is answered when the VM stops.
    pub fn send(&mut self, payload: &[u8]) -> Result<()> {
        self.link.send(payload).map_err(Error::from)
    }

    /// What has come.
    pub fn receive(&mut self, wait: Duration) -> Result<Option<Received>> {
        self.link.receive(wait).map_err(Error::from)
    }

    /// Waits for either side to say something, a moment at most; a VM that runs on and does nothing
    /// is woken first.
    pub(super) fn wait(
        &mut self,
        gdb: &GdbConnection<TcpStream>,
        idling: &mut Idling,
    ) -> Result<()> {
        let (is_idle, wait) = idling.look();
        if is_idle {
            // Whether it is still there is told by its stub.
            let _ = self.icount();
        }
        wait_for_either(gdb, &self.link, wait).map_err(Error::from)
    }

    /// Of the VM that is to run on.
    pub(super) fn idling(&mut self) -> Idling {
        Idling::new(self.standing.replay.restored().vm().pid())
    }

    /// Has a VM that runs stop.
    pub fn interrupt(&mut self) -> Result<()> {
        self.link.interrupt().map_err(Error::from)
    }

    /// The instruction it stands before.
    pub fn icount(&mut self) -> Result<u64> {
        self.standing.icount()
    }

    /// Whether the guest has shut down: its log ends there.
    pub fn is_shut_down(&mut self) -> Result<bool> {
        let status = self.standing.replay.restored().vm().qmp().status()?;
        Ok(status == keyframe_qemu::RunStatus::Shutdown)
    }

    /// Its VM, without breakpoints.
    pub(super) fn release(mut self) -> Result<Standing> {
        self.ask(b"?")?;
        Ok(self.standing)
    }
}
