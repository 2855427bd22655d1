//! How a command fails: a message, what to do about it, and the exit code.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | failed |
//! | 2 | wrong usage |
//! | 3 | done, with warnings |
//! | 4 | the guest panicked |
//! | 5 | the guest's watchdog expired |
//! | 10 | no store |
//! | 11 | the store is locked |
//! | 12 | the newest checkpoints are missing: the store is full |

mod kind;
pub mod paths;

use keyframe_event_text::shell_word;
pub use kind::FailureKind;
use std::fmt;
use std::path::Path;

/// Done.
pub const DONE: u8 = 0;
/// Failed.
pub const FAILED: u8 = 1;
/// Wrong usage.
pub const USAGE: u8 = 2;
/// Done with warnings.
pub const WARNED: u8 = 3;
/// The guest panicked.
pub const GUEST_PANICKED: u8 = 4;
/// The guest's watchdog expired.
pub const WATCHDOG_EXPIRED: u8 = 5;
/// There is no store.
pub const NO_STORE: u8 = 10;
/// Another process writes to the store.
pub const LOCKED: u8 = 11;
/// The newest checkpoints of a run are missing, because the store is full.
pub const STORE_FULL: u8 = 12;

/// Why a command ended, for a person.
#[derive(Debug)]
pub struct Failure {
    /// The exit code.
    pub code: u8,
    /// The kind, if the exit code does not tell it: see [`Self::kind`].
    pub kind: FailureKind,
    /// What went wrong, naming the object and the operation.
    pub message: String,
    /// What to do about it, where we know.
    pub fix: Option<String>,
}

/// The result of a command: its exit code.
pub type Outcome = Result<u8, Failure>;

/// Returns the fix if `path` is not a store.
fn without_store(path: &Path) -> String {
    let shown = shell_word(path);
    if path.join("recording.json").is_file() {
        return format!(
            "that is a recording: its checkpoints are listed with --store {shown}/store, and brought up by: keyframe goto {shown}"
        );
    }
    format!("create it with: keyframe init {shown}; or name one that is there")
}

impl Failure {
    /// A plain failure.
    pub fn new(message: impl Into<String>) -> Self {
        Self { code: FAILED, kind: FailureKind::Failed, message: message.into(), fix: None }
    }

    /// Wrong usage that the parser of the command line cannot find.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { code: USAGE, ..Self::new(message) }
    }

    /// Adds what to do about it.
    #[must_use]
    pub fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }

    /// Replaces the fix by `fix`, if there is one.
    #[must_use]
    pub fn with_fix(mut self, fix: Option<String>) -> Self {
        self.fix = fix.or(self.fix);
        self
    }

    /// Says which VM of several it is about.
    #[must_use]
    pub fn about(mut self, vm: &str) -> Self {
        self.message = format!("VM {vm}: {}", self.message);
        self
    }

    /// A store's error, with the way out that a person at the shell has.
    pub fn store(error: &keyframe_store::Error, path: &Path) -> Self {
        use keyframe_store::Error;
        let failure = Self::new(chain(error)).of_kind(FailureKind::of_store(error));
        match error {
            Error::NoStore { .. } => Self { code: NO_STORE, fix: Some(without_store(path)), ..failure },
            Error::Locked { .. } => Self {
                code: LOCKED,
                fix: Some("wait until that one ends (keyframe status), or use another store".into()),
                ..failure
            },
            Error::OtherVersion { .. } => {
                failure.fix("read it with a later Keyframe; nothing in it was changed")
            }
            Error::PreRelease { .. } => failure.fix(
                "make a new store with this build; only the build that made the old one reads it",
            ),
            Error::Damaged { .. } if path.is_file() => failure.fix(
                "copy the bundle again from where it was made, or make it again (keyframe bundle)",
            ),
            Error::Damaged { .. } => failure.fix(format!(
                "find out what else is hurt with: keyframe check --read-data --store {}",
                shell_word(path)
            )),
            Error::UnknownTag { .. } => {
                failure.fix(format!("see what tags there are with: keyframe list --store {}", shell_word(path)))
            }
            Error::Pinned { id } => {
                failure.fix(format!("unpin it first (keyframe pin --remove {id}), or name it with --force"))
            }
            Error::InUse { .. } => failure.fix("keep the newest, or stop the run first (keyframe stop)"),
            Error::UnknownCheckpoint { .. } => failure.fix(format!(
                "name a number, a tag or `latest`; see what there is with: keyframe list --store {}",
                shell_word(path)
            )),
            _ if error.is_disk_full() => failure.fix("free some space; sealed checkpoints are unharmed"),
            _ => Self { fix: keyframe_store_keys::fix(error).or_else(|| error.fix()), ..failure },
        }
    }

    /// An error of an analysis.
    pub fn analysis(error: &keyframe_analysis::Error) -> Self {
        let fix = error.fix();
        Self { fix, ..Self::new(chain(error)) }
    }

    /// An error of a queue of intervals or of its workers.
    pub fn cluster(error: &keyframe_cluster::Error) -> Self {
        let fix = error.fix();
        Self { fix, ..Self::new(chain(error)) }
    }

    /// An error of a recording.
    pub fn recording(error: &keyframe_replay::Error) -> Self {
        let fix = error.fix();
        Self { fix, ..Self::new(chain(error)) }
    }

    /// An error of QEMU or of the command line meant for it.
    pub fn qemu(error: &keyframe_qemu::Error) -> Self {
        let fix = error.fix();
        Self { fix, ..Self::new(chain(error)) }
    }
}

