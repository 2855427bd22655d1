//! One connection of a QEMU: what it sends, what it is sent, and how it is seen that it has taken
//! in all of it.
//!
//! QEMU's netdev reads up to 68 KiB at once and hands each frame to the NIC. A frame that the NIC
//! cannot take waits in a queue of QEMU's, and QEMU drops it when the VM stops. While that queue is
//! not empty QEMU does not read its socket, with one exception: the frames that came with the same
//! read follow it into the queue, and the first that the NIC takes switches reading on again, with
//! the others still waiting. Two things make the queue visible from here:
//!
//! ```text
//!   | 0 | len | frame •| 0 | len | frame •|       • a descriptor (of /dev/null) goes with the last piece of each frame
//!   └─ one read ───────┘└─ one read ──────┘         so that a read ends there: at most one frame ever waits in QEMU
//!
//!   clean ──frame──▶ sent ──probe: the 0 of the next frame's header──▶ probed ──frame, without its 0──▶ sent
//!                     │                                                  │
//!                unread = 0: QEMU has it                  unread = 0: QEMU reads, so no frame waits there
//! ```
//!
//! The kernel ends a read of a stream behind bytes that have descriptors with them. QEMU gives
//! `recvmsg` no room for descriptors, so the kernel closes them; none is ever seen in QEMU. Seen
//! with 7.2 and 10.0.
//!
//! Invariants: a frame is sent whole or its connection is closed; the probe is part of the stream,
//! so a frame after it loses nothing.
//!
//! Left out: frames that QEMU queues behind a hub or a network filter between netdev and NIC;
//! nothing shows those.

use crate::frame::{Deframer, Frame};
use rustix::io::{Errno, IoSlice};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// The most that is sent with one call: what the kernel keeps in one piece, so that a descriptor
/// sent with it is at its end.
const PIECE_BYTES: usize = 32 << 10;
/// What QEMU's end may hold before QEMU has to wait, where the kernel does not say.
const SEND_BUFFER_BYTES: usize = 212_992;

/// A NIC that takes nothing at all for so long has no driver, or is switched off.
const DEAF_AFTER: Duration = Duration::from_secs(2);
/// The same of one that was deaf at the hold before.
const STILL_DEAF_AFTER: Duration = Duration::from_millis(20);

/// How far QEMU is with what it was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// All was delivered to the NIC.
    Quiet,
    /// A frame is half sent: QEMU does not read.
    Sending,
    /// QEMU has not read all frames.
    Unread,
    /// QEMU has read all frames, but does not read on: the NIC does not take the last one.
    Waiting,
    /// Nothing was taken for so long that nobody listens: what waits there is lost, as on any wire.
    Deaf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tail {
    Clean,
    Sent,
    Probed,
}

/// Why sending ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// Nothing is left to send.
    All,
    /// The socket is full.
    Full,
    /// Too many descriptors are on their way (a limit of the user's): try again soon.
    Later,
}

/// What one read brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// So many bytes.
    Bytes(usize),
    /// Nothing waits.
    Nothing,
    /// The connection has ended.
    End,
}

/// The connection.
pub struct Port {
    stream: UnixStream,
    deframer: Deframer,
    sending: Option<(Frame, usize)>,
    tail: Tail,
    send_buffer_bytes: usize,
    /// Since when QEMU has not read on during this hold, and what was unread then.
    stuck: Option<(Instant, u64)>,
    deaf: bool,
    /// The most that QEMU's end held since [`Self::watch`], in the kernel's accounting, rounded up.
    peak_bytes: usize,
}

impl Port {
    /// For a connection that does not block.
    pub fn new(stream: UnixStream) -> Self {
        let send_buffer_bytes = std::fs::read_to_string("/proc/sys/net/core/wmem_default")
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .unwrap_or(SEND_BUFFER_BYTES);
        let (deframer, tail) = (Deframer::default(), Tail::Clean);
        Self {
            stream,
            deframer,
            sending: None,
            tail,
            send_buffer_bytes,
            stuck: None,
            deaf: false,
            peak_bytes: 0,
        }
    }

