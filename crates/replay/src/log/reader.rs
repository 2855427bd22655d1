//! Reads a log event by event.

use super::{HEADER_BYTES, LogVersion};
use crate::{Error, Result};
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// The event kind of an interrupt.
const INTERRUPT: u8 = 1;
/// The event kind of an exception.
const EXCEPTION: u8 = 2;
/// The event kind of a disk's answer.
const DISK_ANSWER: u8 = 8;
/// The event kind of a reading of the warp clock.
pub(crate) const WARP_CLOCK: u8 = 29;
/// The longest packet or input that is accepted, in bytes.
const DATA_BYTES_MAX: u64 = 16 << 20;
/// The length of a sample of audio input, left and right, in bytes.
const SAMPLE_BYTES: u64 = 16;

/// An event of the log, with the payload that Keyframe needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogEvent {
    /// This many instructions ran.
    Instructions(u32),
    /// The processor took an interrupt or an exception.
    Delivery,
    /// A device's bottom half ran; it had been scheduled at this instruction.
    BottomHalf(u64),
    /// A disk answered a request.
    DiskAnswer,
    /// The machine was asked to shut down or reset, for this cause (QEMU's `ShutdownCause`).
    Shutdown(u8),
    /// The console backend took this many bytes of output; negative if it failed.
    ConsoleOutput(i32),
    /// A reading of the host's clock, in nanoseconds.
    HostClock(i64),
    /// A reading of the clock that drives the jumps of a halted guest's clock, in nanoseconds.
    WarpClock(i64),
    /// One of QEMU's own synchronization points, by its number (QEMU's `ReplayCheckpoint`).
    Checkpoint(u8),
    /// QEMU ended the log.
    End,
    /// Any other event, by its kind.
    Other(u8),
}

/// An event with its position in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PositionedEvent {
    /// The event.
    pub event: LogEvent,
    /// The byte offset of the event in the file.
    pub offset: u64,
    /// The number of instructions that ran before the event; an [`LogEvent::Instructions`] counts
    /// its own.
    pub icount: u64,
}

/// Reads a log event by event.
///
/// The log may still be growing: an incomplete event at its end is not returned, and a later
/// reader can continue at [`LogReader::offset`].
pub struct LogReader<R> {
    input: BufReader<R>,
    path: PathBuf,
    version: LogVersion,
    offset: u64,
    icount: u64,
    has_ended: bool,
}

/// The reason why an event could not be read.
enum EventError {
    /// The file ends within the event.
    Incomplete,
    Io(io::Error),
    Unknown(String),
}

impl<R: Read> LogReader<R> {
    /// Creates a reader of a log of `version` that begins with the first event. `input` starts
    /// directly after the header; `path` appears in error messages.
    pub fn new(input: R, path: &Path, version: LogVersion) -> Self {
        Self::resume(input, path, version, HEADER_BYTES, 0)
    }

    /// Creates a reader of a log of `version` that begins at byte `offset`, before which `icount`
    /// instructions ran. `input` starts there; `path` appears in error messages.
    pub fn resume(input: R, path: &Path, version: LogVersion, offset: u64, icount: u64) -> Self {
        Self {
            input: BufReader::with_capacity(1 << 16, input),
            path: path.into(),
            version,
            offset,
            icount,
            has_ended: false,
        }
    }

    /// Returns the byte offset of the end of the last event that was returned.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the number of instructions that ran up to [`LogReader::offset`].
    pub fn icount(&self) -> u64 {
        self.icount
    }

    /// Returns the next event, or `None` at the end of the file, even if that lies within an event.
    ///
    /// Errors: [`Error::Io`]; [`Error::Damaged`] for bytes that QEMU does not write.
    pub fn next_event(&mut self) -> Result<Option<PositionedEvent>> {
        if self.has_ended {
            return Ok(None);
        }
        let offset = self.offset;
        let mut len = 0;
        match self.read_event(&mut len) {
            Ok(event) => {
                if let LogEvent::Instructions(count) = event {
                    self.icount = self.icount.saturating_add(u64::from(count));
                }
                self.has_ended = event == LogEvent::End;
                self.offset += len;
                Ok(Some(PositionedEvent { event, offset, icount: self.icount }))
            }
            Err(EventError::Incomplete) => {
                self.has_ended = true;
                Ok(None)
            }
            Err(EventError::Io(source)) => {
                Err(Error::Io { operation: "read", path: self.path.clone(), source })
            }
            Err(EventError::Unknown(problem)) => {
                Err(Error::Damaged { path: self.path.clone(), offset, problem })
            }
        }
    }

