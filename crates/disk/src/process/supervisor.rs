//! Starts the process that serves the disks again if it ends without an order.
//!
//! ```text
//!   up ──process ends──▶ down ──started──▶ up          epochs of the old process are void
//!                          └──not started──▶ wait, longer each time ──▶ try again
//! ```
//!
//! The listening socket belongs to this process too, so that a client that connects meanwhile waits
//! for the next server.
//!
//! Left out: a guest whose requests wait for long. The engine pauses its VM.

use super::connection::Connection;
use super::{DiskRequest, DiskSpec};
use crate::{DiskEpoch, Error, Result};
use keyframe_confine::{KeptRights, capabilities_but};
use keyframe_locks::IgnorePoison;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// A process that served for less long counts as one that could not be started.
const STEADY_AFTER: Duration = Duration::from_secs(10);
/// The wait after the first failed start. It doubles with each further one.
const WAIT_MIN: Duration = Duration::from_millis(500);
/// The longest wait between two starts.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// How often a process is looked at whose end cannot be waited for.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Each process numbers its epochs from a multiple of this on.
const EPOCHS_OF_PROCESS: u64 = 1 << 32;

/// An event of the process that serves the disks.
#[derive(Debug)]
pub enum ServerEvent {
    /// A process has ended without an order, and a new one serves the disks. No write that was
    /// acknowledged to the guest is lost.
    Restarted {
        /// The process id of the new process.
        pid: u32,
        /// The time for which no process served the disks.
        down: Duration,
    },
    /// A process has ended without an order, and no new one could be started. The guest's requests
    /// wait. The supervisor tries again.
    NotRestarted {
        /// The reason why none could be started.
        error: Error,
        /// The time until the next try.
        again: Duration,
    },
}

/// The caller's function that receives each event of the server. The supervisor calls it on its own
/// thread and waits until it returns.
pub type ServerObserver = Arc<dyn Fn(ServerEvent) + Send + Sync>;

/// What the engine's handle and the supervisor share.
pub(super) struct Shared {
    state: Mutex<State>,
}

pub(super) struct State {
    /// `None` while no process serves the disks.
    connection: Option<Connection>,
    /// The process id of the newest process.
    pub pid: u32,
    /// The disks that are served.
    pub specs: Vec<DiskSpec>,
    /// The disks that are open but not served.
    pub staged: Vec<DiskSpec>,
    /// The core on which the server answers requests. `None` if it was not set.
    pub core: Option<u32>,
    /// How many processes have ended without an order.
    restarts: u64,
    /// The function that receives the events.
    pub observer: Option<ServerObserver>,
}

impl State {
    /// Returns the connection to the process. Error: [`Error::ServerEnded`] while there is none.
    pub fn connection(&mut self) -> Result<&mut Connection> {
        self.connection.as_mut().ok_or(Error::ServerEnded)
    }

    /// Epochs up to this one are of processes that have ended.
    fn void_epochs(&self) -> DiskEpoch {
        DiskEpoch(self.restarts * EPOCHS_OF_PROCESS)
    }

    /// Returns true if all of `epochs` are of processes that have ended.
    pub fn are_void(&self, epochs: &[DiskEpoch]) -> bool {
        epochs.iter().all(|epoch| epoch.0 <= self.void_epochs().0)
    }
}

impl Shared {
    /// Creates the shared state of a handle and its supervisor, for disks that `connection`'s
    /// process serves.
    pub fn new(connection: Connection, specs: Vec<DiskSpec>) -> Self {
        let pid = connection.child.id();
        let (connection, staged) = (Some(connection), Vec::new());
        let (core, restarts, observer) = (None, 0, None);
        let state = State { connection, pid, specs, staged, core, restarts, observer };
        Self { state: Mutex::new(state) }
    }

    /// Locks the shared state and returns the guard.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().ignore_poison()
    }
}

/// The thread that starts the process again whenever it ends without an order.
pub(super) struct Supervisor {
    /// The state that it shares with the handle.
    pub shared: Arc<Shared>,
    /// The command that starts the process.
    pub command: Command,
    /// The path to which `listener` is bound.
    pub socket: PathBuf,
    /// The socket on which QEMU connects. It stays open between two processes.
    pub listener: UnixListener,
    /// A socket whose other end is closed when no process may be started any more.
    pub until: UnixStream,
}

