//! The errors of the dashboard's server.

use std::io;
use std::net::SocketAddr;

/// The result of the server's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why the dashboard cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Other machines could reach the dashboard without a token.
    #[error("other machines can reach {0} and would see all VMs and stores without a token")]
    NoToken(SocketAddr),
    /// An I/O error.
    #[error("{object}: cannot {operation}")]
    Io {
        /// The address, or the runtime.
        object: String,
        /// The operation that failed, as a verb such as "listen".
        operation: &'static str,
        /// The cause.
        source: io::Error,
    },
}

impl Error {
    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::NoToken(_) => Some(
                "give it a token: (umask 077; head -c 24 /dev/urandom | base64 > TOKEN), keyframe \
                 serve --token-file TOKEN; or listen at 127.0.0.1 and forward the port: ssh -L \
                 7421:127.0.0.1:7421 HOST"
                    .into(),
            ),
            Self::Io { operation: "listen", source, .. }
                if source.kind() == io::ErrorKind::AddrInUse =>
            {
                Some(
                    "another process uses this address: name another port with --http, 0 for any \
                     port, or --http none"
                        .into(),
                )
            }
            Self::Io { .. } => None,
        }
    }

    /// Returns true if the error is that another process uses the address.
    pub fn is_taken(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::AddrInUse)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_testing::{assert_golden, error_text};

    #[test]
    fn error_texts_are_golden() {
        let failed = |operation, kind: io::ErrorKind| Error::Io {
            object: "127.0.0.1:7421".into(),
            operation,
            source: kind.into(),
        };
        let errors = [
            Error::NoToken("0.0.0.0:7421".parse().unwrap()),
            failed("listen", io::ErrorKind::AddrInUse),
            failed("listen", io::ErrorKind::PermissionDenied),
        ];
        let texts: Vec<_> = errors.iter().map(|error| error_text(error, error.fix())).collect();
        assert_golden("tests/golden/errors.txt", &texts.concat());
    }
}
