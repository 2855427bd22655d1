//! The VM that a watchdog watches, and the connection by which it reaches QEMU.
//!
//! | VM | way | why |
//! |---|---|---|
//! | launched | a monitor of its own | Keyframe gave QEMU a second one at launch |
//! | attached, socket | the engine's own connection, inherited | a running QEMU cannot add a monitor |
//! | attached, libvirt | a virsh of its own | libvirt serves many clients |
//!
//! ```text
//!   a shared connection:   engine ──stop──▶ ┐                     ┌──▶ answers and events: the engine's
//!                          watchdog ─cont─▶ ┴─▶ QEMU ──▶ socket ──┤
//!                                                                 └──▶ the watchdog's, once the engine is gone
//! ```
//!
//! While the engine lives, the watchdog only writes to a shared connection: `cont`, in one piece,
//! with an id that the engine does not use. It cannot read whether the VM is paused, or which
//! client paused it. It therefore writes `cont` a few times, all within [`SEND_FOR`] after the
//! deadline: a later pause may be a user's. The engine sees the RESUME as one that it did not
//! request.
//!
//! Left out: an engine that stalls before its `stop` for longer than [`SEND_FOR`], and stalls again
//! after the `stop`.

use crate::rollback::rescue::ToldRollback;
use crate::{EndHold, Error, Qmp, Result, RunStatus, fleece, spawn, statefile};
use keyframe_pause_watchdog::{
    CONNECT_TIMEOUT, LAST_STOP, LOOK_EVERY, RESCUE_MAX, Rescuer, RollbackEnd, empty_pipe,
};
use keyframe_vmm::{Resumer, RollbackPlan, RollbackRescuer, RollbackStep};
use rustix::event::{PollFd, PollFlags};
use rustix::net::SendFlags;
use rustix::process::{PidfdFlags, PidfdGetfdFlags};
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How long after the deadline the watchdog sends `cont` without knowing the VM's state.
const SEND_FOR: Duration = LAST_STOP;
/// Resumes a paused VM. QEMU ignores it if the VM runs.
const CONT: &[u8] = b"{\"execute\": \"cont\", \"id\": \"keyframe-watchdog\"}\n";

/// What a watchdog needs to know of the VM that it watches.
#[derive(Debug)]
pub struct Watched {
    /// The monitor by which it resumes the VM.
    pub monitor: WatchedMonitor,
    /// The read end of the pipe for which QEMU waits in a one-command pause. It does not block.
    /// `None` for a VM without one.
    pub pipe: Option<OwnedFd>,
    /// The ends of the guest at which QEMU is held as long as the engine lives. `None` if QEMU is
    /// not held.
    pub hold: Option<EndHold>,
}

/// The monitor by which a watchdog reaches the VM.
#[derive(Debug)]
pub enum WatchedMonitor {
    /// A monitor of its own, at this socket.
    Own(PathBuf),
    /// The engine's connection to its monitor.
    Shared {
        /// The connection.
        socket: OwnedFd,
        /// The descriptor set that QEMU forgets when the engine has ended.
        set: u32,
    },
    /// A VM that libvirt manages.
    Libvirt {
        /// The domain.
        domain: String,
        /// The URI of libvirt's connection; `None` for virsh's default.
        uri: Option<String>,
        /// The descriptor set that QEMU forgets when the engine has ended, if there is one.
        set: Option<u32>,
    },
}

/// How often it is looked whether an engine that closed its descriptors has ended.
const ENGINE_LOOKS: u32 = 100;
const ENGINE_LOOK_EVERY: Duration = Duration::from_millis(50);

/// The first of the words that name the pipe.
const PIPE: &str = "pipe";
/// The first of the words that name the ends of the guest.
const HOLD: &str = "hold";

impl Watched {
    /// Creates a VM without a pipe, whose watchdog has a monitor of its own at socket `monitor`.
    pub fn by_monitor(monitor: PathBuf) -> Self {
        Self { monitor: WatchedMonitor::Own(monitor), pipe: None, hold: None }
    }

