//! One connection: frames in both directions, from any thread.
//!
//! ```text
//!   send      for each frame: lock ─▶ encrypt, write ─▶ wait for room without the lock ─▶ ...
//!   receive   wait for bytes without the lock ─▶ lock ─▶ decrypt ─▶ frames
//! ```
//!
//! Invariant: no thread waits for the other host while it holds the encryption lock, so two hosts
//! that both send also receive.

use crate::{Error, FRAME_BYTES_MAX, Result};
use keyframe_locks::IgnorePoison;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt;
use rustls::Connection;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

const HEAD_BYTES: usize = 5;
/// The longest wait for the other host to accept more bytes.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// The largest number of bytes that are encrypted at once.
const PART_BYTES: usize = 64 << 10;

/// A frame received from the other host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkFrame {
    /// The kind of frame, defined by the caller's protocol.
    pub kind: u8,
    /// The content of the frame.
    pub payload: Vec<u8>,
}

/// The received bytes of a channel that do not form a whole frame yet. Each receiving thread owns
/// one.
#[derive(Debug, Default)]
pub struct FrameBuffer {
    bytes: Vec<u8>,
    /// The number of `bytes` that earlier frames used.
    taken: usize,
}

/// An encrypted connection with a host that has the same key.
pub struct Channel {
    stream: TcpStream,
    tls: Mutex<Connection>,
    /// Held from a frame's first byte to its last.
    sending: Mutex<()>,
    peer: String,
}

impl Channel {
    /// Shakes hands within `timeout`, however slowly the other host sends.
    pub(crate) fn new(stream: TcpStream, mut tls: Connection, timeout: Duration) -> Result<Self> {
        let peer = stream.peer_addr().map_or_else(|_| "the other side".into(), |a| a.to_string());
        tls.set_buffer_limit(Some(4 * PART_BYTES));
        let new = Self { stream, tls: Mutex::new(tls), sending: Mutex::new(()), peer };
        let prepared = new.stream.set_nodelay(true).and_then(|()| new.stream.set_nonblocking(true));
        prepared.map_err(new.io("prepare the connection with"))?;
        new.shake_hands(Instant::now() + timeout)?;
        Ok(new)
    }

    fn shake_hands(&self, deadline: Instant) -> Result<()> {
        loop {
            let is_sent = {
                let mut tls = self.lock();
                let is_sent = self.flush(&mut tls)?;
                if is_sent && !tls.is_handshaking() {
                    return Ok(());
                }
                is_sent
            };
            let left = deadline.saturating_duration_since(Instant::now());
            let what = if is_sent { PollFlags::IN } else { PollFlags::OUT };
            if left.is_zero() || !self.wait(what, left)? {
                return Err(self.io("shake hands with")(ErrorKind::TimedOut.into()));
            }
            if is_sent {
                self.read_handshake()?;
            }
        }
    }

