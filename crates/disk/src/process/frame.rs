//! Framing of requests and responses: a 32-bit length, then JSON.

use crate::{Error, Result};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};

/// The longest message in bytes: some thousand extents, or the paths of 64 disks.
const MESSAGE_BYTES_MAX: u32 = 4 << 20;
const OBJECT: &str = "the engine's connection to its disks";

/// Sends one message. Errors: [`Error::Protocol`] if it is longer than 4 MiB; the stream cannot be
/// written.
pub fn send(mut stream: &UnixStream, message: &impl Serialize) -> Result<()> {
    let mut bytes = vec![0; 4];
    serde_json::to_writer(&mut bytes, message)
        .map_err(|e| Error::protocol(OBJECT, e.to_string()))?;
    let len = u32::try_from(bytes.len() - 4).ok().filter(|len| *len <= MESSAGE_BYTES_MAX);
    let len =
        len.ok_or_else(|| Error::protocol(OBJECT, format!("a message of {} bytes", bytes.len())))?;
    bytes[..4].copy_from_slice(&len.to_le_bytes());
    stream.write_all(&bytes).map_err(Error::io(OBJECT, "write to"))
}

/// Receives one message. Returns `None` if the other end has disconnected before it. Errors:
/// [`Error::Protocol`] if it is longer than 4 MiB or not a `T`; the stream cannot be read.
pub fn receive<T: DeserializeOwned>(mut stream: &UnixStream) -> Result<Option<T>> {
    let mut len = [0u8; 4];
    match stream.read_exact(&mut len) {
        Ok(()) => {}
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset
            ) =>
        {
            return Ok(None);
        }
        Err(e) => return Err(Error::io(OBJECT, "read from")(e)),
    }
    let len = u32::from_le_bytes(len);
    if len > MESSAGE_BYTES_MAX {
        return Err(Error::protocol(OBJECT, format!("a message of {len} bytes")));
    }
    let mut bytes = vec![0; len as usize];
    stream.read_exact(&mut bytes).map_err(Error::io(OBJECT, "read from"))?;
    serde_json::from_slice(&bytes).map(Some).map_err(|e| Error::protocol(OBJECT, e.to_string()))
}

/// Sends a listening socket as a file descriptor, in a message of one byte. Error: the stream
/// cannot be written.
pub fn send_listener(stream: &UnixStream, listener: &UnixListener) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [listener.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    let byte = [IoSlice::new(&[0])];
    rustix::net::sendmsg(stream, &byte, &mut control, SendFlags::NOSIGNAL)
        .map(drop)
        .map_err(Error::io(OBJECT, "write to"))
}

/// Receives the socket that [`send_listener`] sent, and returns it. Errors: [`Error::Protocol`] if
/// the message has no socket; the stream cannot be read.
pub fn receive_listener(stream: &UnixStream) -> Result<UnixListener> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut parts = [IoSliceMut::new(&mut byte)];
    rustix::net::recvmsg(stream, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)
        .map_err(Error::io(OBJECT, "read from"))?;
    let listener = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    let listener = listener.ok_or_else(|| Error::protocol(OBJECT, "no listening socket came"))?;
    Ok(UnixListener::from(listener))
}
