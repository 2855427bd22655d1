//! What a watchdog watches, and how it reaches it.
//!
//! | VM | way | why |
//! |---|---|---|
//! | launched | a monitor of its own | it was given a second one at launch |
//! | attached, socket | the engine's own connection, inherited | a running QEMU takes no further monitor |
//! | attached, libvirt | a virsh of its own | libvirt serves many clients |
//!
//! ```text
//!   a shared connection:   engine ──stop──▶ ┐                     ┌──▶ answers and events: the engine's
//!                          watchdog ─cont─▶ ┴─▶ QEMU ──▶ socket ──┤
//!                                                                 └──▶ the watchdog's, once the engine is gone
//! ```
//!
//! While the engine lives, the watchdog only writes: a `cont` in one piece, with an id that no
//! engine waits for. It cannot see whether the VM is paused, nor by whom; so it writes only a few,
//! all within [`SEND_FOR`] behind the deadline, since a pause that is found later may be a user's.
//! The engine sees the RESUME as one that it did not ask for.
//!
//! Left out: an engine that stalls before its `stop` for longer than that, and after it a second
//! time.

use super::{CONNECT_TIMEOUT, LAST_STOP, LOOK_EVERY};
use crate::{Error, Qmp, Result, RunStatus, fleece, spawn, statefile};
use keyframe_vmm::Resumer;
use rustix::event::{PollFd, PollFlags};
use rustix::net::SendFlags;
use rustix::process::{PidfdFlags, PidfdGetfdFlags};
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// For how long behind the deadline a `cont` is sent without knowing the VM's state.
const SEND_FOR: Duration = LAST_STOP;
/// Resumes a VM in whatever state it is paused; on one that runs it does nothing.
const CONT: &[u8] = b"{\"execute\": \"cont\", \"id\": \"keyframe-watchdog\"}\n";

/// What a watchdog watches.
#[derive(Debug)]
pub enum Watched {
    /// A monitor of its own, at this socket.
    Monitor(PathBuf),
    /// The engine's connection to its monitor.
    Shared {
        /// The connection.
        socket: OwnedFd,
        /// The descriptor set that QEMU is to forget with the engine.
        set: u32,
    },
    /// A VM of libvirt's.
    Libvirt {
        /// The domain.
        domain: String,
        /// libvirt's URI; virsh's default without one.
        uri: Option<String>,
        /// The descriptor set that QEMU is to forget with the engine.
        set: Option<u32>,
    },
}

impl Watched {
    /// The words of a command line that [`Watched::parse`] reads in a child that has inherited
    /// [`Watched::inherited`].
    pub(super) fn words(&self) -> Vec<OsString> {
        match self {
            Self::Monitor(path) => vec!["monitor".into(), path.into()],
            Self::Shared { socket, set } => {
                vec![
                    "shared".into(),
                    spawn::number(socket).to_string().into(),
                    set.to_string().into(),
                ]
            }
            Self::Libvirt { domain, uri, set } => {
                let mut words = vec!["libvirt".into(), domain.into()];
                words.push(set.map_or_else(|| "-".to_owned(), |set| set.to_string()).into());
                words.extend(uri.as_ref().map(OsString::from));
                words
            }
        }
    }

    /// The same as a value of crate `vmm`, for [`super::Watchdog::spawn_resumer`].
    pub fn into_resumer(self) -> Resumer {
        let words = self.words();
        let descriptors = match self {
            Self::Shared { socket, .. } => vec![socket],
            _ => Vec::new(),
        };
        Resumer { words, descriptors }
    }

    pub(super) fn inherited(&self) -> Vec<&OwnedFd> {
        match self {
            Self::Shared { socket, .. } => vec![socket],
            _ => Vec::new(),
        }
    }

