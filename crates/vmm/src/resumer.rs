//! How another process can resume a VM.

use std::ffi::OsString;
use std::os::fd::OwnedFd;

/// Instructions with which another process, the watchdog, can resume a VM whose engine died.
///
/// The driver that made it reads `words` in that process.
#[derive(Debug, Default)]
pub struct Resumer {
    /// Arguments for the watchdog's command line. They may name descriptors by number.
    pub words: Vec<OsString>,
    /// Descriptors that the watchdog must inherit under the same numbers.
    pub descriptors: Vec<OwnedFd>,
}
