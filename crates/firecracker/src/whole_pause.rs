//! A whole pause by requests that are sent at once, with a pipe for the device state.
//!
//! ```text
//!   engine       state?, pause, save, resume ─▶ sent at once
//!   Firecracker      pause ─▶ save the devices ─▶ write ············▶ rest of the state ─▶ resume
//!                                                  │ waits for room  ▲
//!   engine                                         └▶ look           ┘ empties the pipe
//! ```
//!
//! The thread of the API and that of the devices both wait in the request to save. So Firecracker
//! carries out the requests of other clients before this pause or after it. The resumption does not
//! undo a pause of the user that comes meanwhile. If the engine dies, the watchdog empties the pipe.
//! If both die, the pipe has no reader any more: the save fails, and Firecracker takes the next
//! request, which resumes the VM.
//!
//! The user may pause the VM between the last look at it and the requests, some tens of
//! microseconds. The first answer shows that, and the VM is paused again. Its state is the same, but
//! it has run for the moment in between.
//!
//! Firecracker saves its devices before it opens the file. As long as it waits to write, the request
//! is not done, and no device can work.
//!
//! A pipe cannot be flushed to a disk. That ends each save with an error after the state is written,
//! and before Firecracker comes to the RAM.

use crate::api::{InstanceState, WholePause};
use crate::state_file::{NO_MEMORY, check};
use crate::state_pipe::StatePipe;
use crate::vm::{FirecrackerVm, RanMeanwhile};
use crate::{Error, Result};
use keyframe_vmm::{RunState, SavedPause, StopOutcome};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long Firecracker may take to come to the save, or to end it: it flushes its drives.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The time between two looks at Firecracker.
const LOOK_EVERY: Duration = Duration::from_micros(30);
/// The same if the save takes long.
const LOOK_LATER_EVERY: Duration = Duration::from_millis(1);
/// When it takes long.
const LATER: Duration = Duration::from_millis(20);
/// How long Firecracker usually takes at most for the rest of the state and the resumption, if the
/// pipe has room for it.
const ANSWER_LIKELY: Duration = Duration::from_millis(2);
/// What Firecracker answers after it has written the devices to a pipe.
const NOT_FLUSHED: &str = "on the snapshot backing file: Invalid argument";
/// What it answers if it could not open the pipe.
const NOT_OPENED: &str = "open on the snapshot backing file";
/// How often a pause is tried, and how often Firecracker is asked whether the VM runs, if that has
/// changed since.
const ATTEMPTS: u32 = 4;
/// How long after the requests were sent a pause of the user still holds for sure.
const PAUSE_AGAIN_WITHIN: Duration = Duration::from_millis(20);

/// The whole pauses of a VM.
#[derive(Debug, Default)]
pub(crate) struct WholePauses {
    /// True once this Firecracker has been found unable to pause so.
    is_impossible: bool,
    held: Option<Held>,
    ending: Option<Ending>,
    /// The device state of the last pause.
    pub(crate) state: Option<Vec<u8>>,
}

/// What an attempt has led to.
enum Attempt {
    Held(Held),
    /// The user has resumed the VM, which was paused.
    Resumed,
    /// This Firecracker does not write its state to the pipe.
    Impossible,
}

/// A whole pause whose requests were sent.
#[derive(Clone, Copy, Debug)]
struct Held {
    /// Whether the VM ran before, so that it is paused and resumed.
    ran: bool,
    sent_at: Instant,
}

/// The end of a whole pause.
#[derive(Debug)]
struct Ending {
    held: Held,
    /// Whether Firecracker waited for room in the pipe until then.
    waits: bool,
    /// What has been read of the state.
    state: Vec<u8>,
    answered: Option<WholePause>,
}

