//! What becomes of captures: sealed, failed, or of RAM that is not there any more.

use super::{
    Arc, CaptureError, Copying, EncodeReport, Engine, Entry, Failure, Instant, Response,
    SAY_LATE_EVERY, Sealed, SettledReport, StoreSink, chain, encode, output,
};
use keyframe_units::duration_ns;

impl Engine<'_> {
    /// Takes in what the encoder reports.
    pub(super) fn settle(&mut self, report: EncodeReport<Sealed>) {
        match self.copying.cycle.settle(report) {
            SettledReport::Sealed { seq, sealed } => {
                if let Some((disks, vms)) = self.machines.storage() {
                    disks.sealed(seq, vms);
                }
                let entry = self.succeeded(seq, &sealed);
                if let Some(taker) = self.takers.remove(&seq) {
                    let _ = taker.send(Response::Taken(Box::new(entry)));
                }
            }
            SettledReport::Failed { lost, error } => {
                if let Some((disks, vms)) = self.machines.storage() {
                    disks.failed(&lost, vms);
                }
                let text = self.failed(&chain(&error), lost.len().max(1) as u64, false);
                for taker in lost.iter().filter_map(|seq| self.takers.remove(seq)) {
                    let _ = taker.send(Response::Failed(text.clone()));
                }
            }
            SettledReport::Stale => {}
        }
        let queued = self.copying.cycle.in_flight();
        self.update(|status| status.queued = queued);
    }

    fn succeeded(&mut self, seq: u64, sealed: &Sealed) -> Entry {
        let entry = Entry::of(sealed);
        let backlog_ns = entry.backlog_ns;
        self.last_pages = entry.dirty_pages;
        self.sealed += 1;
        self.newest = Some(sealed.id);
        if sealed.meta.parent == self.came_from.map(|(id, _)| id) {
            self.came_from = None;
        }
        self.sealed_at = Some(Instant::now());
        self.tune(&entry);
        let behind = self.options.interval.is_some_and(|i| backlog_ns > duration_ns(i) / 10);
        if behind && self.said_late.is_none_or(|at| at.elapsed() > SAY_LATE_EVERY) {
            self.said_late = Some(Instant::now());
            self.say(&format!(
                "checkpoint {} began {} late: the one before was still being encoded",
                entry.id,
                output::duration(backlog_ns)
            ));
        }
        if self.options.verbose {
            self.say(&format!(
                "checkpoint {}: pause {}, {} dirty pages, {} stored",
                entry.id,
                output::duration(entry.pause_ns),
                entry.dirty_pages,
                output::bytes(entry.stored_bytes)
            ));
        }
        if let Some(audit) = &mut self.watch.audit {
            match audit.compare(self.store, seq, sealed.id) {
                Ok(differing) if differing.is_empty() => {}
                Ok(differing) => {
                    self.audited_wrong += 1;
                    eprintln!(
                        "keyframe: AUDIT FAILED: checkpoint {} differs from RAM in {} pages, first {}",
                        entry.id,
                        differing.len(),
                        differing[0].0
                    );
                }
                Err(e) => {
                    self.audited_wrong += 1;
                    eprintln!("keyframe: audit of checkpoint {}: {}", entry.id, chain(&*e));
                }
            }
        }
        let (sealed_count, shown) = (self.sealed, entry.clone());
        self.update(|status| {
            status.sealed = sealed_count;
            status.last = Some(shown);
            status.last_error = None;
        });
        entry
    }

    /// Keeps the budgets that were asked for.
    fn tune(&mut self, entry: &Entry) {
        let Some(tuning) = &mut self.tuning else { return };
        let (tuned, said) = tuning.learn(entry);
        if let Some(cadence) = &mut self.cadence {
            cadence.set_interval(tuned.interval_ns);
        }
        self.copying.strategies.tune(tuned.target_pages);
        self.update(|status| {
            status.interval_ns = Some(tuned.interval_ns);
            status.tuned = Some(tuned.why.to_string());
        });
        if let Some(text) = said {
            self.say(&text);
        }
    }

    /// A checkpoint that failed: say why (once for a row of the same), and whether there is hope.
    pub(super) fn stumbled(&mut self, error: &CaptureError) -> String {
        let mut message = chain(error);
        // A VM that ended in the middle is no failure; the loop finds out and says how it ended.
        if self.machines.any_has_ended() {
            message = format!("the VM ended before the checkpoint was complete ({message})");
            return message;
        }
        if matches!(error, CaptureError::OtherRam) {
            return match self.begin_anew() {
                Ok(()) => format!("{message}; the next checkpoint is complete"),
                Err(failure) => {
                    self.given_up = true;
                    self.failed(&format!("{message}: {failure}"), 1, true)
                }
            };
        }
        if let Some(pid) = self.machines.without_monitor() {
            (self.given_up, self.is_blind) = (true, true);
            let message = format!(
                "QEMU (pid {pid}) runs, but has closed the monitor by which it is paused and its devices are saved"
            );
            return self.failed(&message, 1, true);
        }
        self.failed(&message, 1, false)
    }

    /// The VM's RAM blocks are others now: tracks those, and begins a new run with a complete
    /// checkpoint.
    fn begin_anew(&mut self) -> Result<(), Failure> {
        let sink = self.end_encoding()?;
        let known = sink.finish().map_err(|e| Failure::store(&e, self.store.path()))?;
        self.copying.cycle.untrack();
        self.copying.strategies.untrack();
        let is_group = self.machines.is_group();
        let members = self.machines.members_mut().iter_mut();
        let mut vms: Vec<_> = members.map(|m| (&*m.name, &mut m.machine.vm)).collect();
        self.copying = Copying::start(&mut vms, is_group, &self.options)?;
        for (member, watches) in
            self.machines.members_mut().iter_mut().zip(&self.copying.watches_discards)
        {
            member.machine.set_watches_discards(*watches);
        }
        self.meta.refresh(self.machines.members_mut().iter_mut().map(|m| &mut m.machine.vm))?;
        let disks = self.machines.disks.as_ref();
        let metas = disks.map_or_else(Vec::new, |disks| disks.metas().to_vec());
        let run = self
            .writer
            .begin_run_with(&self.name, &self.copying.layout, metas, known)
            .map_err(|e| Failure::store(&e, self.store.path()))?;
        let fault = self.options.fault.clone();
        let sink = StoreSink::new(run, self.meta.clone(), fault.clone(), self.newest);
        let (inbox, status) = (self.inbox_sender.clone(), Arc::clone(&self.status));
        let space_pages = self.copying.layout.len_pages();
        self.encoding = Some(encode(sink, space_pages, inbox, status, fault)?);
        self.say("RAM was plugged or unplugged: a new run begins with a complete checkpoint");
        Ok(())
    }

    /// Says why `lost` checkpoints failed, once for a row of the same.
    pub(super) fn failed(&mut self, message: &str, lost: u64, hopeless: bool) -> String {
        self.failed += lost;
        let consequence = if hopeless {
            "no more checkpoints are taken; the VM runs on"
        } else {
            "nothing is lost: its pages go into the next one"
        };
        let behind =
            if lost > 1 { format!(" (and {} behind it)", lost - 1) } else { String::new() };
        let text = format!("checkpoint failed{behind}: {message}; {consequence}");
        let (failed, owed) = (self.failed, self.copying.cycle.owed_pages());
        let mut repeated = false;
        self.update(|status| {
            repeated = status.last_error.as_deref() == Some(message);
            status.failed = failed;
            status.last_error = Some(message.to_owned());
        });
        if !repeated {
            eprintln!("keyframe: {text} ({owed} pages)");
        }
        text
    }
}
