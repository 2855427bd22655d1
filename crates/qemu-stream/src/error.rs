//! The errors of this crate.

use std::io;

/// The result of this crate's functions.
pub type Result<T, E = StreamError> = std::result::Result<T, E>;

/// An error in a device state or a migration stream. [`StreamError::fix`] tells what to do about
/// it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// Reading or writing failed.
    #[error("{operation}")]
    Io {
        /// The operation and its object.
        operation: String,
        /// The reason why it failed.
        source: io::Error,
    },
    /// A device state is malformed.
    #[error("device state, byte {offset}: {problem}")]
    DeviceState {
        /// The offset of the problem in bytes.
        offset: u64,
        /// What is wrong.
        problem: String,
    },
    /// A migration stream is malformed.
    #[error("migration stream, byte {offset}: {problem}")]
    Migration {
        /// The offset of the problem in bytes.
        offset: u64,
        /// What is wrong.
        problem: String,
    },
    /// A migration stream uses a feature that this crate does not read.
    #[error("migration stream: it was made with {feature}, which Keyframe does not read")]
    MigrationFeature {
        /// QEMU's name of the migration capability.
        feature: String,
    },
    /// A device state cannot continue under another accelerator or clock.
    #[error("the checkpoint cannot change its accelerator: {reason}")]
    Conversion {
        /// The reason why not.
        reason: String,
        /// What the user can do.
        fix: String,
    },
}

impl StreamError {
    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::Conversion { fix, .. } => Some(fix.clone()),
            Self::MigrationFeature { feature } => Some(format!(
                "write the stream again without it: in QEMU's monitor, \
                 migrate_set_capability {feature} off, then migrate \"exec:cat > FILE\""
            )),
            Self::Io { .. } | Self::DeviceState { .. } | Self::Migration { .. } => None,
        }
    }

    /// For `map_err`: an I/O error of `operation`.
    pub(crate) fn io(operation: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let operation = operation.into();
        move |source| Self::Io { operation, source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_testing::{assert_golden, error_text};

    #[test]
    fn error_texts_are_golden() {
        let errors = [
            StreamError::Io {
                operation: "write the stream's header".into(),
                source: io::ErrorKind::BrokenPipe.into(),
            },
            StreamError::DeviceState { offset: 8, problem: "it holds no device".into() },
            StreamError::Migration { offset: 12, problem: "it is cut short here".into() },
            StreamError::MigrationFeature { feature: "multifd".into() },
            StreamError::Conversion {
                reason: "processor 0: the guest runs VMs of its own".into(),
                fix: "end the guest's own VMs first".into(),
            },
        ];
        let texts: Vec<_> = errors.iter().map(|error| error_text(error, error.fix())).collect();
        assert_golden("tests/golden/errors.txt", &texts.concat());
    }
}
