//! One restore each, as a user would start it, timed from the command.

use crate::{Error, Options};
use keyframe_qemu::{Qmp, RunStatus};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How long any restore may take.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(120);
const END_TIMEOUT: Duration = Duration::from_secs(20);

/// A lazy restore.
pub struct Lazy {
    /// Until `cont` was answered.
    pub first_ns: f64,
    /// Until all RAM was there.
    pub resident_ns: f64,
}

/// Restores of the one checkpoint of a store.
pub struct Restores<'a> {
    pub options: &'a Options,
    pub store: &'a Path,
    pub dir: &'a Path,
}

/// What it says, with the time of each line.
type Lines = Receiver<(Instant, String)>;

/// Ends on drop.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(pid) = i32::try_from(self.0.id()).ok().and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let deadline = Instant::now() + END_TIMEOUT;
        while Instant::now() < deadline {
            if matches!(self.0.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Restores<'_> {
    /// As if the checkpoint was never restored.
    pub fn forget_working_set(&self) -> Result<(), Error> {
        match std::fs::remove_dir_all(self.store.join("worksets")) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove working sets")(e)),
            _ => Ok(()),
        }
    }

    pub fn lazy(&self) -> Result<Lazy, Error> {
        let (_running, started, lines) = self.start(&["--lazy"])?;
        let first_ns = told(&lines, started, "is running after")?;
        let resident_ns = told(&lines, started, "all of its RAM is there after")?;
        // It keeps the working set just behind that.
        std::thread::sleep(Duration::from_millis(100));
        Ok(Lazy { first_ns, resident_ns })
    }

    /// Until `cont` was answered.
    pub fn eager(&self) -> Result<f64, Error> {
        let (_running, started, lines) = self.start(&[])?;
        told(&lines, started, "is running after")
    }

    fn start(&self, options: &[&str]) -> Result<(Running, Instant, Lines), Error> {
        let mut command = Command::new(&self.options.keyframe);
        command.args(["restore", "latest", "--store"]).arg(self.store).args(options).current_dir(self.dir);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let started = Instant::now();
        let mut child = command.spawn().map_err(Error::io("start keyframe restore"))?;
        let errors = child.stderr.take();
        let running = Running(child);
        let errors = errors.ok_or_else(|| Error::failed("start keyframe restore", "no pipe"))?;
        let (send, lines) = channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(errors).lines().map_while(Result::ok);
            lines.map(|line| (Instant::now(), line)).try_for_each(|line| send.send(line))
        });
        Ok((running, started, lines))
    }
}

/// When the line with `text` came.
fn told(lines: &Lines, started: Instant, text: &str) -> Result<f64, Error> {
    let mut before = Vec::new();
    loop {
        match lines.recv_timeout(RESTORE_TIMEOUT) {
            Ok((at, line)) if line.contains(text) => {
                return Ok(at.duration_since(started).as_nanos() as f64);
            }
            Ok((_, line)) => before.push(line),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                return Err(Error::failed(format!("wait for {text:?}"), before.join("; ")));
            }
        }
    }
}

/// `line`, a QEMU that loads its own snapshot, until its monitor answers that it runs: it does so when all is loaded.
pub fn loadvm(line: &[String], dir: &Path) -> Result<f64, Error> {
    let socket = dir.join("loadvm.sock");
    let _ = std::fs::remove_file(&socket);
    let Some((program, words)) = line.split_first() else {
        return Err(Error::failed("start QEMU", "empty command"));
    };
    let mut command = Command::new(program);
    command.args(words).args(["-qmp", &format!("unix:{},server=on,wait=off", socket.display())]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::inherit());
    let started = Instant::now();
    let running = Running(command.spawn().map_err(Error::io(format!("start {program}")))?);
    while !socket.exists() {
        if started.elapsed() > RESTORE_TIMEOUT {
            return Err(Error::failed("-loadvm", "QEMU opens no monitor"));
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    let mut qmp = Qmp::connect(&socket, RESTORE_TIMEOUT).map_err(Error::qmp("connect to QEMU"))?;
    loop {
        if qmp.status().map_err(Error::qmp("query-status"))? == RunStatus::Running {
            let taken = started.elapsed().as_nanos() as f64;
            drop(running);
            return Ok(taken);
        }
        if started.elapsed() > RESTORE_TIMEOUT {
            return Err(Error::failed("-loadvm", "the VM does not run"));
        }
        std::thread::sleep(Duration::from_micros(500));
    }
}
