//! A guest in a child process, plain or under `keyframe run`, and its console.

use crate::{Error, Options};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A line of a guest's console.
#[derive(Clone, Debug)]
pub struct AwaitedLine {
    /// The time at which it came.
    pub at: Instant,
    pub text: String,
}

/// A span of time.
#[derive(Clone, Copy, Debug)]
pub struct TimeSpan {
    pub from: Instant,
    pub to: Instant,
}

type Lines = Arc<Mutex<Vec<AwaitedLine>>>;

/// A running guest. Dropping it ends the guest.
pub struct RunningGuest {
    child: Child,
    console: ChildStdin,
    lines: Lines,
}

impl RunningGuest {
    /// Starts `command` and collects the lines of its console.
    pub fn start(command: &[String]) -> Result<Self, Error> {
        let Some((program, args)) = command.split_first() else {
            return Err(Error::failed("start a guest", "empty command"));
        };
        Self::spawn(Command::new(program).args(args).stderr(Stdio::inherit()))
    }

    /// Starts `command`, whose standard error the caller has set, and collects the lines of its console.
    pub fn spawn(command: &mut Command) -> Result<Self, Error> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| Error::io(format!("start {}", command.get_program().display()))(e))?;
        let (Some(console), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Error::failed("start a guest", "no pipes"));
        };
        let lines = Lines::default();
        let collected = Arc::clone(&lines);
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if let Ok(mut lines) = collected.lock() {
                    lines.push(AwaitedLine { at: Instant::now(), text: line });
                }
            }
        });
        Ok(Self { child, console, lines })
    }

    /// Returns the pid of its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the time of the first line that contains `text`.
    pub fn at(&self, text: &str) -> Option<Instant> {
        self.with_lines(|lines| {
            lines.iter().find(|line| line.text.contains(text)).map(|line| line.at)
        })
    }

    /// Types a line at the guest's console.
    pub fn say(&mut self, line: &str) -> Result<(), Error> {
        writeln!(self.console, "{line}").map_err(Error::io("write to the guest's console"))
    }

    /// Waits at most `seconds` for a line that contains `text`, and returns it. Fails earlier if the
    /// guest reports an error or the end of its job.
    pub fn wait_for(&mut self, text: &str, seconds: u64) -> Result<String, Error> {
        let deadline = Instant::now() + Duration::from_secs(seconds);
        while Instant::now() < deadline {
            if let Some(line) = self.poll_for(text)? {
                return Ok(line);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let last = self.with_lines(|lines| lines.last().map(|line| line.text.clone()));
        Err(Error::failed(
            format!("wait for {text:?}"),
            format!("not within {seconds} s; last line: {last:?}"),
        ))
    }

    /// Returns the first line that contains `text`; `None` if there is none yet. Fails if the guest
    /// has reported an error or the end of its job instead.
    pub fn poll_for(&mut self, text: &str) -> Result<Option<String>, Error> {
        if let Some(line) =
            self.with_lines(|lines| lines.iter().find(|line| line.text.contains(text)).cloned())
        {
            return Ok(Some(line.text));
        }
        // A guest whose job has failed or ended prints no more lines.
        let last_lines = [self.lines("KF ERROR"), self.lines("KF DONE")].concat();
        if let Some(line) = last_lines.first() {
            return Err(Error::failed(format!("wait for {text:?}"), &line.text));
        }
        if let Some(exit) = self.child.try_wait().map_err(Error::io("wait for a guest"))? {
            let problem = format!("the guest ended with {exit}");
            return Err(Error::failed(format!("wait for {text:?}"), problem));
        }
        Ok(None)
    }

    /// Returns the console lines that begin with `prefix`.
    pub fn lines(&self, prefix: &str) -> Vec<AwaitedLine> {
        self.with_lines(|lines| {
            lines.iter().filter(|line| line.text.starts_with(prefix)).cloned().collect()
        })
    }

    /// Returns the growth of the counter `field` per second in a time span, from the lines that begin
    /// with `prefix`; `None` if there are fewer than two.
    pub fn rate(&self, prefix: &str, field: &str, span: TimeSpan) -> Option<f64> {
        let lines = self.lines(prefix);
        let mut inside = lines.iter().filter(|line| line.at >= span.from && line.at <= span.to);
        let first = inside.next()?;
        let last = inside.next_back()?;
        let seconds = last.at.duration_since(first.at).as_secs_f64();
        let growth = number(&last.text, field)? - number(&first.text, field)?;
        (seconds > 0.0).then_some(growth / seconds)
    }

    /// Switches the guest off at its console, so that QEMU prints no message about a signal.
    pub fn power_off(mut self) {
        if self.say("poweroff").is_ok() {
            self.end(10);
        }
    }

    fn with_lines<T>(&self, f: impl FnOnce(&[AwaitedLine]) -> T) -> T {
        match self.lines.lock() {
            Ok(lines) => f(&lines),
            Err(poisoned) => f(&poisoned.into_inner()),
        }
    }

    /// Waits at most `seconds` until the process ends, then kills it.
    pub fn end(&mut self, seconds: u64) {
        let deadline = Instant::now() + Duration::from_secs(seconds);
        while Instant::now() < deadline {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        // The VM is killed first, because a killed `keyframe run` leaves it running.
        for qemu in children(self.child.id()) {
            let _ = rustix::process::kill_process(qemu, rustix::process::Signal::KILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for RunningGuest {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        // `keyframe run` ends its VM on SIGTERM, and plain QEMU ends too.
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id() as i32) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        self.end(60);
    }
}

/// Returns the pids of the children of process `pid`.
fn children(pid: u32) -> Vec<rustix::process::Pid> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
    let of_task = |task: std::fs::DirEntry| {
        std::fs::read_to_string(task.path().join("children")).unwrap_or_default()
    };
    let lists: Vec<String> = tasks.into_iter().flatten().flatten().map(of_task).collect();
    lists
        .iter()
        .flat_map(|list| list.split_whitespace())
        .filter_map(|word| word.parse().ok())
        .filter_map(rustix::process::Pid::from_raw)
        .collect()
}

/// Returns the number that follows `field` in `line`.
fn number(line: &str, field: &str) -> Option<f64> {
    line.split_whitespace().find_map(|word| word.strip_prefix(field))?.parse().ok()
}

/// Makes a store at `store` if there is none.
pub fn make_store(options: &Options, store: &Path) -> Result<(), Error> {
    if store.exists() {
        return Ok(());
    }
    let made = Command::new(&options.keyframe)
        .arg("init")
        .arg(store)
        .output()
        .map_err(Error::io("run keyframe init"))?;
    if made.status.success() {
        return Ok(());
    }
    Err(Error::failed("keyframe init", String::from_utf8_lossy(&made.stderr)))
}

/// When and how `keyframe run` takes checkpoints.
#[derive(Clone, Copy, Debug)]
pub struct Schedule<'a> {
    /// The value of `--interval`.
    pub interval: &'a str,
    /// The value of `--strategy`.
    pub strategy: &'a str,
}

/// What a rollback keeps of the present state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RollbackKind {
    /// A checkpoint.
    Kept,
    /// Nothing: `--fast`.
    Fast,
}

/// A guest under `keyframe run`.
pub struct CheckpointedGuest<'a> {
    /// The guest and its console.
    pub guest: RunningGuest,
    options: &'a Options,
    name: String,
    strategy: String,
}

