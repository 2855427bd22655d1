//! A terminal that is connected to a console of a VM.
//!
//! ```text
//!   this terminal, raw ─┬─ Ctrl-] ─▶ end
//!                       └──────────▶ serial.sock ─▶ guest ─▶ serial.sock ─▶ this terminal
//! ```

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use std::io::{self, IsTerminal, Read, Stdin, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Ctrl-].
const ESCAPE: u8 = 0x1d;
/// The time between two looks whether a signal has come.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How long the guest must be silent after the end of an input that is no terminal.
const SILENCE: Duration = Duration::from_secs(1);
const CHUNK_BYTES: usize = 4096;

/// Passes `input` to `connection`, and what comes from there to standard output, until `connection` or
/// `interrupted` ends it. If the input is a terminal, Ctrl-] ends it too; otherwise it ends when the
/// input has ended and the guest has been silent for a second. Error: the connection, the input or
/// the output fails.
pub fn forward(
    mut connection: &UnixStream,
    input: &Stdin,
    is_terminal: bool,
    interrupted: &AtomicBool,
) -> io::Result<()> {
    let (mut output, mut chunk) = (io::stdout().lock(), [0; CHUNK_BYTES]);
    let (mut has_input, mut last) = (true, Instant::now());
    while !interrupted.load(Ordering::Relaxed) {
        if !has_input && last.elapsed() > SILENCE {
            break;
        }
        let mut fds = vec![PollFd::new(&connection, PollFlags::IN)];
        if has_input {
            fds.push(PollFd::new(input, PollFlags::IN));
        }
        let limit = Timespec::try_from(LOOK_EVERY).map_err(io::Error::other)?;
        match poll(&mut fds, Some(&limit)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let is_ready = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
        let (answers, types) = (is_ready(0), is_ready(1));
        drop(fds);
        if answers {
            let count = connection.read(&mut chunk)?;
            if count == 0 {
                break;
            }
            output.write_all(chunk.get(..count).unwrap_or_default())?;
            output.flush()?;
            last = Instant::now();
        }
        if types {
            // Unbuffered: what a buffer holds is not seen by `poll`.
            let count = rustix::io::read(input, &mut chunk)?;
            let typed = chunk.get(..count).unwrap_or_default();
            let end = typed.iter().position(|byte| is_terminal && *byte == ESCAPE);
            connection.write_all(typed.get(..end.unwrap_or(count)).unwrap_or_default())?;
            if end.is_some() {
                break;
            }
            has_input = count > 0;
            last = Instant::now();
        }
    }
    Ok(())
}

/// A terminal that passes each key on at once. Dropping this makes it what it was.
pub struct RawTerminal<'a> {
    terminal: &'a Stdin,
    before: Termios,
}

impl<'a> RawTerminal<'a> {
    /// Makes the terminal `input` raw. Returns `None` if `input` is no terminal. Error: the terminal
    /// refuses.
    pub fn of(input: &'a Stdin) -> Result<Option<Self>, Errno> {
        if !input.is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(input)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(input, OptionalActions::Flush, &raw)?;
        Ok(Some(Self { terminal: input, before }))
    }
}

impl Drop for RawTerminal<'_> {
    fn drop(&mut self) {
        let _ = tcsetattr(self.terminal, OptionalActions::Flush, &self.before);
    }
}
