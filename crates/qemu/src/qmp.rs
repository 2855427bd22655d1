//! QEMU's monitor: the commands that Keyframe needs, with bounded answers, and the events in
//! between.
//!
//! ```text
//!   connect ─▶ greeting ─▶ qmp_capabilities ─▶ idle ──command──▶ waits for the answer with its id ─▶ idle
//!                                               │                   (events met on the way are kept)
//! ```
//!
//! Invariants:
//! 1. Each wait ends: with an answer, with [`Error::Timeout`], or with [`Error::Gone`] when QEMU
//!    has ended.
//! 2. An answer is matched by its id, so the late answer of a command that timed out is never taken
//!    for another's.
//! 3. A resume by another client between our `stop` and our `cont` is noticed: each RESUME event
//!    that arrived before our `cont` was sent, or has an earlier time stamp, is another client's. A
//!    later one does no harm, because the capture is complete when `cont` is sent.
//!
//! The messages are plain JSON values. A library's generated types follow the schema of one QEMU
//! version, and 7.2 lacks fields that 10.0 requires. The library's synchronous client can neither
//! bound a wait nor separate a command from its answer.
//!
//! Left out: out-of-band commands.

mod channel;
mod event;
pub(crate) mod fuzzing;
mod lagging;
pub(crate) mod one_command;
mod transport;
mod virsh;

pub use event::{QmpEvent, RunStatus};

use crate::deletions::Deletions;
use crate::{Error, Result};
use channel::QmpChannel;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use transport::Transport;
use virsh::Virsh;
pub(crate) use virsh::domain_xml;

/// How long an answer may take, unless [`Qmp::set_timeout`] says otherwise.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How many events are kept until they are fetched. A guest can cause some kinds at will.
const EVENTS_MAX: usize = 4096;
/// How long QEMU may take to write the device state, which a vGPU or many disks make large.
const SAVE_TIMEOUT: Duration = Duration::from_secs(30);
/// The first message of a monitor.
const GREETING: &str = "greeting";
/// The first command id of a [`Qmp`] that takes a connection over.
const TAKEN_OVER_ID: u64 = 1 << 40;
/// How long an answer may take after the guest has shut down.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// The effect of a `stop` command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// True if the command stopped the VM. If false, another client had paused the VM, and that
    /// client must resume it.
    pub was_running: bool,
}

/// The state of a pause since our `stop`.
#[derive(Default)]
struct Pause {
    /// RESUME events since our `stop`, met before our `cont`.
    resumed: bool,
    /// When our `cont` was sent.
    cont_us: Option<u64>,
    /// The time at which our `stop` was sent, if events lag. Earlier events belong to an earlier
    /// pause.
    stop_us: Option<u64>,
    /// True once the RESUME event of our own `cont` has arrived.
    resumed_by_us: bool,
    /// True if our `stop` stopped the VM.
    was_running: bool,
}

impl Pause {
    /// Counts a RESUME event with the time stamp `at_us`.
    fn note_resume(&mut self, at_us: Option<u64>) {
        if at_us.is_some_and(|us| self.stop_us.is_some_and(|stop_us| us < stop_us)) {
            return;
        }
        match (self.cont_us, at_us) {
            (None, _) => self.resumed = true,
            (Some(cont_us), Some(us)) if us < cont_us => self.resumed = true,
            (Some(_), _) => self.resumed_by_us = true,
        }
    }
}

/// A connection to a QEMU monitor that speaks the QEMU Monitor Protocol.
pub struct Qmp {
    channel: QmpChannel,
    timeout: Duration,
    last_id: u64,
    events: VecDeque<QmpEvent>,
    /// Events of unplugged devices.
    deletions: Deletions,
    /// Events in all, for finding out whether one came.
    stops: u64,
    /// When the last of them happened.
    stopped_us: Option<u64>,
    /// True from a load of a state by Keyframe until the VM runs.
    stands_since_load: bool,
    pause: Option<Pause>,
}

impl Qmp {
    /// Connects to the monitor at `path` and negotiates capabilities. If the socket does not exist
    /// yet, waits for it at most `wait`. Errors: there is no such socket; no monitor answers there.
    pub fn connect(path: &Path, wait: Duration) -> Result<Self> {
        Self::connect_while(path, wait, &mut || Ok(()))
    }