    /// Reads once and appends the frames that are complete. Error: why the connection cannot go on.
    ///
    /// `buffer` is larger than what a socket holds, so that one read takes all that waits.
    pub fn take(&mut self, buffer: &mut [u8], frames: &mut Vec<Frame>) -> Result<Taken, String> {
        let len = loop {
            match rustix::net::recv(&self.stream, &mut *buffer, RecvFlags::DONTWAIT) {
                Ok((_, len)) => break len,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(Taken::Nothing),
                Err(e) => return Err(format!("reading from it: {}", std::io::Error::from(e))),
            }
        };
        if len == 0 {
            return Ok(Taken::End);
        }
        let (before, full) = (frames.len(), len == buffer.len());
        self.deframer.push(buffer.get(..len).unwrap_or_default(), frames)?;
        // All that was read was in the socket at once: nobody else empties it.
        let pieces =
            frames.iter().skip(before).map(|frame| kernel_bytes(frame.wire().len())).sum::<usize>();
        let occupied =
            if full { usize::MAX } else { pieces + kernel_bytes(self.deframer.begun_bytes()) };
        self.peak_bytes = self.peak_bytes.max(occupied);
        Ok(Taken::Bytes(len))
    }

    /// Sends what has begun, and then what `next` gives. Error: why the connection cannot go on.
    pub fn send(
        &mut self,
        marker: BorrowedFd<'_>,
        mut next: impl FnMut() -> Option<Frame>,
    ) -> Result<Sent, String> {
        loop {
            let Some((frame, from)) = self.sending.take().or_else(|| {
                // Its first byte may have gone ahead.
                next().map(|frame| (frame, usize::from(self.tail == Tail::Probed)))
            }) else {
                return Ok(Sent::All);
            };
            self.tail = Tail::Sent;
            let left = frame.wire().get(from..).unwrap_or_default();
            let piece = left.get(..PIECE_BYTES).unwrap_or(left);
            match send_piece(&self.stream, piece, (piece.len() == left.len()).then_some(marker)) {
                Ok(len) if from + len == frame.wire().len() => {}
                Ok(len) => self.sending = Some((frame, from + len)),
                Err(e) => {
                    self.keep(frame, from);
                    return match e {
                        Errno::AGAIN => Ok(Sent::Full),
                        Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM => Ok(Sent::Later),
                        e => Err(format!("writing to it: {}", std::io::Error::from(e))),
                    };
                }
            }
        }
    }

    /// Of a frame nothing was sent now.
    fn keep(&mut self, frame: Frame, from: usize) {
        self.sending = Some((frame, from));
    }

    /// How far QEMU is; sends the probe when it is due. Only while nothing is delivered.
    pub fn rest(&mut self) -> Result<Rest, String> {
        let rest = self.taken_in()?;
        if rest == Rest::Quiet {
            (self.stuck, self.deaf) = (None, false);
            return Ok(rest);
        }
        let unread = self.unread()?;
        let since = match self.stuck {
            Some((since, before)) if before == unread => since,
            _ => Instant::now(),
        };
        self.stuck = Some((since, unread));
        if since.elapsed() >= if self.deaf { STILL_DEAF_AFTER } else { DEAF_AFTER } {
            self.deaf = true;
            return Ok(Rest::Deaf);
        }
        Ok(rest)
    }

    fn taken_in(&mut self) -> Result<Rest, String> {
        if self.sending.is_some() {
            return Ok(Rest::Sending);
        }
        if self.tail == Tail::Clean {
            return Ok(Rest::Quiet);
        }
        if self.tail == Tail::Sent && self.unread()? == 0 {
            match send_piece(&self.stream, &[0], None) {
                Ok(_) => self.tail = Tail::Probed,
                Err(Errno::AGAIN) => {}
                Err(e) => return Err(format!("writing to it: {}", std::io::Error::from(e))),
            }
        }
        Ok(match (self.tail, self.unread()?) {
            (Tail::Probed, 0) => Rest::Quiet,
            (Tail::Probed, _) => Rest::Waiting,
            _ => Rest::Unread,
        })
    }

