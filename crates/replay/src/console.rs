//! The lines that the guest wrote to its serial console, each with its instructions.
//!
//! ```text
//!   log      ... 1000 instructions | output: 1 byte | 40 instructions | output: 1 byte ...
//!   console  "H" "i"                ─▶  H at 1000, i at 1040
//! ```
//!
//! The log says when the console took how many bytes; the console's file has the bytes in order.
//! The log does not say which console took them, so a recording with two recorded consoles has no
//! usable lines.

use crate::log::{LogEvent, LogReader};
use crate::{Error, Result};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// A longer line is split into lines of this many bytes.
const LINE_BYTES_MAX: usize = 4096;

/// A line of a recorded console.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConsoleLine {
    /// The number of instructions that ran before its first byte was written.
    pub first: u64,
    /// The number of instructions that ran before its last byte was written.
    pub last: u64,
    /// The line without its end, invalid UTF-8 replaced.
    pub text: String,
}

/// The output of a recorded console.
#[derive(Clone, Debug, Default)]
pub struct Console {
    /// The lines in order.
    pub lines: Vec<ConsoleLine>,
    /// The number of trailing bytes of the console's file that the log has no events for.
    pub unplaced_bytes: u64,
}

/// A line that is not complete yet.
struct PartialLine {
    first: u64,
    last: u64,
    bytes: Vec<u8>,
}

impl Console {
    /// Splits `output`, the contents of the console's file, into lines and places them by the
    /// events of `log`.
    ///
    /// Errors: those of [`LogReader::next_event`].
    pub fn new<R: Read>(mut log: LogReader<R>, output: &[u8]) -> Result<Self> {
        let mut console = Self::default();
        let mut left = output;
        let mut line: Option<PartialLine> = None;
        while let Some(event) = log.next_event()? {
            let LogEvent::ConsoleOutput(count) = event.event else { continue };
            let count = usize::try_from(count).unwrap_or(0).min(left.len());
            let (taken, rest) = left.split_at(count);
            left = rest;
            let icount = event.icount;
            for byte in taken {
                let current = line.get_or_insert_with(|| PartialLine {
                    first: icount,
                    last: icount,
                    bytes: Vec::new(),
                });
                current.last = icount;
                if *byte != b'\n' {
                    current.bytes.push(*byte);
                }
                if *byte == b'\n' || current.bytes.len() >= LINE_BYTES_MAX {
                    console.push_line(&mut line);
                }
            }
        }
        console.push_line(&mut line);
        console.unplaced_bytes = left.len() as u64;
        Ok(console)
    }

    fn push_line(&mut self, line: &mut Option<PartialLine>) {
        if let Some(PartialLine { first, last, bytes }) = line.take() {
            let text = String::from_utf8_lossy(&bytes).trim_end_matches('\r').to_owned();
            self.lines.push(ConsoleLine { first, last, text });
        }
    }

    /// Returns the first line that contains `marker`; `None` if no line does.
    pub fn find(&self, marker: &str) -> Option<&ConsoleLine> {
        self.lines.iter().find(|line| line.text.contains(marker))
    }
}

/// Reads the first `bytes_max` bytes of the console's file.
///
/// Error: [`Error::Io`].
pub fn read_console_output(path: &Path, bytes_max: u64) -> Result<Vec<u8>> {
    let file = File::open(path).map_err(Error::io("open", path))?;
    let mut output = Vec::new();
    file.take(bytes_max).read_to_end(&mut output).map_err(Error::io("read", path))?;
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::tests::bytes;

    #[test]
    fn lines_are_placed_by_the_instructions_of_their_bytes() {
        let run = |n: u8| vec![0, 0, 0, 0, n];
        let taken = |n: u8| vec![22, 0, 0, 0, n, 0, 0, 0, 0];
        let log = bytes(&[
            &run(10),
            &taken(1),
            &run(5),
            &taken(2),
            &run(5),
            &taken(1),
            &[22, 255, 255, 255, 255, 0, 0, 0, 0],
        ]);
        let console = Console::new(
            LogReader::new(&log[12..], Path::new("log"), crate::log::LogVersion::QEMU_10),
            b"a\r\nbc",
        )
        .unwrap();
        let line = |first, last, text: &str| ConsoleLine { first, last, text: text.into() };
        assert_eq!(console.lines, [line(10, 15, "a"), line(20, 20, "b")]);
        assert_eq!(console.unplaced_bytes, 1);
        assert_eq!(console.find("b").unwrap().first, 20);
    }
}