impl Supervisor {
    /// Supervises until the handle is ended or dropped.
    pub fn run(mut self) {
        // The engine gives up rights later, and this thread would keep them. A kernel that refuses
        // leaves it with all.
        let _ = capabilities_but(KeptRights::Files);
        let mut began = Instant::now();
        let mut failures = 0;
        while self.process_ended() {
            let ended = Instant::now();
            self.mark_ended();
            if began.elapsed() >= STEADY_AFTER {
                failures = 0;
            }
            // The first one is started at once.
            let mut outcome = if failures == 0 { self.start() } else { Err(Error::ServerEnded) };
            while let Err(error) = outcome {
                failures += 1;
                let again = wait_after(failures);
                self.tell(ServerEvent::NotRestarted { error, again });
                if self.is_over(again) {
                    return;
                }
                outcome = self.start();
            }
            failures += 1;
            began = Instant::now();
            let pid = self.shared.lock().pid;
            self.tell(ServerEvent::Restarted { pid, down: ended.elapsed() });
        }
    }

    fn tell(&self, event: ServerEvent) {
        let observer = self.shared.lock().observer.clone();
        if let Some(observer) = observer {
            observer(event);
        }
    }

    /// Waits for the end of the process. False if it is not supervised any more.
    fn process_ended(&self) -> bool {
        loop {
            if let Some(ended) = self.wait_for_end() {
                return ended;
            }
            // The kernel has no descriptor or no memory left for now.
            if self.is_over(LOOK_EVERY) {
                return false;
            }
            if self.has_ended() {
                return true;
            }
        }
    }

    /// Returns what [`Self::process_ended`] does. Returns `None` if the process cannot be waited
    /// for.
    fn wait_for_end(&self) -> Option<bool> {
        let process = self.process()?;
        loop {
            let mut fds =
                [PollFd::new(&process, PollFlags::IN), PollFd::new(&self.until, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) if !fds[1].revents().is_empty() => return Some(false),
                Ok(_) if !fds[0].revents().is_empty() => return Some(true),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return None,
            }
        }
    }

    /// Returns true if the process has ended.
    fn has_ended(&self) -> bool {
        let mut state = self.shared.lock();
        let connection = state.connection.as_mut();
        connection.is_some_and(|connection| !matches!(connection.child.try_wait(), Ok(None)))
    }

    fn process(&self) -> Option<OwnedFd> {
        let pid = Pid::from_raw(self.shared.lock().pid.cast_signed())?;
        pidfd_open(pid, PidfdFlags::empty()).ok()
    }

    /// True if the handle is ended or dropped within `wait`.
    fn is_over(&self, wait: Duration) -> bool {
        let limit =
            Timespec { tv_sec: wait.as_secs().cast_signed(), tv_nsec: wait.subsec_nanos().into() };
        let ended = poll(&mut [PollFd::new(&self.until, PollFlags::IN)], Some(&limit));
        let give_up = |_| {
            std::thread::sleep(wait);
            false
        };
        ended.map_or_else(give_up, |count| count > 0)
    }

    /// From here on the epochs of the process are void, before a new one reuses their slots.
    fn mark_ended(&self) {
        let mut state = self.shared.lock();
        if let Some(mut connection) = state.connection.take() {
            let _ = connection.child.wait();
        }
        state.restarts += 1;
    }

    fn start(&mut self) -> Result<()> {
        let (specs, staged, core, epochs_after) = {
            let state = self.shared.lock();
            let (specs, staged) = (state.specs.clone(), state.staged.clone());
            (specs, staged, state.core, state.void_epochs())
        };
        if !self.socket.exists() {
            // A process that panics removes it.
            let bound = UnixListener::bind(&self.socket);
            let name = self.socket.display().to_string();
            self.listener = bound.map_err(Error::io(name, "listen on"))?;
        }
        let place = (&*self.socket, &self.listener);
        let (mut new, _) = Connection::start(&mut self.command, place, &specs, epochs_after)?;
        let again = || {
            if !staged.is_empty() {
                let request = DiskRequest::Stage { specs: staged };
                new.ask(&request, super::connection::OPEN_TIMEOUT)?;
            }
            if let Some(core) = core {
                new.ask(&DiskRequest::AnswerOn { core }, super::connection::OPEN_TIMEOUT)?;
            }
            Ok(())
        };
        if let Err(error) = again() {
            new.kill();
            return Err(error);
        }
        let mut state = self.shared.lock();
        state.pid = new.child.id();
        state.connection = Some(new);
        Ok(())
    }
}

fn wait_after(failures: u32) -> Duration {
    WAIT_MIN.saturating_mul(1 << (failures - 1).min(10)).min(WAIT_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_and_are_bounded() {
        let waits: Vec<_> = (1..40).map(wait_after).collect();
        assert_eq!(waits[0], WAIT_MIN);
        assert!(waits.is_sorted() && *waits.last().unwrap() == WAIT_MAX);
    }
}
