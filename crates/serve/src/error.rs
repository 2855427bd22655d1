//! Why a server does not serve.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

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
    /// The server is to accept checkpoints, and has no token.
    #[error("--allow-write without a token: every user of this machine could write to the store")]
    OpenToWriters,
    /// The server is to accept checkpoints for a store that is not in a directory of this host.
    #[error("{}: a server accepts checkpoints only for a store in a directory of its own host", .0.display())]
    NoDirectory(PathBuf),
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
            Self::OpenToWriters => {
                "give it a token: (umask 077; head -c 24 /dev/urandom | base64 > TOKEN), keyframe serve --allow-write --token-file TOKEN".into()
            }
            Self::NoDirectory(_) => {
                "leave out --allow-write: the other hosts use the object storage itself; or serve a store in a directory".into()
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
