//! Going to an instruction of a recording.
//!
//! ```text
//!   checkpoints   ├───────────┼──────────────┼─────────
//!   asked for                                     ▲
//!   way                                      └────┘  a replay from the nearest checkpoint before it
//! ```
//!
//! A replay never stands at its checkpoint, so that even one that lies at the instruction itself is
//! reached from the one before.

use super::{Reached, Replay, Source, With};
use crate::error::{Error, ReplayError, Result};
use keyframe_gdb::GdbConnection;
use keyframe_qemu::restore::Until;
use keyframe_replay::interval::RecordedCheckpoint;
use std::ffi::OsString;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;

/// How to get to an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// The checkpoint to begin with.
    pub begin: RecordedCheckpoint,
    /// Where its replay stands then.
    pub icount: u64,
    /// The same, for QEMU.
    pub until: Until,
}

impl Way {
    /// To `icount`, or, where that is the recording's beginning, to the first instruction that a
    /// replay can stand before. `places` are the recording's checkpoints.
    pub fn to(source: &Source, places: &[RecordedCheckpoint], icount: u64) -> Result<Self> {
        let last = source.last_standing()?;
        let icount = icount.max(places.first().map_or(0, |place| place.icount) + 1);
        let before = places.partition_point(|place| place.icount < icount);
        let begin = before.checked_sub(1).and_then(|at| places.get(at)).copied();
        let begin = begin.filter(|_| icount <= last);
        let begin = begin.ok_or(Error::NoInstruction { icount, last_stop: last })?;
        Ok(Self { begin, icount, until: source.until(icount)? })
    }
}

/// A VM that stands at an instruction.
pub struct Standing {
    /// Its QEMU.
    pub replay: Replay,
    stub: Option<tempfile::TempDir>,
}

/// The stub's socket, in a directory of its own.
const STUB: &str = "gdb.sock";

impl Standing {
    /// Goes `way`; `None` where that was interrupted. `extra` are words for QEMU; with a stub,
    /// debuggers can attach.
    pub fn at(
        source: &Source,
        way: Way,
        (extra, stub): (&[OsString], bool),
        interrupted: &AtomicBool,
        tell: &mut dyn FnMut(u64),
    ) -> Result<Option<Self>> {
        let mut extra = extra.to_vec();
        let folder =
            stub.then(|| tempfile::Builder::new().prefix("keyframe-gdb-").tempdir()).transpose();
        let folder = folder.map_err(|e| Error::io("make a directory for a socket", e))?;
        if let Some(folder) = &folder {
            let socket = folder.path().join(STUB);
            extra.extend([
                "-gdb".into(),
                format!("unix:{},server=on,wait=off", socket.display()).into(),
            ]);
        }
        let with = With { extra, lazy: true, ..With::default() };
        let mut replay = Replay::start(source, way.begin, way.until, &with)?;
        match replay.arrive(interrupted, tell)? {
            Reached::Interrupted => Ok(None),
            Reached::There | Reached::LogEnd => Ok(Some(Self { replay, stub: folder })),
        }
    }

    /// The instruction it stands before.
    pub fn icount(&mut self) -> Result<u64> {
        let qmp = self.replay.restored().vm().qmp();
        // Nobody else takes them.
        qmp.drain_events().and_then(|_| qmp.icount()).map_err(Error::from)
    }

    /// A connection to its stub.
    pub fn attach(&self) -> Result<GdbConnection<UnixStream>> {
        let Some(folder) = &self.stub else {
            return Err(ReplayError::NoStub.into());
        };
        let socket = folder.path().join(STUB);
        let stream = UnixStream::connect(&socket)
            .map_err(|e| Error::file("connect to QEMU's stub at", &socket, e))?;
        Ok(GdbConnection::new(stream, "QEMU's stub"))
    }
}