impl<'a> CheckpointedGuest<'a> {
    /// Starts `command` under `keyframe run` with this schedule. Makes the store if it is missing.
    pub fn start(
        options: &'a Options,
        store: &Path,
        schedule: Schedule<'_>,
        command: &[String],
    ) -> Result<Self, Error> {
        let place = store.file_name().unwrap_or_default().to_string_lossy();
        Self::start_named(options, store, schedule, &place, command)
    }

    /// Starts `command` as [`Self::start`] does, under a name that ends with `name`.
    pub fn start_named(
        options: &'a Options,
        store: &Path,
        schedule: Schedule<'_>,
        name: &str,
        command: &[String],
    ) -> Result<Self, Error> {
        let name = format!("bench-{}-{name}", std::process::id());
        let keyframe = options.keyframe.display().to_string();
        let store_arg = store.display().to_string();
        make_store(options, store)?;
        let mut line: Vec<String> = [
            &keyframe,
            "run",
            "--quiet",
            "--store",
            &store_arg,
            "--interval",
            schedule.interval,
            "--strategy",
            schedule.strategy,
            "--name",
            &name,
            "--",
        ]
        .map(str::to_owned)
        .to_vec();
        line.extend_from_slice(command);
        Ok(Self {
            guest: RunningGuest::start(&line)?,
            options,
            name,
            strategy: schedule.strategy.into(),
        })
    }

    /// Returns the strategy with which it was started.
    pub fn strategy(&self) -> &str {
        &self.strategy
    }

    /// Takes a checkpoint with `keyframe take --json` and returns its output.
    pub fn take(&self, strategy: &str) -> Result<Value, Error> {
        self.ask("take", &["--strategy", strategy])
    }

    /// Puts the VM back to a checkpoint with `keyframe rollback --json` and returns its output.
    pub fn roll_back(&self, checkpoint: &str, kind: RollbackKind) -> Result<Value, Error> {
        match kind {
            RollbackKind::Kept => self.ask("rollback", &[checkpoint]),
            RollbackKind::Fast => self.ask("rollback", &[checkpoint, "--fast"]),
        }
    }

    /// Runs a command for this VM, and returns its JSON.
    fn ask(&self, command: &str, args: &[&str]) -> Result<Value, Error> {
        let output = Command::new(&self.options.keyframe)
            .args([command, "--json", "--name", &self.name])
            .args(args)
            .output()
            .map_err(Error::io(format!("run keyframe {command}")))?;
        if !output.status.success() {
            let problem = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(Error::failed(format!("keyframe {command}"), problem));
        }
        serde_json::from_slice(&output.stdout)
            .map_err(|e| Error::failed(format!("read keyframe {command} --json"), e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read_by_their_names() {
        let line = "dirty t=3.000 written=180000 work=77\r";
        assert_eq!(number(line, "written="), Some(180_000.0));
        assert_eq!(number(line, "work="), Some(77.0));
        assert_eq!(number(line, "passes="), None);
        assert_eq!(number("compute work=x", "work="), None);
    }
}
