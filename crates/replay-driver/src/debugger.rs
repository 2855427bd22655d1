//! GDB over a recording. It runs the VM forward in the paused QEMU, and backward in another QEMU.
//!
//! ```text
//!   gdb ◀──▶ Debugger ◀──▶ gdbstub of the paused QEMU ──▶ forward: packets are passed on
//!                 └── backward: another QEMU, replayed to where gdb would have come (reverse.rs)
//! ```
//!
//! QEMU itself goes back by its own snapshots, which only qcow2 images have. Checkpoints go back
//! with any disk, and without disks. The gdbstub is QEMU's, with all that it knows of the
//! processor; only the few packets that concern time are interpreted here.
//!
//! Invariant: a debugger cannot change what is replayed. Writes are refused; breakpoints are
//! QEMU's, not the guest's.

mod careful;
mod deliveries;
mod forward;
mod reverse;
mod session;
mod stub;

use crate::error::{Error, ReplayError, Result};
use crate::event::{EventSink, ReplayEvent};
use crate::{PauseOptions, PausedReplay, ReplayRoute, ReplayableRecording};
use keyframe_gdb::{Breakpoint, GdbConnection, GdbMessage};
use keyframe_replay::interval::RecordedCheckpoint;
use session::{Session, SessionEnd};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use stub::Stub;

/// How often a wait is interrupted for other work.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// The signal of a stop that the user asked for: SIGINT.
const INTERRUPT: u8 = 2;
/// The signal of a stop at a breakpoint, watchpoint or step: SIGTRAP.
const TRAP: u8 = 5;

/// What all replays of a session share.
struct DebugContext<'a> {
    recording: &'a ReplayableRecording,
    checkpoints: Vec<RecordedCheckpoint>,
    /// Words for QEMU's command line.
    extra: Vec<OsString>,
    events: &'a dyn EventSink<ReplayEvent>,
    interrupted: &'a AtomicBool,
}

impl DebugContext<'_> {
    /// Replays `route` with a gdbstub. Returns `None` if the debugger or the user interrupts this.
    /// Errors: those of [`PausedReplay::at`].
    fn replay(
        &self,
        gdb: &mut GdbConnection<TcpStream>,
        route: ReplayRoute,
    ) -> Result<Option<PausedReplay>> {
        let options = PauseOptions { extra: &self.extra, has_gdbstub: true };
        let interrupted = AtomicBool::new(self.interrupted.load(Ordering::Relaxed));
        let mut look = |_| {
            let message = gdb.receive(Duration::ZERO);
            if !matches!(message, Ok(None | Some(GdbMessage::Packet(_))))
                || self.interrupted.load(Ordering::Relaxed)
            {
                interrupted.store(true, Ordering::Relaxed);
            }
        };
        PausedReplay::at(self.recording, route, options, &interrupted, &mut look)
    }
}

/// What a debugger has told a gdbstub, for the gdbstubs after it.
#[derive(Clone, Debug, Default)]
struct StubState {
    /// The packet with its capabilities.
    supported: Vec<u8>,
    /// The packet that selects its thread.
    thread: Vec<u8>,
    /// Its breakpoints and watchpoints.
    points: BTreeSet<Breakpoint>,
}

/// Serves debuggers that connect to a TCP port.
pub struct Debugger<'a> {
    listener: TcpListener,
    port: u16,
    recording: &'a ReplayableRecording,
    extra: Vec<OsString>,
    events: &'a dyn EventSink<ReplayEvent>,
}

impl<'a> Debugger<'a> {
    /// Listens at `port` of the loopback device; 0 selects a free port. `extra` are words for the
    /// command line of each QEMU.
    ///
    /// # Errors
    ///
    /// [`ReplayError::Listen`] if the port is taken.
    pub fn listen(
        recording: &'a ReplayableRecording,
        port: u16,
        extra: Vec<OsString>,
        events: &'a dyn EventSink<ReplayEvent>,
    ) -> Result<Self> {
        let failed = |source| ReplayError::Listen { port, source };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        Ok(Self { listener, port, recording, extra, events })
    }

    /// Returns the number of the port at which it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Serves one debugger after the other. Returns when one kills the VM, QEMU ends, or
    /// `interrupted` becomes true. Errors: the socket fails; the replay fails.
    pub fn serve(self, paused: PausedReplay, interrupted: &AtomicBool) -> Result<()> {
        let context = DebugContext {
            recording: self.recording,
            checkpoints: self.recording.checkpoints()?,
            extra: self.extra,
            events: self.events,
            interrupted,
        };
        let mut paused = paused;
        while !interrupted.load(Ordering::Relaxed) {
            if paused.replay.restored().try_wait()?.is_some() {
                return Ok(());
            }
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                    std::thread::sleep(LOOK_EVERY);
                    continue;
                }
                Err(e) => return Err(Error::io("wait for a debugger", e)),
            };
            let gdb = connection(stream)?;
            let stub = Stub::new(paused, &StubState::default())?;
            let mut session = Session::new(&context, gdb, stub);
            if session.run()? == SessionEnd::Killed {
                return Ok(());
            }
            paused = session.release()?;
        }
        Ok(())
    }
}

fn connection(stream: TcpStream) -> Result<GdbConnection<TcpStream>> {
    let prepared = stream.set_nonblocking(false).and_then(|()| stream.set_nodelay(true));
    prepared.map_err(|e| Error::io("prepare a debugger's connection", e))?;
    Ok(GdbConnection::new(stream, "the debugger"))
}
