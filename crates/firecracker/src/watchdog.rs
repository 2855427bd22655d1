//! The watchdog of Firecracker's pauses: how it reaches Firecracker.
//!
//! It has a connection of its own, which it opens before the first pause. So it resumes the VM also
//! if the socket's file is removed in a pause.

use crate::api::{Api, InstanceState};
use crate::{Error, Result};
use keyframe_kernel::Process;
use keyframe_pause_watchdog::{LOOK_EVERY, Rescuer};
use keyframe_vmm::Resumer;
use rustix::event::{PollFd, PollFlags};
use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Instant;

/// The first word of a watchdog's command line that watches a Firecracker.
pub const WORD: &str = "firecracker";

/// Returns the instructions with which another process resumes the VM of the Firecracker `pid` with
/// the API at `socket`.
pub fn resumer(pid: u32, socket: &Path) -> Resumer {
    let words = vec![WORD.into(), pid.to_string().into(), socket.into()];
    Resumer { words, descriptors: Vec::new() }
}

/// Runs the watchdog's process by the words of [`resumer`], as [`keyframe_pause_watchdog::run`]
/// does. Errors: the words have another form; those of that function.
pub fn run(words: &[OsString], commands: impl Read + AsFd, reports: impl Write) -> Result<()> {
    let bad = || keyframe_pause_watchdog::Error::Problem {
        problem: format!("{words:?} says nothing to watch"),
    };
    let [word, pid, socket] = words else { return Err(bad().into()) };
    let pid = pid.to_str().and_then(|pid| pid.parse().ok()).filter(|_| word == WORD);
    let process = Process::open(pid.ok_or_else(bad)?)?;
    let api = Api::connect(Path::new(socket))?;
    keyframe_pause_watchdog::run(FirecrackerRescuer { process, api }, commands, reports)
}

/// How a watchdog's process rescues a VM of Firecracker.
struct FirecrackerRescuer {
    process: Process,
    api: Api,
}

impl FirecrackerRescuer {
    /// The error, or that of a Firecracker that has ended meanwhile. One whose API does not answer
    /// may come to answer.
    fn of<T>(&self, answer: Result<T>) -> Result<T> {
        match answer {
            Err(Error::Gone { socket, operation, .. }) if self.process.is_alive() => {
                Err(Error::Timeout { socket, operation, waited_ms: LOOK_EVERY.as_millis() as u64 })
            }
            other => other,
        }
    }
}

impl Rescuer for FirecrackerRescuer {
    type Error = Error;

    fn is_gone(error: &Error) -> bool {
        matches!(error, Error::Gone { .. })
    }

    fn is_timeout(error: &Error) -> bool {
        matches!(error, Error::Timeout { .. })
    }

    /// Readable once Firecracker has ended.
    fn poll_fd(&self) -> PollFd<'_> {
        PollFd::from_borrowed_fd(self.process.pidfd(), PollFlags::IN)
    }

    fn drain(&mut self) -> Result<()> {
        Err(Error::Gone {
            socket: self.api.socket().to_owned(),
            operation: "watch".into(),
            source: std::io::ErrorKind::NotConnected.into(),
        })
    }

    fn resume(&mut self, _: Instant) -> Result<bool> {
        let state = self.api.instance().map(|instance| instance.state);
        let is_paused = self.of(state)? == InstanceState::Paused;
        if is_paused {
            let resumed = self.api.resume();
            self.of(resumed)?;
        }
        Ok(is_paused)
    }

    fn quit(&mut self) -> Result<()> {
        match rustix::process::pidfd_send_signal(
            self.process.pidfd(),
            rustix::process::Signal::KILL,
        ) {
            Ok(()) | Err(rustix::io::Errno::SRCH) if self.process.exits_within(100) => self.drain(),
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(e) => Err(Error::io("end Firecracker")(e)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_that_say_nothing_to_watch_are_refused() {
        for words in [&[][..], &["firecracker"], &["firecracker", "x", "/s"], &["other", "1", "/s"]]
        {
            let words: Vec<OsString> = words.iter().map(OsString::from).collect();
            let (commands, _orders) = std::io::pipe().unwrap();
            assert!(run(&words, commands, std::io::sink()).is_err(), "{words:?}");
        }
        let words = resumer(7, Path::new("/a b")).words;
        assert_eq!(words, ["firecracker", "7", "/a b"]);
    }
}
