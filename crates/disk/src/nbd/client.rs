//! An NBD client that reads exports: the allocated or dirty ranges of a disk, and its bytes.
//!
//! ```text
//!   connect ─▶ structured replies ─▶ one metadata context ─▶ go ─▶ status, read, ... ─▶ drop
//! ```
//!
//! Invariants: one request is under way at a time. Every wait ends. The client allocates memory
//! only for what it asked for, and checks all answers. A patient client ([`Client::patient`]) asks
//! for no more than the server's socket can hold: the server never waits for it to read.
//!
//! Left out: writing, encryption, concurrent requests, extended headers.

use super::wire::{
    CHUNK_BLOCK_STATUS, CHUNK_DONE, CHUNK_OFFSET_DATA, CMD_BLOCK_STATUS, CMD_DISC, CMD_READ,
    FIXED_NEWSTYLE, IHAVEOPT, INFO_EXPORT, NBDMAGIC, NO_ZEROES, OPT_GO, OPT_SET_META_CONTEXT,
    OPT_STRUCTURED_REPLY, OPTION_REPLY, REP_ACK, REP_INFO, REP_META_CONTEXT, REQUEST,
    STRUCTURED_REPLY,
};
use crate::{BLOCK, BLOCK_BYTES, Block, Error, Result};
use keyframe_bytes::ByteReader;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// The time limit of one answer.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The longest answer to an option, and the longest status, in bytes.
const ANSWER_BYTES_MAX: u32 = 1 << 20;
/// The largest number of answers to one option.
const ANSWERS_MAX: usize = 64;
/// The largest number of chunks of one reply.
const CHUNKS_MAX: usize = 1 << 16;
/// The largest number of parts of one status: one for each sector.
const STATUS_PARTS_MAX: usize = (STATUS_BYTES_MAX / 512) as usize;
/// The chunk type of a hole in a reply to a read.
const CHUNK_OFFSET_HOLE: u16 = 2;
const CHUNK_IS_ERROR: u16 = 0x8000;
/// The longest range whose status the client asks for. It is a multiple of every block size.
const STATUS_BYTES_MAX: u64 = 1 << 30;

/// The longest read: 1 MiB.
const READ_BYTES_MAX: usize = 1 << 20;
/// The bytes that one range takes in a status.
const STATUS_PART_BYTES: u64 = 8;

/// Receives flags, type and content of a chunk of a reply. Returns `None` if the chunk is invalid.
type Take<'a> = &'a mut dyn FnMut(u16, u16, &[u8]) -> Option<()>;

/// A range of a disk with its flags in the metadata context of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeStatus {
    /// The offset of its first byte in the disk.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u64,
    /// The flags. In `base:allocation`, bit 0 is set for a hole, bit 1 for zeros. In a dirty
    /// bitmap, bit 0 is set for changed data.
    pub flags: u32,
}

/// A connection to an export, for reading.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    name: String,
    len_bytes: u64,
    context: u32,
    cookie: u64,
    /// The longest read in bytes.
    read_bytes: usize,
    /// The longest range whose status is asked for, in bytes.
    status_bytes: u64,
    /// Whether the client announces its end, upon which the server closes the connection.
    takes_leave: bool,
}

impl Client {
    /// Connects to the export `export` of the server at `socket`, with the metadata context
    /// `context`, such as `base:allocation`. From then on, each read from the connection and each
    /// write to it waits for at most 30 s.
    ///
    /// Errors: [`Error::Io`] if no server listens or it does not answer; [`Error::Protocol`] if it
    /// has no such export or context, or breaks the protocol.
    pub fn connect(socket: &Path, export: &str, context: &str) -> Result<Self> {
        let name = format!("export {export} at {}", socket.display());
        let stream = UnixStream::connect(socket).map_err(Error::io(&name, "connect to"))?;
        Self::unnegotiated(stream, name).negotiate(export, context)
    }

