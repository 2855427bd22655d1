//! Tells the program that started a session that the session is ready.
//!
//! | who waits | what it gets |
//! |---|---|
//! | a script, s6, dinit: an inherited descriptor | one line of JSON; then the descriptor is closed |
//! | systemd, podman: the socket of `NOTIFY_SOCKET` | `READY=1` (`sd_notify(3)`) |
//!
//! If the session ends before it is ready, the descriptor is closed without a line.

use crate::error::{Error, Result};
use crate::event::{Event, EventSink, SharedEventSink, Step, tell_failed};
use keyframe_kernel::inherited_descriptor::take_inherited_descriptor;
use keyframe_locks::IgnorePoison;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The longest wait until a reader takes the line.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);

/// The recipients of the message that a session is ready.
#[derive(Debug, Default)]
pub struct ReadyNotifier {
    descriptor: Option<File>,
    /// The path of a service manager's socket. An abstract one begins with `@`.
    socket: Option<OsString>,
}

impl ReadyNotifier {
    /// Takes the inherited descriptor `number`, if there is one, and the socket that
    /// `NOTIFY_SOCKET` names. Call this before the process opens anything. Error:
    /// [`Error::ReadyDescriptor`] if the descriptor is not open.
    pub fn take(number: Option<u32>) -> Result<Self> {
        let take = |number| {
            let error = |source| Error::ReadyDescriptor { number, source };
            take_inherited_descriptor(number).map(File::from).map_err(error)
        };
        let socket = std::env::var_os("NOTIFY_SOCKET").filter(|socket| !socket.is_empty());
        Ok(Self { descriptor: number.map(take).transpose()?, socket })
    }

    /// Tells all recipients that the session is ready. The line is `message` as JSON. Error: a
    /// recipient could not be told.
    pub fn notify(self, message: &impl Serialize) -> io::Result<()> {
        let Self { descriptor, socket } = self;
        let written = descriptor.map_or(Ok(()), |descriptor| write_line(descriptor, message));
        let sent = socket.map_or(Ok(()), |socket| send_ready(&socket));
        written.and(sent)
    }

    /// Returns a sink that passes events to `events`, and that tells the recipients when the session
    /// is ready.
    pub fn telling(self, events: SharedEventSink) -> SharedEventSink {
        Arc::new(ReadySink { events, notifier: Mutex::new(Some(self)) })
    }
}

fn write_line(mut descriptor: File, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    // A reader that does not read must not hold the session up.
    let limit = Timespec::try_from(WRITE_TIMEOUT).map_err(io::Error::other)?;
    if poll(&mut [PollFd::new(&descriptor, PollFlags::OUT)], Some(&limit))? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    descriptor.write_all(&line)
}

fn send_ready(socket: &OsString) -> io::Result<()> {
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(socket)?,
    };
    let sender = UnixDatagram::unbound()?;
    sender.set_write_timeout(Some(WRITE_TIMEOUT))?;
    sender.send_to_addr(b"READY=1\n", &address).map(drop)
}

/// A sink that tells a [`ReadyNotifier`].
struct ReadySink {
    events: SharedEventSink,
    /// `None` once it was told.
    notifier: Mutex<Option<ReadyNotifier>>,
}

impl EventSink<Event> for ReadySink {
    fn event(&self, event: &Event) {
        if let Event::Ready(status) = event
            && let Some(notifier) = self.notifier.lock().ignore_poison().take()
        {
            tell_failed(&*self.events, Step::TellReady, notifier.notify(status));
        }
        self.events.event(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NoEvents;
    use crate::control::EngineStatus;
    use std::io::Read;

    #[test]
    fn the_descriptor_gets_one_line_and_is_closed() {
        let (mut reader, writer) = io::pipe().unwrap();
        let descriptor = Some(File::from(std::os::fd::OwnedFd::from(writer)));
        let events = ReadyNotifier { descriptor, socket: None }.telling(Arc::new(NoEvents));
        let status = EngineStatus { vm: "web".into(), sealed: 1, ..EngineStatus::default() };
        for _ in 0..2 {
            events.event(&Event::Ready(Box::new(status.clone())));
        }
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text.matches('\n').count(), 1);
        let told: EngineStatus = serde_json::from_str(&text).unwrap();
        assert_eq!((&*told.vm, told.sealed), ("web", 1));
    }

    #[test]
    fn a_session_that_is_never_ready_closes_the_descriptor_without_a_line() {
        let (mut reader, writer) = io::pipe().unwrap();
        let descriptor = Some(File::from(std::os::fd::OwnedFd::from(writer)));
        drop(ReadyNotifier { descriptor, socket: None }.telling(Arc::new(NoEvents)));
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_service_manager_is_told_by_its_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let by_path = UnixDatagram::bind(&path).unwrap();
        let name = format!("keyframe-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let abstract_one = UnixDatagram::bind_addr(&address).unwrap();
        for (socket, receiver) in
            [(path.into_os_string(), by_path), (format!("@{name}").into(), abstract_one)]
        {
            ReadyNotifier { descriptor: None, socket: Some(socket) }.notify(&()).unwrap();
            let mut message = [0; 64];
            let count = receiver.recv(&mut message).unwrap();
            assert_eq!(&message[..count], b"READY=1\n");
        }
    }
}
