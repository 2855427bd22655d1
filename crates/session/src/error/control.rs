//! Why an engine could not be asked.

use std::path::PathBuf;

/// The reason why a request to a running engine has no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The control socket cannot be used.
    #[error("{operation} {}", socket.display())]
    Io {
        /// The operation, as a verb.
        operation: &'static str,
        /// The control socket.
        socket: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A request or an answer is not the JSON that it should be.
    #[error("{operation} {}", socket.display())]
    Json {
        /// The operation, as a verb.
        operation: &'static str,
        /// The control socket.
        socket: PathBuf,
        /// The JSON library's error.
        source: serde_json::Error,
    },
    /// The engine ended before it answered.
    #[error("read from {}: the engine ended without an answer", .0.display())]
    NoAnswer(PathBuf),
    /// The engine refused the request, for this reason.
    #[error("{0}")]
    Refused(String),
    /// The thread that asked the engine panicked.
    #[error("the thread that asked the engine panicked")]
    Panicked,
}

impl ControlError {
    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::Io { .. } | Self::Json { .. } | Self::NoAnswer(_) => {
                Some("see what runs with: keyframe status".into())
            }
            Self::Refused(_) | Self::Panicked => None,
        }
    }
}
