//! VMs whose guests have ended or failed: what the engine's last checkpoint of them needs.

use super::{Machines, Member};
use crate::error::Result;
use keyframe_vmm::GuestEnd;

/// An end or a failure of a guest that an event has told.
#[derive(Clone, Copy, Debug)]
pub(super) struct SeenEnd {
    end: GuestEnd,
    /// Whether its VMM ends for it.
    is_final: bool,
    /// Whether the last checkpoint has been tried.
    is_done: bool,
}

impl Member {
    /// True if the guest has ended and the VMM waits for the last checkpoint.
    pub(super) fn stays_at_its_end(&self) -> bool {
        self.guest_end.is_some_and(|seen| seen.is_final) && self.vm.is_held_at_its_end()
    }

    /// Notes an end. A panic that ends the VMM comes as two events, of which the first one tells
    /// more. An end after the last checkpoint of an earlier one is another end: the guest ran on.
    pub(super) fn note_end(&mut self, end: GuestEnd, is_final: bool) {
        match &mut self.guest_end {
            Some(seen) if !seen.is_done && is_final => seen.is_final = true,
            Some(seen) if !seen.is_done && seen.is_final => {}
            seen => *seen = Some(SeenEnd { end, is_final, is_done: false }),
        }
    }
}

impl Machines {
    /// Makes the VMMs stand still when their guests end, for the members for which this is wanted.
    pub fn hold_ends(&mut self) {
        for member in self.members.iter_mut().filter(|m| m.ended.is_none()) {
            member.vm.hold_end();
        }
    }

    /// Undoes [`Machines::hold_ends`]. Ends each VMM whose guest has ended. Returns the first
    /// error.
    pub fn release_ends(&mut self) -> Result<()> {
        let mut result = Ok(());
        for member in self.members.iter_mut().filter(|m| m.ended.is_none()) {
            result = result.and(member.vm.release_end());
        }
        result
    }

    /// Returns the first VM whose guest has ended or failed and which has no last checkpoint yet,
    /// with its name, if its VMM is still there. Returns `None` if there is none.
    pub fn newly_ended(&self) -> Option<(String, GuestEnd)> {
        let mut ends = self.members.iter().filter(|m| m.ended.is_none() && !m.shut_down);
        ends.find_map(|m| m.guest_end.filter(|seen| !seen.is_done).map(|s| (m.name.clone(), s.end)))
    }

    /// Returns how a guest ended or failed: that of the first VM whose guest did so. Returns `None`
    /// if no guest did.
    pub fn guest_end(&self) -> Option<GuestEnd> {
        self.members.iter().find_map(|member| member.guest_end.map(|seen| seen.end))
    }

    /// Lets the VMMs whose guests have ended do what their users want then. The caller has taken
    /// the last checkpoint before. Returns the first error of a VMM that does not answer.
    pub fn finish_ends(&mut self) -> Result<()> {
        let mut result = Ok(());
        for member in self.members.iter_mut().filter(|m| m.ended.is_none()) {
            let Some(seen) = &mut member.guest_end else { continue };
            seen.is_done = true;
            result = result.and(member.vm.finish_end(seen.is_final));
        }
        result
    }
}
