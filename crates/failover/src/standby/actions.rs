//! Carries out what the protocol's core asks of the standby.

use super::prepared_vm::IncomingEpoch;
use super::{Activation, StandbyEngine, StandbyEngineEvent};
use crate::event::FailoverEvent;
use crate::guard::now_ns;
use crate::notice_text::notice_text;
use crate::{arbitration, links, resync, verify};
use keyframe_replication::{Epoch, SessionId, StandbyAction, StandbyEvent};
use keyframe_session::control::ReplicationRole;
use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

impl StandbyEngine {
    /// Tells the core of an epoch whose device state and streams have all arrived.
    pub(super) fn complete(&mut self) {
        let Some(ready) = &self.ready else { return };
        let Some(IncomingEpoch { session, epoch, head, .. }) = &ready.coming else { return };
        let whole = ready.marks.iter().all(|mark| *mark == Some((*session, *epoch)));
        if whole {
            let (session, epoch) = (SessionId(*session), *epoch);
            let after = head.after;
            self.handle(StandbyEvent::EpochComplete { session, epoch, after });
        }
    }

    pub(super) fn handle(&mut self, input: StandbyEvent) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            let Some(ready) = &mut self.ready else { return };
            for output in ready.core.handle(now_ns(), input) {
                if let Some(next) = self.carry_out(output) {
                    inputs.push_back(next);
                }
            }
        }
    }

    fn carry_out(&mut self, output: StandbyAction) -> Option<StandbyEvent> {
        match output {
            StandbyAction::Send { path, message } => {
                let of = if path == 0 { &self.control } else { &self.beat };
                if let Some((_, channel)) = of
                    && !links::send_message(channel, &message)
                {
                    // Its reader thread reports the break.
                    channel.close();
                }
            }
            StandbyAction::AskWitness(request) => {
                arbitration::ask(
                    &self.options.setup,
                    request,
                    &self.sender,
                    StandbyEngineEvent::Witness,
                );
            }
            StandbyAction::Receive { session } => {
                let ready = self.ready.as_mut()?;
                ready.streams.receive(session.0);
                (ready.devices, ready.coming) = (None, None);
                ready.marks.fill(None);
                ready.resync_session = Some(session.0);
                self.send_page_hashes();
            }
            StandbyAction::Apply { epoch } => return self.apply(epoch),
            StandbyAction::Reject { .. } | StandbyAction::DiscardPartial => {
                let ready = self.ready.as_mut()?;
                ready.streams.discard();
                ready.coming = None;
                ready.marks.fill(None);
            }
            StandbyAction::Fence => {
                let name =
                    self.ready.as_ref().map(|ready| ready.machine.name.clone()).unwrap_or_default();
                arbitration::fence(
                    &self.options.setup,
                    &name,
                    "standby",
                    &self.sender,
                    StandbyEngineEvent::Fenced,
                );
            }
            StandbyAction::Activate { epoch, term, forced } => {
                self.activate = Some(Activation { epoch, term, forced });
            }
            StandbyAction::Notify(note) => {
                let role = ReplicationRole::Standby;
                let text = notice_text(role, &note);
                let event = FailoverEvent::Notice { role, notice: note };
                self.options.setup.events.failover_event(&event);
                self.update(|status| status.note = text);
            }
        }
        None
    }

    /// Sends the primary of a session that begins the hashes of the pages here, once no epoch is
    /// being applied.
    pub(super) fn send_page_hashes(&mut self) {
        let Some((_, control)) = &self.control else { return };
        let Some(ready) = self.ready.as_mut().filter(|ready| ready.applying == 0) else { return };
        let Some(session) = ready.resync_session.take() else { return };
        let (image, channel, blank) = (Arc::clone(&ready.image), Arc::clone(control), ready.blank);
        let work = move || {
            if !resync::send_page_hashes(&*image, image.len_pages(), blank, session, &channel) {
                channel.close();
            }
        };
        if std::thread::Builder::new().name("page-hashes".into()).spawn(work).is_err() {
            control.close();
        }
    }

    /// Applies a whole epoch in another thread.
    fn apply(&mut self, epoch: Epoch) -> Option<StandbyEvent> {
        let failed = |reason: &str| Some(StandbyEvent::ApplyFailed { reason: reason.into() });
        let ready = self.ready.as_mut()?;
        let Some(IncomingEpoch { session, head, devices, .. }) =
            ready.coming.take_if(|incoming| incoming.epoch == epoch)
        else {
            return failed("its pages were dropped");
        };
        let Some(pages) = ready.streams.take(session, epoch) else {
            return failed("its pages were dropped");
        };
        let (image, sender, checks) =
            (Arc::clone(&ready.image), self.sender.clone(), head.checks.clone());
        let ram_pages = ready.machine.ram.len_pages();
        let streams = Arc::clone(&ready.streams);
        let apply = move || {
            let applied = image.apply(&pages).map_err(|e| format!("write the VM's pages: {e}"));
            applied.and_then(|()| match &*checks {
                [] => Ok(()),
                checks => verify::compare(&*image, ram_pages, checks),
            })
        };
        let work = move || {
            // All wait for its end, also if it panics.
            let result = std::panic::catch_unwind(AssertUnwindSafe(apply))
                .unwrap_or_else(|_| Err("the thread that writes the VM's pages has failed".into()));
            let _ = sender.send(StandbyEngineEvent::Applied { streams, epoch, devices, result });
        };
        let Ok(thread) = std::thread::Builder::new().name("apply".into()).spawn(work) else {
            ready.streams.applied();
            return failed("no thread can be started");
        };
        ready.apply_thread = Some(thread);
        (ready.applying, ready.blank) = (ready.applying + 1, false);
        self.update(|status| {
            status.reason.clone_from(&head.reason);
            status.pages = head.pages;
            status.wire_bytes = head.wire_bytes;
            status.all_wire_bytes += head.wire_bytes;
            status.all_raw_bytes += head.pages * keyframe_units::PAGE_BYTES as u64;
            status.epochs += 1;
            status.epoch = Some(epoch.0);
        });
        None
    }
}
