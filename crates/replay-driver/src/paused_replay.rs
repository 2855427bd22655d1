//! Goes to an instruction of a recording, and stops there.
//!
//! ```text
//!   checkpoints   ├───────────┼──────────────┼─────────
//!   target                                        ▲
//!   route                                    └────┘  a replay from the nearest checkpoint before it
//! ```
//!
//! A replay never stops at its own checkpoint. So a target at which a checkpoint lies is reached
//! from the checkpoint before.

use crate::error::{Error, ReplayError, Result};
use crate::{Replay, ReplayOptions, ReplayableRecording, StopReason};
use keyframe_gdb::GdbConnection;
use keyframe_qemu::restore::Until;
use keyframe_replay::interval::RecordedCheckpoint;
use keyframe_scratch_directory::ScratchDirectory;
use std::ffi::OsString;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;

/// The route of a replay: where it begins, and where it stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplayRoute {
    /// The checkpoint to begin with.
    pub begin: RecordedCheckpoint,
    /// The instruction before which the replay stops.
    pub icount: u64,
    /// The stop, in the form that QEMU needs.
    pub until: Until,
}

impl ReplayRoute {
    /// Finds the route to instruction `icount`. For the recording's beginning it leads to the first
    /// instruction before which a replay can stop. `checkpoints` are the recording's.
    ///
    /// # Errors
    ///
    /// [`Error::NoInstruction`] if `icount` lies after the recording's end.
    pub fn to(
        recording: &ReplayableRecording,
        checkpoints: &[RecordedCheckpoint],
        icount: u64,
    ) -> Result<Self> {
        let last_stop = recording.last_stop()?;
        let icount = icount.max(checkpoints.first().map_or(0, |first| first.icount) + 1);
        let before = checkpoints.partition_point(|checkpoint| checkpoint.icount < icount);
        let begin = before.checked_sub(1).and_then(|at| checkpoints.get(at)).copied();
        let begin = begin.filter(|_| icount <= last_stop);
        let begin = begin.ok_or(Error::NoInstruction { icount, last_stop })?;
        Ok(Self { begin, icount, until: recording.until(icount)? })
    }
}

/// The options of a replay that is to stop.
#[derive(Clone, Copy, Debug, Default)]
pub struct PauseOptions<'a> {
    /// Words to append to QEMU's command line.
    pub extra: &'a [OsString],
    /// True if debuggers can connect.
    pub has_gdbstub: bool,
}

/// A replay that has stopped before an instruction.
pub struct PausedReplay {
    /// The QEMU that replays.
    pub replay: Replay,
    /// The directory of the gdbstub's socket.
    stub: Option<ScratchDirectory>,
}

/// The name of the gdbstub's socket.
const STUB_SOCKET: &str = "gdb.sock";

impl PausedReplay {
    /// Replays `route`, and calls `on_progress` now and then with the instruction that QEMU has
    /// reached. Returns `None` if `interrupted` became true. Errors: those of [`Replay::start`] and
    /// [`Replay::arrive`].
    pub fn at(
        recording: &ReplayableRecording,
        route: ReplayRoute,
        options: PauseOptions<'_>,
        interrupted: &AtomicBool,
        on_progress: &mut dyn FnMut(u64),
    ) -> Result<Option<Self>> {
        let mut extra = options.extra.to_vec();
        let folder = || ScratchDirectory::new("gdb");
        let stub = options.has_gdbstub.then(folder).transpose();
        let stub = stub.map_err(|e| Error::io("make a directory for a socket", e))?;
        if let Some(stub) = &stub {
            let socket = stub.path().join(STUB_SOCKET);
            extra.extend([
                "-gdb".into(),
                format!("unix:{},server=on,wait=off", socket.display()).into(),
            ]);
        }
        let options =
            ReplayOptions { extra, lazy: true, stops_anywhere: true, ..ReplayOptions::default() };
        let mut replay = Replay::start(recording, route.begin, route.until, &options)?;
        match replay.arrive(interrupted, on_progress)? {
            StopReason::Interrupted => Ok(None),
            StopReason::Target | StopReason::LogEnd => Ok(Some(Self { replay, stub })),
        }
    }

    /// Returns the instruction before which the replay has stopped. Error: QEMU does not answer.
    pub fn icount(&mut self) -> Result<u64> {
        let qmp = self.replay.restored().vm().qmp();
        // No other code takes these events.
        qmp.drain_events()?;
        Ok(qmp.icount()?)
    }

    /// Connects to the gdbstub of the replay's QEMU.
    ///
    /// # Errors
    ///
    /// [`ReplayError::NoStub`] if it was started without.
    pub fn connect(&self) -> Result<GdbConnection<UnixStream>> {
        let Some(folder) = &self.stub else {
            return Err(ReplayError::NoStub.into());
        };
        let socket = folder.path().join(STUB_SOCKET);
        let stream = UnixStream::connect(&socket)
            .map_err(|e| Error::file("connect to QEMU's stub at", &socket, e))?;
        Ok(GdbConnection::new(stream, "QEMU's stub"))
    }
}
