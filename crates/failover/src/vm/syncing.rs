//! The begin of a session with a standby: what it has already is left out, all else goes over.

use super::Keeper;
use super::{Having, VmEvent};
use crate::error::Error;
use keyframe_capture::BoxError;
use keyframe_disk::nbd::client::Client;
use keyframe_units::PAGE_BYTES;

/// NBD_STATE_ZERO of `base:allocation`.
const ZERO: u32 = 2;

impl Keeper {
    pub(super) fn have(&mut self, session: u64, first: u64, hashes: &[u8]) {
        let pages = self.all_pages();
        if self.having.as_ref().is_none_or(|(known, _)| *known != session) {
            self.having = Some((session, Having::new(session, pages)));
        }
        let Some((_, having)) = &mut self.having else { return };
        if let Err(problem) = having.take_in(first, hashes, pages) {
            self.having = None;
            return self.tell(VmEvent::CaptureFailed(problem.into()));
        }
        self.begin();
    }

    /// Begins a session that is wanted, once it is known what its standby has.
    pub(super) fn begin(&mut self) {
        let is_known = |(session, having): &(u64, Having)| {
            self.wanted_session == Some(*session) && having.is_complete()
        };
        if self.having.as_ref().is_some_and(is_known)
            && let Some((session, having)) = self.having.clone()
        {
            // It is kept: what the standby has stays so until an epoch is there, and this one may
            // have to begin again.
            self.wanted_session = None;
            self.sync(session, having);
        }
    }

    /// All of the VM is to go over, but what is there: disks first, as they are, then what changed
    /// meanwhile with the epoch.
    fn sync(&mut self, session: u64, having: Having) {
        let blank = having.is_blank();
        self.wire.begin(session, self.next_epoch, (!blank).then_some(having));
        // What a fresh tracker does not report is zeros.
        if !(std::mem::take(&mut self.fresh) && blank) {
            self.copying.cycle.restart();
        }
        if let Err(error) = self.sync_disks() {
            self.tell(VmEvent::CaptureFailed(Error::vm("copy the disks", error)));
            return;
        }
        self.capture("first", false);
    }

    fn sync_disks(&mut self) -> Result<(), BoxError> {
        let Some((socket, disks)) = self.disks.clone() else { return Ok(()) };
        if let Some((storage, _)) = self.gated.machines.storage() {
            storage.begin_anew()?;
        }
        for (number, (export, _)) in disks.iter().enumerate() {
            let mut client = Client::connect(&socket, export, "base:allocation")?;
            self.sync_disk(number, &mut client)?;
        }
        Ok(())
    }

    /// What no data touches is a hole.
    fn sync_disk(&self, number: usize, client: &mut Client) -> Result<(), BoxError> {
        let blocks = client.len_bytes().div_ceil(PAGE_BYTES as u64);
        let mut done = 0;
        client.each_block(
            |flags| flags & ZERO == 0,
            |first, data| {
                self.wire.put_hole(number, done, first - done)?;
                done = first + data.len() as u64;
                self.wire.put_blocks(number, first, data)
            },
        )?;
        self.wire.put_hole(number, done, blocks - done)
    }

    /// Pages of RAM and disks.
    fn all_pages(&self) -> u64 {
        let disks = self.disks.iter().flat_map(|(_, disks)| disks);
        let blocks: u64 = disks.map(|(_, bytes)| bytes.div_ceil(PAGE_BYTES as u64)).sum();
        self.copying.layout.len_pages() + blocks
    }
}
