//! The file to which QEMU writes device state: a memfd that QEMU and Keyframe have open, in one of
//! QEMU's descriptor sets.
//!
//! ```text
//!   launched:  -add-fd fd=N,set=19270,opaque=keyframe-engine:PID:START       inherited
//!   attached:  add-fd  {fdset-id, opaque}                                    passed along with the command
//!                └▶ xen-save-devices-state /dev/fdset/19270 ──▶ read here
//! ```
//!
//! The set's `opaque` text names the engine. Through any monitor, another engine sees by it that
//! this QEMU has an engine, and finds what a killed engine left behind. QEMU 7.2 drops the set with
//! the last connection to any of its monitors, if the VM runs then; QEMU 10.0 never drops it. A set
//! that QEMU 7.2 is told to forget while the VM is paused stays in its list until a monitor closes
//! while the VM runs.
//!
//! The file's permissions note that the engine has paused the VM for a moment. They cost one system
//! call, and the next engine finds them through `/proc/QEMU/fd`, even if the engine and its watchdog
//! died in that pause.

use crate::state_pipe::StatePipe;
use crate::{Error, Qmp, Result, spawn};
use keyframe_locks::IgnorePoison;
use keyframe_qemu_cmdline::options::{Argument, keys, value_of};
use keyframe_qemu_stream::StreamError;
use rustix::fs::{MemfdFlags, Mode, OFlags, SeekFrom};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// More than any device state: a vGPU's is some MiB.
const STATE_BYTES_MAX: u64 = 1 << 30;
/// The number of the descriptor set for device state; if it is taken, the first free one after it.
/// Users count theirs from 1, libvirt from 0.
const FDSET: u32 = 19270;
/// The prefix of the `opaque` text of all sets of Keyframe.
const MARK: &str = "keyframe";
/// The prefix of the `opaque` text of a set that an engine uses. The engine's pid, its start time
/// and the file's number in that process follow.
const ENGINE_MARK: &str = "keyframe-engine:";

/// The name of the file, as `/proc/PID/fd` shows it.
const NAME: &str = "keyframe-devices";
/// The file's permissions while its engine has paused the VM for a moment: exactly these, because
/// the kernel makes the file with more.
const IN_PAUSE: Mode = NOT_IN_PAUSE.union(Mode::RGRP);
/// Its permissions after such a pause.
const NOT_IN_PAUSE: Mode = Mode::RUSR.union(Mode::WUSR);

/// The numbers of the files that this process uses.
static IN_USE: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());
static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// The memfd that QEMU and Keyframe have open.
///
/// QEMU uses a descriptor of a set only if its access mode equals the requested one, write-only.
/// QEMU's and Keyframe's copy of that descriptor share one file position. It stands at the end of
/// the previous state until it is reset.
pub(crate) struct StateFile {
    pub(crate) write_end: OwnedFd,
    read_end: File,
    set: u32,
    number: u64,
    /// Where QEMU writes in a one-command pause.
    pub(crate) pipe: StatePipe,
}

impl Drop for StateFile {
    fn drop(&mut self) {
        IN_USE.lock().ignore_poison().remove(&self.number);
    }
}

impl StateFile {
    /// A new file, in a set that `arguments` do not use.
    pub(crate) fn new(arguments: &[Argument]) -> Result<Self> {
        let taken: Vec<u32> = arguments
            .iter()
            .filter(|a| a.name() == "add-fd")
            .filter_map(|a| value_of(&keys(a.value(), ""), "set")?.parse().ok())
            .collect();
        Self::with_set(first_free(&taken))
    }

    fn with_set(set: u32) -> Result<Self> {
        let operation = "make a file in memory for device state";
        let fd =
            rustix::fs::memfd_create(NAME, MemfdFlags::CLOEXEC).map_err(Error::io(operation))?;
        let path = format!("/proc/self/fd/{}", spawn::number(&fd));
        let write_end = rustix::fs::open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
            .map_err(Error::io(operation))?;
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        IN_USE.lock().ignore_poison().insert(number);
        let pipe = StatePipe::new()?;
        Ok(Self { write_end, read_end: File::from(fd), set, number, pipe })
    }

