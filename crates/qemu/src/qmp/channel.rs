//! The two ways to a monitor: its socket, or libvirt, which holds the sockets of its VMs.

use super::transport::Transport;
use super::virsh::Virsh;
use crate::{Error, Result};
use serde_json::Value;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// A way to a monitor. Both take QMP requests, and return events and answers with the request's id.
pub enum QmpChannel {
    /// The monitor's socket. Messages arrive in the order in which they were sent.
    Socket(Transport),
    /// Libvirt. Answers and events arrive over two pipes, each in its own order.
    Libvirt(Box<Virsh>),
}

impl QmpChannel {
    /// Returns the name that errors use for the channel.
    pub fn name(&self) -> &str {
        match self {
            Self::Socket(socket) => socket.name(),
            Self::Libvirt(virsh) => virsh.name(),
        }
    }

    /// Sends a request, with the descriptor `passed` if there is one. Errors call it `operation`.
    /// Error: the monitor is closed, or does not take the request within `timeout`.
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

    /// Returns the next answer or event, waiting for at most `timeout`. Error: the time has passed,
    /// the monitor is closed, or its output is malformed.
    pub fn receive(&mut self, operation: &str, timeout: Duration) -> Result<Value> {
        match self {
            Self::Socket(socket) => socket.receive(operation, timeout),
            Self::Libvirt(virsh) => virsh.receive(operation, timeout),
        }
    }

    /// Returns the next answer or event; `None` if none has arrived. Error: the monitor is closed,
    /// or its output is malformed.
    pub fn receive_now(&mut self, operation: &str) -> Result<Option<Value>> {
        match self {
            Self::Socket(socket) => socket.receive_now(operation),
            Self::Libvirt(virsh) => virsh.receive_now(operation),
        }
    }

    /// Returns true if the event that a command causes may arrive after the command's answer.
    pub fn events_lag(&self) -> bool {
        matches!(self, Self::Libvirt(_))
    }

    /// Returns the error for an answer that cannot be understood.
    pub fn protocol(&self, operation: &str, problem: String) -> Error {
        Error::Protocol { monitor: self.name().into(), operation: operation.into(), problem }
    }
}

impl AsFd for QmpChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Socket(socket) => socket.as_fd(),
            Self::Libvirt(virsh) => virsh.as_fd(),
        }
    }
}