impl From<keyframe_store_keys::PassphraseInJob> for Failure {
    fn from(error: keyframe_store_keys::PassphraseInJob) -> Self {
        Self::new(error.to_string()).fix(error.fix())
    }
}

impl From<keyframe_replay_driver::Error> for Failure {
    fn from(error: keyframe_replay_driver::Error) -> Self {
        use keyframe_replay_driver::Error;
        match error {
            Error::Store { store, source } => Self::store(&source, &store),
            Error::VmDisks(error) => error.into(),
            Error::Session(error) => error.into(),
            Error::InInterval { index, source } => {
                let failure = Self::from(*source);
                Self { message: format!("interval {index}: {}", failure.message), ..failure }
            }
            error => Self { fix: error.fix(), ..Self::new(chain(&error)) },
        }
    }
}

impl From<keyframe_results::Error> for Failure {
    fn from(error: keyframe_results::Error) -> Self {
        Self { fix: error.fix(), ..Self::new(chain(&error)) }
    }
}

impl From<keyframe_profiler::Error> for Failure {
    fn from(error: keyframe_profiler::Error) -> Self {
        Self { fix: error.fix(), ..Self::new(chain(&error)) }
    }
}

impl From<keyframe_dashboard::Error> for Failure {
    fn from(error: keyframe_dashboard::Error) -> Self {
        match error {
            keyframe_dashboard::Error::Analysis(error) => error.into(),
            error => Self::new(chain(&error)),
        }
    }
}

impl From<keyframe_inspect::Error> for Failure {
    fn from(error: keyframe_inspect::Error) -> Self {
        Self { fix: error.fix(), ..Self::new(chain(&error)) }
    }
}

impl From<keyframe_session::Error> for Failure {
    fn from(error: keyframe_session::Error) -> Self {
        use keyframe_session::Error;
        match error {
            Error::Store { store, source } => Self::store(&source, &store),
            Error::VmDisks(error) => error.into(),
            error => Self {
                fix: error.fix(),
                kind: FailureKind::of_session(&error),
                ..Self::new(chain(&error))
            },
        }
    }
}

impl From<keyframe_session::error::RunDirError> for Failure {
    fn from(error: keyframe_session::error::RunDirError) -> Self {
        keyframe_session::Error::from(error).into()
    }
}

impl From<keyframe_bundle::Error> for Failure {
    fn from(error: keyframe_bundle::Error) -> Self {
        use keyframe_bundle::Error;
        match error {
            Error::Store { source, .. } if source.is_disk_full() => Self::new(chain(&*source))
                .fix("free some space, and run the same command: it goes on with what is done"),
            Error::Store { store, source } => Self::store(&source, &store),
            Error::VmDisks(error) => error.into(),
            error => Self { fix: error.fix(), ..Self::new(chain(&error)) },
        }
    }
}

impl From<keyframe_vm_disks::Error> for Failure {
    fn from(error: keyframe_vm_disks::Error) -> Self {
        match &error {
            keyframe_vm_disks::Error::Store(keyframe_vm_disks::StoreError { store, source }) => {
                Self::store(source, store)
            }
            _ => Self { fix: error.fix(), ..Self::new(chain(&error)) },
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.message)?;
        match &self.fix {
            Some(fix) => write!(f, "\n  fix: {fix}"),
            None => Ok(()),
        }
    }
}

pub use keyframe_units::error_chain as chain;
