//! The loop: checkpoints when due, requests when they come, and an orderly end.

use super::Options;
use super::audit::Audit;
use super::launch::Parts;
use super::sink::Label;
use super::watch::Watch;
use crate::control::server::{self, Pending, SharedStatus};
use crate::control::{OnExit, Request, Response, Status, Strategy};
use crate::failure::{DONE, FAILED, Failure, Outcome, WARNED, chain};
use crate::output;
use crate::report::Entry;
use keyframe_capture::CycleError;
use keyframe_qemu::Event;
use keyframe_scheduling::{Cadence, PrecopyPolicy};
use keyframe_store::{Sealed, Store};
use std::process::ExitStatus;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How often a VM's own doings (it exits, it is paused) are looked at, when nothing else wakes the engine.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How often a run that falls behind says so; each checkpoint's backlog is in its entry all the same.
const SAY_LATE_EVERY: Duration = Duration::from_secs(30);

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
    parts: Parts,
    options: Options,
    watch: Watch,
    status: SharedStatus,
    requests: Receiver<Pending>,
    interrupted: Arc<AtomicBool>,
    _socket: server::Socket,
    born: Instant,
    cadence: Option<Cadence>,
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
        let (requests, socket) = server::listen(parts.run_dir.path(), &status)
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
        let watch = Watch::new(Arc::clone(&status), options.fault, audit);
        Ok(Self {
            store,
            watch,
            status,
            requests,
            interrupted,
            _socket: socket,
            born: Instant::now(),
            cadence: options.interval.map(|i| Cadence::new(ns(i), 0)),
            vm_runs: !parts.starts_paused,
            shut_down: false,
            sealed: 0,
            failed: 0,
            audited_wrong: 0,
            given_up: false,
            sealed_at: None,
            said_late: None,
            parts,
            options,
        })
    }

    /// Runs the VM to its end, or until the run is ended.
    pub fn run(mut self) -> Outcome {
        self.say(&self.greeting());
        if self.vm_runs {
            self.parts.machine.vm.qmp().cont().map_err(|e| Failure::qemu(&e))?;
        }
        let end = self.until_end();
        self.finish(end)
    }

    fn until_end(&mut self) -> Result<End, Failure> {
        loop {
            if let Some(exit) = self.parts.machine.vm.try_wait().map_err(|e| Failure::qemu(&e))? {
                return Ok(End::Vm(exit));
            }
            if self.options.count.is_some_and(|count| self.sealed >= count)
                || self.interrupted.load(Ordering::Relaxed)
            {
                return Ok(End::Asked(self.options.on_exit));
            }
            self.look();
            if std::mem::take(&mut self.shut_down)
                && let Some(exit) = self.parts.machine.vm.finish_shutdown().map_err(|e| Failure::qemu(&e))?
            {
                return Ok(End::Vm(exit));
            }
            // Requests first: where checkpoints take longer than the interval, one is always due.
            match self.requests.recv_timeout(self.patience()) {
                Ok(pending) => {
                    if let Some(end) = self.answer(pending) {
                        return Ok(end);
                    }
                }
                Err(RecvTimeoutError::Timeout) if self.is_due() => {
                    // What went wrong has been said.
                    let _ = self.checkpoint("interval", None, None);
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

    fn patience(&self) -> Duration {
        match &self.cadence {
            Some(cadence) if self.vm_runs && !self.given_up => {
                Duration::from_nanos(cadence.due_ns().saturating_sub(ns(self.born.elapsed()))).min(LOOK_EVERY)
            }
            _ => LOOK_EVERY,
        }
    }

    /// What the VM has been up to.
    fn look(&mut self) {
        let Ok(events) = self.parts.machine.vm.qmp().drain_events() else { return };
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
            Request::Take { tag, strategy } => (self.take(tag, strategy), None),
            Request::Stop { on_exit } => {
                (Response::Stopping, Some(End::Asked(on_exit.unwrap_or(self.options.on_exit))))
            }
            Request::Status => (Response::Failed("answered elsewhere".into()), None),
        };
        // Who asked may be gone; the deed is done all the same.
        let _ = pending.answer.send(response);
        end
    }

    fn take(&mut self, tag: Option<String>, strategy: Option<Strategy>) -> Response {
        if let Some(tag) = &tag
            && let Err(e) = keyframe_store::check_tag(tag)
        {
            return Response::Failed(chain(&e));
        }
        if self.given_up {
            return Response::Failed("no more checkpoints are taken: see keyframe status".into());
        }
        match self.checkpoint("take", tag, strategy) {
            Ok(entry) => Response::Taken(Box::new(entry)),
            Err(message) => Response::Failed(message),
        }
    }

    /// One checkpoint, its bookkeeping and its messages.
    fn checkpoint(
        &mut self,
        reason: &'static str,
        tag: Option<String>,
        strategy: Option<Strategy>,
    ) -> Result<Entry, String> {
        let now_ns = ns(self.born.elapsed());
        let backlog_ns = match (&mut self.cadence, reason) {
            (Some(cadence), "interval") => cadence.start(now_ns),
            (Some(cadence), _) => {
                cadence.restart(now_ns);
                0
            }
            (None, _) => 0,
        };
        let strategy = strategy.unwrap_or(self.options.strategy);
        let policy = match strategy {
            Strategy::Precopy => PrecopyPolicy::default(),
            Strategy::StopCopy => PrecopyPolicy::stop_copy(),
        };
        self.parts.sink.label = Label { reason, strategy: strategy.name(), backlog_ns, tag };
        let parts = &mut self.parts;
        let result = parts.cycle.take(&mut parts.machine, &mut parts.sink, &mut self.watch, &policy);
        self.update(|status| {
            status.phase = "idle".into();
            status.backlog_ns = backlog_ns;
        });
        match result {
            Ok((_, sealed)) => Ok(self.succeeded(&sealed, backlog_ns)),
            Err(error) => Err(self.stumbled(&error)),
        }
    }

    fn succeeded(&mut self, sealed: &Sealed, backlog_ns: u64) -> Entry {
        let entry = Entry::of(sealed);
        self.sealed += 1;
        self.sealed_at = Some(Instant::now());
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
            match audit.compare(self.store, sealed.id) {
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

    /// A checkpoint that failed: say why (once for a row of the same), and whether there is hope.
    fn stumbled(&mut self, error: &CycleError) -> String {
        let mut message = chain(error);
        // A VM that ended in the middle is no failure; the loop finds out and says how it ended.
        if self.vm_has_ended() {
            message = format!("the VM ended before the checkpoint was complete ({message})");
            return message;
        }
        self.failed += 1;
        let hopeless = matches!(error, CycleError::OtherRam);
        self.given_up |= hopeless;
        let consequence = if hopeless {
            "no more checkpoints are taken; the VM runs on"
        } else {
            "nothing is lost: its pages go into the next one"
        };
        let text = format!("checkpoint failed: {message}; {consequence}");
        let (failed, owed) = (self.failed, self.parts.cycle.owed_pages());
        let mut repeated = false;
        self.update(|status| {
            repeated = status.last_error.as_ref() == Some(&message);
            status.failed = failed;
            status.last_error = Some(message.clone());
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
        let vm = &mut self.parts.machine.vm;
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

    fn finish(mut self, end: Result<End, Failure>) -> Outcome {
        keyframe_kernel::priority::lower();
        let parts = self.parts;
        let finished = parts.sink.finish();
        let mut run_dir = parts.run_dir;
        // The tracker goes with the cycle: QEMU is on its own again before it is ended or left.
        drop(parts.cycle);
        let mut vm = parts.machine.into_vm();
        let code = match end? {
            End::Vm(exit) => {
                if exit.success() {
                    DONE
                } else {
                    eprintln!("keyframe: QEMU ended with {exit}");
                    FAILED
                }
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
                        parts.name,
                        run_dir.path().join("qmp.sock").display()
                    );
                }
                DONE
            }
        };
        finished.map_err(|e| Failure::store(&e, self.store.path()))?;
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
        format!(
            "VM {}: {every} into {} (QEMU {})",
            self.parts.name,
            self.store.path().display(),
            self.parts.machine.vm.pid()
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
        state: if parts.starts_paused { "paused" } else { "running" }.into(),
        qemu_pid: parts.machine.vm.pid(),
        engine_pid: std::process::id(),
        store: std::path::absolute(store.path())
            .unwrap_or_else(|_| store.path().into())
            .display()
            .to_string(),
        interval_ns: options.interval.map(ns),
        sealed: 0,
        failed: 0,
        last_error: None,
        backlog_ns: 0,
        phase: "idle".into(),
        last: None,
        last_age_ns: None,
        qmp: parts.run_dir.path().join("qmp.sock").display().to_string(),
    }
}

fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
