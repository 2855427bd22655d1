//! Passes QEMU's standard output through, or to standard error if standard output is for JSON, and
//! watches it for a text.
//!
//! ```text
//!   text             QEMU ───────────────────────────▶ our standard output
//!   JSON             QEMU ───────────────────────────▶ our standard error
//!   --when TEXT      QEMU ──pipe──▶ thread searches ─▶ one of these
//! ```
//!
//! QEMU inherits the standard output of this process, which is therefore replaced during the
//! launch.

use crate::error::{Error, Result};
use rustix::pipe::{PipeFlags, pipe_with};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// The number of bytes of a line that are searched, from its beginning.
const LINE_BYTES_MAX: usize = 16 << 10;
/// The longest wait for the last output of a QEMU that has ended.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The standard output of a QEMU, passed on and searched for a text.
pub struct WatchedOutput {
    shown: Arc<AtomicBool>,
    ended: Option<Receiver<()>>,
}

impl WatchedOutput {
    /// Returns true if QEMU has written the text. Always false if no text is searched for.
    pub fn has_shown(&self) -> bool {
        self.shown.load(Ordering::Relaxed)
    }

    /// Waits until the last output of a QEMU that has ended is passed on, at most one second.
    pub fn finish(self) {
        if let Some(ended) = self.ended {
            let _ = ended.recv_timeout(LAST_WORDS);
        }
    }
}

/// Runs `launch`, which starts a QEMU, and chooses where the standard output of that QEMU goes. If
/// `when` is given, a thread passes the output on and watches for this text in it;
/// [`WatchedOutput`] tells whether it came. If `to_stderr` is true, the output goes to the standard
/// error of this process. Returns the result of `launch` and the watched output. Errors: the output
/// cannot be redirected; an error of `launch`.
pub fn around<T>(
    when: Option<&str>,
    to_stderr: bool,
    launch: impl FnOnce() -> Result<T>,
) -> Result<(T, WatchedOutput)> {
    let shown = Arc::new(AtomicBool::new(false));
    if when.is_none() && !to_stderr {
        return Ok((launch()?, WatchedOutput { shown, ended: None }));
    }
    let failed = |e: std::io::Error| Error::io("redirect QEMU's standard output", e);
    let ours =
        rustix::io::fcntl_dupfd_cloexec(std::io::stdout(), 3).map_err(|e| failed(e.into()))?;
    let (theirs, pipe) = match when {
        Some(_) => {
            let (read, write) = pipe_with(PipeFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
            (write, Some(read))
        }
        None => (
            rustix::io::fcntl_dupfd_cloexec(std::io::stderr(), 3).map_err(|e| failed(e.into()))?,
            None,
        ),
    };
    rustix::stdio::dup2_stdout(&theirs).map_err(|e| failed(e.into()))?;
    let launched = launch();
    let restored = rustix::stdio::dup2_stdout(&ours).map_err(|e| failed(e.into()));
    drop(theirs);
    let launched = launched?;
    restored?;
    let ended = match (pipe, when) {
        (Some(pipe), Some(text)) => Some(watch(pipe, text, to_stderr, &shown)),
        _ => None,
    };
    Ok((launched, WatchedOutput { shown, ended }))
}

/// Passes the output on that arrives by `pipe`, until all of its writers have closed it.
fn watch(pipe: OwnedFd, text: &str, to_stderr: bool, shown: &Arc<AtomicBool>) -> Receiver<()> {
    let (done, ended) = channel();
    let (text, shown) = (text.as_bytes().to_vec(), Arc::clone(shown));
    std::thread::spawn(move || {
        let mut pipe = std::fs::File::from(pipe);
        let mut look = Look { text, line: Vec::new() };
        let mut bytes = [0; 4096];
        while let Ok(len @ 1..) = pipe.read(&mut bytes) {
            // The output's reader may be gone: an error must not stop the guest.
            if to_stderr {
                let _ = std::io::stderr().write_all(&bytes[..len]);
            } else {
                let mut out = std::io::stdout().lock();
                let _ = out.write_all(&bytes[..len]).and_then(|()| out.flush());
            }
            if look.sees(&bytes[..len]) {
                shown.store(true, Ordering::Relaxed);
            }
        }
        let _ = done.send(());
    });
    ended
}

/// Searches for a text in lines that arrive in pieces. It searches each piece at once, because a
/// prompt has no line end.
struct Look {
    text: Vec<u8>,
    line: Vec<u8>,
}

impl Look {
    fn sees(&mut self, bytes: &[u8]) -> bool {
        let mut seen = false;
        for piece in bytes.split_inclusive(|b| *b == b'\n') {
            self.line.extend(piece);
            seen |= self.line.windows(self.text.len().max(1)).any(|w| w == self.text);
            if piece.ends_with(b"\n") || self.line.len() > LINE_BYTES_MAX {
                self.line.clear();
            }
        }
        seen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_found_across_pieces_and_without_a_line_end() {
        let mut look = Look { text: b"login:".to_vec(), line: Vec::new() };
        assert!(!look.sees(b"booting\r\nlog"));
        assert!(!look.sees(b"in\n:"));
        assert!(!look.sees(b"\nthe log"));
        assert!(look.sees(b"in: "));
        look.line.clear();
        assert!(!look.sees(&vec![b'x'; LINE_BYTES_MAX * 2]));
        assert!(look.line.len() <= LINE_BYTES_MAX);
    }
}
