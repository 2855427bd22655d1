//! Why a run directory cannot be used.

use std::path::PathBuf;

/// An error of run directories, or of the VMs that they belong to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunDirError {
    /// The file system refused an operation.
    #[error("{operation} {}", path.display())]
    Io {
        /// The operation, as a verb.
        operation: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A description could not be written as JSON.
    #[error("write JSON")]
    Json(#[from] serde_json::Error),
    /// No VM can have this name.
    #[error("{0:?} is no name for a VM")]
    BadName(String),
    /// A VM of this name has an engine.
    #[error("a VM named {0} is running under Keyframe already")]
    NameRuns(String),
    /// A VM of this name runs on without an engine.
    #[error("a VM named {0} still runs, left by an earlier run")]
    NameLeft(String),
    /// The directory belongs to another user, or others may enter it.
    #[error("{} is not a private directory of ours", .0.display())]
    NotPrivate(PathBuf),
    /// A VM's command could not be ended.
    #[error("end VM {vm}")]
    End {
        /// The VM.
        vm: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The VM has ended by itself.
    #[error("VM {0} has just ended")]
    Gone(String),
    /// No engine runs a VM of this name.
    #[error("no VM named {name} runs under Keyframe")]
    Unknown {
        /// The name.
        name: String,
        /// The names of the VMs that run.
        running: Vec<String>,
    },
    /// Several VMs run, and none was named.
    #[error("several VMs run")]
    Several {
        /// Their names.
        running: Vec<String>,
    },
    /// No VM that runs has its checkpoints in this store.
    #[error("no VM that runs under Keyframe has its checkpoints in {}", store.display())]
    NotOfStore {
        /// The store.
        store: PathBuf,
    },
    /// No VM runs.
    #[error("no VM runs under Keyframe")]
    NothingRuns,
}

impl RunDirError {
    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        Some(match self {
            Self::BadName(_) => {
                "use --name with 1 to 64 letters, digits, '-', '_' and '.'".to_owned()
            }
            Self::NameRuns(_) | Self::NameLeft(_) => {
                "give this one another name: --name NAME".to_owned()
            }
            Self::NotPrivate(_) => "remove it, or point XDG_RUNTIME_DIR to a directory that only \
                                    you may enter"
                .to_owned(),
            Self::Unknown { running, .. } if running.is_empty() => {
                "no VM runs under Keyframe now; keyframe status lists those that do".to_owned()
            }
            Self::Unknown { running, .. } => {
                format!("name one that runs: {}", running.join(", "))
            }
            Self::Several { running } => {
                format!("choose one with --name: {}", running.join(", "))
            }
            Self::NotOfStore { .. } => {
                "see the VMs that run, with their stores: keyframe status".to_owned()
            }
            Self::NothingRuns => {
                "start one with: keyframe run --store STORE -- qemu-system-x86_64 ...".to_owned()
            }
            Self::Io { .. } | Self::Json(_) | Self::End { .. } | Self::Gone(_) => return None,
        })
    }
}
