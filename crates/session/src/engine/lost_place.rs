//! A run that has lost its place among the writers of a served store: it begins anew.
//!
//! ```text
//!   no request reached the server for the lease, or the server was restarted
//!     ─▶ each checkpoint fails, its pages are owed ─▶ the server answers
//!     ─▶ a new place, a new run: a complete checkpoint;
//!        its disks are those of the newest sealed one, and what was written since
//! ```
//!
//! Meanwhile other processes may have forgotten and pruned what the old run builds on. So the
//! engine uses nothing of its state in memory again: the new writer reads the store as any other
//! one does.

use super::{CheckpointError, Engine, Event, NotCaptured};
use keyframe_store::{DiskState, Writer};

impl Engine<'_> {
    /// Begins anew if the run's place in the store is lost. Does nothing otherwise. Fails if the
    /// server does not answer yet, or if the run is a recording, which has one run.
    pub(super) fn regain_place(&mut self) -> Result<(), NotCaptured> {
        if !self.writer.is_lost() {
            return Ok(());
        }
        if self.options.recorded.is_some() {
            self.given_up = true;
            return Err(self.failed(CheckpointError::PlaceLost, 1, true).into());
        }
        let writer = match self.writer.again() {
            Ok(writer) => writer,
            Err(error) => {
                return Err(self.failed(CheckpointError::NoPlace(error), 1, false).into());
            }
        };
        self.begin_with(writer).map_err(|restart| {
            self.given_up = true;
            self.failed(CheckpointError::Disks(Box::new(restart)), 1, true).into()
        })
    }

    fn begin_with(&mut self, writer: Writer) -> crate::error::Result<()> {
        let sink = self.end_encoding()?;
        // Its pack cannot be closed without a place. All that is sealed stays.
        drop(sink);
        self.writer = writer;
        self.begin_run(DiskState::default(), self.newest, false, &Event::PlaceRegained)
    }
}