    fn read_event(&mut self, len: &mut u64) -> std::result::Result<LogEvent, EventError> {
        let kind = self.read_bytes::<1>(len)?[0];
        Ok(match kind {
            0 => LogEvent::Instructions(u32::from_be_bytes(self.read_bytes(len)?)),
            INTERRUPT | EXCEPTION => LogEvent::Delivery,
            3 => LogEvent::BottomHalf(u64::from_be_bytes(self.read_bytes(len)?)),
            DISK_ANSWER => {
                self.read_bytes::<8>(len)?;
                LogEvent::DiskAnswer
            }
            10..=21 => LogEvent::Shutdown(kind - 10),
            22 => {
                let result = i32::from_be_bytes(self.read_bytes(len)?);
                self.read_bytes::<4>(len)?;
                LogEvent::ConsoleOutput(result)
            }
            28 => LogEvent::HostClock(i64::from_be_bytes(self.read_bytes(len)?)),
            WARP_CLOCK => LogEvent::WarpClock(i64::from_be_bytes(self.read_bytes(len)?)),
            30..=38 => LogEvent::Checkpoint(kind - 30),
            39 => LogEvent::End,
            _ => {
                self.skip_payload(kind, len)?;
                LogEvent::Other(kind)
            }
        })
    }

    /// Skips the payload of an event of a kind that [`LogEvent`] does not describe.
    fn skip_payload(&mut self, kind: u8, len: &mut u64) -> std::result::Result<(), EventError> {
        match kind {
            // A one-shot bottom half: its number.
            4 => self.read_bytes::<8>(len).map(drop),
            5 => self.skip_input_event(len),
            // The end of a batch of input events.
            6 => Ok(()),
            // Console input, a network packet.
            7 => self.read_bytes::<1>(len).and_then(|_| self.skip_data(len)),
            9 => self.read_bytes::<5>(len).and_then(|_| self.skip_data(len)),
            23 => self.skip_data(len),
            24 | 25 => self.read_bytes::<4>(len).map(drop),
            26 if self.version < LogVersion::QEMU_11_0 => Err(EventError::Unknown(
                "recorded audio input, whose length the log does not contain".into(),
            )),
            26 => self.skip_samples(len),
            27 => self.read_bytes::<4>(len).and_then(|_| self.skip_data(len)),
            _ => Err(EventError::Unknown(format!("an event of unknown kind {kind}"))),
        }
    }

    /// Skips a key press, a button press or a pointer movement.
    fn skip_input_event(&mut self, len: &mut u64) -> std::result::Result<(), EventError> {
        match u32::from_be_bytes(self.read_bytes(len)?) {
            // A key, and whether it is down.
            0 if self.version >= LogVersion::QEMU_11 => drop(self.read_bytes::<5>(len)?),
            // The same, the key by number or by name.
            0 => match u32::from_be_bytes(self.read_bytes(len)?) {
                0 => drop(self.read_bytes::<9>(len)?),
                _ => drop(self.read_bytes::<5>(len)?),
            },
            // A button.
            1 => drop(self.read_bytes::<5>(len)?),
            // A pointer axis and its value.
            2 | 3 => drop(self.read_bytes::<12>(len)?),
            other => {
                let problem = format!("an input event of unknown kind {other}");
                return Err(EventError::Unknown(problem));
            }
        }
        Ok(())
    }

    /// Skips the number of samples of audio input (8 bytes), and the samples.
    fn skip_samples(&mut self, len: &mut u64) -> std::result::Result<(), EventError> {
        let samples = u64::from_be_bytes(self.read_bytes(len)?);
        self.skip(samples.saturating_mul(SAMPLE_BYTES), len)
    }

    /// Skips a 4-byte length and that many bytes.
    fn skip_data(&mut self, len: &mut u64) -> std::result::Result<(), EventError> {
        let data_len = u32::from_be_bytes(self.read_bytes(len)?);
        self.skip(data_len.into(), len)
    }

    /// Skips `data_len` bytes.
    fn skip(&mut self, data_len: u64, len: &mut u64) -> std::result::Result<(), EventError> {
        if data_len > DATA_BYTES_MAX {
            return Err(EventError::Unknown(format!("an event of {data_len} bytes")));
        }
        let mut left = data_len;
        while left > 0 {
            let available = self.input.fill_buf().map_err(EventError::Io)?.len() as u64;
            if available == 0 {
                return Err(EventError::Incomplete);
            }
            let step = available.min(left);
            self.input.consume(step as usize);
            left -= step;
        }
        *len += data_len;
        Ok(())
    }

    fn read_bytes<const N: usize>(
        &mut self,
        len: &mut u64,
    ) -> std::result::Result<[u8; N], EventError> {
        let mut bytes = [0; N];
        self.input.read_exact(&mut bytes).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => EventError::Incomplete,
            _ => EventError::Io(e),
        })?;
        *len += N as u64;
        Ok(bytes)
    }
}