    /// Creates a client over `stream`, a connection to the server that another process keeps open
    /// too. Dropping the client does not close the connection; the server closes it. The client
    /// always reads what it has requested, so the server never waits for it and can close the
    /// connection at any time.
    ///
    /// `part_bytes` is the granularity of the metadata context in bytes: no range is shorter. It is
    /// not 0. Errors: those of [`Self::connect`]; [`Error::Io`] if the size of the socket's buffer
    /// cannot be queried.
    pub fn patient(
        stream: UnixStream,
        export: &str,
        context: &str,
        part_bytes: u64,
    ) -> Result<Self> {
        let name = format!("export {export}");
        let buffer_bytes = rustix::net::sockopt::socket_send_buffer_size(stream.as_fd())
            .map_err(Error::io(&name, "ask for the size of the buffer of"))?;
        // The kernel counts up to twice a message's length, and its own records.
        let reply_bytes = (buffer_bytes / 4).clamp(BLOCK_BYTES, READ_BYTES_MAX);
        let parts = reply_bytes as u64 / STATUS_PART_BYTES - 1;
        let mut client = Self::unnegotiated(stream, name);
        client.read_bytes = reply_bytes / BLOCK_BYTES * BLOCK_BYTES;
        client.status_bytes = (parts * part_bytes).min(STATUS_BYTES_MAX);
        client.takes_leave = false;
        client.negotiate(export, context)
    }

    fn unnegotiated(stream: UnixStream, name: String) -> Self {
        Self {
            stream,
            name,
            len_bytes: 0,
            context: 0,
            cookie: 0,
            read_bytes: READ_BYTES_MAX,
            status_bytes: STATUS_BYTES_MAX,
            takes_leave: true,
        }
    }

    fn negotiate(self, export: &str, context: &str) -> Result<Self> {
        let mut client = self;
        let timed = client
            .stream
            .set_read_timeout(Some(TIMEOUT))
            .and_then(|()| client.stream.set_write_timeout(Some(TIMEOUT)));
        timed.map_err(Error::io(&client.name, "set the timeouts of"))?;
        client.greet()?;
        client.option(OPT_STRUCTURED_REPLY, &[])?;
        let mut asked = string(export);
        asked.extend(1u32.to_be_bytes());
        asked.extend(string(context));
        let answers = client.option(OPT_SET_META_CONTEXT, &asked)?;
        let id = answers.iter().find(|(kind, _)| *kind == REP_META_CONTEXT);
        client.context = id
            .and_then(|(_, bytes)| ByteReader::new(bytes).u32_be().ok())
            .ok_or_else(|| client.wrong(format!("it does not know {context}")))?;
        let mut asked = string(export);
        asked.extend(0u16.to_be_bytes());
        let answers = client.option(OPT_GO, &asked)?;
        let len_bytes =
            answers.iter().filter(|(kind, _)| *kind == REP_INFO).find_map(|(_, bytes)| {
                let mut reader = ByteReader::new(bytes);
                (reader.u16_be().ok()? == INFO_EXPORT).then(|| reader.u64_be().ok())?
            });
        client.len_bytes = len_bytes.ok_or_else(|| client.wrong("it has no size".into()))?;
        Ok(client)
    }

    /// Returns the size of the disk in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Returns the status of consecutive ranges from byte `offset` on: at least one range, of at
    /// most 1 GiB together, perhaps not up to the end of the disk.
    ///
    /// Errors: [`Error::Protocol`] if `offset` is not inside the disk, or if the server refuses or
    /// breaks the protocol; [`Error::Io`] if the server does not answer.
    pub fn status(&mut self, offset: u64) -> Result<Vec<RangeStatus>> {
        let len = self.len_bytes.saturating_sub(offset).min(self.status_bytes);
        let mut found = Vec::new();
        self.request(CMD_BLOCK_STATUS, offset, len as u32)?;
        let (context, end) = (self.context, offset + len);
        self.replies(&mut |_, kind, bytes| {
            let mut reader = ByteReader::new(bytes);
            if kind != CHUNK_BLOCK_STATUS || reader.u32_be() != Ok(context) {
                return None;
            }
            let mut from = offset;
            while !reader.is_empty() {
                let (len, flags) = (u64::from(reader.u32_be().ok()?), reader.u32_be().ok()?);
                // The last part may exceed the range that the client asked for.
                let len = len.min(end.saturating_sub(from));
                if found.len() >= STATUS_PARTS_MAX {
                    return None;
                }
                if len > 0 {
                    found.push(RangeStatus { offset: from, len, flags });
                }
                from += len;
            }
            Some(())
        })?;
        if found.is_empty() {
            Err(self.wrong(format!("it returned no status for byte {offset}")))
        } else {
            Ok(found)
        }
    }

