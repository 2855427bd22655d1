//! Why a server does not serve.

use std::io;
use std::net::SocketAddr;

/// A result of the server.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why a server does not serve.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The store cannot be opened.
    #[error(transparent)]
    Store(#[from] keyframe_store::Error),
    /// The address is reachable from other machines, and the server has no token.
    #[error(
        "{0} can be reached from other machines, and each of them could read the memory of the VMs"
    )]
    Open(SocketAddr),
    /// A file is not a certificate or key.
    #[error("{object}: {problem}")]
    Certificate {
        /// The file.
        object: String,
        /// What is wrong.
        problem: String,
    },
    /// The system refused an operation.
    #[error("{object}: {operation}: {source}")]
    Io {
        /// The file or address.
        object: String,
        /// The operation, a participle such as "reading".
        operation: &'static str,
        /// The system's answer.
        source: io::Error,
    },
}

impl Error {
    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        Some(match self {
            Self::Open(_) => {
                "give it a token: (umask 077; head -c 24 /dev/urandom | base64 > TOKEN), keyframe serve --token-file TOKEN; or let it \
                 listen on 127.0.0.1"
                    .into()
            }
            Self::Certificate { .. } => {
                "name a certificate and its key, as PEM, with --tls-cert and --tls-key; or neither: then one is made".into()
            }
            Self::Io { operation: "listen", source, .. } if source.kind() == io::ErrorKind::AddrInUse => {
                "another process listens there: name another port, or 0 for any, with --listen".into()
            }
            Self::Io { .. } => return None,
            Self::Store(error) => return error.fix(),
        })
    }
}