    /// The arguments that give the file to a QEMU whose engine is this process.
    pub(crate) fn arguments(&self) -> [String; 2] {
        self.arguments_marked(&self.mark())
    }

    /// The arguments that give the file to a QEMU without an engine.
    pub(crate) fn arguments_of(&self, mark: Option<String>) -> [String; 2] {
        self.arguments_marked(&mark.unwrap_or_else(|| MARK.into()))
    }

    fn arguments_marked(&self, mark: &str) -> [String; 2] {
        [
            "-add-fd".into(),
            format!("fd={},set={},opaque={mark}", spawn::number(&self.write_end), self.set),
        ]
    }

    /// Gives the file to the running QEMU behind `qmp`, which marks this process as its engine, and
    /// checks that this QEMU is process `pid`. Returns true if an engine paused the VM for a
    /// moment and died before it ended that pause; this file then holds the note of that pause.
    ///
    /// Error: [`Error::Attach`] if the QEMU has a living engine, or if the monitor belongs to
    /// another process.
    pub(crate) fn pass(&mut self, qmp: &mut Qmp, pid: u32) -> Result<bool> {
        let Claims { taken, was_in_pause } = self.claim(qmp, pid)?;
        self.set = first_free(&taken);
        let arguments = json!({ "fdset-id": self.set, "opaque": self.mark() });
        let answer = qmp.execute_passing("add-fd", arguments, self.write_end.as_fd())?;
        let theirs =
            answer.get("fd").and_then(Value::as_u64).map(|fd| format!("/proc/{pid}/fd/{fd}"));
        let checked = theirs
            .ok_or_else(|| qmp.unexpected("add-fd", &answer))
            .and_then(|path| self.check_is_at(&path, pid))
            // Two engines that looked at the same time found no other, and now find each other.
            .and_then(|()| self.check_alone(qmp, pid));
        if checked.is_err() {
            self.take_back(qmp);
        }
        checked.map(|()| was_in_pause)
    }

    /// Makes QEMU forget the sets of engines that have ended, and takes over the note of a pause.
    /// Fails if an engine lives.
    fn claim(&self, qmp: &mut Qmp, pid: u32) -> Result<Claims> {
        let all = sets(qmp)?;
        if let Some(engine) = all.iter().find_map(|one| living(&one.mark)) {
            return Err(held(pid, engine));
        }
        let left = || all.iter().filter(|one| one.is_of_engine());
        let notes: Vec<String> = left().filter_map(|one| one.pause_note(pid)).collect();
        if !notes.is_empty() {
            self.note_pause(true);
        }
        for note in &notes {
            // QEMU 7.2 may keep the file.
            let _ = rustix::fs::chmod(note, NOT_IN_PAUSE);
        }
        remove(qmp, left())?;
        // QEMU may still have those that it was told to forget.
        let taken = all.iter().map(|one| one.set).collect();
        Ok(Claims { taken, was_in_pause: !notes.is_empty() })
    }

    /// Notes that the engine has paused the VM for a moment, or that this pause has ended.
    pub(crate) fn note_pause(&self, begins: bool) {
        let mode = if begins { IN_PAUSE } else { NOT_IN_PAUSE };
        // Without the note the watchdog alone can end the pause of an engine that dies.
        let _ = rustix::fs::fchmod(&self.write_end, mode);
    }

    /// The descriptors that QEMU is given through its monitor.
    pub(crate) fn write_ends(&self) -> [&OwnedFd; 2] {
        [&self.write_end, self.pipe.write_end()]
    }

