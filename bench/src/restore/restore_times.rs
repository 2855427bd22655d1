//! Times of single restores, each started as a user would start it, from the command on.

use crate::running_guest::AwaitedLine;
use crate::{Error, Options};
use keyframe_qemu::{Qmp, RunStatus};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Longest time of a restore.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(120);
/// Longest time for a restored VM to end.
const END_TIMEOUT: Duration = Duration::from_secs(20);

/// The times of a lazy restore.
pub struct LazyTimes {
    /// The time until QEMU answered `cont`.
    pub first_ns: f64,
    /// The time until all RAM was loaded.
    pub resident_ns: f64,
}

/// The times of an eager restore.
pub struct EagerTimes {
    /// The time until QEMU answered `cont`.
    pub first_ns: f64,
    /// The time to load all RAM, as the restore reports it.
    pub filled_ns: f64,
}

/// Restores the only checkpoint of a store.
pub struct CheckpointRestores<'a> {
    pub options: &'a Options,
    pub store: &'a Path,
    pub dir: &'a Path,
}

/// The lines of a process's standard error, with their times.
type Lines = Receiver<AwaitedLine>;

/// A process that is ended when this is dropped.
struct RunningProcess(Child);

impl Drop for RunningProcess {
    fn drop(&mut self) {
        if let Some(pid) = i32::try_from(self.0.id()).ok().and_then(rustix::process::Pid::from_raw)
        {
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
        let (first_ns, _) = wait_for_line(&lines, started, "is running after")?;
        let (resident_ns, _) = wait_for_line(&lines, started, "all of its RAM is there after")?;
        // The restore writes the working set right after that line.
        std::thread::sleep(Duration::from_millis(100));
        Ok(LazyTimes { first_ns, resident_ns })
    }

    /// Restores eagerly.
    pub fn eager(&self) -> Result<EagerTimes, Error> {
        let (_running, started, lines) = self.start(&[])?;
        let (first_ns, line) = wait_for_line(&lines, started, "is running after")?;
        let filled_ns = filled_ns(&line).ok_or_else(|| {
            Error::failed("read how long its RAM took", format!("no time in {line:?}"))
        })?;
        Ok(EagerTimes { first_ns, filled_ns })
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
        let (send, lines) = channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(errors).lines().map_while(Result::ok);
            let lines = lines.map(|text| AwaitedLine { at: Instant::now(), text });
            lines.into_iter().try_for_each(|line| send.send(line))
        });
        Ok((running, started, lines))
    }
}

/// Returns the time after "filled in" (for example `1.73 ms`), in nanoseconds.
fn filled_ns(line: &str) -> Option<f64> {
    let (_, rest) = line.split_once("its RAM filled in ")?;
    let mut words = rest.split_whitespace();
    let value: f64 = words.next()?.parse().ok()?;
    let unit = match words.next()? {
        "us" => 1e3,
        "ms" => 1e6,
        "s" => 1e9,
        _ => return None,
    };
    Some(value * unit)
}

/// Waits for the line that contains `text`. Returns its time since `started` in ns, and the line.
fn wait_for_line(lines: &Lines, started: Instant, text: &str) -> Result<(f64, String), Error> {
    let mut before = Vec::new();
    loop {
        match lines.recv_timeout(RESTORE_TIMEOUT) {
            Ok(line) if line.text.contains(text) => {
                return Ok((line.at.duration_since(started).as_nanos() as f64, line.text));
            }
            Ok(line) => before.push(line.text),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                return Err(Error::failed(format!("wait for {text:?}"), before.join("; ")));
            }
        }
    }
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

#[cfg(test)]
mod tests {
    use super::filled_ns;

    #[test]
    fn the_time_of_filling_is_read_in_each_unit() {
        let line = |time| {
            format!("keyframe: ... is running after 2.0 s, its RAM filled in {time} (QEMU 77)")
        };
        for (time, ns) in [("850 us", 850e3), ("1.73 ms", 1.73e6), ("2.4 s", 2.4e9)] {
            assert!((filled_ns(&line(time)).unwrap() - ns).abs() < 1.0, "{time}");
        }
        assert!(filled_ns("is running after 2.0 s (QEMU 77)").is_none());
    }
}
