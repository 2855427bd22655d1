//! One connection of a QEMU: frames from it, frames to it, and whether QEMU has taken all of them.
//!
//! QEMU's netdev reads up to 68 KiB at once and passes each frame to the NIC. If the NIC cannot
//! take a frame, QEMU queues it, and drops it when the VM stops. While that queue is not empty,
//! QEMU does not read its socket, with one exception: frames from the same read follow into the
//! queue, and the first that the NIC takes resumes reading while the others still wait. Two methods
//! make the queue visible:
//!
//! ```text
//!   | 0 | len | frame •| 0 | len | frame •|     • a descriptor (of /dev/null) goes with the last
//!   └─ one read ──────┘ └─ one read ──────┘       piece of each frame, so that a read ends there:
//!                                                 at most one frame ever waits in QEMU
//!
//!   clean ──frame──▶ sent ──probe: the 0 of the next frame's header──▶ probed
//!                     │    ◀──────────frame, without its 0────────────    │
//!                unread = 0: QEMU has it           unread = 0: QEMU reads, so no frame waits there
//! ```
//!
//! The kernel ends a read of a stream after bytes that have descriptors with them. QEMU gives
//! `recvmsg` no room for descriptors, so the kernel closes them, and QEMU never sees one. QEMU 7.2
//! and 10.0 behave so.
//!
//! Invariants: a frame is sent whole, or its connection is closed. The probe is part of the stream,
//! so the frame after it loses no byte.
//!
//! Left out: frames that QEMU queues in a hub or a network filter between netdev and NIC. They
//! cannot be detected.

use crate::frame::{Deframer, Frame};
use rustix::io::{Errno, IoSlice};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// The most bytes that one call sends. The kernel keeps that many in one piece, so a descriptor
/// that is sent with it is at its end.
const PIECE_BYTES: usize = 32 << 10;
/// The capacity of QEMU's end, in bytes, if the kernel does not tell.
const SEND_BUFFER_BYTES: usize = 212_992;

/// The time without a read after which a NIC counts as having no driver or being switched off.
const DEAF_AFTER: Duration = Duration::from_secs(2);
/// The same, for a NIC that took no frame at the previous hold.
const STILL_DEAF_AFTER: Duration = Duration::from_millis(20);

/// The progress of QEMU with the frames that were sent to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// The NIC has taken all frames.
    Complete,
    /// A frame is partly sent, and QEMU does not read.
    Sending,
    /// QEMU has not read all frames.
    Unread,
    /// QEMU has read all frames but does not read on: the NIC does not take the last one.
    Waiting,
    /// QEMU has read nothing for [`DEAF_AFTER`]: the NIC counts as not listening. The frames that
    /// wait there are lost, as on a cable.
    Deaf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tail {
    Clean,
    Sent,
    Probed,
}

/// The reason why a port has stopped sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOutcome {
    /// No frame is left to send.
    All,
    /// The socket is full.
    Full,
    /// Too many descriptors are in transit (a limit per user). The caller tries again soon.
    Later,
}

/// The result of one read from a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadOutcome {
    /// The number of bytes.
    Bytes(usize),
    /// No byte waits.
    Nothing,
    /// The connection has ended.
    End,
}

/// A port of the switch: the connection of one QEMU.
pub struct Port {
    stream: UnixStream,
    deframer: Deframer,
    sending: Option<(Frame, usize)>,
    tail: Tail,
    send_buffer_bytes: usize,
    /// The time since which QEMU has not read during this hold, and the number of unread bytes
    /// then.
    stuck: Option<(Instant, u64)>,
    deaf: bool,
    /// The most that QEMU's end held since [`Self::watch`], in the kernel's accounting, rounded up.
    peak_bytes: usize,
}

impl Port {
    /// Makes a port on `stream`, which must not block.
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