    /// Reads the words that [`super::Watchdog::spawn`] gives a watchdog's process, in that process.
    pub fn parse(words: &[OsString]) -> Result<Self> {
        let bad = || Error::Watchdog { problem: format!("{words:?} says nothing to watch") };
        let text: Vec<&str> = words.iter().map(|w| w.to_str().unwrap_or_default()).collect();
        match text.as_slice() {
            ["monitor", _] => Ok(Self::Monitor(words.get(1).ok_or_else(bad)?.into())),
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

/// The descriptor that this process has inherited under `number`, once more.
fn inherited(number: i32) -> Result<OwnedFd> {
    let operation = || format!("take hold of inherited descriptor {number}");
    let ourselves = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())
        .map_err(Error::io(operation()))?;
    rustix::process::pidfd_getfd(&ourselves, number, PidfdGetfdFlags::empty())
        .map_err(Error::io(operation()))
}

/// How a watchdog's process reaches QEMU.
pub(super) enum Reach {
    /// Over a monitor of its own, and the descriptor set to forget.
    Own(Box<Qmp>, Option<u32>),
    /// Over the engine's.
    Shared(Shared),
}

/// A connection that the engine reads.
pub(super) struct Shared {
    socket: OwnedFd,
    set: u32,
    /// Since when the pause is overdue, when to send next, and how long to wait then.
    sending: Option<(Instant, Instant, Duration)>,
}

impl Reach {
    pub fn to(watched: Watched) -> Result<Self> {
        Ok(match watched {
            Watched::Monitor(path) => {
                Self::Own(Box::new(Qmp::connect(&path, CONNECT_TIMEOUT)?), None)
            }
            Watched::Shared { socket, set } => Self::Shared(Shared { socket, set, sending: None }),
            Watched::Libvirt { domain, uri, set } => {
                Self::Own(Box::new(Qmp::connect_libvirt(&domain, uri.as_deref(), &[])?), set)
            }
        })
    }

    /// What to wait for: events, or on a shared connection only its end.
    pub fn poll_fd(&self) -> PollFd<'_> {
        match self {
            Self::Own(qmp, _) => PollFd::new(qmp.as_ref(), PollFlags::IN),
            Self::Shared(shared) => PollFd::new(&shared.socket, PollFlags::empty()),
        }
    }

    /// Takes in what [`Reach::poll_fd`] told of.
    pub fn drain(&mut self) -> Result<()> {
        match self {
            Self::Own(qmp, _) => qmp.drain_events().map(drop),
            Self::Shared(_) => Err(gone()),
        }
    }

    /// A new order has come.
    pub fn begin_anew(&mut self) {
        if let Self::Shared(shared) = self {
            shared.sending = None;
        }
    }

    /// Lets the VM run where it is paused; true if it did, or where it cannot know.
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

    /// The engine is gone: its connection is ours.
    pub fn take_over(&mut self) -> Result<()> {
        if let Self::Shared(shared) = self {
            let socket = rustix::io::fcntl_dupfd_cloexec(&shared.socket, 3)
                .map_err(Error::io("take over the engine's monitor"))?;
            let qmp = Qmp::take_over(socket, "that the engine has left");
            *self = Self::Own(Box::new(qmp), Some(shared.set));
        }
        Ok(())
    }

    /// Ends QEMU, once the connection is ours. Error: [`Error::Gone`] once it has ended.
    pub fn quit(&mut self) -> Result<()> {
        match self {
            Self::Own(qmp, _) => qmp.execute("quit", None).map(drop),
            Self::Shared(_) => Ok(()),
        }
    }

    /// QEMU forgets what the engine gave it, and what it had of the VM's disks: a job of its would
    /// fill the disk of its scratch file.
    pub fn forget_engine(&mut self) -> Result<()> {
        let Self::Own(qmp, set) = self else { return Ok(()) };
        let swept = match statefile::has_engine(qmp) {
            Ok(true) => Ok(()),
            Ok(false) => fleece::sweep(qmp).map(drop),
            Err(error) => Err(error),
        };
        let forgot = set.map_or(Ok(()), |set| statefile::forget(qmp, set));
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
            // So little that it goes or does not: QEMU reads nothing, and the next attempt is not
            // far.
            Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(false),
            Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => Err(gone()),
            Err(e) => Err(Error::io("write to the engine's monitor")(e)),
        }
    }
}

fn gone() -> Error {
    Error::Gone { monitor: "that the engine uses".into(), operation: "watch".into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_to_watch_survives_the_command_line() {
        let monitor = Watched::Monitor("/a b".into()).words();
        assert!(
            matches!(Watched::parse(&monitor).unwrap(), Watched::Monitor(path) if path.as_os_str() == "/a b")
        );
        for uri in [None, Some("qemu:///session".to_owned())] {
            let words =
                Watched::Libvirt { domain: "web".into(), uri: uri.clone(), set: Some(7) }.words();
            let Watched::Libvirt { domain, uri: read, set } = Watched::parse(&words).unwrap()
            else {
                panic!()
            };
            assert_eq!((domain.as_str(), read, set), ("web", uri, Some(7)));
        }
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let shared = Watched::Shared { socket: socket.into(), set: 9 };
        // The child finds it under the same number; so do we.
        assert!(matches!(Watched::parse(&shared.words()).unwrap(), Watched::Shared { set: 9, .. }));
        for bad in [
            &["monitor"][..],
            &["shared", "x", "1"],
            &["shared", "99999", "1"],
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