    /// Gives the pipe of one-command pauses to the QEMU behind `qmp`, in a set of its own.
    pub(crate) fn pass_pipe(&mut self, qmp: &mut Qmp) -> Result<()> {
        let taken: Vec<u32> = sets(qmp)?.into_iter().map(|one| one.set).collect();
        let mark = self.mark();
        self.pipe.pass(qmp, first_free(&taken), &mark)
    }

    /// Has QEMU forget the file and the pipe. A QEMU that does not answer is ignored.
    pub(crate) fn take_back(&self, qmp: &mut Qmp) {
        self.pipe.take_back(qmp);
        let _ = qmp.execute("remove-fd", Some(json!({ "fdset-id": self.set })));
    }

    /// The text that names this engine.
    fn mark(&self) -> String {
        mark_of(self.number)
    }

    /// Fails if another engine has come meanwhile.
    fn check_alone(&self, qmp: &mut Qmp, pid: u32) -> Result<()> {
        let own = self.mark();
        let others = sets(qmp)?;
        match others.iter().filter(|one| one.mark != own).find_map(|one| living(&one.mark)) {
            Some(engine) => Err(held(pid, engine)),
            None => Ok(()),
        }
    }

    /// Checks that process `pid`, which should answer the monitor, has this file open under `path`.
    fn check_is_at(&self, path: &str, pid: u32) -> Result<()> {
        let ours = rustix::fs::fstat(&self.read_end)
            .map_err(Error::io("look at the device state file"))?;
        match rustix::fs::stat(path) {
            Ok(theirs) if (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino) => Ok(()),
            Ok(_) | Err(rustix::io::Errno::NOENT) => Err(Error::Attach {
                pid,
                problem: "the monitor belongs to another process".into(),
                fix: "name the pid and the monitor of the same QEMU".into(),
            }),
            Err(e) => Err(Error::io(format!("look at {path}"))(e)),
        }
    }

    /// QEMU's name of the file.
    pub(crate) fn target(&self) -> String {
        format!("/dev/fdset/{}", self.set)
    }

    /// The number of its set.
    pub(crate) fn set(&self) -> u32 {
        self.set
    }

    /// Empties the file for the next state.
    pub(crate) fn rewind(&self) -> Result<()> {
        rustix::fs::ftruncate(&self.write_end, 0)
            .map_err(Error::io("empty the device state file"))?;
        rustix::fs::seek(&self.write_end, SeekFrom::Start(0))
            .map_err(Error::io("rewind the device state file"))?;
        Ok(())
    }

    /// The bytes that QEMU has written.
    pub(crate) fn read(&self) -> Result<Vec<u8>> {
        let len_bytes =
            self.read_end.metadata().map_err(Error::io("look at the device state file"))?.len();
        if len_bytes > STATE_BYTES_MAX {
            let problem = format!("it has {len_bytes} bytes, more than {STATE_BYTES_MAX}");
            return Err(StreamError::DeviceState { offset: STATE_BYTES_MAX, problem }.into());
        }
        let mut state = vec![0; usize::try_from(len_bytes).unwrap_or(0)];
        self.read_end
            .read_exact_at(&mut state, 0)
            .map_err(Error::io(format!("read {len_bytes} bytes of the device state file")))?;
        Ok(state)
    }
}

/// Makes QEMU forget set `set`, if it is one of Keyframe's, and all sets of the same engine: for a
/// watchdog whose engine has ended.
pub(crate) fn forget(qmp: &mut Qmp, set: u32) -> Result<()> {
    let all = sets(qmp)?;
    let ours = |one: &&Passed| one.set == set && one.mark.starts_with(MARK);
    let Some(engine) = all.iter().find(ours) else { return Ok(()) };
    remove(qmp, all.iter().filter(|one| one.mark == engine.mark))
}

/// Makes QEMU forget the sets whose `opaque` text is `mark`. Error: QEMU refuses or does not
/// answer.
pub(crate) fn forget_marked(qmp: &mut Qmp, mark: &str) -> Result<()> {
    let all = sets(qmp)?;
    remove(qmp, all.iter().filter(|one| one.mark == mark))
}

