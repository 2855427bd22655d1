//! Times of single restores, each started as a user would start it, from the command on.

use crate::running_process::{Lines, RunningProcess, collect_lines, time_after, wait_for_line};
use crate::{Error, Options};
use keyframe_qemu::{Qmp, RunStatus};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Longest time of a restore.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(120);
/// What the command prints before the time at which the VM runs.
const RUNNING: &str = "is running after";

/// The time until a restored VM runs.
pub struct TimeToRun {
    /// From the start of the command until it tells that the VM runs.
    pub whole_ns: f64,
    /// As the command tells it: without its own start.
    pub reported_ns: f64,
}

/// The times of a lazy restore.
pub struct LazyTimes {
    /// The time until the VM runs.
    pub running: TimeToRun,
    /// The time until all RAM was loaded.
    pub resident_ns: f64,
}

/// The times of an eager restore.
pub struct EagerTimes {
    /// The time until the VM runs.
    pub running: TimeToRun,
    /// The time to load all RAM, as the restore reports it.
    pub filled_ns: f64,
}

/// Restores the only checkpoint of a store.
pub struct CheckpointRestores<'a> {
    pub options: &'a Options,
    pub store: &'a Path,
    pub dir: &'a Path,
}

impl CheckpointRestores<'_> {
    /// Removes the working set of earlier restores.
    pub fn forget_working_set(&self) -> Result<(), Error> {
        match std::fs::remove_dir_all(self.store.join("worksets")) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io("remove working sets")(e))
            }
            _ => Ok(()),
        }
    }

    /// Restores lazily.
    pub fn lazy(&self) -> Result<LazyTimes, Error> {
        let (_running, started, lines) = self.start(&["--lazy"])?;
        let running = wait_until_running(&lines, started)?.0;
        let resident = "all of its RAM is there after";
        let (resident_ns, _) = wait_for_line(&lines, started, resident, RESTORE_TIMEOUT)?;
        // The restore writes the working set right after that line.
        std::thread::sleep(Duration::from_millis(100));
        Ok(LazyTimes { running, resident_ns })
    }

    /// Restores eagerly.
    pub fn eager(&self) -> Result<EagerTimes, Error> {
        let (_running, started, lines) = self.start(&[])?;
        let (running, line) = wait_until_running(&lines, started)?;
        let filled_ns = time_after(&line, "its RAM filled in")?;
        Ok(EagerTimes { running, filled_ns })
    }

    fn start(&self, options: &[&str]) -> Result<(RunningProcess, Instant, Lines), Error> {
        let mut command = Command::new(&self.options.keyframe);
        command
            .args(["restore", "latest", "--store"])
            .arg(self.store)
            .args(options)
            .current_dir(self.dir);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let started = Instant::now();
        let mut child = command.spawn().map_err(Error::io("start keyframe restore"))?;
        let errors = child.stderr.take();
        let running = RunningProcess(child);
        let errors = errors.ok_or_else(|| Error::failed("start keyframe restore", "no pipe"))?;
        let lines = collect_lines(errors);
        Ok((running, started, lines))
    }
}

/// Waits until the command tells that the VM runs. Returns its times, and the line.
fn wait_until_running(lines: &Lines, started: Instant) -> Result<(TimeToRun, String), Error> {
    let (whole_ns, line) = wait_for_line(lines, started, RUNNING, RESTORE_TIMEOUT)?;
    Ok((TimeToRun { whole_ns, reported_ns: time_after(&line, RUNNING)? }, line))
}

/// Runs `line`, a QEMU that loads its own snapshot. Returns the ns until its monitor reports that the
/// VM runs, which is when all RAM is loaded.
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
    let running = RunningProcess(command.spawn().map_err(Error::io(format!("start {program}")))?);
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
