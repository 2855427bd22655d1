//! The start of a session with a standby: pages that it holds already are not sent.

use super::epochs::VmLoop;
use super::{ProtectedVm, ProtectedVmEvent};
use crate::resync::RemotePageHashes;

impl<V: ProtectedVm> VmLoop<V> {
    /// Takes in hashes of pages that the standby of a session holds.
    pub(super) fn take_page_hashes(&mut self, session: u64, first: u64, hashes: &[u8]) {
        let pages = self.vm.len_pages();
        if self.remote.as_ref().is_none_or(|(known, _)| *known != session) {
            self.remote = Some((session, RemotePageHashes::new(session, pages)));
        }
        let Some((_, remote)) = &mut self.remote else { return };
        if let Err(error) = remote.take_in(first, hashes, pages) {
            self.remote = None;
            return self.tell(ProtectedVmEvent::CaptureFailed(error.into()));
        }
        self.begin_wanted_session();
    }

    /// Begins the wanted session once all hashes of its standby are here.
    pub(super) fn begin_wanted_session(&mut self) {
        let is_known = |(session, remote): &(u64, RemotePageHashes)| {
            self.wanted_session == Some(*session) && remote.is_complete()
        };
        if !self.is_blocked()
            && self.remote.as_ref().is_some_and(is_known)
            && let Some((session, remote)) = self.remote.clone()
        {
            // The hashes are kept: the standby's pages do not change before its first epoch, and
            // this session may have to begin again.
            self.wanted_session = None;
            self.begin_session(session, remote);
        }
    }

    /// Sends all of the VM that the standby does not hold: first the disks as they are, then, with
    /// the epoch, RAM and what changed meanwhile.
    fn begin_session(&mut self, session: u64, remote: RemotePageHashes) {
        if let Err(error) = self.vm.check_machine() {
            return self.capture_failed(error);
        }
        self.is_session_void = false;
        let is_blank = remote.is_blank();
        self.wire.begin(session, self.next_epoch, (!is_blank).then_some(remote));
        self.vm.begin_session(is_blank);
        if let Err(error) = self.vm.copy_disks() {
            return self.capture_failed(error);
        }
        self.capture("first", false);
    }
}