    /// Reads once and appends the frames that are complete to `frames`. The error tells as a text
    /// why the connection must be closed.
    ///
    /// `buffer` must be larger than the send buffer of the other end, so that one read takes all
    /// waiting bytes.
    pub fn read(
        &mut self,
        buffer: &mut [u8],
        frames: &mut Vec<Frame>,
    ) -> Result<ReadOutcome, String> {
        let len = loop {
            match rustix::net::recv(&self.stream, &mut *buffer, RecvFlags::DONTWAIT) {
                Ok((_, len)) => break len,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(ReadOutcome::Nothing),
                Err(e) => return Err(format!("reading from it: {}", std::io::Error::from(e))),
            }
        };
        if len == 0 {
            return Ok(ReadOutcome::End);
        }
        let (before, full) = (frames.len(), len == buffer.len());
        self.deframer.push(buffer.get(..len).unwrap_or_default(), frames)?;
        // The socket held all these bytes at once, because only this read empties it.
        let pieces =
            frames.iter().skip(before).map(|frame| kernel_bytes(frame.wire().len())).sum::<usize>();
        let occupied =
            if full { usize::MAX } else { pieces + kernel_bytes(self.deframer.begun_bytes()) };
        self.peak_bytes = self.peak_bytes.max(occupied);
        Ok(ReadOutcome::Bytes(len))
    }

    /// Sends the frame that was partly sent, then the frames that `next` returns. Each frame goes
    /// with a duplicate of the descriptor `marker`, which ends a read of QEMU. Returns the reason
    /// why it has stopped sending. The error tells as a text why the connection must be closed.
    pub fn send(
        &mut self,
        marker: BorrowedFd<'_>,
        mut next: impl FnMut() -> Option<Frame>,
    ) -> Result<SendOutcome, String> {
        loop {
            let Some((frame, from)) = self.sending.take().or_else(|| {
                // The probe has already sent the first byte of this frame.
                next().map(|frame| (frame, usize::from(self.tail == Tail::Probed)))
            }) else {
                return Ok(SendOutcome::All);
            };
            self.tail = Tail::Sent;
            let left = frame.wire().get(from..).unwrap_or_default();
            let piece = left.get(..PIECE_BYTES).unwrap_or(left);
            match send_piece(&self.stream, piece, (piece.len() == left.len()).then_some(marker)) {
                Ok(len) if from + len == frame.wire().len() => {}
                Ok(len) => self.sending = Some((frame, from + len)),
                Err(e) => {
                    self.keep_unsent(frame, from);
                    return match e {
                        Errno::AGAIN => Ok(SendOutcome::Full),
                        Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM => Ok(SendOutcome::Later),
                        e => Err(format!("writing to it: {}", std::io::Error::from(e))),
                    };
                }
            }
        }
    }

    /// Remembers a frame of which this call sent no byte.
    fn keep_unsent(&mut self, frame: Frame, from: usize) {
        self.sending = Some((frame, from));
    }

    /// Returns how far QEMU has read, and sends the probe when it is due. Call it only while no
    /// frame is delivered. The error tells as a text why the connection must be closed.
    pub fn delivery(&mut self) -> Result<Delivery, String> {
        let rest = self.probe_delivery()?;
        if rest == Delivery::Complete {
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
            return Ok(Delivery::Deaf);
        }
        Ok(rest)
    }

    fn probe_delivery(&mut self) -> Result<Delivery, String> {
        if self.sending.is_some() {
            return Ok(Delivery::Sending);
        }
        if self.tail == Tail::Clean {
            return Ok(Delivery::Complete);
        }
        if self.tail == Tail::Sent && self.unread()? == 0 {
            match send_piece(&self.stream, &[0], None) {
                Ok(_) => self.tail = Tail::Probed,
                Err(Errno::AGAIN) => {}
                Err(e) => return Err(format!("writing to it: {}", std::io::Error::from(e))),
            }
        }
        Ok(match (self.tail, self.unread()?) {
            (Tail::Probed, 0) => Delivery::Complete,
            (Tail::Probed, _) => Delivery::Waiting,
            _ => Delivery::Unread,
        })
    }

    /// Returns the number of bytes that QEMU has not read, as the kernel counts them. The error
    /// tells as a text why the kernel does not tell the number.
    pub fn unread(&self) -> Result<u64, String> {
        keyframe_kernel::socket::unread_bytes(self.stream.as_fd())
            .map_err(|e| format!("asking what it has read: {e}"))
    }

    /// Begins a hold: observes from now on whether QEMU's end fills up and whether QEMU reads on.
    pub fn watch(&mut self) {
        self.peak_bytes = 0;
        self.stuck = None;
    }

