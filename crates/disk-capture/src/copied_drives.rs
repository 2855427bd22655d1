//! Drives whose files a VMM other than QEMU opens itself, on a file system that does not clone
//! files: what was written since the last checkpoint is read after the pause, as it was in it
//! ([`crate::copy_before_write`]).
//!
//! ```text
//!   begin: other drives? ─▶ stop ─▶ the VMM saves its devices ─▶ settled: cut ─▶ cont ─▶ the same files?
//!   encoder: the blocks of the cut ─▶ checkpoint
//! ```
//!
//! The first checkpoint of a session has all blocks, and its disks have no image beneath. If writes
//! were not reported, or a drive got another file, the VMM opens the files anew, and the next
//! checkpoint has all blocks. After another file it is the first of another run.

use crate::copy_before_write::{CopyBeforeWrite, CutBlocks, CutNumber};
use crate::drives::{drives_of, record_writes, require_same};
use crate::error::DiskError;
use crate::{DiskCapture, DiskCut};
use keyframe_capture::BoxError;
use keyframe_store::{BaseMeta, DiskMeta};
use keyframe_vmm::{Vmm, WritableDrive};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The longest time for which the drives of the previous capture may still be read.
const READ_TIMEOUT: Duration = Duration::from_secs(120);

/// Captures the drives of a VM by reading what was written to their files, for the engine's thread.
pub struct CopiedDriveCapture {
    drives: Vec<WritableDrive>,
    metas: Vec<DiskMeta>,
    /// True if the drives are others than those of the present run.
    have_changed: bool,
    copies: CopyBeforeWrite,
    /// The number of the present capture's cut, from [`DiskCapture::begin`] on.
    number: Option<CutNumber>,
    /// The blocks of the present capture, once it is cut.
    cut: Option<CutBlocks>,
    in_flight: BTreeMap<u64, CutBlocks>,
    /// True if a checkpoint was captured in this run.
    has_captured: bool,
}

impl CopiedDriveCapture {
    /// Prepares to read `drives`, whose writes `copies` records.
    pub fn new(copies: CopyBeforeWrite, drives: Vec<WritableDrive>) -> Self {
        Self {
            metas: metas_of(&drives),
            drives,
            have_changed: false,
            copies,
            number: None,
            cut: None,
            in_flight: BTreeMap::new(),
            has_captured: false,
        }
    }

    /// Records the writes to `drives` from now on; all blocks are owed. Errors: the kernel does not
    /// report them; the VMM does not open the files anew.
    fn record_anew(
        &mut self,
        drives: Vec<WritableDrive>,
        members: &mut [&mut dyn Vmm],
    ) -> Result<(), BoxError> {
        self.copies = record_writes(&drives)?;
        self.in_flight.clear();
        if drives != self.drives {
            (self.metas, self.have_changed) = (metas_of(&drives), true);
            self.drives = drives;
        }
        for member in members {
            member.reopen_drives(&self.drives)?;
        }
        Ok(())
    }
}

impl DiskCapture for CopiedDriveCapture {
    fn metas(&self) -> &[DiskMeta] {
        &self.metas
    }

    fn is_busy(&self) -> bool {
        !self.copies.is_read()
    }

    fn takes_new_run(&self) -> bool {
        self.have_changed
    }

    fn began_run(&mut self) {
        (self.have_changed, self.has_captured) = (false, false);
    }

    fn begin(&mut self, members: &mut [&mut dyn Vmm]) -> Result<DiskCut, BoxError> {
        let now = drives_of(members)?;
        if now != self.drives || self.copies.is_broken() {
            self.record_anew(now, members)?;
        }
        if self.have_changed {
            return Err(DiskError::DrivesChanged.into());
        }
        let began = Instant::now();
        while self.is_busy() {
            if began.elapsed() > READ_TIMEOUT {
                return Err(DiskError::ReadTimeout { seconds: READ_TIMEOUT.as_secs() }.into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.copies.sync()?;
        let (cut, number) = self.copies.begin(self.has_captured);
        self.number = Some(number);
        Ok(DiskCut::Copied(cut))
    }

    /// As it saves its devices, a VMM may flush the files. Little is left to flush then.
    fn before_stop(&mut self) -> Result<(), BoxError> {
        Ok(self.copies.sync()?)
    }

    /// Nothing yet: the VMM may still carry out a request of the guest.
    fn cut(&mut self, _: &mut [&mut dyn Vmm]) -> Result<(), BoxError> {
        Ok(())
    }

    fn settled(&mut self) -> Result<(), BoxError> {
        let Some(number) = &self.number else { return Ok(()) };
        self.cut = Some(self.copies.cut(number)?);
        Ok(())
    }

    /// The guest must still write to the same files.
    fn resumed(&mut self, members: &mut [&mut dyn Vmm]) -> Result<(), BoxError> {
        require_same(&self.drives, members)
    }

    fn captured(&mut self, seq: Option<u64>, _: &mut [&mut dyn Vmm]) {
        self.number = None;
        let Some(blocks) = self.cut.take() else { return };
        if let Some(seq) = seq {
            self.has_captured = true;
            self.in_flight.insert(seq, blocks);
        } else {
            self.copies.end_cut();
            self.copies.owe(&blocks);
        }
    }

    fn sealed(&mut self, seq: u64, _: &mut [&mut dyn Vmm]) {
        self.in_flight.remove(&seq);
    }

    fn failed(&mut self, lost: &[u64], _: &mut [&mut dyn Vmm]) {
        for blocks in lost.iter().filter_map(|seq| self.in_flight.remove(seq)) {
            self.copies.owe(&blocks);
        }
    }
}

fn metas_of(drives: &[WritableDrive]) -> Vec<DiskMeta> {
    let meta = |drive: &WritableDrive| DiskMeta {
        name: drive.name.clone(),
        disk_bytes: drive.disk_bytes,
        base: BaseMeta::blank(),
        ..DiskMeta::default()
    };
    drives.iter().map(meta).collect()
}
