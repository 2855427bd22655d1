//! The loop: checkpoints when due, requests and the encoder's reports when they come, and an orderly end.
//!
//! A due checkpoint is captured even where earlier ones are still being encoded, as long as there is memory for its pages:
//! so intervals stay uniform. Where memory is short it waits, and is late.

use super::Options;
use super::audit::Audit;
use super::copying::Copying;
use super::encoding::Encoding;
use super::launch::Parts;
use super::machine::QemuMachine;
use super::sink::{Label, StoreSink};
use super::tuning::Tuning;
use super::watch::Watch;
use crate::control::server::{self, Pending, SharedStatus};
use crate::control::{OnExit, Request, Response, Status, Strategy};
use crate::failure::{DONE, FAILED, Failure, Outcome, WARNED, chain};
use crate::output;
use crate::report::Entry;
use crate::rundir::RunDir;
use keyframe_capture::{CycleError, Report, Settled};
use keyframe_qemu::Event;
use keyframe_scheduling::Cadence;
use keyframe_store::{MachineMeta, Sealed, Store, Writer};
use std::collections::BTreeMap;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How often a VM's own doings (it exits, it is paused) are looked at, when nothing else wakes the engine.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How often a run that falls behind says so; each checkpoint's backlog is in its entry all the same.
const SAY_LATE_EVERY: Duration = Duration::from_secs(30);

/// What wakes the engine.
pub enum Inbox {
    /// A client of the control socket.
    Request(Pending),
    /// The encoder.
    Report(Box<Report<Sealed>>),
}

/// How a run ended.
enum End {
    /// The VM ended by itself.
    Vm(ExitStatus),
    /// Enough checkpoints, a signal, or `keyframe stop`.
    Asked(OnExit),
}

/// A running engine.
pub struct Engine<'a> {
    store: &'a Store,
    name: String,
    run_dir: RunDir,
    machine: QemuMachine,
    copying: Copying,
    /// `None` only at the end, and between two runs.
    encoding: Option<Encoding>,
    writer: Writer,
    meta: MachineMeta,
    options: Options,
    watch: Watch,
    status: SharedStatus,
    inbox: Receiver<Inbox>,
    inbox_sender: Sender<Inbox>,
    /// Who waits for which capture to be sealed.
    takers: BTreeMap<u64, Sender<Response>>,
    /// Pages of the newest checkpoint.
    last_pages: u64,
    interrupted: Arc<AtomicBool>,
    _socket: server::Socket,
    born: Instant,
    cadence: Option<Cadence>,
    tuning: Option<Tuning>,
    vm_runs: bool,
    /// The VM was shut down, and QEMU's end has not been looked for yet.
    shut_down: bool,
    sealed: u64,
    failed: u64,
    audited_wrong: u64,
    /// Why checkpoints are no longer taken, where they are not.
    given_up: bool,
    sealed_at: Option<Instant>,
    said_late: Option<Instant>,
}

