//! The error of all operations on a VMM.

use crate::Unsupported;
use std::error::Error;
use std::fmt;

/// The kind of a [`VmmError`], by which the caller decides how to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmmErrorKind {
    /// The VMM closed its monitor: the VM has ended, or it can no longer be controlled.
    MonitorLost,
    /// The VMM did not answer in time. The request may still take effect.
    Timeout,
    /// The VMM refuses to load a device state.
    StateRefused,
    /// This VMM does not have the ability.
    Unsupported,
    /// Any other failure.
    Other,
}

/// A failed operation on a VMM. The text is the driver's own error text.
#[derive(Debug)]
pub struct VmmError {
    kind: VmmErrorKind,
    error: Box<dyn Error + Send + Sync>,
    fix: Option<String>,
}

impl VmmError {
    /// Creates an error from a driver's `error`. `fix` tells the user what to do about it, if that
    /// is known.
    pub fn new(
        kind: VmmErrorKind,
        error: impl Into<Box<dyn Error + Send + Sync>>,
        fix: Option<String>,
    ) -> Self {
        Self { kind, error: error.into(), fix }
    }

    /// Returns the kind of the error, by which the caller decides how to go on.
    pub fn kind(&self) -> VmmErrorKind {
        self.kind
    }

    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<&str> {
        self.fix.as_deref()
    }

    /// Returns the driver's error, for example to downcast it to the driver's own type.
    pub fn driver_error(&self) -> &(dyn Error + Send + Sync + 'static) {
        &*self.error
    }
}

impl fmt::Display for VmmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl Error for VmmError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        // The driver's error is the text of this one: its source is the next cause.
        self.error.source()
    }
}

impl From<Unsupported> for VmmError {
    fn from(unsupported: Unsupported) -> Self {
        let fix = Some(unsupported.fix.clone());
        Self::new(VmmErrorKind::Unsupported, unsupported, fix)
    }
}
