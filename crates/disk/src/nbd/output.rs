//! Replies. The thread that serves requests gathers them; the thread that waits for syncs sends
//! them at once.
//!
//! Invariant: each reply is sent whole, because one lock protects the stream.

use super::wire::{
    CHUNK_BLOCK_STATUS, CHUNK_DONE, CHUNK_ERROR, CHUNK_NONE, CHUNK_OFFSET_DATA, NbdRequest,
    SIMPLE_REPLY, STATE_HOLE_ZERO, STRUCTURED_REPLY,
};
use crate::{DiskRange, Error, Result};
use keyframe_locks::IgnorePoison;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

/// Gathered replies are sent at this size: gathering saves system calls for small replies, and
/// large ones would only wait.
const GATHERED_BYTES: usize = 32 << 10;
/// The memory that a connection keeps for gathered replies.
const KEPT_BYTES: usize = 2 << 20;

/// The writing half of a connection, shared by its threads.
#[derive(Clone)]
pub struct Sender {
    stream: Arc<Mutex<UnixStream>>,
    structured: bool,
}

impl Sender {
    /// Creates the writing half of `stream`. `structured` is true if the client understands
    /// structured replies.
    pub fn new(stream: UnixStream, structured: bool) -> Self {
        Self { stream: Arc::new(Mutex::new(stream)), structured }
    }

    fn send(&self, bytes: &[u8]) -> Result<()> {
        let mut stream = self.stream.lock().ignore_poison();
        stream.write_all(bytes).map_err(Error::io("an NBD client", "write to"))
    }

    /// Sends the reply to a request that returns no data. `cookie` is the request's; `error` is 0
    /// or an error number of the protocol. Error: the connection failed.
    pub fn answer(&self, cookie: u64, error: u32) -> Result<()> {
        let mut bytes = Vec::new();
        answer(&mut bytes, self.structured, cookie, error);
        self.send(&bytes)
    }
}

fn answer(bytes: &mut Vec<u8>, structured: bool, cookie: u64, error: u32) {
    if structured && error != 0 {
        chunk(bytes, CHUNK_ERROR, cookie, 6);
        bytes.extend(error.to_be_bytes());
        bytes.extend(0u16.to_be_bytes());
    } else {
        bytes.extend(SIMPLE_REPLY.to_be_bytes());
        bytes.extend(error.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
    }
}

fn chunk(bytes: &mut Vec<u8>, kind: u16, cookie: u64, len: u32) {
    bytes.extend(STRUCTURED_REPLY.to_be_bytes());
    bytes.extend(CHUNK_DONE.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(len.to_be_bytes());
}

/// Gathers replies, so that one write sends many.
pub struct Output {
    sender: Sender,
    bytes: Vec<u8>,
}

impl Output {
    /// Creates an empty collection of replies that `sender` sends.
    pub fn new(sender: Sender) -> Self {
        Self { sender, bytes: Vec::new() }
    }

    /// Sends the gathered replies. Error: the connection failed.
    pub fn flush(&mut self) -> Result<()> {
        if !self.bytes.is_empty() {
            self.sender.send(&self.bytes)?;
            self.bytes.clear();
        }
        if self.bytes.capacity() > KEPT_BYTES {
            // One large reply must not keep its memory.
            self.bytes.shrink_to(KEPT_BYTES);
        }
        Ok(())
    }

    fn gathered(&mut self) -> Result<()> {
        if self.bytes.len() >= GATHERED_BYTES { self.flush() } else { Ok(()) }
    }

    /// Adds the reply to a request that returns no data. `cookie` is the request's; `error` is 0 or
    /// an error number of the protocol. If many bytes are gathered, sends them; error: the
    /// connection failed.
    pub fn answer(&mut self, cookie: u64, error: u32) -> Result<()> {
        // Also used for a failed read, whose reply has no data.
        answer(&mut self.bytes, self.sender.structured, cookie, error);
        self.gathered()
    }

    /// Adds the reply to the read `request`: the content that `read` writes to the buffer it is
    /// given, or the error number of the protocol that it returns. Returns `false` and adds nothing
    /// if `read` returned `Ok(false)`, that is, wrote no content. If many bytes are gathered, sends
    /// them; error: the connection failed.
    pub fn data(
        &mut self,
        request: &NbdRequest,
        read: impl FnOnce(&mut [u8]) -> Result<bool, u32>,
    ) -> Result<bool> {
        let before = self.bytes.len();
        if self.sender.structured {
            chunk(&mut self.bytes, CHUNK_OFFSET_DATA, request.cookie, 8 + request.len);
            self.bytes.extend(request.offset.to_be_bytes());
        } else {
            answer(&mut self.bytes, false, request.cookie, 0);
        }
        let start = self.bytes.len();
        self.bytes.resize(start + request.len as usize, 0);
        match read(&mut self.bytes[start..]) {
            Ok(true) => self.gathered()?,
            Ok(false) => {
                self.bytes.truncate(before);
                return Ok(false);
            }
            Err(error) => {
                self.bytes.truncate(before);
                self.answer(request.cookie, error)?;
            }
        }
        Ok(true)
    }

    /// Adds the reply to the status request `cookie`, in the metadata context with number
    /// `context`. Each range must be shorter than 4 GiB. If many bytes are gathered, sends them;
    /// error: the connection failed.
    pub fn status(&mut self, cookie: u64, context: u32, ranges: &[DiskRange]) -> Result<()> {
        chunk(&mut self.bytes, CHUNK_BLOCK_STATUS, cookie, 4 + 8 * ranges.len() as u32);
        self.bytes.extend(context.to_be_bytes());
        for range in ranges {
            let state = if range.is_zero { STATE_HOLE_ZERO } else { 0 };
            self.bytes.extend((range.len_bytes as u32).to_be_bytes());
            self.bytes.extend(state.to_be_bytes());
        }
        self.gathered()
    }

    /// Adds a reply without content to the request `cookie`. If many bytes are gathered, sends
    /// them; error: the connection failed.
    pub fn none(&mut self, cookie: u64) -> Result<()> {
        if self.sender.structured {
            chunk(&mut self.bytes, CHUNK_NONE, cookie, 0);
            return self.gathered();
        }
        self.answer(cookie, 0)
    }
}
