//! The watchdog of Firecracker's pauses: how it reaches Firecracker.
//!
//! It has a connection of its own, which it opens before the first pause. So it resumes the VM also
//! if the socket's file is removed in a pause. In a whole pause Firecracker answers no client; the
//! watchdog empties the pipe for which it waits.
//!
//! If the engine dies in a rollback, the watchdog ends it:
//!
//! | last step that the engine told | the former Firecracker | the watchdog | the VM is |
//! |---|---|---|---|
//! | none | runs | resumes the VM | as it was |
//! | `Loads` | runs | resumes the VM | as it was |
//! | `Loads` | has ended, or is about to | ends an incomplete successor, starts one | the checkpoint |
//! | `Loaded` | has ended | resumes the successor | as the successor is |
//!
//! It takes hold of the VM's place when it hears of the plan, while the former Firecracker runs.

use crate::api::{Api, InstanceState};
use crate::succession::FirecrackerSuccession;
use crate::{Error, FirecrackerVm, Result};
use keyframe_kernel::Process;
use keyframe_pause_watchdog::{LOOK_EVERY, Rescuer, RollbackEnd, empty_pipe};
use keyframe_vmm::{
    RescuedVm, Resumer, RollbackPlan, RollbackStep, Succession, SuccessionRescuer, VmmError,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a Firecracker that has just been started may take to serve its API.
const START_OF_API: Duration = Duration::from_millis(100);
/// The first word of a watchdog's command line that watches a Firecracker.
pub const WORD: &str = "firecracker";

/// Returns the instructions with which another process resumes the VM of the Firecracker `pid` with
/// the API at `socket`. `pipe` is the pipe for which Firecracker waits in a whole pause.
pub fn resumer(pid: u32, socket: &Path, pipe: Option<&Path>) -> Resumer {
    let mut words = vec![WORD.into(), pid.to_string().into(), socket.into()];
    words.extend(pipe.map(OsString::from));
    Resumer { words, descriptors: Vec::new() }
}

/// Runs the watchdog's process by the words of [`resumer`], as [`keyframe_pause_watchdog::run`]
/// does. `rescuer` helps to end the rollback of an engine that dies. Errors: the words have another form; those of that function.
pub fn run(
    words: &[OsString],
    commands: impl Read + AsFd,
    reports: impl Write,
    rescuer: &mut dyn SuccessionRescuer,
) -> Result<()> {
    let bad = || keyframe_pause_watchdog::Error::Problem {
        problem: format!("{words:?} says nothing to watch"),
    };
    let (word, pid, socket, pipe) = match words {
        [word, pid, socket] => (word, pid, socket, None),
        [word, pid, socket, pipe] => (word, pid, socket, Some(pipe)),
        _ => return Err(bad().into()),
    };
    let pid = pid.to_str().and_then(|pid| pid.parse().ok()).filter(|_| word == WORD);
    let process = Process::open(pid.ok_or_else(bad)?)?;
    let api = Api::connect(Path::new(socket))?;
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let pipe = pipe.map(|pipe| rustix::fs::open(Path::new(pipe), flags, Mode::empty()));
    let pipe = pipe.transpose().map_err(Error::io("open the pipe for the device state"))?;
    let never = eventfd(0, EventfdFlags::CLOEXEC).map_err(Error::io("make a descriptor"))?;
    let reach = FirecrackerRescuer { process, api, pipe, rescuer, told: None, never };
    keyframe_pause_watchdog::run(reach, commands, reports)
}

/// What an engine has told of a rollback that is under way.
struct Told {
    plan: RollbackPlan,
    /// The place of the VM.
    succession: FirecrackerSuccession,
    is_loaded: bool,
}

/// How a watchdog's process rescues a VM of Firecracker.
struct FirecrackerRescuer<'a> {
    process: Process,
    api: Api,
    /// The pipe for which Firecracker waits in a whole pause.
    pipe: Option<OwnedFd>,
    rescuer: &'a mut dyn SuccessionRescuer,
    told: Option<Told>,
    /// Is never readable.
    never: OwnedFd,
}

impl FirecrackerRescuer<'_> {
    /// Returns whether the VM is in its former process, which lets it run if it `ran`. A process that is
    /// about to end does not answer.
    fn is_intact(&mut self, ran: bool) -> bool {
        let answers = |api: &mut Api| if ran { api.resume() } else { api.instance().map(drop) };
        self.process.is_alive() && answers(&mut self.api).is_ok() && !self.process.exits_within(0)
    }

    /// Puts a VM into its place, and lets it run if it is to. Returns what it is.
    fn succeed(&mut self, told: Told) -> Result<RescuedVm, VmmError> {
        let Told { plan, mut succession, is_loaded } = told;
        if is_loaded {
            if plan.runs {
                let resume = || Api::connect(self.api.socket())?.resume();
                resume().or_else(|_| {
                    std::thread::sleep(START_OF_API);
                    resume()
                })?;
            }
            return Ok(RescuedVm::RolledBack);
        }
        if self.is_intact(plan.ran) {
            // The VM runs. A successor that is left takes memory and does no other harm.
            let _ = succession.end_incomplete(false);
            return Ok(RescuedVm::AsItWas);
        }
        // It may be about to end.
        succession.end_predecessor()?;
        // A successor that the engine has just started has no API yet.
        std::thread::sleep(START_OF_API);
        succession.end_incomplete(true)?;
        let (mut vm, rescued) = self.rescuer.succeed(&plan.words, &mut succession)?;
        if plan.runs {
            vm.resume()?;
        }
        vm.leave_running();
        Ok(rescued)
    }

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