    /// The words of a command line that [`Watched::parse`] reads in a child that has inherited
    /// [`Watched::inherited`].
    pub(super) fn words(&self) -> Vec<OsString> {
        let pipe = self.pipe.iter().flat_map(|pipe| [PIPE.into(), number_of(pipe)]);
        let hold = self.hold.iter().flat_map(|hold| [HOLD.into(), hold.word().into()]);
        hold.chain(pipe).chain(self.monitor.words()).collect()
    }

    /// Converts it to the value of crate `vmm`, whose words [`Watched::parse`] reads.
    pub fn into_resumer(self) -> Resumer {
        let words = self.words();
        let mut descriptors: Vec<OwnedFd> = self.pipe.into_iter().collect();
        if let WatchedMonitor::Shared { socket, .. } = self.monitor {
            descriptors.push(socket);
        }
        Resumer { words, descriptors }
    }

    pub(super) fn inherited(&self) -> Vec<&OwnedFd> {
        let mut all: Vec<&OwnedFd> = self.pipe.iter().collect();
        if let WatchedMonitor::Shared { socket, .. } = &self.monitor {
            all.push(socket);
        }
        all
    }

    /// Reads the words that [`super::spawn`] gives a watchdog's process, in that process.
    /// Error: the words have another form.
    pub fn parse(words: &[OsString]) -> Result<Self> {
        match words {
            [hold, ends, rest @ ..] if hold == HOLD => {
                let hold = ends.to_str().and_then(EndHold::parse);
                let hold = Some(hold.ok_or_else(|| nothing_to_watch(words))?);
                Ok(Self { hold, ..Self::parse(rest)? })
            }
            [pipe, number, monitor @ ..] if pipe == PIPE => {
                let number = number.to_str().and_then(|n| n.parse().ok());
                let number = number.ok_or_else(|| nothing_to_watch(words))?;
                let monitor = WatchedMonitor::parse(monitor)?;
                Ok(Self { monitor, pipe: Some(inherited(number)?), hold: None })
            }
            _ => Ok(Self { monitor: WatchedMonitor::parse(words)?, pipe: None, hold: None }),
        }
    }
}

impl WatchedMonitor {
    fn words(&self) -> Vec<OsString> {
        match self {
            Self::Own(path) => vec!["monitor".into(), path.into()],
            Self::Shared { socket, set } => {
                vec!["shared".into(), number_of(socket), set.to_string().into()]
            }
            Self::Libvirt { domain, uri, set } => {
                let mut words = vec!["libvirt".into(), domain.into()];
                words.push(set.map_or_else(|| "-".to_owned(), |set| set.to_string()).into());
                words.extend(uri.as_ref().map(OsString::from));
                words
            }
        }
    }

    fn parse(words: &[OsString]) -> Result<Self> {
        let bad = || nothing_to_watch(words);
        let text: Vec<&str> = words.iter().map(|w| w.to_str().unwrap_or_default()).collect();
        match text.as_slice() {
            ["monitor", _] => Ok(Self::Own(words.get(1).ok_or_else(bad)?.into())),
            ["shared", number, set] => {
                let number = number.parse().map_err(|_| bad())?;
                Ok(Self::Shared {
                    socket: inherited(number)?,
                    set: set.parse().map_err(|_| bad())?,
                })
            }
            ["libvirt", domain, set, uri @ ..] if uri.len() < 2 => Ok(Self::Libvirt {
                domain: (*domain).into(),
                uri: uri.first().map(|uri| (*uri).into()),
                set: if *set == "-" { None } else { Some(set.parse().map_err(|_| bad())?) },
            }),
            _ => Err(bad()),
        }
    }
}

fn number_of(descriptor: &OwnedFd) -> OsString {
    spawn::number(descriptor).to_string().into()
}

fn nothing_to_watch(words: &[OsString]) -> Error {
    Error::Watchdog { problem: format!("{words:?} says nothing to watch") }
}

/// The descriptor that this process has inherited under `number`, once more.
fn inherited(number: i32) -> Result<OwnedFd> {
    let operation = || format!("take hold of inherited descriptor {number}");
    let ourselves = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())
        .map_err(Error::io(operation()))?;
    rustix::process::pidfd_getfd(&ourselves, number, PidfdGetfdFlags::empty())
        .map_err(Error::io(operation()))
}

