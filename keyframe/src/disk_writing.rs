//! What commit and export share in writing a disk: how far it has got, giving up, and what an error
//! means.

use crate::failure::{Failure, chain};
use crate::progress;
use indicatif::ProgressBar;
use keyframe_disk::{Error, ImageFormat, Result};
use keyframe_kernel::Interrupt;
use keyframe_store::BaseMeta;
use keyframe_vm_disks::base_image::require_unchanged;
use rustix::process::Signal;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The format of a new image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum NewFormat {
    /// As it is.
    Raw,
    /// QEMU's own.
    Qcow2,
}

impl From<NewFormat> for ImageFormat {
    fn from(format: NewFormat) -> Self {
        match format {
            NewFormat::Raw => Self::Raw,
            NewFormat::Qcow2 => Self::Qcow2,
        }
    }
}

/// A progress bar on the terminal, and whether the user has interrupted the work (Ctrl-C, SIGTERM).
pub struct Progress {
    bar: ProgressBar,
    interrupted: Arc<AtomicBool>,
    object: String,
    bytes: u64,
    image: Option<BaseMeta>,
}

impl Progress {
    /// Makes the progress of `bytes` bytes of `object`; `verb` names the operation.
    pub fn new(verb: &str, object: &Path, bytes: u64, quiet: bool) -> Result<Self, Failure> {
        let interrupted = Interrupt::on(&[Signal::INT, Signal::TERM])
            .map_err(|e| Failure::new(format!("catch signals: {e}")))?
            .into_flag();
        let template = format!("{verb} {{wide_bar}} {{bytes}}/{{total_bytes}}");
        let bar = progress::bar(quiet, Some(bytes), &template);
        Ok(Self { bar, interrupted, object: object.display().to_string(), bytes, image: None })
    }

    /// Sets the image from which the data is read. It is checked for changes, if it is known.
    #[must_use]
    pub fn reading(self, image: Option<BaseMeta>) -> Self {
        Self { image, ..self }
    }

    /// Shows that `done_bytes` bytes are done. Errors: the user has interrupted the work; at the end,
    /// the image has changed.
    pub fn reached(&self, done_bytes: u64) -> Result<()> {
        self.bar.set_position(done_bytes);
        if self.interrupted.load(Ordering::Relaxed) {
            let source = std::io::Error::other("it was given up");
            return Err(Error::Io { object: self.object.clone(), operation: "write", source });
        }
        match &self.image {
            Some(image) if done_bytes >= self.bytes => {
                require_unchanged(image).map_err(|changed| {
                    let fix = changed.fix().unwrap_or_default();
                    Error::Refused { object: self.object.clone(), problem: chain(&changed), fix }
                })
            }
            _ => Ok(()),
        }
    }

    /// Removes the progress bar.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}

/// A disk's error, for a person.
pub fn failure(error: &Error) -> Failure {
    Failure { fix: error.fix(), ..Failure::new(chain(error)) }
}
