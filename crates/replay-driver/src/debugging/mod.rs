//! A debugger over a recording: it runs the VM on in the QEMU that stands, and back in another one.
//!
//! ```text
//!   gdb ◀──▶ Debugger ◀──▶ stub of the QEMU that stands ──▶ forward: passed on as it is
//!                 └── back: another QEMU, replayed to where the debugger would have come (reverse.rs)
//! ```
//!
//! QEMU goes back by its own snapshots, which only qcow2 images have; checkpoints go back with any
//! disk, and with none. The stub is QEMU's, with all it knows of the processor; only the few
//! packets that time is in are looked into.
//!
//! Invariant: nothing that a debugger asks for changes what is replayed. Writes are refused;
//! breakpoints are QEMU's, not the guest's.

mod reverse;
mod stub;

use super::Source;
use super::travel::{Standing, Way};
use crate::error::{Error, ReplayError, Result};
use crate::event::{Event, EventSink};
use keyframe_gdb::{Breakpoint, GdbConnection, GdbRequest, Received, StopReply};
use keyframe_replay::interval::RecordedCheckpoint;
use reverse::Back;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use stub::Stub;

/// How often it is looked for what else there is to do.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long a VM that runs on may stand at one instruction before it counts as having come off its
/// log.
const PATIENCE: Duration = Duration::from_secs(20);
/// A running VM's instruction is asked for so often.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// What every replay of a session has.
struct With<'a> {
    source: &'a Source,
    /// Its checkpoints.
    places: Vec<RecordedCheckpoint>,
    /// Further words for QEMU.
    extra: Vec<OsString>,
    events: &'a dyn EventSink,
    interrupted: &'a AtomicBool,
}

/// What a debugger has told the stub, for the stubs that come after it.
#[derive(Clone, Debug, Default)]
struct Told {
    /// What it can.
    supported: Vec<u8>,
    /// The thread that its packets are about.
    thread: Vec<u8>,
    /// Its breakpoints and watchpoints.
    points: BTreeSet<Breakpoint>,
}

/// Waits for debuggers at a port.
pub struct Debugger<'a> {
    listener: TcpListener,
    port: u16,
    source: &'a Source,
    extra: Vec<OsString>,
    events: &'a dyn EventSink,
}

/// How a session ended.
#[derive(PartialEq, Eq)]
enum Ended {
    /// The debugger has let go: another one may come.
    Detached,
    /// The VM is to end, or somebody wants us to.
    Killed,
}

impl<'a> Debugger<'a> {
    /// At `port` of the loopback device; 0 is a free one. `extra` are words for each QEMU.
    pub fn listen(
        source: &'a Source,
        port: u16,
        extra: Vec<OsString>,
        events: &'a dyn EventSink,
    ) -> Result<Self> {
        let failed = |source| ReplayError::Listen { port, source };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        Ok(Self { listener, port, source, extra, events })
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Serves one debugger after the other, until one kills the VM or the user interrupts.
    pub fn serve(self, standing: Standing, interrupted: &AtomicBool) -> Result<()> {
        let places = self.source.places()?;
        let (source, extra, events) = (self.source, self.extra, self.events);
        let with = With { source, places, extra, events, interrupted };
        let mut standing = standing;
        while !interrupted.load(Ordering::Relaxed) {
            if standing.replay.restored().try_wait()?.is_some() {
                return Ok(());
            }
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                    std::thread::sleep(LOOK_EVERY);
                    continue;
                }
                Err(e) => return Err(Error::io("wait for a debugger", e)),
            };
            let prepared = stream.set_nonblocking(false).and_then(|()| stream.set_nodelay(true));
            prepared.map_err(|e| Error::io("prepare a debugger's connection", e))?;
            let stub = Stub::new(standing, &Told::default())?;
            let gdb = GdbConnection::new(stream, "the debugger");
            let mut session =
                Session { with: &with, gdb, stub, told: Told::default(), has_refused: false };
            if session.run()? == Ended::Killed {
                return Ok(());
            }
            standing = session.stub.release()?;
        }
        Ok(())
    }
}

