//! The outcome of captures: sealed, failed, or a new run because RAM blocks were plugged.

use super::{
    Arc, CaptureError, CheckpointError, CheckpointFailure, EncodeReport, Engine, EngineResponse,
    Entry, Error, Event, Instant, NotCaptured, Result, Sealed, SettledReport, StoreSink, Taker,
    encode,
};
use crate::control::FailingCause;
use crate::error::error_chain;
use crate::event::shared;
use crate::rehearsal::NotRestorable;
use keyframe_capture::EncodeError;
use keyframe_store::{CheckpointId, DiskState};
use keyframe_units::duration_ns;
use std::io;

/// The end of the error that a status shows, if it is the last one.
pub(super) const NO_MORE: &str = "; no more checkpoints are taken";

/// True if the rehearsal of a restore has shown that the run's checkpoints cannot be restored.
fn is_unrestorable(error: &EncodeError) -> bool {
    matches!(error, EncodeError::Sink { source, .. } if source.is::<NotRestorable>())
}

/// True if a store or a disk has no space left.
fn is_store_full(error: &(dyn std::error::Error + 'static)) -> bool {
    let kinds = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded];
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| kinds.contains(&cause.kind()))
}

impl Engine<'_> {
    /// Handles a report of the encoder.
    pub(super) fn settle(&mut self, report: EncodeReport<Sealed>) {
        match self.copying.cycle.settle(report) {
            SettledReport::Sealed { seq, sealed } => {
                if let Some((disks, mut vms)) = self.machines.storage() {
                    disks.sealed(seq, &mut vms);
                }
                let entry = self.succeeded(seq, &sealed);
                match self.takers.remove(&seq) {
                    Some(Taker::Client(client)) => {
                        let _ = client.send(EngineResponse::Taken(Box::new(entry)));
                    }
                    Some(Taker::Engine(engine)) => drop(engine.send(Ok(sealed.id))),
                    None => {}
                }
            }
            SettledReport::Failed { lost, error } => {
                if let Some((disks, mut vms)) = self.machines.storage() {
                    disks.failed(&lost, &mut vms);
                }
                let is_final = is_unrestorable(&error);
                self.given_up |= is_final;
                let error = CheckpointError::Encode(error);
                let failure = self.failed(error, lost.len().max(1) as u64, is_final);
                for taker in lost.iter().filter_map(|seq| self.takers.remove(seq)) {
                    match taker {
                        Taker::Client(client) => {
                            let _ = client.send(EngineResponse::Failed(failure.to_string()));
                        }
                        Taker::Engine(engine) => drop(engine.send(Err(failure.clone()))),
                    }
                }
            }
            SettledReport::Stale => {}
        }
        let queued = self.copying.cycle.in_flight();
        self.update(|status| status.queued = queued);
    }

    fn succeeded(&mut self, seq: u64, sealed: &Sealed) -> Entry {
        let mut entry = Entry::of(sealed);
        entry.parent = entry.restored_from.or(self.newest.map(|id| id.0));
        let backlog_ns = entry.backlog_ns;
        self.last_pages = entry.dirty_pages;
        if self.sealed > 0 {
            let pool = self.copying.cycle.pool();
            self.copying.memory.give_back(pool, entry.dirty_pages);
        }
        self.sealed += 1;
        self.newest = Some(sealed.id);
        if sealed.meta.parent == self.came_from.map(|(id, _)| id) {
            self.came_from = None;
        }
        self.sealed_at = Some(Instant::now());
        self.tune(&entry);
        let behind = self.options.interval.is_some_and(|i| backlog_ns > duration_ns(i) / 10);
        if behind && self.warnings.is_late_due(Instant::now()) {
            self.tell(&Event::Late { id: entry.id, backlog_ns });
        }
        self.tell(&Event::Sealed(Box::new(entry.clone())));
        self.compare(seq, sealed);
        let (sealed_count, shown) = (self.sealed, entry.clone());
        self.failing = None;
        let store_free_bytes = self.store.free_bytes();
        self.warn_of_space(store_free_bytes);
        self.update(|status| {
            status.sealed = sealed_count;
            status.last = Some(shown);
            status.last_error = None;
            status.failing = None;
            status.store_free_bytes = store_free_bytes;
        });
        entry
    }

    /// Warns of a medium that is filling up. A store that is bounded by time stops to grow.
    fn warn_of_space(&mut self, free_bytes: Option<u64>) {
        let Some(free_bytes) = free_bytes.filter(|_| self.options.keep_within.is_none()) else {
            return;
        };
        if let Some(lasts) = self.warnings.space_lasts(Instant::now(), free_bytes) {
            let store = self.store.path().to_owned();
            self.tell(&Event::SpaceShrinks { store, free_bytes, lasts });
        }
    }

    /// Compares the checkpoint with the copy that the audit made in its pause.
    fn compare(&mut self, seq: u64, sealed: &Sealed) {
        let Some(audit) = &mut self.watch.audit else { return };
        let id = sealed.id.0;
        let event = match audit.compare(self.store, seq, sealed.id) {
            Ok(differing) => {
                let Some(first) = differing.first().copied() else { return };
                Event::AuditDiffers { id, pages: differing.len() as u64, first }
            }
            Err(error) => Event::AuditFailed { id, error: shared(error) },
        };
        self.audited_wrong += 1;
        self.tell(&event);
    }

    /// Adapts the interval to the budgets.
    fn tune(&mut self, entry: &Entry) {
        let Some(tuning) = &mut self.tuning else { return };
        let (tuned, has_changed) = tuning.learn(entry);
        if let Some(cadence) = &mut self.cadence {
            cadence.set_interval(tuned.interval_ns);
        }
        self.copying.strategies.tune(tuned.target_pages);
        self.update(|status| {
            status.interval_ns = Some(tuned.interval_ns);
            status.tuned = Some(tuned.why.to_string());
        });
        if has_changed {
            self.tell(&Event::IntervalTuned { interval_ns: tuned.interval_ns, why: tuned.why });
        }
    }

    /// Handles a failed capture: finds the reason, and whether further captures are possible.
    pub(super) fn capture_failed(&mut self, error: CaptureError) -> NotCaptured {
        // A VM that ended during the capture is no failure: the loop tells how it ended.
        if self.machines.any_has_ended() {
            return CheckpointError::VmEnded(error).into();
        }
        if let Some(pid) = self.machines.without_monitor() {
            (self.given_up, self.is_blind) = (true, true);
            return self.failed(CheckpointError::MonitorLost { pid }, 1, true).into();
        }
        let is_final = self.machines.have_lost_watchdog() || self.machines.have_lost_network();
        if is_final {
            self.given_up = true;
            let final_error = if self.machines.have_lost_watchdog() {
                CheckpointError::NoWatchdog(error)
            } else {
                CheckpointError::NoNetwork(error)
            };
            return self.failed(final_error, 1, true).into();
        }
        self.failed(error.into(), 1, false).into()
    }

    /// Tracks the VM's present RAM blocks, and begins a new run with a complete checkpoint: the RAM
    /// blocks, or the disks if `has_other_disks` is true, differ from those before.
    pub(super) fn begin_anew(&mut self, has_other_disks: bool) -> Result<()> {
        let sink = self.end_encoding()?;
        let disks_of = sink.awaited_disks();
        let known = sink.finish().map_err(|e| Error::store(self.store.path(), e))?;
        self.begin_run(known, disks_of, has_other_disks, &Event::NewRun)
    }

    /// Begins a run after the former one has ended: with the disks `known`, or those of checkpoint
    /// `disks_of`, unless `has_other_disks` is true. Then tells `event`.
    pub(super) fn begin_run(
        &mut self,
        known: DiskState,
        disks_of: Option<CheckpointId>,
        has_other_disks: bool,
        event: &Event,
    ) -> Result<()> {
        self.copying.cycle.untrack();
        self.copying.strategies.untrack();
        let is_group = self.machines.is_group();
        let members = self.machines.members_mut().iter_mut();
        let mut vms: Vec<_> = members.map(|m| (&*m.name, m.vm.vm_mut())).collect();
        self.copying = self.copying.restart(&mut vms, is_group, &self.options)?;
        for (member, watches) in
            self.machines.members_mut().iter_mut().zip(&self.copying.watches_discards)
        {
            member.vm.set_watches_discards(*watches);
        }
        self.meta.refresh(self.machines.members_mut().iter_mut().map(|m| &mut m.vm))?;
        let disks = self.machines.disks.as_ref();
        let metas = disks.map_or_else(Vec::new, |disks| disks.metas().to_vec());
        let has_other_disks = has_other_disks || disks.is_some_and(|disks| disks.takes_new_run());
        let known = if has_other_disks { DiskState::default() } else { known };
        let disks_of = disks_of.filter(|_| !has_other_disks && !metas.is_empty());
        let run = self
            .writer
            .begin_run_with(&self.name, &self.copying.layout, metas, known)
            .map_err(|e| Error::store(self.store.path(), e))?;
        if let Some(disks) = &mut self.machines.disks {
            disks.began_run();
        }
        let fault = self.options.fault.clone();
        let mut sink = StoreSink::new(run, self.meta.clone(), fault, self.newest);
        sink.await_disks(disks_of);
        self.followed = None;
        let (inbox, status) = (self.inbox_sender.clone(), Arc::clone(&self.status));
        let space_pages = self.copying.layout.len_pages();
        let observer = Arc::clone(&self.encoder_observer);
        self.encoding = Some(encode(sink, space_pages, inbox, status, observer)?);
        self.tell(event);
        Ok(())
    }

    /// Counts `lost` checkpoints as failed. Tells the event unless it repeats the failure before.
    pub(super) fn failed(
        &mut self,
        error: CheckpointError,
        lost: u64,
        is_final: bool,
    ) -> CheckpointFailure {
        self.failed += lost;
        let is_full = is_store_full(&error);
        let failing = Some(if is_full { FailingCause::StoreFull } else { FailingCause::Other });
        self.failing = failing;
        let store_free_bytes = self.store.free_bytes();
        let text = error_chain(&error) + if is_final { NO_MORE } else { "" };
        let failure = CheckpointFailure { error: Arc::new(error), lost, is_final };
        let (failed, owed_pages) = (self.failed, self.copying.cycle.owed_pages());
        let mut is_repeated = false;
        self.update(|status| {
            is_repeated = status.last_error.as_deref() == Some(&*text);
            status.failed = failed;
            status.last_error = Some(text);
            status.failing = failing;
            status.store_free_bytes = store_free_bytes;
        });
        if !is_repeated {
            self.tell(&Event::Failed { failure: failure.clone(), owed_pages });
        }
        failure
    }
}
