//! Serves the requests of one client.

use super::Shared;
use super::affinity::ThreadPlacement;
use super::handshake::{Agreed, CONTEXT_ID};
use super::input::ClientInput;
use super::output::{Output, Sender};
use super::slow::SlowReads;
use super::wire::{
    CMD_BLOCK_STATUS, CMD_CACHE, CMD_DISC, CMD_FLUSH, CMD_READ, CMD_TRIM, CMD_WRITE,
    CMD_WRITE_ZEROES, EINVAL, EIO, ENOSPC, EOVERFLOW, FLAG_DONT_FRAGMENT, FLAG_FAST_ZERO, FLAG_FUA,
    FLAG_NO_HOLE, FLAG_REQ_ONE, NbdRequest, PAYLOAD_BYTES_MAX, REQUEST_BYTES,
};
use crate::disk::{FlushOutcome, ReadNow};
use crate::{Disk, Error, Result};
use keyframe_kernel::cpu_affinity;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

/// The largest number of flushes of a client that wait. More flushes wait in its socket.
const FLUSHES_MAX: usize = 128;
/// The memory that a connection keeps for the data of writes.
const PAYLOAD_KEPT_BYTES: usize = 2 << 20;
/// The largest number of ranges in one status reply.
const RANGES_MAX: usize = 4096;

/// The connection of a client that has chosen its export.
pub struct Transmission {
    shared: Arc<Shared>,
    agreed: Agreed,
    input: ClientInput,
    output: Output,
    sender: Sender,
    flusher: Option<(SyncSender<u64>, JoinHandle<()>)>,
    slow: Option<SlowReads>,
    payload: Vec<u8>,
    placement: ThreadPlacement,
}

/// Returns the error number of the NBD protocol that tells a client of `error`.
pub fn number(error: &Error) -> u32 {
    if error.is_disk_full() || matches!(error, Error::Limit { .. }) { ENOSPC } else { EIO }
}