/// One debugger.
struct Session<'a> {
    with: &'a With<'a>,
    gdb: GdbConnection<TcpStream>,
    /// Of the VM that stands.
    stub: Stub,
    told: Told,
    /// It has been said that nothing can be written.
    has_refused: bool,
}

impl Session<'_> {
    fn run(&mut self) -> Result<Ended> {
        let mut is_first = true;
        loop {
            if self.with.interrupted.load(Ordering::Relaxed) {
                return Ok(Ended::Killed);
            }
            let payload = match self.gdb.receive(LOOK_EVERY) {
                Ok(None | Some(Received::Interrupt)) => continue,
                Ok(Some(Received::Closed)) => return Ok(Ended::Detached),
                Ok(Some(Received::Packet(payload))) => payload,
                Err(e) => {
                    // Whoever that was, the VM stands for the next one.
                    self.with.events.event(&Event::DebuggerLost { error: e.into() });
                    return Ok(Ended::Detached);
                }
            };
            if std::mem::take(&mut is_first) {
                // One who connected before the VM stood has asked again and again meanwhile.
                while self.gdb.receive(Duration::ZERO)? == Some(Received::Packet(payload.clone())) {
                }
            }
            match self.answer(&payload)? {
                Answer::Send(answer) => self.gdb.send(&answer)?,
                Answer::End(ended, answer) => {
                    self.gdb.send(&answer)?;
                    return Ok(ended);
                }
            }
        }
    }

    fn answer(&mut self, payload: &[u8]) -> Result<Answer> {
        let answer = match GdbRequest::parse(payload) {
            GdbRequest::Detach => return Ok(Answer::End(Ended::Detached, b"OK".to_vec())),
            GdbRequest::Kill => return Ok(Answer::End(Ended::Killed, b"OK".to_vec())),
            GdbRequest::Unsupported => Vec::new(),
            GdbRequest::Write => self.refuse(),
            GdbRequest::Run => self.run_on(payload)?,
            GdbRequest::StepBack => self.back(Back::Step)?,
            GdbRequest::RunBack => self.back(Back::Run)?,
            GdbRequest::SetBreakpoint(point) => {
                let answer = self.stub.ask(payload)?;
                if answer == b"OK" {
                    self.told.points.insert(point);
                }
                answer
            }
            GdbRequest::RemoveBreakpoint(point) => {
                let answer = self.stub.ask(payload)?;
                if answer == b"OK" {
                    self.told.points.remove(&point);
                }
                answer
            }
            GdbRequest::StopReason => {
                self.told.points.clear();
                self.stub.ask(payload)?
            }
            GdbRequest::Supported => {
                self.told.supported = payload.to_vec();
                with_reverse(self.stub.ask(payload)?)
            }
            GdbRequest::Thread => {
                self.told.thread = payload.to_vec();
                self.stub.ask(payload)?
            }
            GdbRequest::Monitor => self.monitor(payload)?,
            GdbRequest::Other => self.stub.ask(payload)?,
        };
        Ok(Answer::Send(answer))
    }

    /// A line for QEMU's monitor: what it prints comes before the answer.
    fn monitor(&mut self, payload: &[u8]) -> Result<Vec<u8>> {
        let mut answer = self.stub.ask(payload)?;
        while answer.first() == Some(&b'O') && answer != b"OK" {
            self.gdb.send(&answer)?;
            answer = self.stub.answer()?;
        }
        Ok(answer)
    }

    fn refuse(&mut self) -> Vec<u8> {
        if !std::mem::replace(&mut self.has_refused, true) {
            self.with.events.event(&Event::DebuggerWriteRefused);
        }
        b"E01".to_vec()
    }

    /// Lets the VM run as `payload` says, until it stops or the debugger wants it to.
    fn run_on(&mut self, payload: &[u8]) -> Result<Vec<u8>> {
        let with = self.with;
        let end = with.source.last_standing()?;
        let gdb = &mut self.gdb;
        let stub = &mut self.stub;
        let thread = stub.thread.clone();
        let ended = || {
            StopReply { signal: 5, watch: None, thread: thread.clone() }.packet("replaylog:end;")
        };
        if stub.icount()? >= end {
            return Ok(ended());
        }
        if !with.source.ends_with_log()? {
            stub.standing.replay.restored().vm().qmp().replay_break(end)?;
        }
        stub.send(payload)?;
        let (mut idling, mut watch, mut has_stopped) = (stub.idling(), StallWatch::new(), false);
        loop {
            stub.wait(gdb, &mut idling)?;
            match stub.receive(Duration::ZERO)? {
                Some(Received::Packet(reply)) => match StopReply::parse(&reply) {
                    // Console output and the like.
                    None => gdb.send(&reply)?,
                    Some(_) if stub.icount()? >= end || stub.is_shut_down()? => return Ok(ended()),
                    Some(_) => return Ok(reply),
                },
                Some(Received::Closed) => {
                    return Err(ReplayError::EndedUnderDebugger.into());
                }
                Some(Received::Interrupt) | None => {}
            }
            // One who has gone does not wait for it any more; whoever comes next finds it standing.
            let wants_stop = matches!(
                gdb.receive(Duration::ZERO)?,
                Some(Received::Interrupt | Received::Closed)
            );
            if !has_stopped
                && (wants_stop
                    || with.interrupted.load(Ordering::Relaxed)
                    || watch.is_frozen(stub, with.events)?)
            {
                stub.interrupt()?;
                has_stopped = true;
            }
        }
    }

    /// Another replay to where the debugger comes when it goes back.
    fn back(&mut self, how: Back) -> Result<Vec<u8>> {
        let from = self.stub.icount()?;
        let thread = self.stub.thread.clone();
        let stop = |signal, watch, why: &str| {
            StopReply { signal, watch, thread: thread.clone() }.packet(why)
        };
        let found = match how {
            Back::Step => Some(reverse::Found { icount: from.saturating_sub(1), watch: None }),
            Back::Run => reverse::search(self.with, &mut self.gdb, &self.told, from)?,
        };
        let Some(found) = found else {
            // Interrupted: it still stands where it stood.
            return Ok(stop(2, None, ""));
        };
        let way = Way::to(self.with.source, &self.with.places, found.icount)?;
        if way.icount >= from {
            return Ok(stop(5, None, "replaylog:begin;"));
        }
        let what = (&self.with.extra[..], true);
        // It is kept until the other one stands: should that fail, nothing is lost.
        let stands = Standing::at(self.with.source, way, what, self.with.interrupted, &mut |_| ())?;
        let Some(standing) = stands else { return Ok(stop(2, None, "")) };
        self.stub = Stub::new(standing, &self.told)?;
        let begins = found.icount < way.icount || found.icount == 0;
        Ok(stop(5, found.watch, if begins { "replaylog:begin;" } else { "" }))
    }
}

