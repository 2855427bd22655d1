//! Serves the requests of one client.

use super::Shared;
use super::affinity::Placement;
use super::handshake::{Agreed, CONTEXT_ID};
use super::input::Input;
use super::output::{Output, Sender};
use super::slow::Slow;
use super::wire::{
    CMD_BLOCK_STATUS, CMD_CACHE, CMD_DISC, CMD_FLUSH, CMD_READ, CMD_TRIM, CMD_WRITE,
    CMD_WRITE_ZEROES, EINVAL, EIO, ENOSPC, EOVERFLOW, FLAG_DONT_FRAGMENT, FLAG_FAST_ZERO, FLAG_FUA,
    FLAG_NO_HOLE, FLAG_REQ_ONE, PAYLOAD_BYTES_MAX, REQUEST_BYTES, Request, STATE_HOLE_ZERO,
};
use crate::disk::{Flushed, Now};
use crate::{Disk, Error, Result};
use keyframe_kernel::cpu_affinity;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

/// How many flushes of a client may wait at once; more wait in its socket.
const FLUSHES_MAX: usize = 128;
/// The buffer for writes that a client keeps.
const PAYLOAD_KEPT_BYTES: usize = 2 << 20;
/// How many ranges one answer about status has.
const RANGES_MAX: usize = 4096;

/// A client that has chosen its export.
pub struct Transmission {
    shared: Arc<Shared>,
    agreed: Agreed,
    input: Input,
    output: Output,
    sender: Sender,
    flusher: Option<(SyncSender<u64>, JoinHandle<()>)>,
    slow: Option<Slow>,
    payload: Vec<u8>,
    placement: Placement,
}

/// What a failure is to the client.
pub fn number(error: &Error) -> u32 {
    if error.is_disk_full() || matches!(error, Error::Limit { .. }) { ENOSPC } else { EIO }
}

impl Transmission {
    pub fn new(shared: Arc<Shared>, agreed: Agreed, input: Input, stream: UnixStream) -> Self {
        let sender = Sender::new(stream, agreed.structured);
        let output = Output::new(sender.clone());
        Self {
            shared,
            agreed,
            input,
            output,
            sender,
            flusher: None,
            slow: None,
            payload: Vec::new(),
            placement: Placement::default(),
        }
    }

    /// Until the client leaves. Flushes and reads under way are finished.
    pub fn run(mut self) -> Result<()> {
        let served = self.serve();
        // What was done is said, to a client that still listens.
        let sent = self.output.flush();
        if let Some((orders, thread)) = self.flusher.take() {
            drop(orders);
            let _ = thread.join();
        }
        if let Some(slow) = self.slow.take() {
            slow.end();
        }
        served.and(sent)
    }

    fn serve(&mut self) -> Result<()> {
        loop {
            if !self.input.has(REQUEST_BYTES) {
                self.output.flush()?;
            }
            let mut header = [0u8; REQUEST_BYTES];
            if !self.input.fill(&mut header)? {
                return Ok(());
            }
            let Some(request) = Request::parse(&header) else {
                return Err(Error::protocol(
                    "an NBD client",
                    "a request does not begin as one does",
                ));
            };
            if request.command == CMD_DISC {
                return Ok(());
            }
            self.shared.affinity.take(&mut self.placement);
            self.shared.traffic.requests.fetch_add(1, Ordering::Relaxed);
            self.handle(&request)?;
        }
    }

    /// The flags that a command may have.
    fn allowed(command: u16) -> u16 {
        match command {
            CMD_READ => FLAG_FUA | FLAG_DONT_FRAGMENT,
            CMD_WRITE_ZEROES => FLAG_FUA | FLAG_NO_HOLE | FLAG_FAST_ZERO,
            CMD_BLOCK_STATUS => FLAG_FUA | FLAG_REQ_ONE,
            _ => FLAG_FUA,
        }
    }

    fn handle(&mut self, request: &Request) -> Result<()> {
        let Request { command, cookie, offset, len, flags } = *request;
        let end = offset.checked_add(len.into());
        let inside = end.is_some_and(|end| end <= self.agreed.export.disk.disk_bytes());
        if command == CMD_WRITE {
            return self.write(request, inside);
        }
        if flags & !Self::allowed(command) != 0 {
            return self.output.answer(cookie, EINVAL);
        }
        match command {
            CMD_FLUSH if len == 0 && offset == 0 => self.flush(cookie),
            CMD_READ | CMD_TRIM | CMD_CACHE | CMD_WRITE_ZEROES | CMD_BLOCK_STATUS
                if !inside || len == 0 =>
            {
                // An empty one does nothing; the protocol leaves open what comes of it.
                let error = if inside && command != CMD_BLOCK_STATUS { 0 } else { EINVAL };
                if command == CMD_READ && error == 0 {
                    self.output.none(cookie)
                } else {
                    self.output.answer(cookie, error)
                }
            }
            CMD_READ => self.read(request),
            CMD_TRIM => {
                self.shared.traffic.discarded_bytes.fetch_add(len.into(), Ordering::Relaxed);
                let done = self.disk().discard(offset, len.into());
                self.done(request, done)
            }
            CMD_WRITE_ZEROES => {
                self.shared.traffic.zeroed_bytes.fetch_add(len.into(), Ordering::Relaxed);
                let done = self.disk().zero(offset, len.into());
                self.done(request, done)
            }
            // The page cache is asked for nothing: a guest caches for itself.
            CMD_CACHE => self.output.answer(cookie, 0),
            CMD_BLOCK_STATUS => self.status(request),
            _ => self.output.answer(cookie, EINVAL),
        }
    }

