//! The ways to a monitor: its socket, or libvirt, which holds the socket of its own VMs.

use super::transport::Transport;
use super::virsh::Virsh;
use crate::{Error, Result};
use serde_json::Value;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// A way to a monitor. Both take requests as QMP words them and give answers with the request's id,
/// and events.
pub enum Channel {
    /// Its socket: what comes, comes in the order in which it happened.
    Socket(Transport),
    /// Through libvirt: answers and events come by two ways, each in its own order.
    Libvirt(Box<Virsh>),
}

impl Channel {
    /// What errors call it.
    pub fn name(&self) -> &str {
        match self {
            Self::Socket(socket) => socket.name(),
            Self::Libvirt(virsh) => virsh.name(),
        }
    }

    /// Sends a request, and `passed` along with it.
    pub fn send(
        &mut self,
        message: &Value,
        passed: Option<BorrowedFd<'_>>,
        operation: &str,
        timeout: Duration,
    ) -> Result<()> {
        match self {
            Self::Socket(socket) => socket.send(message, passed, operation, timeout),
            Self::Libvirt(virsh) => virsh.send(message, passed, operation),
        }
    }

    /// The next answer or event, waiting for at most `timeout`.
    pub fn receive(&mut self, operation: &str, timeout: Duration) -> Result<Value> {
        match self {
            Self::Socket(socket) => socket.receive(operation, timeout),
            Self::Libvirt(virsh) => virsh.receive(operation, timeout),
        }
    }

    /// The next answer or event, if it is there already.
    pub fn receive_now(&mut self, operation: &str) -> Result<Option<Value>> {
        match self {
            Self::Socket(socket) => socket.receive_now(operation),
            Self::Libvirt(virsh) => virsh.receive_now(operation),
        }
    }

    /// True where the event of a command may come behind the command's answer.
    pub fn events_lag(&self) -> bool {
        matches!(self, Self::Libvirt(_))
    }

    /// An answer that cannot be understood.
    pub fn protocol(&self, operation: &str, problem: String) -> Error {
        Error::Protocol { monitor: self.name().into(), operation: operation.into(), problem }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Socket(socket) => socket.as_fd(),
            Self::Libvirt(virsh) => virsh.as_fd(),
        }
    }
}