enum Answer {
    Send(Vec<u8>),
    End(Ended, Vec<u8>),
}

/// That one can go back is said whatever QEMU says.
fn with_reverse(mut answer: Vec<u8>) -> Vec<u8> {
    for word in [&b";ReverseStep+"[..], b";ReverseContinue+"] {
        if !answer.windows(word.len() - 1).any(|part| part == &word[1..]) {
            answer.extend(word);
        }
    }
    answer
}

/// Looks at a VM that runs now and then.
struct StallWatch {
    progress: Option<keyframe_replay::StallDetector>,
    began: Instant,
    asked: Instant,
}

impl StallWatch {
    fn new() -> Self {
        Self { progress: None, began: Instant::now(), asked: Instant::now() }
    }

    /// Whether it has stood at one instruction for too long, which is said.
    fn is_frozen(&mut self, stub: &mut Stub, events: &dyn EventSink) -> Result<bool> {
        if self.asked.elapsed() < ASK_EVERY {
            return Ok(false);
        }
        self.asked = Instant::now();
        let icount = stub.icount()?;
        let progress = self
            .progress
            .get_or_insert_with(|| keyframe_replay::StallDetector::new(icount, PATIENCE));
        let keyframe_replay::ReplayProgress::Stalled { icount } =
            progress.observe(self.began.elapsed(), icount, None)
        else {
            return Ok(false);
        };
        events.event(&Event::DivergedUnderDebugger { icount });
        Ok(true)
    }
}
