//! A socket between this process and a QEMU that it starts.

use crate::{Error, Result};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::io;
use std::os::fd::OwnedFd;

/// A connected pair of sockets: this process's end, and the end that QEMU inherits.
pub(super) struct SocketPair {
    pub ours: OwnedFd,
    theirs: Option<OwnedFd>,
}

impl SocketPair {
    /// Makes the pair. Error: [`Error::Io`] if the kernel refuses.
    pub fn new() -> Result<Self> {
        let kind = (AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC);
        let (ours, theirs) = rustix::net::socketpair(kind.0, kind.1, kind.2, None)
            .map_err(Error::io("make a socket pair for QEMU"))?;
        Ok(Self { ours, theirs: Some(theirs) })
    }

    /// Gives QEMU's end away. `what` names the socket in the error. Error: [`Error::Io`] if the end
    /// was given away before.
    pub fn give_away(&mut self, what: &str) -> Result<OwnedFd> {
        self.theirs.take().ok_or_else(|| {
            let source = io::Error::other("it was given away already");
            Error::io(format!("give QEMU its {what}"))(source)
        })
    }
}
