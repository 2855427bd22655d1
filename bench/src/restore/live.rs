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

/// An eager restore.
pub struct Eager {
    /// Until `cont` was answered.
    pub first_ns: f64,
    /// From the start of filling until all RAM was there, as the restore tells it.
    pub filled_ns: f64,
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

impl Restores<'_> {
    /// As if the checkpoint was never restored.
    pub fn forget_working_set(&self) -> Result<(), Error> {
        match std::fs::remove_dir_all(self.store.join("worksets")) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io("remove working sets")(e))
            }
            _ => Ok(()),
        }
    }

    pub fn lazy(&self) -> Result<Lazy, Error> {
        let (_running, started, lines) = self.start(&["--lazy"])?;
        let (first_ns, _) = told(&lines, started, "is running after")?;
        let (resident_ns, _) = told(&lines, started, "all of its RAM is there after")?;
        // It keeps the working set just behind that.
        std::thread::sleep(Duration::from_millis(100));
        Ok(Lazy { first_ns, resident_ns })
    }

    pub fn eager(&self) -> Result<Eager, Error> {
        let (_running, started, lines) = self.start(&[])?;
        let (first_ns, line) = told(&lines, started, "is running after")?;
        let filled_ns = filled_ns(&line).ok_or_else(|| {
            Error::failed("read how long its RAM took", format!("nothing of it in {line:?}"))
        })?;
        Ok(Eager { first_ns, filled_ns })
    }

    fn start(&self, options: &[&str]) -> Result<(Running, Instant, Lines), Error> {
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

/// `1.73 ms` behind "filled in", in nanoseconds.
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

/// When the line with `text` came, and all of it.
fn told(lines: &Lines, started: Instant, text: &str) -> Result<(f64, String), Error> {
    let mut before = Vec::new();
    loop {
        match lines.recv_timeout(RESTORE_TIMEOUT) {
            Ok((at, line)) if line.contains(text) => {
                return Ok((at.duration_since(started).as_nanos() as f64, line));
            }
            Ok((_, line)) => before.push(line),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                return Err(Error::failed(format!("wait for {text:?}"), before.join("; ")));
            }
        }
    }
}

/// `line`, a QEMU that loads its own snapshot, until its monitor answers that it runs: it does so
/// when all is loaded.
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
