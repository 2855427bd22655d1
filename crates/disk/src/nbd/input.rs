//! Buffered input from a client: one system call reads several small requests.

use crate::{Error, Result};
use std::io::{self, Read};
use std::os::unix::net::UnixStream;

const BUFFER_BYTES: usize = 64 << 10;

/// The reading half of a client's connection, with a buffer.
pub struct ClientInput {
    stream: UnixStream,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

fn failed(error: io::Error) -> Error {
    Error::io("an NBD client", "read from")(error)
}

impl ClientInput {
    /// Creates a reader of the requests that arrive on `stream`.
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, buffer: vec![0; BUFFER_BYTES].into(), start: 0, end: 0 }
    }

    /// Returns true if `len` bytes are in the buffer, so that reading them does not wait for the
    /// client.
    pub fn has(&self, len: usize) -> bool {
        self.end - self.start >= len
    }

    /// Fills `into`. Returns `false` if the client disconnected before the first byte. Errors: the
    /// client disconnected after the first byte; the connection failed.
    pub fn fill(&mut self, into: &mut [u8]) -> Result<bool> {
        let mut done = self.take_buffered(into);
        while done < into.len() {
            let rest = &mut into[done..];
            // Data as long as the buffer is read past it.
            let got = if rest.len() >= self.buffer.len() {
                retry(|| self.stream.read(rest))?
            } else {
                self.end = retry(|| self.stream.read(&mut self.buffer))?;
                self.start = 0;
                if self.end == 0 { 0 } else { self.take_buffered(rest) }
            };
            match got {
                0 if done == 0 => return Ok(false),
                0 => return Err(failed(io::ErrorKind::UnexpectedEof.into())),
                got => done += got,
            }
        }
        Ok(true)
    }

    /// Fills `into`. Errors: the client disconnected; the connection failed.
    pub fn exactly(&mut self, into: &mut [u8]) -> Result<()> {
        if into.is_empty() || self.fill(into)? {
            Ok(())
        } else {
            Err(failed(io::ErrorKind::UnexpectedEof.into()))
        }
    }

    /// Reads `len` bytes and discards them. Errors: those of [`Self::exactly`].
    pub fn skip(&mut self, len: u64) -> Result<()> {
        let mut scrap = [0u8; 4096];
        let mut left = len;
        while left > 0 {
            let part = left.min(scrap.len() as u64) as usize;
            self.exactly(&mut scrap[..part])?;
            left -= part as u64;
        }
        Ok(())
    }

    fn take_buffered(&mut self, into: &mut [u8]) -> usize {
        let len = into.len().min(self.end - self.start);
        into[..len].copy_from_slice(&self.buffer[self.start..self.start + len]);
        self.start += len;
        len
    }
}

fn retry(mut read: impl FnMut() -> io::Result<usize>) -> Result<usize> {
    loop {
        match read() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            other => return other.map_err(failed),
        }
    }
}
