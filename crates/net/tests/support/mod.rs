//! Peers that speak QEMU's protocol.

#![allow(dead_code, reason = "each test program uses a part of it")]

pub mod ping;

use rustix::net::{RecvFlags, SendFlags};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// A peer's connection to the switch, without a guest.
pub struct Peer {
    stream: UnixStream,
    /// The rest of a frame that was partly sent.
    rest: Vec<u8>,
    /// Frames that a thread reads as they arrive. Without the thread, frames are read on demand.
    reader: Option<Receiver<Vec<u8>>>,
    probed: bool,
}

/// A frame between addresses; 255 is broadcast.
pub fn frame(from: u8, to: u8, number: u32) -> Vec<u8> {
    let to = if to == 255 { [255; 6] } else { [2, 0, 0, 0, 0, to] };
    [&to[..], &[2, 0, 0, 0, 0, from, 0x88, 0xb5], &number.to_be_bytes(), &[0; 40]].concat()
}

/// Waits up to a minute until `done` returns true.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_mins(1);
    while !done() {
        assert!(Instant::now() < deadline, "waited a minute for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl Peer {
    /// A peer that reads at once, as a QEMU whose guest takes its packets.
    pub fn connect(lan: &Path) -> Self {
        let mut reading = Self::deaf(lan);
        let (sender, receiver) = channel();
        let stream = reading.stream.try_clone().unwrap();
        std::thread::spawn(move || {
            let mut peer = Self { stream, rest: Vec::new(), reader: None, probed: false };
            while let Ok(frame) = peer.read_frame() {
                if sender.send(frame).is_err() {
                    return;
                }
            }
        });
        reading.reader = Some(receiver);
        reading
    }

    /// A peer that reads on demand.
    pub fn deaf(lan: &Path) -> Self {
        let stream = UnixStream::connect(lan).unwrap();
        stream.set_write_timeout(Some(Duration::from_mins(1))).unwrap();
        Self { stream, rest: Vec::new(), reader: None, probed: false }
    }

    pub fn send(&mut self, frame: &[u8]) {
        self.stream.write_all(&wire(frame)).unwrap();
    }

    /// Sends without waiting for room. The next call finishes a frame that is partly sent.
    pub fn try_send(&mut self, frame: &[u8]) -> io::Result<()> {
        if self.rest.is_empty() {
            self.rest = wire(frame);
        }
        // Not O_NONBLOCK: the thread that reads shares the descriptor.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let written = rustix::net::send(&self.stream, &self.rest, flags)?;
        self.rest.drain(..written);
        if self.rest.is_empty() { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }

    pub fn receive(&mut self) -> Vec<u8> {
        if let Some(reader) = &self.reader {
            return reader.recv_timeout(Duration::from_mins(1)).unwrap();
        }
        self.stream.set_read_timeout(Some(Duration::from_mins(1))).unwrap();
        self.read_frame().unwrap()
    }

    /// The next frame, if one has come.
    pub fn received(&self) -> Option<Vec<u8>> {
        self.reader.as_ref().and_then(|reader| reader.try_recv().ok())
    }

    fn read_frame(&mut self) -> io::Result<Vec<u8>> {
        let mut header = [0; 4];
        let from = usize::from(std::mem::take(&mut self.probed));
        self.stream.read_exact(&mut header[from..])?;
        let mut frame = vec![0; u32::from_be_bytes(header) as usize];
        self.stream.read_exact(&mut frame)?;
        Ok(frame)
    }

    /// Reads the first byte of a header.
    pub fn take_probe(&mut self) {
        let mut byte = [1];
        self.stream.set_read_timeout(Some(Duration::from_mins(1))).unwrap();
        self.stream.read_exact(&mut byte).unwrap();
        assert_eq!((byte, std::mem::replace(&mut self.probed, true)), ([0], false));
    }

    pub fn receive_some(&mut self, count: usize) -> Vec<Vec<u8>> {
        (0..count).map(|_| self.receive()).collect()
    }

    /// The number of bytes that wait to be read.
    pub fn waits_bytes(&self) -> usize {
        let mut bytes = vec![0; 1 << 16];
        let peeked =
            rustix::net::recv(&self.stream, &mut bytes[..], RecvFlags::PEEK | RecvFlags::DONTWAIT);
        peeked.map_or(0, |(_, len)| len)
    }

    pub fn has_nothing(&self) -> bool {
        self.reader.as_ref().is_some_and(|reader| reader.try_recv().is_err())
            && self.waits_bytes() <= 1
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The reader's copy keeps the connection open.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

fn wire(frame: &[u8]) -> Vec<u8> {
    [&(frame.len() as u32).to_be_bytes()[..], frame].concat()
}