    /// Like [`Qmp::connect`], but ends with the error of `alive`, which it asks meanwhile.
    pub(crate) fn connect_while(
        path: &Path,
        wait: Duration,
        alive: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Self> {
        let started = Instant::now();
        let transport = Transport::connect(path, wait, alive)?;
        Self::greet(
            transport,
            wait.saturating_sub(started.elapsed()).max(Duration::from_secs(1)),
            alive,
        )
    }

    /// Connects to the monitor at `path`, whose socket exists, within `wait`. Errors:
    /// [`Error::MonitorBusy`] if it serves another client; no monitor answers there.
    pub fn connect_running(path: &Path, wait: Duration) -> Result<Self> {
        let busy = || Error::MonitorBusy { monitor: path.display().to_string() };
        let connected = Transport::connect(path, Duration::ZERO, &mut || Ok(()));
        // A server that is busy lets one more wait in its queue, and none behind that.
        let transport = connected.map_err(|e| match e {
            Error::Io { source, .. } if source.kind() == std::io::ErrorKind::WouldBlock => busy(),
            other => other,
        })?;
        Self::greet(transport, wait, &mut || Ok(())).map_err(|e| match e {
            Error::Timeout { operation, .. } if operation == GREETING => busy(),
            other => other,
        })
    }

    /// Connects to the monitor of `domain` through libvirt at `uri`; `None` for virsh's default.
    /// `passed` are the descriptors that commands may pass to QEMU.
    pub(crate) fn connect_libvirt(
        domain: &str,
        uri: Option<&str>,
        passed: &[&OwnedFd],
    ) -> Result<Self> {
        let mut qmp =
            Self::new(QmpChannel::Libvirt(Box::new(Virsh::connect(domain, uri, passed)?)));
        // The first answer tells whether libvirt lets us.
        qmp.execute("query-version", None)?;
        Ok(qmp)
    }

    /// Takes over the connection of an engine that has ended. Capabilities are negotiated already,
    /// and the engine may have read half a line.
    pub(crate) fn take_over(socket: OwnedFd, name: &str) -> Self {
        let mut qmp = Self::new(QmpChannel::Socket(Transport::taken_over(socket, name.into())));
        // Not the ids of the engine, whose answers may still come.
        qmp.last_id = TAKEN_OVER_ID;
        qmp
    }

    /// A second descriptor of the connection, for the watchdog's process; `None` with libvirt.
    pub(crate) fn duplicate(&self) -> Result<Option<OwnedFd>> {
        match &self.channel {
            QmpChannel::Socket(transport) => transport.duplicate().map(Some),
            QmpChannel::Libvirt(_) => Ok(None),
        }
    }

    fn new(channel: QmpChannel) -> Self {
        Self {
            channel,
            timeout: TIMEOUT,
            last_id: 0,
            events: VecDeque::new(),
            deletions: Deletions::default(),
            stops: 0,
            stopped_us: None,
            stands_since_load: false,
            pause: None,
        }
    }

    /// A client over a connected, non-blocking socket.
    pub(crate) fn over(
        socket: OwnedFd,
        name: &str,
        wait: Duration,
        alive: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Self> {
        Self::greet(Transport::over(socket, name.into()), wait, alive)
    }

    fn greet(
        transport: Transport,
        wait: Duration,
        alive: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Self> {
        let mut qmp = Self::new(QmpChannel::Socket(transport));
        let started = Instant::now();
        let greeting = loop {
            // In slices, so that a QEMU that died is seen.
            match qmp.channel.receive(GREETING, Duration::from_millis(50)) {
                Err(Error::Timeout { .. }) if started.elapsed() < wait => alive()?,
                Err(Error::Gone { .. }) => {
                    alive()?;
                    return Err(Error::Gone {
                        monitor: qmp.channel.name().into(),
                        operation: GREETING.into(),
                    });
                }
                // Before the greeting, QEMU may still send events that were meant for the previous
                // client.
                Ok(message) if message.get("event").is_some() && started.elapsed() < wait => {}
                other => break other?,
            }
        };
        if greeting.get("QMP").is_none() {
            let start: String = greeting.to_string().chars().take(80).collect();
            return Err(qmp
                .channel
                .protocol(GREETING, format!("this is no QMP monitor: it says {start}")));
        }
        // QEMU greets early, and answers when it is ready.
        let timeout = qmp.set_timeout(TIMEOUT.max(wait.saturating_sub(started.elapsed())));
        qmp.execute("qmp_capabilities", None)?;
        qmp.set_timeout(timeout);
        Ok(qmp)
    }

    /// Sets the time that an answer may take from now on to `timeout`. Returns the previous value.
    pub fn set_timeout(&mut self, timeout: Duration) -> Duration {
        std::mem::replace(&mut self.timeout, timeout)
    }

    /// Executes the command `command` with `arguments` (`None` for none), and returns the `return`
    /// value of QEMU's answer. Error: QEMU refuses the command or does not answer.
    pub fn execute(&mut self, command: &str, arguments: Option<Value>) -> Result<Value> {
        let id = self.send(command, arguments, None)?;
        self.answer(id, command, self.timeout)
    }

    /// As [`Qmp::execute`], and passes a descriptor to QEMU with the command.
    pub(crate) fn execute_passing(
        &mut self,
        command: &str,
        arguments: Value,
        passed: BorrowedFd<'_>,
    ) -> Result<Value> {
        let id = self.send(command, Some(arguments), Some(passed))?;
        self.answer(id, command, self.timeout)
    }

    /// Passes a file to QEMU, in a set of its own. Returns the number of the set: QEMU opens the
    /// file as `/dev/fdset/NUMBER`, until the command `remove-fd`. `opaque` is the name of the set.
    pub(crate) fn add_fd(&mut self, opaque: &str, file: BorrowedFd<'_>) -> Result<u64> {
        let answer = self.execute_passing("add-fd", json!({ "opaque": opaque }), file)?;
        let set = answer.get("fdset-id").and_then(Value::as_u64);
        set.ok_or_else(|| self.unexpected("add-fd", &answer))
    }

    /// Executes several queries. Returns their answers. Over a socket all are sent before the first
    /// answer is awaited, so there is one round trip, and QEMU takes its lock once.
    pub(crate) fn ask_all<const N: usize>(
        &mut self,
        commands: [(&str, Value); N],
    ) -> Result<[Value; N]> {
        let mut answers = [const { Value::Null }; N];
        if self.channel.events_lag() {
            for (answer, (command, arguments)) in answers.iter_mut().zip(commands) {
                *answer = self.execute(command, Some(arguments))?;
            }
            return Ok(answers);
        }
        let mut sent = [(0, ""); N];
        for (sent, (command, arguments)) in sent.iter_mut().zip(commands) {
            *sent = (self.send(command, Some(arguments), None)?, command);
        }
        for (answer, (id, command)) in answers.iter_mut().zip(sent) {
            *answer = self.answer(id, command, self.timeout)?;
        }
        Ok(answers)
    }

    /// The devices that QEMU has reported as unplugged. Over libvirt there are never any.
    pub(crate) fn deletions(&self) -> &Deletions {
        &self.deletions
    }

    /// Pauses the VM. Returns whether the VM ran before. Error: QEMU refuses the command or does
    /// not answer.
    pub fn stop(&mut self) -> Result<Stopped> {
        if self.channel.events_lag() {
            return self.stop_lagging();
        }
        self.drain("stop")?;
        let stops = self.stops;
        self.pause = Some(Pause::default());
        self.execute("stop", None)?;
        // QEMU sends the event before the answer.
        let was_running = self.stops > stops;
        if let Some(pause) = &mut self.pause {
            pause.was_running = was_running;
        }
        Ok(Stopped { was_running })
    }

    /// Resumes the VM. Error: QEMU refuses the command or does not answer.
    pub fn cont(&mut self) -> Result<()> {
        self.drain("cont")?;
        if let Some(pause) = &mut self.pause {
            pause.cont_us.get_or_insert_with(now_us);
        }
        self.execute("cont", None).map(drop)
    }

    /// Resumes the VM after [`Qmp::stop`]. Returns true if another client resumed it in between:
    /// the capture is then torn. Error: QEMU refuses the command or does not answer.
    pub fn cont_after_stop(&mut self) -> Result<bool> {
        self.cont()?;
        self.resumed_by_other()
    }

    /// Returns true if another client (a user's monitor, the watchdog) resumed the VM after the
    /// last [`Qmp::stop`] and before [`Qmp::cont`], or before now if there was no `cont` yet.
    /// Error: QEMU refuses the command or does not answer.
    pub fn resumed_by_other(&mut self) -> Result<bool> {
        self.drain("look for events")?;
        if self.channel.events_lag() {
            self.await_resume()?;
        }
        Ok(self.pause.as_ref().is_some_and(|p| p.resumed))
    }

    /// Has QEMU write the state of all devices to `target`, a path or `/dev/fdset/N`. Error: QEMU
    /// refuses the command or does not answer.
    pub fn save_devices(&mut self, target: &str) -> Result<()> {
        let operation = "xen-save-devices-state";
        // All that `live` does to a VM that stands still is to give its images away, as if another
        // host took them over: that fails beside a job on them, and a second time before it runs
        // again QEMU aborts.
        let id = self.send(operation, Some(json!({ "filename": target, "live": false })), None)?;
        self.answer(id, operation, self.timeout.max(SAVE_TIMEOUT)).map(drop)
    }

    /// Notes that Keyframe loads a state into the VM, which stands still.
    pub(crate) fn note_load(&mut self) {
        self.stands_since_load = true;
    }

    /// True if Keyframe loaded a state into the VM, and the VM has not run since.
    pub(crate) fn stands_since_load(&self) -> bool {
        self.stands_since_load
    }

    /// True if our last [`Qmp::stop`] stopped the VM. False if another client had paused it before.
    pub(crate) fn stopped_by_us(&self) -> bool {
        self.pause.as_ref().is_some_and(|pause| pause.was_running)
    }

    /// Forgets that [`Qmp::stop`] stopped the VM, which stands still for another reason now.
    pub(crate) fn forget_stop(&mut self) {
        self.pause = None;
    }

    /// Returns the run state of the VM. Error: QEMU refuses the command or does not answer.
    pub fn status(&mut self) -> Result<RunStatus> {
        let answer = self.execute("query-status", None)?;
        match answer.get("status").and_then(Value::as_str) {
            Some(word) => Ok(RunStatus::parse(word)),
            None => Err(self.unexpected("query-status", &answer)),
        }
    }

    /// Returns the thread ids of the virtual CPUs, in rising order. It is one id if all of them
    /// share a thread. Error: QEMU refuses the command or does not answer.
    pub fn cpu_threads(&mut self) -> Result<Vec<u32>> {
        let answer = self.execute("query-cpus-fast", None)?;
        let thread = |cpu: &Value| {
            cpu.get("thread-id")?.as_u64().and_then(|thread| u32::try_from(thread).ok())
        };
        let threads =
            answer.as_array().and_then(|cpus| cpus.iter().map(thread).collect::<Option<Vec<_>>>());
        let mut threads = threads
            .filter(|all| !all.is_empty())
            .ok_or_else(|| self.unexpected("query-cpus-fast", &answer))?;
        threads.sort_unstable();
        threads.dedup();
        Ok(threads)
    }

    /// Returns the number of instructions that a recorded or replayed VM has executed since its
    /// start. Error: QEMU refuses the command or does not answer.
    pub fn icount(&mut self) -> Result<u64> {
        let answer = self.execute("query-replay", None)?;
        answer
            .get("icount")
            .and_then(Value::as_u64)
            .ok_or_else(|| self.unexpected("query-replay", &answer))
    }

    /// Has a replay stop at instruction `icount`, which it has not reached yet. Error: QEMU refuses
    /// the command or does not answer.
    pub fn replay_break(&mut self, icount: u64) -> Result<()> {
        self.execute("replay-break", Some(json!({ "icount": icount }))).map(drop)
    }

    /// Returns the events since the last call, oldest first. Error: the monitor is closed.
    pub fn drain_events(&mut self) -> Result<Vec<QmpEvent>> {
        let drained = self.drain("look for events");
        // Events that came before QEMU ended tell why it did.
        if self.events.is_empty() {
            drained?;
        }
        Ok(self.events.drain(..).collect())
    }

    /// Executes a line of the human monitor, QEMU's textual command language. Returns its output.
    /// Error: QEMU refuses the command or does not answer.
    pub fn hmp(&mut self, line: &str) -> Result<String> {
        let answer =
            self.execute("human-monitor-command", Some(json!({ "command-line": line })))?;
        match answer {
            Value::String(text) => Ok(text),
            other => Err(self.unexpected(line, &other)),
        }
    }

    /// Asks QEMU to end. Error: QEMU refuses the command or does not answer.
    pub fn quit(&mut self) -> Result<()> {
        match self.execute("quit", None) {
            // It may be gone before its answer is.
            Ok(_) | Err(Error::Gone { .. }) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// An error about an answer of an unexpected form.
    pub(crate) fn unexpected(&self, operation: &str, answer: &Value) -> Error {
        let start: String = answer.to_string().chars().take(200).collect();
        self.channel.protocol(operation, format!("an answer of an unexpected form: {start}"))
    }

    fn send(
        &mut self,
        command: &str,
        arguments: Option<Value>,
        passed: Option<BorrowedFd<'_>>,
    ) -> Result<u64> {
        self.last_id += 1;
        let mut message = json!({ "execute": command, "id": self.last_id });
        // QEMU reads its monitor byte by byte, so a word less is time won in a pause.
        let is_empty = |arguments: &Value| arguments.as_object().is_some_and(Map::is_empty);
        let arguments = arguments.filter(|arguments| !is_empty(arguments));
        if let (Some(arguments), Some(object)) = (arguments, message.as_object_mut()) {
            object.insert("arguments".into(), arguments);
        }
        self.channel.send(&message, passed, command, self.timeout)?;
        Ok(self.last_id)
    }

    fn answer(&mut self, id: u64, operation: &str, timeout: Duration) -> Result<Value> {
        let mut deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let message = self.channel.receive(operation, left).map_err(|e| match e {
                Error::Timeout { monitor, operation, .. } => {
                    Error::Timeout { monitor, operation, waited_ms: timeout.as_millis() as u64 }
                }
                other => other,
            })?;
            if self.keep_event(&message) {
                if matches!(self.events.back(), Some(QmpEvent::Shutdown { .. })) {
                    // A QEMU on its way out may never answer, and not end for that: see
                    // `Vm::finish_shutdown`.
                    deadline = deadline.min(Instant::now() + SHUTDOWN_TIMEOUT);
                }
                continue;
            }
            if let Some(answer) = self.match_answer(&message, id, operation) {
                return answer;
            }
        }
    }

    /// The answer in `message`. `None` if it is the late answer of a command that was given up.
    fn match_answer(&self, message: &Value, id: u64, operation: &str) -> Option<Result<Value>> {
        let ours = message.get("id").and_then(Value::as_u64) == Some(id);
        match (message.get("return"), message.get("error")) {
            (Some(value), None) if ours => Some(Ok(value.clone())),
            // An error without an id is about a line that QEMU could not read: ours, as only one is
            // under way.
            (None, Some(error)) if ours || message.get("id").is_none() => {
                let reason =
                    error.get("desc").and_then(Value::as_str).unwrap_or("for no reason given");
                let (operation, reason) = (operation.into(), reason.into());
                Some(Err(Error::Refused { operation, reason }))
            }
            (None, None) | (Some(_), Some(_)) => Some(Err(self.unexpected(operation, message))),
            _ => None,
        }
    }

    /// Reads the events that have arrived.
    fn drain(&mut self, operation: &str) -> Result<()> {
        while let Some(message) = self.channel.receive_now(operation)? {
            self.keep_event(&message);
        }
        Ok(())
    }

    fn keep_event(&mut self, message: &Value) -> bool {
        let Some(event) = QmpEvent::parse(message) else { return false };
        self.stands_since_load &= event != QmpEvent::Resume;
        match (&event, &mut self.pause) {
            (QmpEvent::Stop, _) => {
                self.stops += 1;
                self.stopped_us = event::timestamp_us(message);
            }
            (QmpEvent::Resume, Some(pause)) => pause.note_resume(event::timestamp_us(message)),
            _ => {}
        }
        if event == QmpEvent::Other("DEVICE_DELETED".into()) {
            self.deletions.note(message);
        }
        if self.events.len() >= EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(event);
        true
    }
}

impl AsFd for Qmp {
    /// A descriptor that is readable when events have arrived.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

fn now_us() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| u64::try_from(d.as_micros()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests;