/// Marks this process in QEMU as its engine, until the caller removes the set that this function
/// returns. While this process ends the rollback of a dead engine, no engine attaches to the VM.
pub(crate) fn mark_rescuer(qmp: &mut Qmp) -> Result<u64> {
    let nothing = File::open("/dev/null").map_err(Error::io("open /dev/null"))?;
    qmp.add_fd(&mark_of(0), nothing.as_fd())
}

/// True if an engine that lives has given a file to this QEMU.
pub(crate) fn has_engine(qmp: &mut Qmp) -> Result<bool> {
    Ok(sets(qmp)?.iter().any(|one| living(&one.mark).is_some()))
}

/// What engines have left in a QEMU.
struct Claims {
    /// The numbers of all sets.
    taken: Vec<u32>,
    /// Whether an engine that has ended was in a pause.
    was_in_pause: bool,
}

/// Makes QEMU forget the sets of engines that have ended: for a watchdog of a VM that its engine
/// launched. Error: QEMU refuses or does not answer.
pub(crate) fn forget_ended(qmp: &mut Qmp) -> Result<()> {
    let all = sets(qmp)?;
    remove(qmp, all.iter().filter(|one| one.is_of_engine() && living(&one.mark).is_none()))
}

/// Makes QEMU forget the sets of `passed`.
fn remove<'a>(qmp: &mut Qmp, mut passed: impl Iterator<Item = &'a Passed>) -> Result<()> {
    passed.try_for_each(|one| {
        qmp.execute("remove-fd", Some(json!({ "fdset-id": one.set }))).map(drop)
    })
}

fn held(pid: u32, engine: u32) -> Error {
    Error::Attach {
        pid,
        problem: format!("another engine takes checkpoints of it already: process {engine}"),
        fix: "end that one first (`keyframe stop`)".into(),
    }
}

/// A descriptor in one of QEMU's sets.
struct Passed {
    set: u32,
    /// Its `opaque` text.
    mark: String,
    /// Its number in QEMU.
    fd: Option<u64>,
}

impl Passed {
    /// Returns true if an engine passed it, living or not.
    fn is_of_engine(&self) -> bool {
        self.mark.starts_with(ENGINE_MARK)
    }

    /// Returns the path of the descriptor in QEMU `pid`, if it is a state file in which its engine
    /// has noted a pause.
    fn pause_note(&self, pid: u32) -> Option<String> {
        let path = format!("/proc/{pid}/fd/{}", self.fd?);
        let target = std::fs::read_link(&path).ok()?;
        let is_state_file = target.to_string_lossy().starts_with(&format!("/memfd:{NAME}"));
        let mode = Mode::from_raw_mode(rustix::fs::stat(&path).ok()?.st_mode);
        (is_state_file && mode == IN_PAUSE).then_some(path)
    }
}

/// The descriptors in QEMU's sets.
fn sets(qmp: &mut Qmp) -> Result<Vec<Passed>> {
    let answer = qmp.execute("query-fdsets", None)?;
    let Some(all) = answer.as_array() else { return Err(qmp.unexpected("query-fdsets", &answer)) };
    let mut found = Vec::new();
    for set in all {
        let Some(number) =
            set.get("fdset-id").and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok())
        else {
            continue;
        };
        let fds = set.get("fds").and_then(Value::as_array).into_iter().flatten();
        found.extend(fds.map(|fd| Passed {
            set: number,
            mark: fd.get("opaque").and_then(Value::as_str).unwrap_or_default().to_owned(),
            fd: fd.get("fd").and_then(Value::as_u64),
        }));
    }
    Ok(found)
}

fn first_free(taken: &[u32]) -> u32 {
    (FDSET..=u32::MAX).find(|set| !taken.contains(set)).unwrap_or(FDSET)
}