    /// Fills `into` from byte `offset` of the disk on. Errors: [`Error::Protocol`] if `into` is
    /// longer than 32 MiB, or if the server refuses, cannot read these bytes or breaks the
    /// protocol; [`Error::Io`] if the server does not answer.
    pub fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<()> {
        let len = u32::try_from(into.len())
            .ok()
            .filter(|_| into.len() <= super::wire::PAYLOAD_BYTES_MAX as usize);
        let len = len.ok_or_else(|| self.wrong(format!("a read of {} bytes", into.len())))?;
        self.request(CMD_READ, offset, len)?;
        // QEMU sends chunks in order. If overlapping chunks were accepted, gaps would go
        // undetected.
        let mut filled = 0;
        self.replies(&mut |_, kind, bytes| {
            let mut reader = ByteReader::new(bytes);
            let start = usize::try_from(reader.u64_be().ok()?.checked_sub(offset)?).ok()?;
            if start != filled {
                return None;
            }
            let part = match kind {
                CHUNK_OFFSET_DATA => {
                    let part = into.get_mut(start..start.checked_add(reader.remaining().len())?)?;
                    part.copy_from_slice(reader.remaining());
                    part.len()
                }
                CHUNK_OFFSET_HOLE => {
                    let part =
                        into.get_mut(start..start.checked_add(reader.u32_be().ok()? as usize)?)?;
                    part.fill(0);
                    part.len()
                }
                _ => return None,
            };
            filled += part;
            Some(())
        })?;
        if filled == into.len() {
            return Ok(());
        }
        Err(self.wrong(format!("it returned {filled} of {len} bytes from {offset} on")))
    }

    /// Calls `take` with the blocks that have at least one byte in a range whose flags satisfy
    /// `wanted`. Each call gets the number of the first block and the content of consecutive whole
    /// blocks, at most 1 MiB. Blocks come in rising order, each once. The server's ranges need not
    /// begin or end at a block. If the disk ends within its last block, zeros fill the block.
    ///
    /// Errors: those of `take`, of [`Self::status`] and of [`Self::read`].
    pub fn each_block<E: From<Error>>(
        &mut self,
        wanted: fn(u32) -> bool,
        mut take: impl FnMut(u64, &[Block]) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let blocks_at_once = self.read_bytes / BLOCK_BYTES;
        let mut buffer = vec![[0; BLOCK_BYTES]; blocks_at_once];
        // Blocks before `next` are done.
        let (mut at, mut next) = (0, 0);
        while at < self.len_bytes {
            for RangeStatus { offset, len, flags } in self.status(at)? {
                at = offset + len;
                if !wanted(flags) {
                    continue;
                }
                next = next.max(offset / BLOCK);
                while next < at.div_ceil(BLOCK) {
                    let count = (at.div_ceil(BLOCK) - next).min(blocks_at_once as u64) as usize;
                    let blocks = &mut buffer[..count];
                    let bytes = blocks.as_flattened_mut();
                    let inside = (self.len_bytes - next * BLOCK).min(bytes.len() as u64) as usize;
                    bytes[inside..].fill(0);
                    self.read(next * BLOCK, &mut bytes[..inside])?;
                    take(next, blocks)?;
                    next += count as u64;
                }
            }
        }
        Ok(())
    }

    fn greet(&mut self) -> Result<()> {
        let start = self.take::<18>()?;
        let mut reader = ByteReader::new(&start);
        let (magic, option, flags) =
            (reader.u64_be(), reader.u64_be(), reader.u16_be().unwrap_or_default());
        if magic != Ok(NBDMAGIC) || option != Ok(IHAVEOPT) || flags & FIXED_NEWSTYLE == 0 {
            return Err(self.wrong("its greeting is not that of an NBD server".into()));
        }
        self.send(&u32::from(FIXED_NEWSTYLE | NO_ZEROES & flags).to_be_bytes())
    }