    /// What QEMU has not read, in the kernel's accounting.
    pub fn unread(&self) -> Result<u64, String> {
        keyframe_kernel::socket::unread_bytes(self.stream.as_fd())
            .map_err(|e| format!("asking what it has read: {e}"))
    }

    /// A hold begins: watches whether QEMU's end fills up, and whether QEMU reads on.
    pub fn watch(&mut self) {
        self.peak_bytes = 0;
        self.stuck = None;
    }

    /// Why frames that the guest sent since [`Self::watch`] may be missing; to be asked when
    /// nothing waits.
    pub fn torn(&self) -> Option<String> {
        if self.deframer.begun_bytes() > 0 {
            return Some("it has sent half a frame".into());
        }
        (self.peak_bytes >= self.send_buffer_bytes).then(|| {
            "its socket was full, or nearly: the guest sent faster than the switch could read, and QEMU drops what it \
             cannot send when it stops"
                .into()
        })
    }
}

impl AsFd for Port {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn send_piece(
    stream: &UnixStream,
    piece: &[u8],
    marker: Option<BorrowedFd<'_>>,
) -> Result<usize, Errno> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = marker.map(|fd| [fd]);
    if let Some(descriptors) = &descriptors {
        // The space is made for one.
        let _ = control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    loop {
        match rustix::net::sendmsg(stream, &[IoSlice::new(piece)], &mut control, flags) {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

/// At least what the kernel counts for `len` bytes sent with one call: rounded up to a power of
/// two, with what describes them.
fn kernel_bytes(len: usize) -> usize {
    /// What stands beside each piece's bytes, in their block and in its own.
    const BESIDE: usize = 512;
    const OWN: usize = 256;
    let pieces = len.div_ceil(PIECE_BYTES);
    let page_rounded = len.next_multiple_of(4096) + pieces * (4096 + OWN);
    let block = (len + BESIDE).next_power_of_two() + OWN;
    if len + BESIDE <= 4096 { block } else { page_rounded.max(block) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::FRAME_BYTES_MAX;

    fn pair() -> (Port, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nonblocking(true).unwrap();
        (Port::new(ours), theirs)
    }

    fn read(from: &UnixStream, bytes_max: usize) -> Vec<u8> {
        let mut buffer = vec![0; bytes_max];
        let len =
            rustix::net::recv(from, &mut buffer[..], RecvFlags::DONTWAIT).map_or(0, |(_, len)| len);
        buffer.truncate(len);
        buffer
    }

    #[test]
    fn a_reader_gets_one_frame_at_a_time_however_many_wait() {
        let marker = std::fs::File::open("/dev/null").unwrap();
        let (mut port, qemu) = pair();
        // Of one piece, of several, at the boundary of pieces.
        let sizes = [60, 1514, 9000, PIECE_BYTES - 4, PIECE_BYTES, 40_000, 60];
        let frames: Vec<Frame> =
            sizes.iter().map(|len| Frame::new(&vec![*len as u8; *len]).unwrap()).collect();
        let mut queue = frames.iter().cloned();
        assert_eq!(port.send(marker.as_fd(), || queue.next()).unwrap(), Sent::All);
        let (mut deframer, mut found) = (Deframer::default(), Vec::new());
        while port.unread().unwrap() > 0 {
            let before = found.len();
            deframer.push(&read(&qemu, 69_632), &mut found).unwrap();
            assert!(found.len() <= before + 1, "two frames with one read");
        }
        assert_eq!(found, frames);
    }

    #[test]
    fn rest_is_seen_only_behind_the_probe_and_the_stream_stays_whole() {
        let marker = std::fs::File::open("/dev/null").unwrap();
        let (mut port, qemu) = pair();
        assert_eq!(port.rest().unwrap(), Rest::Quiet);
        let (mut deframer, mut found, mut sent) = (Deframer::default(), Vec::new(), Vec::new());
        for round in 1..4 {
            let frame = Frame::new(&[round; 100]).unwrap();
            sent.push(frame.clone());
            let mut queue = Some(frame);
            assert_eq!(port.send(marker.as_fd(), || queue.take()).unwrap(), Sent::All);
            assert_eq!(port.rest().unwrap(), Rest::Unread);
            deframer.push(&read(&qemu, 69_632), &mut found).unwrap();
            assert_eq!(port.rest().unwrap(), Rest::Waiting);
            assert_eq!(port.rest().unwrap(), Rest::Waiting);
            let probe = read(&qemu, 69_632);
            assert_eq!(probe, [0]);
            deframer.push(&probe, &mut found).unwrap();
            // Twice: one probe is enough for two holds.
            assert_eq!(port.rest().unwrap(), Rest::Quiet);
            assert_eq!(port.rest().unwrap(), Rest::Quiet);
        }
        assert_eq!(found, sent);
    }

    #[test]
    fn what_a_full_socket_takes_in_pieces_arrives_whole() {
        let marker = std::fs::File::open("/dev/null").unwrap();
        let (mut port, qemu) = pair();
        let frames: Vec<Frame> = (0..40u8).map(|n| Frame::new(&vec![n; 65_000]).unwrap()).collect();
        let mut queue = frames.iter().cloned();
        let (mut deframer, mut found, mut full) = (Deframer::default(), Vec::new(), 0);
        while found.len() < frames.len() {
            match port.send(marker.as_fd(), || queue.next()).unwrap() {
                Sent::Full => full += 1,
                Sent::All | Sent::Later => {}
            }
            if port.sending.is_some() {
                assert_eq!(port.rest().unwrap(), Rest::Sending);
            }
            deframer.push(&read(&qemu, 1000), &mut found).unwrap();
            deframer.push(&read(&qemu, 69_632), &mut found).unwrap();
        }
        assert!(full > 0, "the socket was never full");
        assert_eq!(found, frames);
    }

    #[test]
    fn the_estimate_is_never_below_what_the_kernel_counts() {
        let (port, mut qemu) = pair();
        for len in (5..6000).chain((6000..FRAME_BYTES_MAX + 4).step_by(97)) {
            use std::io::Write;
            qemu.write_all(&vec![0; len]).unwrap();
            let counted = keyframe_kernel::socket::unread_bytes(qemu.as_fd()).unwrap();
            assert!(
                kernel_bytes(len) as u64 >= counted,
                "{len}: {} < {counted}",
                kernel_bytes(len)
            );
            let mut left = len;
            while left > 0 {
                left -= read(&port.stream, len).len();
            }
        }
    }

    #[test]
    fn a_sender_that_had_to_wait_is_noticed_and_one_that_had_not_is_not() {
        use std::io::Write;
        for (frames, torn) in [(20, false), (1000, true)] {
            let (mut port, mut qemu) = pair();
            port.watch();
            let frame = Frame::new(&[1; 1514]).unwrap();
            let mut blocked = false;
            for _ in 0..frames {
                blocked |= qemu.write(frame.wire()).is_err();
            }
            assert_eq!(blocked, torn);
            let (mut buffer, mut found) = (vec![0; 512 << 10], Vec::new());
            while port.take(&mut buffer, &mut found).unwrap() != Taken::Nothing {}
            assert_eq!(port.torn().is_some(), torn);
            port.watch();
            assert_eq!(port.torn(), None);
            qemu.write_all(&frame.wire()[..700]).unwrap();
            port.take(&mut buffer, &mut found).unwrap();
            assert!(port.torn().unwrap().contains("half a frame"));
        }
    }
}