/// How a watchdog's process rescues a VM of QEMU.
pub(super) struct QemuRescuer<'a> {
    reach: Reach,
    /// The pipe for which QEMU waits in a one-command pause.
    pipe: Option<OwnedFd>,
    /// The ends of the guest at which the engine holds QEMU.
    hold: Option<EndHold>,
    /// The rollback that is under way.
    rollback: Option<ToldRollback>,
    rescuer: &'a mut dyn RollbackRescuer,
}

impl<'a> QemuRescuer<'a> {
    /// Connects to the monitor of `watched`. `rescuer` serves the disks and corrects the RAM of a
    /// rollback whose engine has died. Error: the monitor cannot be reached.
    pub fn reach(watched: Watched, rescuer: &'a mut dyn RollbackRescuer) -> Result<Self> {
        let reach = Reach::to(watched.monitor)?;
        Ok(Self { reach, pipe: watched.pipe, hold: watched.hold, rollback: None, rescuer })
    }
}

impl Rescuer for QemuRescuer<'_> {
    type Error = Error;

    fn is_gone(error: &Error) -> bool {
        matches!(error, Error::Gone { .. })
    }

    fn is_timeout(error: &Error) -> bool {
        matches!(error, Error::Timeout { .. })
    }

    fn poll_fd(&self) -> PollFd<'_> {
        self.reach.poll_fd()
    }

    fn drain(&mut self) -> Result<()> {
        self.reach.drain()
    }

    fn begin_anew(&mut self) {
        self.reach.begin_anew();
    }

    fn resume(&mut self, now: Instant) -> Result<bool> {
        self.reach.resume(now)
    }

    /// Empties the pipe for which QEMU waits; true if something was in it.
    fn end_saved_pause(&mut self) -> Result<bool> {
        Ok(self.pipe.as_ref().map_or(Ok(false), empty_pipe)?)
    }

    /// Without a reader QEMU cannot write, and ends its command.
    fn close_saved_pause(&mut self) {
        self.pipe = None;
    }

    fn take_over(&mut self) -> Result<()> {
        self.reach.take_over()
    }

    fn plan_rollback(&mut self, plan: Option<RollbackPlan>) -> Result<()> {
        self.rollback = plan.map(ToldRollback::new);
        Ok(())
    }

    fn note_step(&mut self, step: RollbackStep) {
        if let Some(rollback) = &mut self.rollback {
            rollback.note(step);
        }
    }

    fn end_rollback(&mut self) -> Result<RollbackEnd> {
        let Some(rollback) = self.rollback.take() else {
            let problem = "it had failed, or was not planned".into();
            return Ok(RollbackEnd::NotEnded { problem });
        };
        let rescued = self.reach.on_monitor(|qmp| rollback.end(qmp, self.rescuer));
        let words = &rollback.plan.words;
        match rescued {
            Ok(rescued) => {
                self.rescuer.tidy(words);
                self.rescuer.tell(words, Ok(rescued));
                Ok(RollbackEnd::Ended)
            }
            Err(error @ Error::Gone { .. }) => Err(error),
            Err(error) => {
                let problem = error.to_string();
                self.rescuer.tell(words, Err(&error.into()));
                Ok(RollbackEnd::NotEnded { problem })
            }
        }
    }

    fn tidy_rollback(&mut self) {
        if let Some(rollback) = self.rollback.take() {
            self.rescuer.tidy(&rollback.plan.words);
        }
    }

    fn quit(&mut self) -> Result<()> {
        self.reach.quit()
    }

    /// First of all, QEMU is to end with its guest again.
    fn forget_engine(&mut self) -> Result<()> {
        let began = Instant::now();
        let released = loop {
            let Some(hold) = self.hold else { break Ok(()) };
            match self.reach.release_end(hold) {
                Err(Error::Gone { .. }) => return Ok(()),
                Err(Error::Timeout { .. }) if began.elapsed() < RESCUE_MAX => {
                    std::thread::sleep(LOOK_EVERY);
                }
                other => break other,
            }
        };
        self.reach.forget_engine().and(released)
    }
}

/// The connection by which a watchdog's process reaches QEMU.
enum Reach {
    /// By a monitor of its own, with the descriptor set that QEMU forgets when the engine has
    /// ended.
    Own(Box<Qmp>, Option<u32>),
    /// By the engine's monitor.
    Shared(Shared),
}