/// The text that names this process as an engine with the file `number`. It has the process's start
/// time too, because pids are reused.
fn mark_of(number: u64) -> String {
    let pid = std::process::id();
    format!("{ENGINE_MARK}{pid}:{}:{number}", started_ticks(pid).unwrap_or(0))
}

/// The pid of the engine that `mark` names; `None` if it has ended.
fn living(mark: &str) -> Option<u32> {
    let mut parts = mark.strip_prefix(ENGINE_MARK)?.split(':');
    let (pid, start, number) =
        (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    let in_use = || IN_USE.lock().ignore_poison().contains(&number);
    let lives = started_ticks(pid) == Some(start) && (pid != std::process::id() || in_use());
    lives.then_some(pid)
}

/// The start time of process `pid`, in clock ticks since boot; `None` if there is no such process,
/// or if it is a zombie.
fn started_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    fields.nth(18)?.parse().ok().filter(|_| !matches!(state, "Z" | "X"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_descriptor_set_is_one_that_the_user_does_not_use() {
        let add = |set: u32| Argument::Option("add-fd".into(), format!("fd=3,set={set}"));
        assert_eq!(StateFile::new(&[add(1)]).unwrap().set, FDSET);
        assert_eq!(StateFile::new(&[add(FDSET), add(FDSET + 1)]).unwrap().set, FDSET + 2);
    }

    #[test]
    fn a_pause_is_noted_until_it_ends() {
        let state = StateFile::new(&[]).unwrap();
        let number = |fd: &OwnedFd| u64::try_from(spawn::number(fd)).unwrap();
        let (pid, fd) = (std::process::id(), number(&state.write_end));
        let passed = Passed { set: 1, mark: state.mark(), fd: Some(fd) };
        assert_eq!(passed.pause_note(pid), None, "a new file");
        state.note_pause(true);
        assert_eq!(passed.pause_note(pid), Some(format!("/proc/{pid}/fd/{fd}")));
        state.note_pause(false);
        assert_eq!(passed.pause_note(pid), None);
        let other = OwnedFd::from(tempfile::tempfile().unwrap());
        rustix::fs::fchmod(&other, IN_PAUSE).unwrap();
        let fd = Some(number(&other));
        assert_eq!(Passed { fd, ..passed }.pause_note(pid), None, "another program's file");
    }

    #[test]
    fn what_is_written_to_the_state_file_is_read_once() {
        let state = StateFile::new(&[]).unwrap();
        for text in ["a longer one", "short"] {
            state.rewind().unwrap();
            rustix::io::write(&state.write_end, text.as_bytes()).unwrap();
            assert_eq!(state.read().unwrap(), text.as_bytes());
        }
    }

    #[test]
    fn an_engine_is_known_to_live_by_its_pid_and_its_start() {
        let state = StateFile::new(&[]).unwrap();
        let (mark, pid) = (state.mark(), std::process::id());
        assert_eq!(living(&mark), Some(pid));
        drop(state);
        assert_eq!(living(&mark), None, "{mark} is used no more");
        let start = started_ticks(pid).unwrap();
        for gone in [
            format!("{pid}:1:1"),
            format!("{pid}"),
            "4194304:1:1".into(),
            "x:y:z".into(),
            String::new(),
        ] {
            assert_eq!(living(&format!("{ENGINE_MARK}{gone}")), None, "{gone}");
        }
        assert_eq!(living(&format!("{pid}:{start}:1")), None, "the mark of another program");

        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let mark = format!("{ENGINE_MARK}{}:{}:1", child.id(), started_ticks(child.id()).unwrap());
        assert_eq!(living(&mark), Some(child.id()));
        child.kill().unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while living(&mark).is_some() {
            assert!(
                std::time::Instant::now() < deadline,
                "one that has ended and was not waited for lives on"
            );
        }
        child.wait().unwrap();
    }
}
