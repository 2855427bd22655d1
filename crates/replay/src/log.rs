//! QEMU's record/replay log, as QEMU 7.2 to 11.1 write it.
//!
//! ```text
//!   header   12 bytes: version (big-endian, 4) | 8 unused; all zero until QEMU ends in good order
//!              e0200c   QEMU 7.2 to 10.0
//!              e0200d   QEMU 11.0, by its source (not tried): audio input (26) tells its length
//!              e0200e   QEMU 11.1: a key (in 5) is Linux's number of it, without a kind before it
//!   events   kind (1) | payload
//!     0        instructions: count (4, big-endian)
//!     1, 2     interrupt, exception
//!     3..9     asynchronous: bottom half, one-shot bottom half, input, input end, console input,
//!              disk answer, network packet
//!     10..21   shutdown or reset, by cause
//!     22       console output: result, offset (4 + 4)
//!     23..26   more console events, audio
//!     27       random bytes: result, length (4 + 4), bytes
//!     28, 29   clock reading: host clock, warp clock (8)
//!     30..38   QEMU's own synchronization points ("checkpoints" in QEMU's source)
//!     39       end
//! ```
//!
//! The file is untrusted: [`LogReader`] bounds every length before it reads.

mod index;
mod reader;
#[cfg(test)]
pub(crate) mod tests;

pub use index::LogIndex;
pub(crate) use reader::WARP_CLOCK;
pub use reader::{LogEvent, LogReader, PositionedEvent};

use crate::{Error, Result};
use index::ShutdownRequest;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The version of a log: the first four bytes of a complete log, as a big-endian number.
///
/// Each QEMU writes one version, and replays no other. A log that is still written has none yet, so
/// the version is asked of the QEMU that writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LogVersion(pub u32);

impl LogVersion {
    /// The version of QEMU 7.2 to 10.0.
    pub const QEMU_10: Self = Self(0x00e0_200c);
    /// The version of QEMU 11.0.
    pub const QEMU_11_0: Self = Self(0x00e0_200d);
    /// The version of QEMU 11.1.
    pub const QEMU_11: Self = Self(0x00e0_200e);
    /// The versions that this crate reads, rising.
    pub const ALL: [Self; 3] = [Self::QEMU_10, Self::QEMU_11_0, Self::QEMU_11];

    /// Returns true if this crate reads logs of this version.
    pub fn is_known(self) -> bool {
        Self::ALL.contains(&self)
    }
}

impl Default for LogVersion {
    fn default() -> Self {
        Self::QEMU_10
    }
}

impl fmt::Display for LogVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// The number of bytes of a log before its first event.
pub const HEADER_BYTES: u64 = 12;

/// The totals of a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogSummary {
    /// The number of instructions up to the shutdown request, or else up to the log's end.
    pub instructions: u64,
    /// The number of events.
    pub events: u64,
    /// The number of bytes up to the end of the last whole event.
    pub bytes: u64,
    /// True if the log has QEMU's end event.
    pub is_complete: bool,
}

/// Reads the log at `path` from beginning to end and returns its totals.
///
/// Errors: [`Error::Io`], [`Error::Damaged`].
pub fn summarize(path: &Path) -> Result<LogSummary> {
    summarize_events(open(path)?)
}

fn summarize_events(mut reader: LogReader<File>) -> Result<LogSummary> {
    let (mut summary, mut shutdown) = (LogSummary::default(), ShutdownRequest::default());
    while let Some(event) = reader.next_event()? {
        summary.events += 1;
        summary.is_complete |= event.event == LogEvent::End;
        shutdown.add(event);
    }
    (summary.instructions, summary.bytes) = (shutdown.end(reader.icount()), reader.offset());
    Ok(summary)
}

/// Opens the log at `path`, which has its header, and returns a reader that stands at its first
/// event.
///
/// Errors: [`Error::Io`], also for a file that is shorter than the header; [`Error::Damaged`] for a
/// log of an unknown version.
pub fn open(path: &Path) -> Result<LogReader<File>> {
    let (file, version) = open_after_header(path)?;
    if !version.is_known() {
        let problem = format!("it is no log of a version that this Keyframe reads: {version}");
        return Err(Error::Damaged { path: path.into(), offset: 0, problem });
    }
    Ok(LogReader::new(file, path, version))
}

/// Opens the log at `path`. Returns it, at its first event, with the version in its header.
fn open_after_header(path: &Path) -> Result<(File, LogVersion)> {
    let mut file = File::open(path).map_err(Error::io("open", path))?;
    let mut header = [0; HEADER_BYTES as usize];
    file.read_exact(&mut header).map_err(Error::io("read the header of", path))?;
    let [a, b, c, d, ..] = header;
    Ok((file, LogVersion(u32::from_be_bytes([a, b, c, d]))))
}

/// Makes the log of a killed QEMU readable: writes the missing header and cuts an incomplete last
/// event off. Returns true if the header was missing. `version` is that of the QEMU.
///
/// Errors: [`Error::Io`]; [`Error::Damaged`] for a file that is not a log of this version.
pub fn repair(path: &Path, version: LogVersion) -> Result<bool> {
    let (events, _) = open_after_header(path)?;
    let summary = summarize_events(LogReader::new(events, path, version))?;
    let file =
        File::options().read(true).write(true).open(path).map_err(Error::io("open", path))?;
    let was_missing = write_missing_header(&file, path, version)?;
    let len = file.metadata().map_err(Error::io("look at", path))?.len();
    if len > summary.bytes && !summary.is_complete {
        file.set_len(summary.bytes).map_err(Error::io("truncate", path))?;
    }
    Ok(was_missing)
}

/// Writes the header into a log that has none: QEMU writes it only when it ends in good order, and
/// refuses to replay a log without it. Returns whether the header was missing.
///
/// Errors: [`Error::Io`]; [`Error::Damaged`] if the file has another header.
pub(crate) fn write_missing_header(file: &File, path: &Path, version: LogVersion) -> Result<bool> {
    let mut header = [0; 4];
    file.read_exact_at(&mut header, 0).map_err(Error::io("read the header of", path))?;
    let found = LogVersion(u32::from_be_bytes(header));
    if found == version {
        return Ok(false);
    }
    if found.0 != 0 {
        let problem =
            format!("its version is {found}, and its QEMU writes logs of version {version}");
        return Err(Error::Damaged { path: path.into(), offset: 0, problem });
    }
    file.write_all_at(&version.0.to_be_bytes(), 0)
        .map_err(Error::io("write the header of", path))?;
    Ok(true)
}