impl Transmission {
    /// Creates the connection of a client after the negotiation `agreed`. Requests come from
    /// `input`; replies go to `stream`.
    pub fn new(
        shared: Arc<Shared>,
        agreed: Agreed,
        input: ClientInput,
        stream: UnixStream,
    ) -> Self {
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
            placement: ThreadPlacement::default(),
        }
    }

    /// Serves requests until the client disconnects. Finishes flushes and reads that are under way
    /// before it returns. Errors: the client broke the protocol; the connection failed.
    pub fn run(mut self) -> Result<()> {
        let served = self.serve();
        // The client may have sent a disconnect and still read the last replies.
        let sent = self.output.flush();
        if let Some((flush_queue, thread)) = self.flusher.take() {
            drop(flush_queue);
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
            let Some(request) = NbdRequest::parse(&header) else {
                return Err(Error::protocol(
                    "an NBD client",
                    "a request with a wrong magic number",
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

    /// The flags that are allowed with a command.
    fn allowed(command: u16) -> u16 {
        match command {
            CMD_READ => FLAG_FUA | FLAG_DONT_FRAGMENT,
            CMD_WRITE_ZEROES => FLAG_FUA | FLAG_NO_HOLE | FLAG_FAST_ZERO,
            CMD_BLOCK_STATUS => FLAG_FUA | FLAG_REQ_ONE,
            _ => FLAG_FUA,
        }
    }

    fn handle(&mut self, request: &NbdRequest) -> Result<()> {
        let NbdRequest { command, cookie, offset, len, flags } = *request;
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
                // An empty request does nothing. The protocol leaves its result undefined.
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
            // Prefetching into the page cache does nothing: a guest has its own cache.
            CMD_CACHE => self.output.answer(cookie, 0),
            CMD_BLOCK_STATUS => self.status(request),
            _ => self.output.answer(cookie, EINVAL),
        }
    }

    fn disk(&self) -> &Disk {
        &self.agreed.export.disk
    }

    fn read(&mut self, request: &NbdRequest) -> Result<()> {
        if request.len > PAYLOAD_BYTES_MAX {
            return self.output.answer(request.cookie, EOVERFLOW);
        }
        self.shared.traffic.read_bytes.fetch_add(request.len.into(), Ordering::Relaxed);
        let disk = &self.agreed.export.disk;
        let placement = &mut self.placement;
        let mut read = |buf: &mut [u8]| match disk.read_now(request.offset, buf)? {
            ReadNow::Done => Ok(true),
            ReadNow::Unknown if placement.may_read_inline() => {
                placement.watch(|| disk.read(request.offset, buf)).map(|()| true)
            }
            ReadNow::Unknown | ReadNow::WouldWait => Ok(false),
        };
        if self.output.data(request, |buf| read(buf).map_err(|e| number(&e)))? {
            return Ok(());
        }
        let slow = match self.slow.take() {
            Some(slow) => slow,
            None => SlowReads::start(disk, &self.sender)?,
        };
        // If many reads wait already, this thread waits too, and sends the gathered replies first.
        self.output.flush()?;
        let handed = slow.read(*request);
        self.slow = Some(slow);
        handed
    }

    fn write(&mut self, request: &NbdRequest, inside: bool) -> Result<()> {
        // The data follows. If it is not read, the next request cannot be found.
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
            // One large write must not keep its memory.
            self.payload.truncate(PAYLOAD_KEPT_BYTES);
            self.payload.shrink_to_fit();
        }
        self.input.exactly(&mut self.payload[..len])?;
        self.shared.traffic.written_bytes.fetch_add(request.len.into(), Ordering::Relaxed);
        let done = self.agreed.export.disk.write(request.offset, &self.payload[..len]);
        self.done(request, done)
    }

    /// Answers a write of any type, whose result is `done`. A FUA write is answered once it is
    /// durable. Error: the connection failed.
    fn done(&mut self, request: &NbdRequest, done: Result<()>) -> Result<()> {
        match done {
            Ok(()) if request.flags & FLAG_FUA != 0 => self.flush(request.cookie),
            Ok(()) => self.output.answer(request.cookie, 0),
            Err(e) => self.output.answer(request.cookie, number(&e)),
        }
    }

    /// Passes a flush to the second thread, which waits for the medium. Errors: the connection
    /// failed; the thread cannot be started.
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
        // The gathered replies are sent before this thread waits.
        self.output.flush()?;
        let sent = flusher.0.send(cookie);
        self.flusher = Some(flusher);
        sent.map_err(|_| Error::protocol("an NBD client", "it went away"))
    }

    fn start_flusher(&self) -> Result<(SyncSender<u64>, JoinHandle<()>)> {
        let (flush_queue, cookies) = sync_channel::<u64>(FLUSHES_MAX);
        let (disk, sender) = (Arc::clone(&self.agreed.export.disk), self.sender.clone());
        let thread = std::thread::Builder::new().name("nbd-flush".into()).spawn(move || {
            cpu_affinity::unbind_current_thread();
            for cookie in cookies {
                let flushed = disk.flush();
                let error = flushed.as_ref().err().map_or(0, number);
                let gone = sender.answer(cookie, error).is_err();
                if flushed.is_ok_and(|flushed| flushed == FlushOutcome::Owed) {
                    // A failure is remembered, and fails the end of the pause.
                    let _ = disk.sync();
                }
                if gone {
                    return;
                }
            }
        });
        Ok((
            flush_queue,
            thread.map_err(Error::io("an NBD client", "start the flushing thread of"))?,
        ))
    }

    fn status(&mut self, request: &NbdRequest) -> Result<()> {
        if !self.agreed.status {
            return self.output.answer(request.cookie, EINVAL);
        }
        let max = if request.flags & FLAG_REQ_ONE != 0 { 1 } else { RANGES_MAX };
        match self.disk().status(request.offset, request.len.into(), max) {
            Ok(ranges) => self.output.status(request.cookie, CONTEXT_ID, &ranges),
            Err(e) => self.output.answer(request.cookie, number(&e)),
        }
    }
}