impl FirecrackerVm {
    /// Pauses the VM and saves its devices. A VM that its user has paused stays paused after it. The
    /// device state is whole after [`Self::finish_whole_pause`]. `None` if this Firecracker cannot do
    /// so: the VM's run state is as it was.
    pub(crate) fn begin_whole_pause(&mut self) -> Result<Option<SavedPause>> {
        self.finish_whole_pause()?;
        self.whole.state = None;
        for _ in 0..ATTEMPTS {
            let Some(pipe) = &mut self.pipe else { return Ok(None) };
            if self.whole.is_impossible {
                return Ok(None);
            }
            pipe.prepare()?;
            let runs = self.runs_now()?;
            // Whatever fails, Firecracker must not wait for the engine.
            match self.hold(runs).inspect_err(|_| self.let_go())? {
                Attempt::Held(held) => {
                    self.whole.held = Some(held);
                    let stop = if runs { StopOutcome::Stopped } else { StopOutcome::AlreadyPaused };
                    return Ok(Some(SavedPause { stop, device_state: Vec::new() }));
                }
                Attempt::Resumed => {}
                Attempt::Impossible => self.whole.is_impossible = true,
            }
        }
        Err(Error::PauseEnded)
    }

    /// Returns whether the VM runs. After the answer the user may have paused it: then the thread of
    /// the devices waits for the next request.
    fn runs_now(&mut self) -> Result<bool> {
        for _ in 0..ATTEMPTS {
            if self.state()? != RunState::Running {
                return Ok(false);
            }
            if !self.event_loop.waits_for_request()? {
                break;
            }
        }
        Ok(true)
    }

    fn hold(&mut self, runs: bool) -> Result<Attempt> {
        self.ran = RanMeanwhile::default();
        let Some(pipe) = &self.pipe else { return Ok(Attempt::Impossible) };
        let held = Held { ran: runs, sent_at: Instant::now() };
        if !self.parts.api.begin_whole_pause(runs, pipe.path(), Path::new(NO_MEMORY))? {
            return Ok(Attempt::Impossible);
        }
        while !self.pipe.as_ref().map_or(Ok(false), StatePipe::has_begun)? {
            if let Some(answered) = self.parts.api.whole_pause()? {
                if !runs && answered.before == InstanceState::Running {
                    // Its user has resumed it, so Firecracker has saved nothing.
                    return Ok(Attempt::Resumed);
                }
                self.conclude(answered, held, false)?;
                // The pipe could not be opened, or the watchdog has emptied it.
                return if self.whole.is_impossible {
                    Ok(Attempt::Impossible)
                } else {
                    Err(Error::PauseEnded)
                };
            }
            let waited = held.sent_at.elapsed();
            if waited > TIMEOUT {
                return Err(self.parts.api.timeout("pause the VM and save its devices", TIMEOUT));
            }
            std::thread::sleep(if waited > LATER { LOOK_LATER_EVERY } else { LOOK_EVERY });
        }
        self.mark()?;
        Ok(Attempt::Held(held))
    }

    /// Lets Firecracker write the rest of the state and resume the VM, and waits until the VM runs.
    /// [`Self::finish_whole_pause`] is to follow.
    pub(crate) fn end_whole_pause(&mut self) -> Result<()> {
        let Some(held) = self.whole.held.take() else { return Ok(()) };
        let released = self.release(held);
        if released.is_err() {
            self.let_go();
        }
        released
    }