    /// Returns why frames that the guest has sent since [`Self::watch`] may be missing; `None` if
    /// none can be. Call it after all waiting bytes are read.
    pub fn torn(&self) -> Option<String> {
        if self.deframer.begun_bytes() > 0 {
            return Some("the guest's last frame is incomplete".into());
        }
        (self.peak_bytes >= self.send_buffer_bytes).then(|| {
            "its socket was full, or nearly: the guest sent faster than the switch could read, and \
             QEMU drops unsent packets when the VM stops"
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
        // The buffer has room for one message.
        let _ = control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    loop {
        match rustix::net::sendmsg(stream, &[IoSlice::new(piece)], &mut control, flags) {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

/// An upper bound of the kernel's accounting for `len` bytes sent with one call: rounded up to a
/// power of two, with the kernel's own structures.
fn kernel_bytes(len: usize) -> usize {
    /// The kernel's structures in the block of each piece's bytes, and in a block of their own.
    const PIECE_OVERHEAD: usize = 512;
    const BLOCK_OVERHEAD: usize = 256;
    let pieces = len.div_ceil(PIECE_BYTES);
    let page_rounded = len.next_multiple_of(4096) + pieces * (4096 + BLOCK_OVERHEAD);
    let block = (len + PIECE_OVERHEAD).next_power_of_two() + BLOCK_OVERHEAD;
    if len + PIECE_OVERHEAD <= 4096 { block } else { page_rounded.max(block) }
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
        // Frames of one piece, of several, and at the boundary of pieces.
        let sizes = [60, 1514, 9000, PIECE_BYTES - 4, PIECE_BYTES, 40_000, 60];
        let frames: Vec<Frame> =
            sizes.iter().map(|len| Frame::new(&vec![*len as u8; *len]).unwrap()).collect();
        let mut queue = frames.iter().cloned();
        assert_eq!(port.send(marker.as_fd(), || queue.next()).unwrap(), SendOutcome::All);
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
        assert_eq!(port.delivery().unwrap(), Delivery::Complete);
        let (mut deframer, mut found, mut sent) = (Deframer::default(), Vec::new(), Vec::new());
        for round in 1..4 {
            let frame = Frame::new(&[round; 100]).unwrap();
            sent.push(frame.clone());
            let mut queue = Some(frame);
            assert_eq!(port.send(marker.as_fd(), || queue.take()).unwrap(), SendOutcome::All);
            assert_eq!(port.delivery().unwrap(), Delivery::Unread);
            deframer.push(&read(&qemu, 69_632), &mut found).unwrap();
            assert_eq!(port.delivery().unwrap(), Delivery::Waiting);
            assert_eq!(port.delivery().unwrap(), Delivery::Waiting);
            let probe = read(&qemu, 69_632);
            assert_eq!(probe, [0]);
            deframer.push(&probe, &mut found).unwrap();
            // Twice: one probe serves two holds.
            assert_eq!(port.delivery().unwrap(), Delivery::Complete);
            assert_eq!(port.delivery().unwrap(), Delivery::Complete);
        }
        assert_eq!(found, sent);
    }

    #[test]
    fn frames_that_a_full_socket_takes_in_pieces_arrive_whole() {
        let marker = std::fs::File::open("/dev/null").unwrap();
        let (mut port, qemu) = pair();
        let frames: Vec<Frame> = (0..40u8).map(|n| Frame::new(&vec![n; 65_000]).unwrap()).collect();
        let mut queue = frames.iter().cloned();
        let (mut deframer, mut found, mut full) = (Deframer::default(), Vec::new(), 0);
        while found.len() < frames.len() {
            match port.send(marker.as_fd(), || queue.next()).unwrap() {
                SendOutcome::Full => full += 1,
                SendOutcome::All | SendOutcome::Later => {}
            }
            if port.sending.is_some() {
                assert_eq!(port.delivery().unwrap(), Delivery::Sending);
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
    fn only_a_sender_that_had_to_wait_tears_the_collection() {
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
            while port.read(&mut buffer, &mut found).unwrap() != ReadOutcome::Nothing {}
            assert_eq!(port.torn().is_some(), torn);
            port.watch();
            assert_eq!(port.torn(), None);
            qemu.write_all(&frame.wire()[..700]).unwrap();
            port.read(&mut buffer, &mut found).unwrap();
            assert!(port.torn().unwrap().contains("incomplete"));
        }
    }
}
