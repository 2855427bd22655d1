//! Why the dashboard does not serve.

use std::io;
use std::net::SocketAddr;

/// A result of the server.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why the dashboard does not serve.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Everybody in the network could see the VMs.
    #[error(
        "{0} can be reached from other machines, and whoever reaches it could see all VMs and stores"
    )]
    Open(SocketAddr),
    /// The system refused.
    #[error("{object}: {operation}")]
    Io {
        /// The address, or the runtime.
        object: String,
        /// What was being done.
        operation: &'static str,
        /// The system's answer.
        source: io::Error,
    },
}

impl Error {
    /// What a person can do about it.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::Open(_) => Some(
                "give it a token: (umask 077; head -c 24 /dev/urandom | base64 > TOKEN), keyframe serve --token-file TOKEN; or leave it at \
                 127.0.0.1 and forward the port: ssh -L 7421:127.0.0.1:7421 HOST"
                    .into(),
            ),
            Self::Io { operation: "listen", source, .. } if source.kind() == io::ErrorKind::AddrInUse => Some(
                "another process listens there: name another port, or 0 for any, with --http; or --http none".into(),
            ),
            Self::Io { .. } => None,
        }
    }

    /// Whether the address is in use.
    pub fn is_taken(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::AddrInUse)
    }
}