    fn release(&mut self, held: Held) -> Result<()> {
        let waits = self.waits_for_the_pipe()?;
        self.look_whether_it_ran()?;
        self.ran.ran |= !waits;
        let mark = self.ran.mark.take();
        let mut ending = Ending { held, waits, state: Vec::new(), answered: None };
        // A reader of an empty pipe would be woken by each of Firecracker's small pieces. So the pipe
        // is read once it is full, or at the end.
        if !self.pipe.as_ref().is_some_and(StatePipe::open_up) {
            self.drain(&mut ending.state)?;
        }
        let began = Instant::now();
        // The answers may come late: the CPUs of the VM compete with Firecracker's other threads.
        let runs_again = |vm: &Self| match &mark {
            Some(mark) if held.ran => vm.vcpus.all_ran_since(mark).unwrap_or(true),
            _ => false,
        };
        while !runs_again(self) {
            ending.answered = self.parts.api.whole_pause()?;
            if ending.answered.is_some() {
                break;
            }
            let waited = began.elapsed();
            if waited > TIMEOUT {
                return Err(self.parts.api.timeout("resume the VM", TIMEOUT));
            }
            if waited > ANSWER_LIKELY {
                self.drain(&mut ending.state)?;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        self.whole.ending = Some(ending);
        Ok(())
    }

    /// Takes Firecracker's answers after [`Self::end_whole_pause`], and the whole state.
    pub(crate) fn finish_whole_pause(&mut self) -> Result<()> {
        let Some(ending) = self.whole.ending.take() else { return Ok(()) };
        let finished = self.finish(ending);
        if finished.is_err() {
            self.let_go();
        }
        finished
    }

    fn finish(&mut self, ending: Ending) -> Result<()> {
        let Ending { held, waits, mut state, mut answered } = ending;
        let deadline = Instant::now() + TIMEOUT;
        let answered = loop {
            answered = match answered {
                Some(answered) => break answered,
                None => self.parts.api.whole_pause()?,
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.parts.api.timeout("resume the VM", TIMEOUT));
            }
            if answered.is_none() && !self.await_answer(left.min(ANSWER_LIKELY))? {
                self.drain(&mut state)?;
            }
        };
        self.drain(&mut state)?;
        self.conclude(answered, held, waits)?;
        if let Some(pipe) = &mut self.pipe {
            // If it has not waited, the next one does.
            pipe.expect(if waits { state.len() } else { 0 });
        }
        if !self.ran.ran {
            check(&state)?;
            self.whole.state = Some(state);
        }
        Ok(())
    }

    /// Takes in the answers. `waited` tells whether Firecracker has waited for the pipe until its
    /// release.
    fn conclude(&mut self, answered: WholePause, held: Held, waited: bool) -> Result<()> {
        let WholePause { before, saved, resumed } = answered;
        resumed.or_else(|_| self.parts.api.resume())?;
        let is_recent = held.sent_at.elapsed() < PAUSE_AGAIN_WITHIN;
        if held.ran && before == InstanceState::Paused && is_recent {
            // Its user paused the VM just before. Later the user may have resumed it.
            self.parts.api.pause()?;
        }
        let message = match saved {
            Err(Error::Refused { message, .. }) => message,
            Err(error) => return Err(error),
            Ok(()) => String::new(),
        };
        if !message.contains(NOT_FLUSHED) {
            self.ran.ran = true;
            self.whole.is_impossible = waited || message.contains(NOT_OPENED);
        }
        Ok(())
    }

    /// Returns the device state of the last whole pause.
    pub(crate) fn take_state(&mut self) -> Option<Vec<u8>> {
        self.whole.state.take()
    }

    /// Waits until Firecracker waits for room in the pipe. Returns false if it does not: it has
    /// written all, and resumed the VM.
    fn waits_for_the_pipe(&mut self) -> Result<bool> {
        let Some(pipe) = &self.pipe else { return Ok(false) };
        let (pipe, deadline) = (pipe.identity()?, Instant::now() + TIMEOUT);
        while Instant::now() < deadline {
            if self.event_loop.waits_to_write(pipe)? {
                return Ok(true);
            }
            // The watchdog has emptied the pipe. The user may have paused the VM since.
            if self.event_loop.waits_for_events()? || self.event_loop.waits_for_request()? {
                return Ok(false);
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Err(self.parts.api.timeout("save the devices", TIMEOUT))
    }

    fn drain(&mut self, state: &mut Vec<u8>) -> Result<()> {
        self.pipe.as_mut().map_or(Ok(()), |pipe| pipe.drain(state))
    }

    /// Waits for an answer, for at most `limit`. Returns true if one has come.
    fn await_answer(&self, limit: Duration) -> Result<bool> {
        let Some(api) = self.parts.api.descriptor() else { return Ok(true) };
        let limit = Timespec { tv_sec: 0, tv_nsec: limit.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&api, PollFlags::IN)], Some(&limit)) {
            Ok(ready) => Ok(ready > 0),
            Err(Errno::INTR) => Ok(true),
            Err(error) => Err(Error::io("wait for Firecracker to resume the VM")(error)),
        }
    }

    /// Lets Firecracker go on after a failure, in a pause or not.
    fn let_go(&mut self) {
        self.ran.ran = true;
        self.parts.api.disconnect();
        if let Some(pipe) = &mut self.pipe {
            pipe.open_up();
            let _ = pipe.drain(&mut Vec::new());
        }
    }
}