impl<'a> Engine<'a> {
    /// An engine over a VM that is ready to run.
    pub fn new(store: &'a Store, parts: Parts, options: Options) -> Result<Self, Failure> {
        let status = Arc::new(Mutex::new(first_status(store, &parts, &options)));
        let (inbox_sender, inbox) = channel();
        let requests = inbox_sender.clone();
        let deliver = move |pending| requests.send(Inbox::Request(pending)).is_ok();
        let socket = server::listen(parts.run_dir.path(), &status, deliver)
            .map_err(|e| Failure::new(format!("listen in {}: {e}", parts.run_dir.path().display())))?;
        let interrupted = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP]
        {
            signal_hook::flag::register(signal, Arc::clone(&interrupted))
                .map_err(|e| Failure::new(format!("catch signal {signal}: {e}")))?;
        }
        let audit = match &options.audit {
            Some(dir) => Some(
                Audit::new(dir.clone()).map_err(|e| Failure::new(format!("make {}: {e}", dir.display())))?,
            ),
            None => None,
        };
        let space_pages = parts.copying.layout.len_pages();
        let encoding = Encoding::start(
            parts.sink,
            space_pages,
            inbox_sender.clone(),
            Arc::clone(&status),
            options.fault.clone(),
        )?;
        Ok(Self {
            store,
            name: parts.name,
            run_dir: parts.run_dir,
            machine: parts.machine,
            copying: parts.copying,
            encoding: Some(encoding),
            writer: parts.writer,
            meta: parts.meta,
            watch: Watch::new(Arc::clone(&status), options.fault.clone(), audit),
            status,
            inbox,
            inbox_sender,
            takers: BTreeMap::new(),
            last_pages: 0,
            interrupted,
            _socket: socket,
            born: Instant::now(),
            cadence: options.interval.map(|i| Cadence::new(ns(i), 0)),
            tuning: Tuning::new(&options)?,
            vm_runs: parts.runs,
            shut_down: false,
            sealed: 0,
            failed: 0,
            audited_wrong: 0,
            given_up: false,
            sealed_at: None,
            said_late: None,
            options,
        })
    }

    /// Runs the VM to its end, or until the run is ended.
    pub fn run(mut self) -> Outcome {
        self.say(&self.greeting());
        if self.vm_runs && !self.machine.vm.is_attached() {
            self.machine.vm.qmp().cont().map_err(|e| Failure::qemu(&e))?;
        }
        let end = self.until_end();
        self.finish(end)
    }

    fn until_end(&mut self) -> Result<End, Failure> {
        loop {
            if let Some(exit) = self.machine.vm.try_wait().map_err(|e| Failure::qemu(&e))? {
                return Ok(End::Vm(exit));
            }
            if self.options.count.is_some_and(|count| self.sealed >= count)
                || self.interrupted.load(Ordering::Relaxed)
                // A VM that was launched is watched on to its end; of one that is not ours nothing is left to do.
                || (self.given_up && self.machine.vm.is_attached() && self.copying.cycle.in_flight() == 0)
            {
                return Ok(End::Asked(self.options.on_exit));
            }
            self.look();
            if std::mem::take(&mut self.shut_down)
                && let Some(exit) = self.machine.vm.finish_shutdown().map_err(|e| Failure::qemu(&e))?
            {
                return Ok(End::Vm(exit));
            }
            // Requests and reports first: where checkpoints take longer than the interval, one is always due.
            match self.inbox.recv_timeout(self.patience()) {
                Ok(Inbox::Request(pending)) => {
                    if let Some(end) = self.answer(pending) {
                        return Ok(end);
                    }
                }
                Ok(Inbox::Report(report)) => self.settle(*report),
                Err(RecvTimeoutError::Timeout) if self.is_due() && self.may_capture() => {
                    // What went wrong has been said.
                    let _ = self.capture("interval", None, None);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(LOOK_EVERY),
            }
        }
    }

    /// Whether a checkpoint is to be taken now. A VM that stands still has not changed.
    fn is_due(&self) -> bool {
        let due = self.cadence.as_ref().is_some_and(|c| c.due_ns() <= ns(self.born.elapsed()));
        due && self.vm_runs && !self.given_up
    }

    /// Whether one may begin although others are still being encoded.
    fn may_capture(&self) -> bool {
        let in_flight = self.copying.cycle.in_flight();
        if in_flight == 0 {
            return true;
        }
        // An audit keeps a whole copy of RAM for the checkpoint that it compares; and --count is exact.
        let enough = self.options.count.is_some_and(|count| self.sealed + in_flight >= count);
        let pool = self.copying.cycle.pool();
        let wanted = (self.last_pages + self.last_pages / 2 + 8192).min(pool.capacity_pages() / 2);
        self.watch.audit.is_none() && !enough && pool.free_pages() >= wanted
    }

    fn patience(&self) -> Duration {
        match &self.cadence {
            Some(cadence) if self.vm_runs && !self.given_up => {
                let due = Duration::from_nanos(cadence.due_ns().saturating_sub(ns(self.born.elapsed())));
                // A due checkpoint that may not begin waits for a report.
                if due.is_zero() && !self.may_capture() { LOOK_EVERY } else { due.min(LOOK_EVERY) }
            }
            _ => LOOK_EVERY,
        }
    }

    /// What the VM has been up to.
    fn look(&mut self) {
        let Ok(events) = self.machine.vm.qmp().drain_events() else { return };
        for event in events {
            match event {
                Event::Stop => self.vm_runs = false,
                Event::Shutdown { .. } => (self.vm_runs, self.shut_down) = (false, true),
                Event::Resume => self.vm_runs = true,
                _ => {}
            }
        }
        let state = if self.vm_runs { "running" } else { "paused" };
        self.update(|status| state.clone_into(&mut status.state));
    }

    fn answer(&mut self, pending: Pending) -> Option<End> {
        let (response, end) = match pending.request {
            Request::Take { tag, strategy } => match self.take(tag, strategy) {
                Ok(seq) => {
                    self.takers.insert(seq, pending.answer);
                    return None;
                }
                Err(message) => (Response::Failed(message), None),
            },
            Request::Stop { on_exit } => {
                (Response::Stopping, Some(End::Asked(on_exit.unwrap_or(self.options.on_exit))))
            }
            Request::Status => (Response::Failed("answered elsewhere".into()), None),
        };
        // Who asked may be gone; the deed is done all the same.
        let _ = pending.answer.send(response);
        end
    }

    fn take(&mut self, tag: Option<String>, strategy: Option<Strategy>) -> Result<u64, String> {
        if let Some(tag) = &tag {
            keyframe_store::check_tag(tag).map_err(|e| chain(&e))?;
        }
        if self.given_up {
            return Err("no more checkpoints are taken: see keyframe status".into());
        }
        self.capture("take", tag, strategy)
    }

    /// Captures one checkpoint; its seal is reported later.
    fn capture(
        &mut self,
        reason: &'static str,
        tag: Option<String>,
        strategy: Option<Strategy>,
    ) -> Result<u64, String> {
        let now_ns = ns(self.born.elapsed());
        let backlog_ns = match (&mut self.cadence, reason) {
            (Some(cadence), "interval") => cadence.start(now_ns),
            (Some(cadence), _) => {
                cadence.restart(now_ns);
                0
            }
            (None, _) => 0,
        };
        let copying = &mut self.copying;
        let strategy = copying.strategies.get(strategy.unwrap_or(self.options.strategy));
        let strategy = strategy.map_err(|failure| failure.to_string())?;
        let label = Label { reason, backlog_ns, tag };
        let Some(encoding) = &mut self.encoding else { return Err("the run is ending".into()) };
        let result =
            copying.cycle.capture(&mut self.machine, &mut self.watch, strategy, encoding.queue(), label);
        keyframe_kernel::priority::lower();
        let queued = self.copying.cycle.in_flight();
        self.update(|status| {
            status.phase = "idle".into();
            status.backlog_ns = backlog_ns;
            status.queued = queued;
        });
        match result {
            Ok(seq) => {
                if let Some(audit) = &mut self.watch.audit {
                    audit.captured(seq);
                }
                Ok(seq)
            }
            Err(error) => Err(self.stumbled(&error)),
        }
    }

    /// Takes in what the encoder reports.
    fn settle(&mut self, report: Report<Sealed>) {
        match self.copying.cycle.settle(report) {
            Settled::Sealed { seq, sealed } => {
                let entry = self.succeeded(seq, &sealed);
                if let Some(taker) = self.takers.remove(&seq) {
                    let _ = taker.send(Response::Taken(Box::new(entry)));
                }
            }
            Settled::Failed { lost, error } => {
                let text = self.failed(&chain(&error), lost.len().max(1) as u64, false);
                for taker in lost.iter().filter_map(|seq| self.takers.remove(seq)) {
                    let _ = taker.send(Response::Failed(text.clone()));
                }
            }
            Settled::Stale => {}
        }
        let queued = self.copying.cycle.in_flight();
        self.update(|status| status.queued = queued);
    }

    fn succeeded(&mut self, seq: u64, sealed: &Sealed) -> Entry {
        let entry = Entry::of(sealed);
        let backlog_ns = entry.backlog_ns;
        self.last_pages = entry.dirty_pages;
        self.sealed += 1;
        self.sealed_at = Some(Instant::now());
        self.tune(&entry);
        let behind = self.options.interval.is_some_and(|i| backlog_ns > ns(i) / 10);
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
    fn stumbled(&mut self, error: &CycleError) -> String {
        let mut message = chain(error);
        // A VM that ended in the middle is no failure; the loop finds out and says how it ended.
        if self.vm_has_ended() {
            message = format!("the VM ended before the checkpoint was complete ({message})");
            return message;
        }
        if matches!(error, CycleError::OtherRam) {
            return match self.begin_anew() {
                Ok(()) => format!("{message}; the next checkpoint is complete"),
                Err(failure) => {
                    self.given_up = true;
                    self.failed(&format!("{message}: {failure}"), 1, true)
                }
            };
        }
        if matches!(self.machine.vm.qmp().status(), Err(keyframe_qemu::Error::Gone { .. })) {
            self.given_up = true;
            let pid = self.machine.vm.pid();
            let message = format!(
                "QEMU (pid {pid}) runs, but has closed the monitor by which it is paused and its devices are saved"
            );
            self.update(|status| status.state = "unknown".into());
            return self.failed(&message, 1, true);
        }
        self.failed(&message, 1, false)
    }

    /// The VM's RAM blocks are others now: tracks those, and begins a new run with a complete checkpoint.
    fn begin_anew(&mut self) -> Result<(), Failure> {
        let sink = self.end_encoding()?;
        sink.finish().map_err(|e| Failure::store(&e, self.store.path()))?;
        self.copying.cycle.untrack();
        self.copying.strategies.untrack();
        let vm = &mut self.machine.vm;
        let watches_discards = vm.discards_ram().map_err(|e| Failure::qemu(&e))?;
        self.copying = Copying::start(vm, &self.options, watches_discards)?;
        let plugged = vm.plugged_memory().map_err(|e| Failure::qemu(&e))?;
        let with_plugged = |line: &[String]| line.iter().chain(&plugged).cloned().collect();
        self.meta.user_command = with_plugged(vm.user_command());
        self.meta.full_command = with_plugged(vm.full_command());
        self.machine.set_watches_discards(watches_discards);
        let run = self
            .writer
            .begin_run(&self.name, &self.copying.layout)
            .map_err(|e| Failure::store(&e, self.store.path()))?;
        let fault = self.options.fault.clone();
        let sink = StoreSink::new(run, self.meta.clone(), fault.clone());
        let (inbox, status) = (self.inbox_sender.clone(), Arc::clone(&self.status));
        let space_pages = self.copying.layout.len_pages();
        self.encoding = Some(Encoding::start(sink, space_pages, inbox, status, fault)?);
        self.say("RAM was plugged or unplugged: a new run begins with a complete checkpoint");
        Ok(())
    }

    /// Says why `lost` checkpoints failed, once for a row of the same.
    fn failed(&mut self, message: &str, lost: u64, hopeless: bool) -> String {
        self.failed += lost;
        let consequence = if hopeless {
            "no more checkpoints are taken; the VM runs on"
        } else {
            "nothing is lost: its pages go into the next one"
        };
        let behind = if lost > 1 { format!(" (and {} behind it)", lost - 1) } else { String::new() };
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

    /// Gives QEMU a moment to be seen as ended.
    fn vm_has_ended(&mut self) -> bool {
        self.look();
        if self.shut_down {
            return true;
        }
        let vm = &mut self.machine.vm;
        if vm.qmp().status().is_ok() {
            return false;
        }
        let deadline = Instant::now() + Duration::from_secs(2);
        while Instant::now() < deadline {
            if matches!(vm.try_wait(), Ok(Some(_))) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }

    /// What was captured is sealed before the run ends.
    fn seal_the_rest(&mut self) -> Result<(), Failure> {
        let sink = self.end_encoding()?;
        sink.finish().map_err(|e| Failure::store(&e, self.store.path()))
    }

    /// Ends the encoder and takes in its last reports.
    fn end_encoding(&mut self) -> Result<StoreSink, Failure> {
        let encoding = self.encoding.take().ok_or_else(|| Failure::new("the encoder has ended"))?;
        let sink = encoding.finish()?;
        while let Ok(message) = self.inbox.try_recv() {
            match message {
                Inbox::Report(report) => self.settle(*report),
                Inbox::Request(pending) => {
                    let _ = pending.answer.send(Response::Failed("the run is ending".into()));
                }
            }
        }
        Ok(sink)
    }

    fn finish(mut self, end: Result<End, Failure>) -> Outcome {
        keyframe_kernel::priority::lower();
        let finished = self.seal_the_rest();
        let mut run_dir = self.run_dir;
        // The tracker goes with the cycle: QEMU is on its own again before it is ended or left.
        drop(self.copying);
        let mut vm = self.machine.into_vm();
        let code = match end? {
            End::Vm(exit) => {
                if exit.success() {
                    // Its console is somebody else's.
                    if vm.is_attached() && !self.options.quiet {
                        eprintln!("keyframe: VM {} has ended", self.name);
                    }
                    DONE
                } else {
                    eprintln!("keyframe: QEMU ended with {exit}");
                    FAILED
                }
            }
            End::Asked(_) if vm.is_attached() => {
                let pid = vm.keep();
                if !self.options.quiet {
                    eprintln!(
                        "keyframe: detached: VM {} runs on without checkpoints (QEMU {pid})",
                        self.name
                    );
                }
                DONE
            }
            End::Asked(OnExit::Kill) => {
                vm.kill().map_err(|e| Failure::qemu(&e))?;
                DONE
            }
            End::Asked(OnExit::Keep) => {
                run_dir.keep();
                let pid = vm.keep();
                if !self.options.quiet {
                    eprintln!(
                        "keyframe: VM {} runs on without checkpoints: QEMU {pid}, monitor {}",
                        self.name,
                        run_dir.path().join("qmp.sock").display()
                    );
                }
                DONE
            }
        };
        finished?;
        self.options.quiet |= code == FAILED;
        if !self.options.quiet {
            eprintln!("keyframe: {} checkpoints sealed, {} failed", self.sealed, self.failed);
        }
        Ok(match code {
            DONE if self.audited_wrong > 0 || self.given_up => FAILED,
            DONE if self.failed > 0 => WARNED,
            code => code,
        })
    }

    fn greeting(&self) -> String {
        let every = match self.options.interval {
            Some(interval) => format!("a checkpoint every {}", humantime::format_duration(interval)),
            None => "checkpoints by `keyframe take`".into(),
        };
        let attached = match self.copying.stopped_ns {
            Some(ns) if self.machine.vm.is_attached() => {
                format!(", whose main thread stood still for {}", output::duration(ns))
            }
            _ => String::new(),
        };
        format!(
            "VM {}: {every} into {} (QEMU {}{attached})",
            self.name,
            self.store.path().display(),
            self.machine.vm.pid()
        )
    }

    fn say(&self, text: &str) {
        if !self.options.quiet {
            eprintln!("keyframe: {text}");
        }
    }

    fn update(&self, change: impl FnOnce(&mut Status)) {
        if let Ok(mut status) = self.status.lock() {
            status.last_age_ns = self.sealed_at.map(|at| ns(at.elapsed()));
            change(&mut status);
        }
    }
}

fn first_status(store: &Store, parts: &Parts, options: &Options) -> Status {
    Status {
        vm: parts.name.clone(),
        state: if parts.runs { "running" } else { "paused" }.into(),
        qemu_pid: parts.machine.vm.pid(),
        engine_pid: std::process::id(),
        store: std::path::absolute(store.path())
            .unwrap_or_else(|_| store.path().into())
            .display()
            .to_string(),
        interval_ns: options.interval.map(ns),
        tuned: None,
        sealed: 0,
        failed: 0,
        last_error: None,
        backlog_ns: 0,
        phase: "idle".into(),
        encoder: "sealed".into(),
        queued: 0,
        last: None,
        last_age_ns: None,
        qmp: if parts.machine.vm.is_attached() {
            parts.machine.monitor.as_ref().map_or_else(String::new, |path| path.display().to_string())
        } else {
            parts.run_dir.path().join("qmp.sock").display().to_string()
        },
    }
}

fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