impl Rescuer for FirecrackerRescuer<'_> {
    type Error = Error;

    fn is_gone(error: &Error) -> bool {
        matches!(error, Error::Gone { .. })
    }

    fn is_timeout(error: &Error) -> bool {
        matches!(error, Error::Timeout { .. })
    }

    /// Readable once Firecracker has ended. In a rollback the engine ends it.
    fn poll_fd(&self) -> PollFd<'_> {
        match self.told {
            Some(_) => PollFd::new(&self.never, PollFlags::IN),
            None => PollFd::from_borrowed_fd(self.process.pidfd(), PollFlags::IN),
        }
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

    /// Empties the pipe for which Firecracker waits; true if something was in it.
    fn end_saved_pause(&mut self) -> Result<bool> {
        Ok(self.pipe.as_ref().map_or(Ok(false), empty_pipe)?)
    }

    /// Without a reader Firecracker cannot write. It ends the save, and takes the next request.
    fn close_saved_pause(&mut self) {
        self.pipe = None;
    }

    fn plan_rollback(&mut self, plan: Option<RollbackPlan>) -> Result<()> {
        let succession = match (plan.is_some(), self.told.take()) {
            (false, _) => return Ok(()),
            (true, Some(told)) => told.succession,
            (true, None) => {
                let mut vm = FirecrackerVm::attach(self.process.pid(), self.api.socket())?;
                FirecrackerSuccession::of(&mut vm)?
            }
        };
        self.told = plan.map(|plan| Told { plan, succession, is_loaded: false });
        Ok(())
    }

    fn note_step(&mut self, step: RollbackStep) {
        if let Some(told) = &mut self.told {
            told.is_loaded = step == RollbackStep::Loaded;
        }
    }

    fn end_rollback(&mut self) -> Result<RollbackEnd> {
        let Some(told) = self.told.take() else {
            return Ok(RollbackEnd::NotEnded { problem: "the engine has told no plan".into() });
        };
        let words = told.plan.words.clone();
        let rescued = self.succeed(told);
        if rescued.is_ok() {
            self.rescuer.tidy(&words);
        }
        self.rescuer.tell(&words, rescued.as_ref().copied());
        Ok(match rescued {
            Ok(_) => RollbackEnd::Ended,
            Err(error) => RollbackEnd::NotEnded { problem: error.to_string() },
        })
    }

    /// The VM was not changed yet.
    fn tidy_rollback(&mut self) {
        if let Some(told) = self.told.take().filter(|_| self.process.is_alive()) {
            let _ = told.succession.end_incomplete(false);
            self.rescuer.tidy(&told.plan.words);
        }
    }

    fn quit(&mut self) -> Result<()> {
        match rustix::process::pidfd_send_signal(
            self.process.pidfd(),
            rustix::process::Signal::KILL,
        ) {
            Ok(()) | Err(Errno::SRCH) if self.process.exits_within(100) => self.drain(),
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(e) => Err(Error::io("end Firecracker")(e)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_vmm::Vmm;

    struct NoRescuer;

    impl SuccessionRescuer for NoRescuer {
        fn succeed(
            &mut self,
            _: &str,
            _: &mut dyn Succession,
        ) -> Result<(Box<dyn Vmm>, RescuedVm), VmmError> {
            unreachable!()
        }
        fn tidy(&mut self, _: &str) {}
        fn tell(&mut self, _: &str, _: Result<RescuedVm, &VmmError>) {}
    }

    #[test]
    fn words_that_say_nothing_to_watch_are_refused() {
        for words in [
            &[][..],
            &["firecracker"],
            &["firecracker", "x", "/s"],
            &["other", "1", "/s"],
            &["firecracker", "1", "/s", "/p", "more"],
        ] {
            let words: Vec<OsString> = words.iter().map(OsString::from).collect();
            let (commands, _orders) = std::io::pipe().unwrap();
            assert!(run(&words, commands, std::io::sink(), &mut NoRescuer).is_err(), "{words:?}");
        }
        assert_eq!(resumer(7, Path::new("/a b"), None).words, ["firecracker", "7", "/a b"]);
        let words = resumer(7, Path::new("/a b"), Some(Path::new("/p"))).words;
        assert_eq!(words, ["firecracker", "7", "/a b", "/p"]);
    }
}
