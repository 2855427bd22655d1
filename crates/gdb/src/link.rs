//! A connection on which each packet is acknowledged.

use crate::packet::{Decoder, Item, frame};
use crate::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// What comes over a connection, its acknowledgements apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Received {
    /// A packet's payload.
    Packet(Vec<u8>),
    /// The user wants the target to stop.
    Interrupt,
    /// The other end has gone.
    Closed,
}

/// A connection.
#[derive(Debug)]
pub struct Link<S> {
    stream: S,
    peer: &'static str,
    decoder: Decoder,
    /// For a peer that did not get it whole.
    sent: Vec<u8>,
}

impl<S: Read + Write + AsFd> Link<S> {
    /// Over `stream`, which blocks, to `peer`, as errors name it.
    pub fn new(stream: S, peer: &'static str) -> Self {
        Self { stream, peer, decoder: Decoder::default(), sent: Vec::new() }
    }

    /// Sends a packet.
    pub fn send(&mut self, payload: &[u8]) -> Result<()> {
        self.sent = frame(payload);
        self.write(&self.sent.clone())
    }

    /// Has the target stop.
    pub fn interrupt(&mut self) -> Result<()> {
        self.write(&[3])
    }

    /// What comes within `wait`, if anything does.
    pub fn receive(&mut self, wait: Duration) -> Result<Option<Received>> {
        let began = Instant::now();
        let mut bytes = [0; 4096];
        loop {
            while let Some(item) = self
                .decoder
                .next_item()
                .map_err(|problem| Error::Protocol { peer: self.peer, problem })?
            {
                match item {
                    Item::Packet(payload) => {
                        self.write(b"+")?;
                        return Ok(Some(Received::Packet(payload)));
                    }
                    Item::Interrupt => return Ok(Some(Received::Interrupt)),
                    Item::Garbled => self.write(b"-")?,
                    Item::Nack => self.write(&self.sent.clone())?,
                    Item::Ack => {}
                }
            }
            let left = wait.saturating_sub(began.elapsed());
            match ready(&[&self.stream], left)? {
                Ready::Yes => {}
                Ready::No => return Ok(None),
                // A signal says nothing of whether the answer comes: whoever waits for the first
                // one must not take it for silence.
                Ready::Interrupted if left.is_zero() => return Ok(None),
                Ready::Interrupted => continue,
            }
            match self.stream.read(&mut bytes) {
                Ok(0) => return Ok(Some(Received::Closed)),
                Ok(len) => self.decoder.feed(&bytes[..len]),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e)
                    if matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) =>
                {
                    return Ok(Some(Received::Closed));
                }
                Err(source) => return Err(Error::Io { peer: self.peer, source }),
            }
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match self.stream.write_all(bytes) {
            // Who has gone is found when it is read from.
            Err(e) if matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {
                Ok(())
            }
            other => other.map_err(|source| Error::Io { peer: self.peer, source }),
        }
    }
}

/// Waits until something comes over one of two connections, at most for `wait`.
pub fn wait_for_either<A: AsFd, B: AsFd>(a: &Link<A>, b: &Link<B>, wait: Duration) -> Result<()> {
    ready(&[&a.stream.as_fd(), &b.stream.as_fd()], wait).map(drop)
}

/// What a wait for streams came to.
enum Ready {
    Yes,
    /// Not within the time.
    No,
    /// A signal came before either.
    Interrupted,
}

fn ready(streams: &[&dyn AsFd], wait: Duration) -> Result<Ready> {
    let mut fds: Vec<_> = streams
        .iter()
        .map(|stream| PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN))
        .collect();
    let wait = Timespec {
        tv_sec: wait.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: wait.subsec_nanos().into(),
    };
    match poll(&mut fds, Some(&wait)) {
        Ok(0) => Ok(Ready::No),
        Ok(_) => Ok(Ready::Yes),
        Err(rustix::io::Errno::INTR) => Ok(Ready::Interrupted),
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
        let mut link = Link::new(near, "the test");
        link.send(b"OK").unwrap();
        let mut sent = [0; 6];
        far.read_exact(&mut sent).unwrap();
        assert_eq!(&sent, b"$OK#9a");
        far.write_all(b"-+$g#67$g#68\x03").unwrap();
        assert_eq!(link.receive(SOON).unwrap(), Some(Received::Packet(b"g".to_vec())));
        assert_eq!(link.receive(SOON).unwrap(), Some(Received::Interrupt));
        assert_eq!(link.receive(Duration::ZERO).unwrap(), None);
        let mut answers = [0; 8];
        far.read_exact(&mut answers).unwrap();
        assert_eq!(&answers, b"$OK#9a+-");
        drop(far);
        assert_eq!(link.receive(SOON).unwrap(), Some(Received::Closed));
        link.send(b"OK").unwrap();
    }
}
