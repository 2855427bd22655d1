//! What the guest wrote to its console, by instruction.
//!
//! ```text
//!   log      ... 1000 instructions | output: 1 byte | 40 instructions | output: 1 byte ...
//!   console  "H" "i"                ─▶  H at 1000, i at 1040
//! ```
//!
//! The log says when bytes were taken and how many, not which; the console's file has them in
//! order. It says neither of which console they are: with more than one that is recorded nothing
//! can be told.

use crate::log::{Event, Events};
use crate::{Error, Result};
use std::io::Read;

/// A line of the console.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Instructions before its first byte.
    pub first: u64,
    /// Before its last one.
    pub last: u64,
    /// Without its end, as text.
    pub text: String,
}

/// A console's lines.
#[derive(Clone, Debug, Default)]
pub struct Console {
    /// In order.
    pub lines: Vec<Written>,
    /// Bytes of the console that the log knows nothing of.
    pub unplaced_bytes: u64,
}

/// A line that never ends is given in parts of this size.
const LINE_BYTES_MAX: usize = 4096;

impl Console {
    /// The lines of `output`, which the log of `events` tells the times of.
    pub fn new<R: Read>(mut events: Events<R>, output: &[u8]) -> Result<Self> {
        let mut console = Self::default();
        let mut left = output;
        let mut line: Option<(u64, u64, Vec<u8>)> = None;
        while let Some(placed) = events.next_event()? {
            let Event::ConsoleOutput(count) = placed.event else { continue };
            let count = usize::try_from(count).unwrap_or(0).min(left.len());
            let (now, rest) = left.split_at(count);
            left = rest;
            for byte in now {
                let (_, last, text) =
                    line.get_or_insert_with(|| (placed.icount, placed.icount, Vec::new()));
                *last = placed.icount;
                match byte {
                    b'\n' => console.end(&mut line),
                    _ => text.push(*byte),
                }
                if line.as_ref().is_some_and(|(.., text)| text.len() >= LINE_BYTES_MAX) {
                    console.end(&mut line);
                }
            }
        }
        console.end(&mut line);
        console.unplaced_bytes = left.len() as u64;
        Ok(console)
    }

    fn end(&mut self, line: &mut Option<(u64, u64, Vec<u8>)>) {
        if let Some((first, last, text)) = line.take() {
            let text = String::from_utf8_lossy(&text).trim_end_matches('\r').to_owned();
            self.lines.push(Written { first, last, text });
        }
    }

    /// The first line that holds `marker`, and the instruction at which it was complete.
    pub fn find(&self, marker: &str) -> Option<&Written> {
        self.lines.iter().find(|line| line.text.contains(marker))
    }
}

/// The console's file, at most `bytes_max` of it.
pub fn read_output(path: &std::path::Path, bytes_max: u64) -> Result<Vec<u8>> {
    let file = std::fs::File::open(path).map_err(Error::io("open", path))?;
    let mut output = Vec::new();
    file.take(bytes_max).read_to_end(&mut output).map_err(Error::io("read", path))?;
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::tests::bytes;
    use std::path::Path;

    #[test]
    fn lines_are_where_their_bytes_were_taken() {
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
        let console = Console::new(Events::new(&log[12..], Path::new("log")), b"a\r\nbc").unwrap();
        let line = |first, last, text: &str| Written { first, last, text: text.into() };
        assert_eq!(console.lines, [line(10, 15, "a"), line(20, 20, "b")]);
        assert_eq!(console.unplaced_bytes, 1);
        assert_eq!(console.find("b").unwrap().first, 20);
    }
}