/// A monitor connection whose answers the engine reads.
struct Shared {
    socket: OwnedFd,
    set: u32,
    /// The beginning of the overdue time, the time of the next `cont`, and the wait after it.
    sending: Option<(Instant, Instant, Duration)>,
}

impl Reach {
    /// Connects to `monitor`, or keeps the connection of the engine. Error: the monitor cannot be
    /// reached.
    pub fn to(monitor: WatchedMonitor) -> Result<Self> {
        Ok(match monitor {
            WatchedMonitor::Own(path) => {
                Self::Own(Box::new(Qmp::connect(&path, CONNECT_TIMEOUT)?), None)
            }
            WatchedMonitor::Shared { socket, set } => {
                Self::Shared(Shared { socket, set, sending: None })
            }
            WatchedMonitor::Libvirt { domain, uri, set } => {
                Self::Own(Box::new(Qmp::connect_libvirt(&domain, uri.as_deref(), &[])?), set)
            }
        })
    }

    /// Returns what to poll for: events; on a shared connection only its end.
    pub fn poll_fd(&self) -> PollFd<'_> {
        match self {
            Self::Own(qmp, _) => PollFd::new(qmp.as_ref(), PollFlags::IN),
            Self::Shared(shared) => PollFd::new(&shared.socket, PollFlags::empty()),
        }
    }

    /// Drains events after [`Reach::poll_fd`] became ready. Error: [`Error::Gone`] if a shared
    /// connection has ended.
    pub fn drain(&mut self) -> Result<()> {
        match self {
            Self::Own(qmp, _) => qmp.drain_events().map(drop),
            Self::Shared(_) => Err(gone()),
        }
    }

    /// Begins a new series of `cont` on a shared connection, after a new order.
    pub fn begin_anew(&mut self) {
        if let Self::Shared(shared) = self {
            shared.sending = None;
        }
    }

    /// Resumes the VM if it is paused. Returns true if it sent `cont`: on a shared connection, the
    /// VM may have been running. Error: the monitor is closed, or QEMU does not answer.
    pub fn resume(&mut self, now: Instant) -> Result<bool> {
        match self {
            Self::Own(qmp, _) => {
                let paused = qmp.status()? == RunStatus::Paused;
                if paused {
                    qmp.cont()?;
                }
                Ok(paused)
            }
            Self::Shared(shared) => shared.resume(now),
        }
    }

    /// Takes the engine's connection for itself, after the engine has ended. Error: [`Error::Io`]
    /// if this process has no free descriptor.
    pub fn take_over(&mut self) -> Result<()> {
        if let Self::Shared(shared) = self {
            let socket = rustix::io::fcntl_dupfd_cloexec(&shared.socket, 3)
                .map_err(Error::io("take over the engine's monitor"))?;
            let qmp = Qmp::take_over(socket, "that the engine has left");
            *self = Self::Own(Box::new(qmp), Some(shared.set));
        }
        Ok(())
    }

    /// Calls `operation` with the monitor, after [`Reach::take_over`]. Errors: those of
    /// `operation`; [`Error::Gone`] while the connection is shared.
    pub fn on_monitor<T>(&mut self, operation: impl FnOnce(&mut Qmp) -> Result<T>) -> Result<T> {
        match self {
            Self::Own(qmp, _) => operation(qmp),
            Self::Shared(_) => Err(gone()),
        }
    }

    /// Asks QEMU to quit; does nothing while the connection is shared. Error: [`Error::Gone`] if
    /// QEMU has ended.
    pub fn quit(&mut self) -> Result<()> {
        match self {
            Self::Own(qmp, _) => qmp.execute("quit", None).map(drop),
            Self::Shared(_) => Ok(()),
        }
    }

    /// Makes QEMU end with its guest again; does nothing while the connection is shared. Error:
    /// QEMU does not answer.
    pub fn release_end(&mut self, hold: EndHold) -> Result<()> {
        match self {
            Self::Own(qmp, _) => hold.release(qmp),
            Self::Shared(_) => Ok(()),
        }
    }

    /// Has QEMU close the descriptors that the engine passed to it. If no other engine lives, also
    /// removes what the engine left on the VM's disks: its jobs would fill the disk of their
    /// scratch files. Does nothing while the connection is shared. Error: QEMU refuses or does not
    /// answer.
    pub fn forget_engine(&mut self) -> Result<()> {
        let Self::Own(qmp, set) = self else { return Ok(()) };
        let swept = match has_other_engine(qmp) {
            Ok(true) => Ok(()),
            Ok(false) => fleece::sweep(qmp).map(drop),
            Err(error) => Err(error),
        };
        let forgot = match set {
            Some(set) => statefile::forget(qmp, *set),
            None => statefile::forget_ended(qmp),
        };
        match swept.and(forgot) {
            Err(Error::Gone { .. }) => Ok(()),
            other => other,
        }
    }
}