    /// Sends an option and returns the answers before the acknowledgement: kind and content.
    /// Errors: [`Error::Protocol`] if the server refuses or breaks the protocol; [`Error::Io`] if
    /// it does not answer.
    fn option(&mut self, option: u32, data: &[u8]) -> Result<Vec<(u32, Vec<u8>)>> {
        let mut message = IHAVEOPT.to_be_bytes().to_vec();
        message.extend(option.to_be_bytes());
        message.extend((data.len() as u32).to_be_bytes());
        message.extend(data);
        self.send(&message)?;
        let mut answers = Vec::new();
        while answers.len() < ANSWERS_MAX {
            let header = self.take::<20>()?;
            let mut reader = ByteReader::new(&header);
            let (magic, about) = (reader.u64_be(), reader.u32_be());
            let (kind, len) =
                (reader.u32_be().unwrap_or_default(), reader.u32_be().unwrap_or_default());
            if magic != Ok(OPTION_REPLY) || about != Ok(option) || len > ANSWER_BYTES_MAX {
                return Err(self.wrong(format!("an invalid answer to option {option}")));
            }
            let bytes = self.take_some(len)?;
            match kind {
                REP_ACK => return Ok(answers),
                refused if refused & 0x8000_0000 != 0 => {
                    let why = String::from_utf8_lossy(&bytes).into_owned();
                    return Err(
                        self.wrong(format!("it refuses option {option} ({refused:#x}) {why}"))
                    );
                }
                _ => answers.push((kind, bytes)),
            }
        }
        Err(self.wrong(format!("too many answers to option {option}")))
    }

    fn request(&mut self, command: u16, offset: u64, len: u32) -> Result<()> {
        self.cookie += 1;
        let mut message = REQUEST.to_be_bytes().to_vec();
        message.extend(0u16.to_be_bytes());
        message.extend(command.to_be_bytes());
        message.extend(self.cookie.to_be_bytes());
        message.extend(offset.to_be_bytes());
        message.extend(len.to_be_bytes());
        self.send(&message)
    }

    /// Passes the chunks of one reply to `take`. Errors: [`Error::Protocol`] if the server answers
    /// with an error, or if a chunk is invalid; [`Error::Io`] if the server does not answer.
    fn replies(&mut self, take: Take<'_>) -> Result<()> {
        for _ in 0..CHUNKS_MAX {
            let header = self.take::<20>()?;
            let mut reader = ByteReader::new(&header);
            let magic = reader.u32_be();
            let (flags, kind) =
                (reader.u16_be().unwrap_or_default(), reader.u16_be().unwrap_or_default());
            let (cookie, len) = (reader.u64_be(), reader.u32_be().unwrap_or_default());
            let longest = super::wire::PAYLOAD_BYTES_MAX + ANSWER_BYTES_MAX;
            if magic != Ok(STRUCTURED_REPLY) || cookie != Ok(self.cookie) || len > longest {
                return Err(self.wrong("an invalid reply".into()));
            }
            let bytes = self.take_some(len)?;
            if kind & CHUNK_IS_ERROR != 0 {
                let mut reader = ByteReader::new(&bytes);
                let errno = reader.u32_be().unwrap_or_default();
                let why = String::from_utf8_lossy(reader.remaining().get(2..).unwrap_or_default())
                    .into_owned();
                return Err(self.wrong(format!("it answers with error {errno} {why}")));
            }
            if kind != 0 && take(flags, kind, &bytes).is_none() {
                return Err(self.wrong(format!("an invalid reply of type {kind}")));
            }
            if flags & CHUNK_DONE != 0 {
                return Ok(());
            }
        }
        Err(self.wrong("a reply with too many parts".into()))
    }

    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.write_all(bytes).map_err(Error::io(&self.name, "ask"))
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).map_err(Error::io(&self.name, "read from"))?;
        Ok(bytes)
    }

    fn take_some(&mut self, len: u32) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let read = Read::by_ref(&mut self.stream).take(u64::from(len)).read_to_end(&mut bytes);
        match read.map_err(Error::io(&self.name, "read from"))? {
            n if n == len as usize => Ok(bytes),
            _ => Err(Error::io(&self.name, "read from")(io::ErrorKind::UnexpectedEof)),
        }
    }

    fn wrong(&self, problem: String) -> Error {
        Error::protocol(&self.name, problem)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if self.takes_leave {
            let _ = self.request(CMD_DISC, 0, 0);
        }
    }
}

/// A 32-bit length, then the text.
fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u32).to_be_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}
