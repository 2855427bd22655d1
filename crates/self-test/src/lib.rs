//! Keyframe tests itself on the user's QEMU, kernel and processor.
//!
//! ```text
//!   captures    payload under each strategy and RAM backing ─▶ each checkpoint = RAM in its pause?
//!   restores    checkpoint ─▶ eager, lazy, branch, rollback  ─▶ a checkpoint of it = the first one?
//!   recording   payload recorded ─▶ verified, analysed       ─▶ the same as one replay?
//! ```
//!
//! The guest is a firmware payload that is compiled into the program: it needs no kernel, boots in
//! milliseconds, and checks its memory and registers all the time. The test runs the `keyframe`
//! program as a user would, in a scratch directory that is removed afterwards.
//!
//! Left out: disks, networks and groups, whose exactness does not depend on the host's processor.

mod captures;
mod check;
mod guest;
mod leftovers;
mod program;
mod recordings;
mod restores;

pub use check::{Check, CheckOutcome, Report};

use guest::Guest;
use keyframe_machine::{Accelerator, Processor};
use keyframe_scratch_directory::ScratchDirectory;
use program::Program;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;

/// An error that keeps the whole test from running. A failed check is no error.
#[derive(Debug, thiserror::Error)]
#[error("{operation}: {source}")]
pub struct Error {
    /// The operation, such as `make a scratch directory`.
    pub operation: &'static str,
    /// The system's error.
    pub source: io::Error,
}

/// A test of one QEMU under one accelerator.
pub struct SelfTest<'a> {
    /// The `keyframe` program.
    pub program: PathBuf,
    /// The QEMU: a path, or a name that `PATH` resolves.
    pub qemu: String,
    /// The processor that it emulates.
    pub processor: Processor,
    /// Its version, for the report.
    pub version: String,
    /// The accelerator.
    pub accelerator: Accelerator,
    /// Set to true to end the test early.
    pub interrupted: &'a AtomicBool,
}

impl SelfTest<'_> {
    /// Runs all checks, two at a time. Calls `on_check` after each.
    ///
    /// # Errors
    ///
    /// [`Error`] if the scratch directory cannot be made.
    pub fn run(&self, on_check: &mut dyn FnMut(&Check)) -> Result<Report, Error> {
        let failed = |operation| move |source| Error { operation, source };
        if self.processor != Processor::X86_64 {
            let problem = format!(
                "it emulates {}, and the guest of the self-test is of x86_64; name another QEMU \
                 with --qemu",
                self.processor
            );
            return Err(failed("test this QEMU")(io::Error::other(problem)));
        }
        let scratch =
            ScratchDirectory::new("self-test").map_err(failed("make a scratch directory"))?;
        let payload = scratch.path().join("payload.bin");
        std::fs::write(&payload, guest::PAYLOAD).map_err(failed("write the guest's firmware"))?;
        let guest = Guest { qemu: &self.qemu, accelerator: self.accelerator, payload: &payload };
        let lane = |name: &str| {
            let directory = scratch.path().join(name);
            std::fs::create_dir(&directory).map_err(failed("make a directory"))?;
            Ok(Program { path: &self.program, directory, interrupted: self.interrupted })
        };
        let (captures, uses) = (lane("c")?, lane("u")?);
        let mut checks = Vec::new();
        std::thread::scope(|scope| {
            let (sender, receiver) = mpsc::channel();
            let other = sender.clone();
            scope
                .spawn(move || captures::run(&captures, &guest, &|check| drop(sender.send(check))));
            scope.spawn(move || {
                let on_check = |check| drop(other.send(check));
                restores::run(&uses, &guest, &on_check);
                recordings::run(&uses, &guest, &on_check);
            });
            for check in receiver {
                on_check(&check);
                checks.push(check);
            }
        });
        leftovers::end(scratch.path());
        Ok(Report::new(self, checks))
    }
}
