//! The status of a protected VM, as clients of the control socket see it.

use super::protocol::Protocol;
use crate::vm::EpochReport;
use keyframe_locks::IgnorePoison;
use keyframe_replication::PrimaryState;
use keyframe_session::control::{ReplicationState, ReplicationStatus};

impl Protocol {
    pub(super) fn record_epoch(&mut self, report: &EpochReport) {
        if self.failed_epoch.take().is_some() {
            self.update(|status| status.note = "epochs reach the standby again".into());
        }
        self.update(|status| {
            status.acknowledged = report.acknowledged.map(|epoch| epoch.0);
            status.epochs += 1;
            status.pages = report.pages;
            status.wire_bytes = report.wire_bytes;
            status.all_wire_bytes += report.wire_bytes;
            status.all_raw_bytes += report.raw_bytes;
            status.pause_ns = report.pause_ns;
            status.transfer_ns = report.transfer_ns;
            status.epoch_ns = report.epoch_ns;
            status.all_pages += report.pages;
            status.all_pause_ns += report.pause_ns;
            status.all_transfer_ns += report.transfer_ns;
            status.all_suspended_ns += report.suspended_ns;
            *status.reasons.entry(report.reason.to_owned()).or_default() += 1;
            status.estimates =
                report.estimates.iter().map(|(name, value)| ((*name).into(), *value)).collect();
        });
    }

    pub(super) fn show(&mut self) {
        let state = self.core.state();
        let held = self.host.gate_status();
        let (term, linked) = (self.core.term().0, self.link.is_some());
        let name = match shown_state(state) {
            // Its standby will get no epoch more.
            ReplicationState::Protected if self.core.is_leaving_standby() => {
                ReplicationState::Unprotected
            }
            name => name,
        };
        self.update(|status| {
            status.state = name;
            status.term = term;
            status.connected = linked;
            status.held_packets = held.held_frames;
            status.held_bytes = held.held_bytes;
            status.passed_packets = held.passed_frames;
            status.dropped_packets = held.dropped_frames;
        });
    }

    pub(super) fn update(&self, change: impl FnOnce(&mut ReplicationStatus)) {
        let mut status = self.status.lock().ignore_poison();
        change(status.replication.get_or_insert_default());
    }
}

fn shown_state(state: PrimaryState) -> ReplicationState {
    match state {
        PrimaryState::Solo => ReplicationState::Unprotected,
        PrimaryState::Syncing => ReplicationState::Syncing,
        PrimaryState::Closing => ReplicationState::Closing,
        PrimaryState::Pairing => ReplicationState::Pairing,
        PrimaryState::Protected => ReplicationState::Protected,
        PrimaryState::Stopped => ReplicationState::Stopped,
        PrimaryState::SwitchingOver => ReplicationState::SwitchingOver,
        PrimaryState::HandedOver => ReplicationState::HandedOver,
        PrimaryState::Ended => ReplicationState::Ended,
    }
}