    /// Reads once, and handles what has arrived of the handshake.
    fn read_handshake(&self) -> Result<()> {
        let failed = |problem| Error::Tls { peer: self.peer.clone(), problem };
        let mut tls = self.lock();
        match tls.read_tls(&mut &self.stream) {
            Ok(0) => return Err(failed("it ended the handshake early".into())),
            Ok(_) => {}
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                return Ok(());
            }
            Err(e) => return Err(self.io("shake hands with")(e)),
        }
        if let Err(error) = tls.process_new_packets() {
            // The other host learns the reason, if the socket has room for it.
            let _ = self.flush(&mut tls);
            return Err(failed(format!("the handshake failed: {error}")));
        }
        Ok(())
    }

    /// Ends the connection if the other host acknowledges nothing of what was sent to it for
    /// `timeout`. Threads that wait in the connection then return with an error. A host that takes
    /// no bytes for so long counts as one that acknowledges nothing. Error: [`Error::Io`] if the
    /// kernel refuses the option.
    pub fn set_silence_limit(&self, timeout: Duration) -> Result<()> {
        let timeout_ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        let timeout_ms = timeout_ms.min(i32::MAX.unsigned_abs());
        sockopt::set_tcp_user_timeout(&self.stream, timeout_ms)
            .map_err(|e| self.io("prepare the connection with")(e.into()))
    }

    /// Returns the address of the other host.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Sends a frame of kind `kind` whose payload is `parts`, end to end. Errors: the frame is
    /// longer than [`FRAME_BYTES_MAX`]; the other host accepts nothing for 30 s; the connection has
    /// ended. After the last two, the connection is closed: a part of the frame may be sent.
    pub fn send(&self, kind: u8, parts: &[&[u8]]) -> Result<()> {
        let len = 1 + parts.iter().map(|part| part.len()).sum::<usize>();
        if len > FRAME_BYTES_MAX {
            return Err(Error::Frame { peer: "this host".into(), len_bytes: len as u64 });
        }
        let mut head = [0; HEAD_BYTES];
        head[..4].copy_from_slice(&(len as u32).to_le_bytes());
        head[4] = kind;
        let _alone = self.sending.lock().ignore_poison();
        let mut pieces = std::iter::once(&head[..])
            .chain(parts.iter().copied())
            .flat_map(|part| part.chunks(PART_BYTES));
        // The other host would take the next frame for the rest of this one.
        pieces.try_for_each(|piece| self.write(piece)).inspect_err(|_| self.close())
    }

    fn write(&self, mut piece: &[u8]) -> Result<()> {
        loop {
            {
                let mut tls = self.lock();
                let len = tls.writer().write(piece).map_err(self.io("write to"))?;
                piece = piece.get(len..).unwrap_or_default();
                if self.flush(&mut tls)? && piece.is_empty() {
                    return Ok(());
                }
                if !tls.wants_write() {
                    continue;
                }
            }
            if !self.wait(PollFlags::OUT, SEND_TIMEOUT)? {
                return Err(self.io("write to")(ErrorKind::TimedOut.into()));
            }
        }
    }

    /// Writes as much as the socket has room for. True if all was written.
    fn flush(&self, tls: &mut Connection) -> Result<bool> {
        while tls.wants_write() {
            match tls.write_tls(&mut &self.stream) {
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(e) => return Err(self.io("write to")(e)),
            }
        }
        Ok(true)
    }

    /// Returns the next frame, or `None` if no whole frame arrives within `timeout`. `input` keeps
    /// what has arrived of it. Errors: the connection has ended, or its bytes are not frames.
    pub fn receive(&self, input: &mut FrameBuffer, timeout: Duration) -> Result<Option<LinkFrame>> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(frame) = input.next(&self.peer)? {
                return Ok(Some(frame));
            }
            if self.decrypted(input)? {
                continue;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if !self.wait(PollFlags::IN, left)? {
                return Ok(None);
            }
            let mut tls = self.lock();
            match tls.read_tls(&mut &self.stream) {
                Ok(0) => return Err(Error::Closed { peer: self.peer.clone() }),
                Ok(_) => {
                    let processed = tls.process_new_packets();
                    processed.map_err(|e| Error::Tls {
                        peer: self.peer.clone(),
                        problem: e.to_string(),
                    })?;
                    if tls.wants_write() {
                        // Data without room in the socket is sent with the next frame.
                        let _ = self.flush(&mut tls)?;
                    }
                }
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(e) => return Err(self.io("read from")(e)),
            }
        }
    }

    /// Appends decrypted bytes to `input`. False if there are none.
    fn decrypted(&self, input: &mut FrameBuffer) -> Result<bool> {
        let mut tls = self.lock();
        let mut chunk = [0; 16 << 10];
        match tls.reader().read(&mut chunk) {
            Ok(0) => Err(Error::Closed { peer: self.peer.clone() }),
            Ok(len) => {
                input.push(chunk.get(..len).unwrap_or_default());
                Ok(true)
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(e) if e.kind() == ErrorKind::UnexpectedEof => {
                Err(Error::Closed { peer: self.peer.clone() })
            }
            Err(e) => Err(self.io("read from")(e)),
        }
    }

    /// Closes the connection. Threads that wait in it return with an error.
    pub fn close(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    fn wait(&self, what: PollFlags, timeout: Duration) -> Result<bool> {
        let timeout = Timespec {
            tv_sec: timeout.as_secs().cast_signed(),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        let mut fds = [PollFd::new(&self.stream, what)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(ready) => Ok(ready > 0),
            Err(Errno::INTR) => Ok(true),
            Err(e) => Err(self.io("wait for")(e.into())),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Connection> {
        self.tls.lock().ignore_poison()
    }

    fn io(&self, operation: &'static str) -> impl FnOnce(io::Error) -> Error {
        let peer = self.peer.clone();
        move |source| Error::Io { operation, peer, source }
    }
}

impl FrameBuffer {
    /// Appends received bytes.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Removes and returns the next frame, if it is complete.
    pub(crate) fn next(&mut self, peer: &str) -> Result<Option<LinkFrame>> {
        let left = self.bytes.get(self.taken..).unwrap_or_default();
        let Some(head) = left.first_chunk::<HEAD_BYTES>() else {
            self.bytes.drain(..self.taken);
            self.taken = 0;
            return Ok(None);
        };
        let [a, b, c, d, kind] = *head;
        let len = u32::from_le_bytes([a, b, c, d]) as usize;
        if !(1..=FRAME_BYTES_MAX).contains(&len) {
            return Err(Error::Frame { peer: peer.into(), len_bytes: len as u64 });
        }
        let Some(payload) = left.get(HEAD_BYTES..HEAD_BYTES + len - 1) else {
            self.bytes.drain(..self.taken);
            self.taken = 0;
            return Ok(None);
        };
        let payload = payload.to_vec();
        self.taken += HEAD_BYTES + payload.len();
        Ok(Some(LinkFrame { kind, payload }))
    }
}

#[cfg(test)]
mod tests {
    use crate::{Channel, Error, FRAME_BYTES_MAX, FrameBuffer, LinkFrame, Party, SharedKey};
    use std::io::ErrorKind;
    use std::net::TcpListener;
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn party(secret: &str) -> Party {
        Party::new(&SharedKey::of(secret.as_bytes()).unwrap()).unwrap()
    }

    /// The result of a handshake, for both sides.
    fn meet(ours: &Party, theirs: &Party) -> (crate::Result<Channel>, crate::Result<Channel>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::scope(|scope| {
            let accepted =
                scope.spawn(move || theirs.accept(listener.accept().unwrap().0, PATIENCE));
            let connected = ours.connect(address, PATIENCE);
            (connected, accepted.join().unwrap())
        })
    }

    #[test]
    fn frames_of_any_length_arrive_unchanged_both_ways_at_once() {
        let (ours, theirs) =
            meet(&party("a secret of some bytes"), &party("a secret of some bytes\n"));
        let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
        let frame =
            |n: usize| LinkFrame { kind: n as u8, payload: vec![n as u8; n * n * 401 % 700_000] };
        let run = |channel: &Channel| {
            let mut input = FrameBuffer::default();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for n in 0..60 {
                        let LinkFrame { kind, payload } = frame(n);
                        let (a, b) = payload.split_at(payload.len() / 3);
                        channel.send(kind, &[a, b]).unwrap();
                    }
                });
                for n in 0..60 {
                    let got = channel.receive(&mut input, PATIENCE).unwrap().unwrap();
                    assert!(got == frame(n), "frame {n}");
                }
            });
            assert_eq!(channel.receive(&mut input, Duration::ZERO).unwrap(), None);
        };
        std::thread::scope(|scope| {
            scope.spawn(|| run(&ours));
            run(&theirs);
        });
        ours.close();
        assert!(matches!(
            theirs.receive(&mut FrameBuffer::default(), PATIENCE),
            Err(Error::Closed { .. })
        ));
    }

    #[test]
    fn a_host_with_another_key_is_refused() {
        let (ours, theirs) =
            meet(&party("a secret of some bytes"), &party("another secret of some"));
        // In TLS 1.3 the client may see the refusal only when it reads.
        assert!(matches!(theirs, Err(Error::Tls { .. })), "{:?}", theirs.err());
        if let Ok(ours) = ours {
            ours.receive(&mut FrameBuffer::default(), PATIENCE).unwrap_err();
        }
    }

    #[test]
    fn a_host_without_tls_is_refused_within_the_time_limit() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut plain = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        std::io::Write::write_all(&mut plain, &[0x55; 2000]).unwrap();
        let theirs = party("a secret of some bytes").accept(listener.accept().unwrap().0, PATIENCE);
        assert!(theirs.is_err());
        let silent = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let limit = Duration::from_millis(50);
        assert!(
            party("a secret of some bytes").accept(listener.accept().unwrap().0, limit).is_err()
        );
        drop(silent);
    }

    /// A host without the key must not keep one of the places for connections.
    #[test]
    fn a_host_that_sends_a_byte_now_and_then_is_refused_within_the_time_limit() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut slow = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        // The head of a record that never ends.
        let bytes = [0x16, 3, 1, 0x3f, 0].into_iter().chain(std::iter::repeat_n(0, 2000));
        let drip = std::thread::spawn(move || {
            for byte in bytes {
                if std::io::Write::write_all(&mut slow, &[byte]).is_err() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let limit = Duration::from_millis(200);
        let theirs = party("a secret of some bytes").accept(listener.accept().unwrap().0, limit);
        let error = theirs.err().unwrap();
        assert!(
            matches!(&error, Error::Io { source, .. } if source.kind() == ErrorKind::TimedOut),
            "{error:?}"
        );
        drip.join().unwrap();
    }

    #[test]
    fn a_limit_of_silence_is_told_to_the_kernel() {
        let (ours, _theirs) =
            meet(&party("a secret of some bytes"), &party("a secret of some bytes"));
        let ours = ours.unwrap();
        ours.set_silence_limit(Duration::from_millis(1500)).unwrap();
        assert_eq!(rustix::net::sockopt::tcp_user_timeout(&ours.stream).unwrap(), 1500);
    }

    #[test]
    fn a_frame_that_is_too_long_is_refused_on_both_sides() {
        let (ours, _theirs) =
            meet(&party("a secret of some bytes"), &party("a secret of some bytes"));
        let long = vec![0; FRAME_BYTES_MAX];
        assert!(matches!(ours.unwrap().send(1, &[&long]), Err(Error::Frame { .. })));
        let mut input = FrameBuffer { bytes: vec![0xff; 9], taken: 0 };
        assert!(matches!(input.next("it"), Err(Error::Frame { .. })));
    }

    #[test]
    fn a_key_file_that_others_may_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, "0123456789abcdef0123").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert!(SharedKey::read(&path).err().unwrap().to_string().contains("644"));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        SharedKey::read(&path).unwrap();
        std::fs::write(&path, "short").unwrap();
        assert!(SharedKey::read(&path).err().unwrap().fix().unwrap().contains("urandom"));
    }
}
