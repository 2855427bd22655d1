//! A connection that acknowledges each packet.

use crate::packet::{DecodedItem, PacketDecoder, frame};
use crate::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// A message from the other end of a connection. Acknowledgements are not among them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GdbMessage {
    /// A packet's payload.
    Packet(Vec<u8>),
    /// A request to stop the target.
    Interrupt,
    /// The other end has closed the connection.
    Closed,
}

/// A connection to GDB or to a gdbstub.
#[derive(Debug)]
pub struct GdbConnection<S> {
    stream: S,
    peer: &'static str,
    decoder: PacketDecoder,
    /// The last packet, in case the peer asks for it again.
    sent: Vec<u8>,
}

impl<S: Read + Write + AsFd> GdbConnection<S> {
    /// Creates a connection over `stream`, which must be in blocking mode. `peer` names the other
    /// end in errors.
    pub fn new(stream: S, peer: &'static str) -> Self {
        Self { stream, peer, decoder: PacketDecoder::default(), sent: Vec::new() }
    }

    /// Sends a packet with this payload.
    ///
    /// Error: [`Error::Io`] if the stream cannot be written. A closed connection is reported by the
    /// next [`GdbConnection::receive`].
    pub fn send(&mut self, payload: &[u8]) -> Result<()> {
        self.sent = frame(payload);
        self.write(&self.sent.clone())
    }

    /// Asks the other end to stop the target. Error: [`Error::Io`] if the stream cannot be written.
    /// A closed connection is reported by the next [`GdbConnection::receive`].
    pub fn interrupt(&mut self) -> Result<()> {
        self.write(&[3])
    }

    /// Returns the next message, or `None` if there is none within `wait`. The end of the
    /// connection is the message [`GdbMessage::Closed`].
    ///
    /// Errors: [`Error::Io`] if the stream cannot be read or written, [`Error::Protocol`] if the
    /// other end sends what the protocol does not allow.
    pub fn receive(&mut self, wait: Duration) -> Result<Option<GdbMessage>> {
        let began = Instant::now();
        let mut bytes = [0; 4096];
        loop {
            while let Some(item) = self
                .decoder
                .next_item()
                .map_err(|problem| Error::Protocol { peer: self.peer, problem })?
            {
                match item {
                    DecodedItem::Packet(payload) => {
                        self.write(b"+")?;
                        return Ok(Some(GdbMessage::Packet(payload)));
                    }
                    DecodedItem::Interrupt => return Ok(Some(GdbMessage::Interrupt)),
                    DecodedItem::Corrupt => self.write(b"-")?,
                    DecodedItem::Nack => self.write(&self.sent.clone())?,
                    DecodedItem::Ack => {}
                }
            }
            let left = wait.saturating_sub(began.elapsed());
            match ready(&[&self.stream], left)? {
                WaitOutcome::Readable => {}
                WaitOutcome::TimedOut => return Ok(None),
                // After a signal, a message may still arrive.
                WaitOutcome::Interrupted if left.is_zero() => return Ok(None),
                WaitOutcome::Interrupted => continue,
            }
            match self.stream.read(&mut bytes) {
                Ok(0) => return Ok(Some(GdbMessage::Closed)),
                Ok(len) => self.decoder.feed(&bytes[..len]),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e)
                    if matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) =>
                {
                    return Ok(Some(GdbMessage::Closed));
                }
                Err(source) => return Err(Error::Io { peer: self.peer, source }),
            }
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match self.stream.write_all(bytes) {
            // Reading reports that the other end has closed the connection.
            Err(e) if matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {
                Ok(())
            }
            other => other.map_err(|source| Error::Io { peer: self.peer, source }),
        }
    }
}

/// Waits until bytes arrive on either of two connections, at most for `wait`. Returns early if a
/// signal arrives.
///
/// Error: [`Error::Io`] if the kernel refuses the wait.
pub fn wait_for_either<A: AsFd, B: AsFd>(
    a: &GdbConnection<A>,
    b: &GdbConnection<B>,
    wait: Duration,
) -> Result<()> {
    ready(&[&a.stream.as_fd(), &b.stream.as_fd()], wait).map(drop)
}

/// The outcome of a wait for streams.
enum WaitOutcome {
    Readable,
    TimedOut,
    /// A signal interrupted the wait.
    Interrupted,
}

fn ready(streams: &[&dyn AsFd], wait: Duration) -> Result<WaitOutcome> {
    let mut fds: Vec<_> = streams
        .iter()
        .map(|stream| PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN))
        .collect();
    let wait = Timespec {
        tv_sec: wait.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: wait.subsec_nanos().into(),
    };
    match poll(&mut fds, Some(&wait)) {
        Ok(0) => Ok(WaitOutcome::TimedOut),
        Ok(_) => Ok(WaitOutcome::Readable),
        Err(rustix::io::Errno::INTR) => Ok(WaitOutcome::Interrupted),
        Err(e) => Err(Error::Io { peer: "the debugger or QEMU", source: e.into() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    const SOON: Duration = Duration::from_secs(5);

    #[test]
    fn packets_are_acknowledged_and_sent_again() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let mut connection = GdbConnection::new(near, "the test");
        connection.send(b"OK").unwrap();
        let mut sent = [0; 6];
        far.read_exact(&mut sent).unwrap();
        assert_eq!(&sent, b"$OK#9a");
        far.write_all(b"-+$g#67$g#68\x03").unwrap();
        assert_eq!(connection.receive(SOON).unwrap(), Some(GdbMessage::Packet(b"g".to_vec())));
        assert_eq!(connection.receive(SOON).unwrap(), Some(GdbMessage::Interrupt));
        assert_eq!(connection.receive(Duration::ZERO).unwrap(), None);
        let mut answers = [0; 8];
        far.read_exact(&mut answers).unwrap();
        assert_eq!(&answers, b"$OK#9a+-");
        drop(far);
        assert_eq!(connection.receive(SOON).unwrap(), Some(GdbMessage::Closed));
        connection.send(b"OK").unwrap();
    }
}
