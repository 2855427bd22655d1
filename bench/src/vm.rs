//! A guest in a child process, plain or under `keyframe run`: its console, its end.

use crate::{Error, Options};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

type Lines = Arc<Mutex<Vec<(Instant, String)>>>;

/// A running guest. Dropping it ends it.
pub struct Guest {
    child: Child,
    console: ChildStdin,
    lines: Lines,
}

impl Guest {
    /// Starts `command` and collects its console.
    pub fn start(command: &[String]) -> Result<Self, Error> {
        let Some((program, args)) = command.split_first() else {
            return Err(Error::failed("start a guest", "empty command"));
        };
        Self::spawn(Command::new(program).args(args).stderr(Stdio::inherit()))
    }

    /// Starts `command` and collects its console; standard error is its own affair.
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
                    lines.push((Instant::now(), line));
                }
            }
        });
        Ok(Self { child, console, lines })
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// When the first line came that contains `text`.
    pub fn at(&self, text: &str) -> Option<Instant> {
        self.with_lines(|lines| {
            lines.iter().find(|(_, line)| line.contains(text)).map(|(at, _)| *at)
        })
    }

    /// Writes a line to the guest's console.
    pub fn say(&mut self, line: &str) -> Result<(), Error> {
        writeln!(self.console, "{line}").map_err(Error::io("write to the guest's console"))
    }

    /// Waits for a line that contains `text`, `seconds` at most.
    pub fn wait_for(&mut self, text: &str, seconds: u64) -> Result<String, Error> {
        let deadline = Instant::now() + Duration::from_secs(seconds);
        while Instant::now() < deadline {
            if let Some(line) = self
                .with_lines(|l| l.iter().find(|(_, l)| l.contains(text)).map(|(_, l)| l.clone()))
            {
                return Ok(line);
            }
            // It says so once, and then waits for commands; a job that is over tells nothing more.
            let over = [self.lines("KF ERROR"), self.lines("KF DONE")].concat();
            if let Some((_, line)) = over.first() {
                return Err(Error::failed(format!("wait for {text:?}"), line));
            }
            if let Some(exit) = self.child.try_wait().map_err(Error::io("wait for a guest"))? {
                return Err(Error::failed(
                    format!("wait for {text:?}"),
                    format!("it ended with {exit}"),
                ));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let last = self.with_lines(|l| l.last().map(|(_, l)| l.clone()));
        Err(Error::failed(
            format!("wait for {text:?}"),
            format!("not within {seconds} s; last line: {last:?}"),
        ))
    }

    /// Console lines with their arrival times that begin with `prefix`.
    pub fn lines(&self, prefix: &str) -> Vec<(Instant, String)> {
        self.with_lines(|l| l.iter().filter(|(_, l)| l.starts_with(prefix)).cloned().collect())
    }

    /// How fast the counter `field` grew between two instants, a second, by lines that begin with
    /// `prefix`.
    pub fn rate(&self, prefix: &str, field: &str, (from, to): (Instant, Instant)) -> Option<f64> {
        let lines = self.lines(prefix);
        let mut inside = lines.iter().filter(|(at, _)| *at >= from && *at <= to);
        let (first, before) = inside.next()?;
        let (last, after) = inside.next_back()?;
        let seconds = last.duration_since(*first).as_secs_f64();
        (seconds > 0.0).then_some((number(after, field)? - number(before, field)?) / seconds)
    }

    /// Switches the guest off by its console, without QEMU's word about a signal.
    pub fn power_off(mut self) {
        if self.say("poweroff").is_ok() {
            self.end(10);
        }
    }

    fn with_lines<T>(&self, f: impl FnOnce(&Vec<(Instant, String)>) -> T) -> T {
        match self.lines.lock() {
            Ok(lines) => f(&lines),
            Err(poisoned) => f(&poisoned.into_inner()),
        }
    }

    /// Waits until the process ends, `seconds` at most, then ends it.
    pub fn end(&mut self, seconds: u64) {
        let deadline = Instant::now() + Duration::from_secs(seconds);
        while Instant::now() < deadline {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        // First the VM, which a `keyframe run` would leave alive.
        for qemu in children(self.child.id()) {
            let _ = rustix::process::kill_process(qemu, rustix::process::Signal::KILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        // `keyframe run` ends its VM on SIGTERM; plain QEMU ends too.
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id() as i32) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        self.end(60);
    }
}

/// The children of process `pid`.
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

/// The number behind `field` in `line`.
fn number(line: &str, field: &str) -> Option<f64> {
    line.split_whitespace().find_map(|word| word.strip_prefix(field))?.parse().ok()
}

/// A guest under `keyframe run`.
pub struct Protected<'a> {
    /// Its console.
    pub guest: Guest,
    options: &'a Options,
    name: String,
    strategy: String,
}

impl<'a> Protected<'a> {
    /// Puts `keyframe run` in front of `command`; `when` is `--interval`, `how` is `--strategy`.
    pub fn start(
        options: &'a Options,
        store: &Path,
        (when, how): (&str, &str),
        command: &[String],
    ) -> Result<Self, Error> {
        let name = format!("bench-{}", std::process::id());
        let keyframe = options.keyframe.display().to_string();
        let store_arg = store.display().to_string();
        if !store.exists() {
            let made = Command::new(&options.keyframe)
                .args(["init", &store_arg])
                .output()
                .map_err(Error::io("run keyframe init"))?;
            if !made.status.success() {
                return Err(Error::failed("keyframe init", String::from_utf8_lossy(&made.stderr)));
            }
        }
        let mut line: Vec<String> = [
            &keyframe,
            "run",
            "--quiet",
            "--store",
            &store_arg,
            "--interval",
            when,
            "--strategy",
            how,
            "--name",
            &name,
            "--",
        ]
        .map(str::to_owned)
        .to_vec();
        line.extend_from_slice(command);
        Ok(Self { guest: Guest::start(&line)?, options, name, strategy: how.into() })
    }

    /// What it was started with.
    pub fn strategy(&self) -> &str {
        &self.strategy
    }

    /// `keyframe take --json`.
    pub fn take(&self, strategy: &str) -> Result<Value, Error> {
        let args = ["take", "--json", "--name", &self.name, "--strategy", strategy];
        let output = Command::new(&self.options.keyframe)
            .args(args)
            .output()
            .map_err(Error::io("run keyframe take"))?;
        if !output.status.success() {
            return Err(Error::failed("keyframe take", String::from_utf8_lossy(&output.stderr)));
        }
        serde_json::from_slice(&output.stdout)
            .map_err(|e| Error::failed("read keyframe take --json", e))
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