impl Shared {
    fn resume(&mut self, now: Instant) -> Result<bool> {
        let (since, next, gap) = *self.sending.get_or_insert((now, now, LOOK_EVERY));
        if now < next || now.saturating_duration_since(since) > SEND_FOR {
            return Ok(false);
        }
        self.sending = Some((since, now + gap, gap * 2));
        match rustix::net::send(&self.socket, CONT, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(sent) if sent == CONT.len() => Ok(true),
            // QEMU does not read at present. The line is so short that it is written whole or not
            // at all, and the next attempt follows soon.
            Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(false),
            Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => Err(gone()),
            Err(e) => Err(Error::io("write to the engine's monitor")(e)),
        }
    }
}

/// Returns true if an engine lives that has given a file to QEMU. The one that has just died is
/// asked for again: its descriptors are closed a moment before the kernel shows its end.
fn has_other_engine(qmp: &mut Qmp) -> Result<bool> {
    for _ in 0..ENGINE_LOOKS {
        if !statefile::has_engine(qmp)? {
            return Ok(false);
        }
        std::thread::sleep(ENGINE_LOOK_EVERY);
    }
    statefile::has_engine(qmp)
}

fn gone() -> Error {
    Error::Gone { monitor: "that the engine uses".into(), operation: "watch".into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_to_watch_survives_the_command_line() {
        let monitor = Watched::by_monitor("/a b".into()).words();
        assert!(
            matches!(Watched::parse(&monitor).unwrap().monitor, WatchedMonitor::Own(path) if path.as_os_str() == "/a b")
        );
        for uri in [None, Some("qemu:///session".to_owned())] {
            let words =
                WatchedMonitor::Libvirt { domain: "web".into(), uri: uri.clone(), set: Some(7) }
                    .words();
            let WatchedMonitor::Libvirt { domain, uri: read, set } =
                Watched::parse(&words).unwrap().monitor
            else {
                panic!()
            };
            assert_eq!((domain.as_str(), read, set), ("web", uri, Some(7)));
        }
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let (pipe, _writer) = std::io::pipe().unwrap();
        let monitor = WatchedMonitor::Shared { socket: socket.into(), set: 9 };
        let shared = Watched { monitor, pipe: Some(pipe.into()), hold: None };
        // The child finds them under the same numbers; so do we.
        let read = Watched::parse(&shared.words()).unwrap();
        assert!(matches!(read.monitor, WatchedMonitor::Shared { set: 9, .. }));
        assert!(read.pipe.is_some());
        for bad in [
            &["monitor"][..],
            &["shared", "x", "1"],
            &["shared", "99999", "1"],
            &["pipe", "99999", "monitor", "/a"],
            &["pipe", "x"],
            &[],
            &["libvirt", "a"],
        ] {
            assert!(
                Watched::parse(&bad.iter().map(OsString::from).collect::<Vec<_>>()).is_err(),
                "{bad:?}"
            );
        }
    }

    #[test]
    fn a_shared_connection_gets_a_few_whole_lines_and_then_none() {
        use std::io::Read;
        let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut shared = Shared { socket: ours.into(), set: 0, sending: None };
        let start = Instant::now();
        let sent = (0..100_000u64)
            .filter(|ms| shared.resume(start + Duration::from_millis(*ms)).unwrap())
            .count();
        assert!((2..20).contains(&sent), "{sent}");
        drop(shared);
        let mut text = String::new();
        theirs.read_to_string(&mut text).unwrap();
        assert_eq!(text.lines().count(), sent);
        assert!(text.lines().all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()));
    }
}