    fn disk(&self) -> &Disk {
        &self.agreed.export.disk
    }

    fn read(&mut self, request: &Request) -> Result<()> {
        if request.len > PAYLOAD_BYTES_MAX {
            return self.output.answer(request.cookie, EOVERFLOW);
        }
        self.shared.traffic.read_bytes.fetch_add(request.len.into(), Ordering::Relaxed);
        let disk = &self.agreed.export.disk;
        let placement = &mut self.placement;
        let mut read = |buf: &mut [u8]| match disk.read_now(request.offset, buf)? {
            Now::Read => Ok(true),
            Now::Unknown if placement.tries() => {
                placement.watch(|| disk.read(request.offset, buf)).map(|()| true)
            }
            Now::Unknown | Now::Waits => Ok(false),
        };
        if self.output.data(request, |buf| read(buf).map_err(|e| number(&e)))? {
            return Ok(());
        }
        let slow = match self.slow.take() {
            Some(slow) => slow,
            None => Slow::start(disk, &self.sender)?,
        };
        // Where many wait already it is this that waits, and what was answered goes out before.
        self.output.flush()?;
        let handed = slow.read(*request);
        self.slow = Some(slow);
        handed
    }

    fn write(&mut self, request: &Request, inside: bool) -> Result<()> {
        // What follows is its data, which is in the way of the next request.
        if request.len > PAYLOAD_BYTES_MAX {
            return Err(Error::protocol(
                "an NBD client",
                format!("a write of {} bytes", request.len),
            ));
        }
        let len = request.len as usize;
        if !self.input.has(len) {
            self.output.flush()?;
        }
        if !inside || request.flags & !FLAG_FUA != 0 {
            self.input.skip(request.len.into())?;
            return self.output.answer(request.cookie, if inside { EINVAL } else { ENOSPC });
        }
        if self.payload.len() < len {
            self.payload.resize(len, 0);
        } else if self.payload.len() > PAYLOAD_KEPT_BYTES && len <= PAYLOAD_KEPT_BYTES {
            // One large write is not to hold its memory for good.
            self.payload.truncate(PAYLOAD_KEPT_BYTES);
            self.payload.shrink_to_fit();
        }
        self.input.exactly(&mut self.payload[..len])?;
        self.shared.traffic.written_bytes.fetch_add(request.len.into(), Ordering::Relaxed);
        let done = self.agreed.export.disk.write(request.offset, &self.payload[..len]);
        self.done(request, done)
    }

    /// Answers a write of any kind, with FUA once it is durable.
    fn done(&mut self, request: &Request, done: Result<()>) -> Result<()> {
        match done {
            Ok(()) if request.flags & FLAG_FUA != 0 => self.flush(request.cookie),
            Ok(()) => self.output.answer(request.cookie, 0),
            Err(e) => self.output.answer(request.cookie, number(&e)),
        }
    }

    /// Hands a flush to the second thread, which waits for the medium.
    fn flush(&mut self, cookie: u64) -> Result<()> {
        self.shared.traffic.flushes.fetch_add(1, Ordering::Relaxed);
        match self.disk().flush_now() {
            Ok(false) => {}
            Ok(true) => return self.output.answer(cookie, 0),
            Err(e) => return self.output.answer(cookie, number(&e)),
        }
        let flusher = match self.flusher.take() {
            Some(flusher) => flusher,
            None => self.start_flusher()?,
        };
        // What was answered before it goes out before it waits.
        self.output.flush()?;
        let sent = flusher.0.send(cookie);
        self.flusher = Some(flusher);
        sent.map_err(|_| Error::protocol("an NBD client", "it went away"))
    }

    fn start_flusher(&self) -> Result<(SyncSender<u64>, JoinHandle<()>)> {
        let (orders, cookies) = sync_channel::<u64>(FLUSHES_MAX);
        let (disk, sender) = (Arc::clone(&self.agreed.export.disk), self.sender.clone());
        let thread = std::thread::Builder::new().name("nbd-flush".into()).spawn(move || {
            cpu_affinity::unbind_current_thread();
            for cookie in cookies {
                let flushed = disk.flush();
                let error = flushed.as_ref().err().map_or(0, number);
                let gone = sender.answer(cookie, error).is_err();
                if flushed.is_ok_and(|flushed| flushed == Flushed::Owed) {
                    // A failure stays owed, and comes up when the pause is to end.
                    let _ = disk.sync();
                }
                if gone {
                    return;
                }
            }
        });
        Ok((orders, thread.map_err(Error::io("an NBD client", "start the flushing thread of"))?))
    }

    fn status(&mut self, request: &Request) -> Result<()> {
        if !self.agreed.status {
            return self.output.answer(request.cookie, EINVAL);
        }
        let max = if request.flags & FLAG_REQ_ONE != 0 { 1 } else { RANGES_MAX };
        match self.disk().status(request.offset, request.len.into(), max) {
            Ok(ranges) => {
                let ranges: Vec<(u32, u32)> = ranges
                    .iter()
                    .map(|&(_, bytes, zero)| (bytes as u32, if zero { STATE_HOLE_ZERO } else { 0 }))
                    .collect();
                self.output.status(request.cookie, CONTEXT_ID, &ranges)
            }
            Err(e) => self.output.answer(request.cookie, number(&e)),
        }
    }
}
