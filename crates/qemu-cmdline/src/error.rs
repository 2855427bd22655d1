//! The errors of this crate.

/// The result of this crate's functions.
pub type Result<T, E = CommandLineError> = std::result::Result<T, E>;

/// A command line that Keyframe cannot run or rewrite. [`CommandLineError::fix`] tells what to do
/// about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommandLineError {
    /// An argument cannot be used.
    #[error("{argument}: {reason}")]
    Argument {
        /// The argument, as the user wrote it.
        argument: String,
        /// The reason why not.
        reason: String,
        /// What the user can do.
        fix: String,
    },
    /// A checkpoint's command line and its RAM blocks contradict each other.
    #[error("the checkpoint's RAM layout: {problem}")]
    RamLayout {
        /// The contradiction.
        problem: String,
    },
    /// A checkpoint's command line cannot run under another accelerator.
    #[error("the checkpoint cannot change its accelerator: {reason}")]
    Accelerator {
        /// The reason why not.
        reason: String,
        /// What the user can do.
        fix: String,
    },
}

impl CommandLineError {
    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::Argument { fix, .. } | Self::Accelerator { fix, .. } => Some(fix.clone()),
            Self::RamLayout { .. } => None,
        }
    }

    /// The error for an argument.
    pub(crate) fn argument(
        argument: impl Into<String>,
        reason: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self::Argument { argument: argument.into(), reason: reason.into(), fix: fix.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_testing::{assert_golden, error_text};

    #[test]
    fn error_texts_are_golden() {
        let errors = [
            CommandLineError::argument("-daemonize", "QEMU would leave its process", "remove it"),
            CommandLineError::RamLayout {
                problem: "RAM block pc.ram has no -object in the kept command line".into(),
            },
            CommandLineError::Accelerator {
                reason: "-cpu host: the processor model host differs between accelerators".into(),
                fix: "restore it under the accelerator that it ran under".into(),
            },
        ];
        let texts: Vec<_> = errors.iter().map(|error| error_text(error, error.fix())).collect();
        assert_golden("tests/golden/errors.txt", &texts.concat());
    }
}
