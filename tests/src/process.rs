//! A child process with its console collected. Dropping it ends it, and QEMU with it.
//!
//! Whoever asks for what it said reads what is in the pipe first: of a process that has ended, that
//! is all it ever said. A thread only keeps the pipe from filling up meanwhile.

use crate::foreign::PATIENCE;
use keyframe_locks::IgnorePoison;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// More than a pipe holds; who writes faster than this reads waits for the next look.
const READS_MAX: usize = 64;

/// The running child.
pub struct Process {
    child: Child,
    input: ChildStdin,
    lines: Arc<Collected>,
    errors: Arc<Collected>,
}

impl Process {
    /// Starts `command` with its standard streams piped.
    pub fn start(mut command: Command) -> Self {
        println!("$ {command:?}");
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("start {command:?}: {e}"));
        let input = child.stdin.take().expect("standard input");
        let lines = Collected::of(child.stdout.take().expect("standard output").into());
        let errors = Collected::of(child.stderr.take().expect("standard error").into());
        Self { child, input, lines, errors }
    }

    /// The child's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Console lines so far, without their line ends. The last one may be incomplete where the
    /// guest was cut off.
    pub fn lines(&self) -> Vec<String> {
        self.lines.said().lines.clone()
    }

    /// What it said on standard error so far.
    pub fn errors(&self) -> String {
        self.errors.said().lines.join("\n")
    }

    /// Writes a line to the console.
    pub fn say(&mut self, line: &str) {
        // The guest's end may be gone; the test finds out by what does not come back.
        let _ = writeln!(self.input, "{line}");
        let _ = self.input.flush();
    }

    /// Waits for a console line that contains `text`.
    pub fn wait_for(&mut self, text: &str) -> String {
        self.wait_for_after(0, text)
    }

    /// Waits for a console line that contains `text` behind the first `skip` lines.
    pub fn wait_for_after(&mut self, skip: usize, text: &str) -> String {
        let found = self.wait_until(|p| {
            p.lines.said().lines.iter().skip(skip).find(|l| l.contains(text)).cloned()
        });
        found.unwrap_or_else(|| panic!("no line with {text:?}; {}", self.report()))
    }

    /// Waits until standard error contains `text`.
    pub fn wait_for_error(&mut self, text: &str) {
        let found = self.wait_until(|p| p.errors().contains(text).then_some(()));
        assert!(found.is_some(), "no {text:?} on standard error; {}", self.report());
    }

    /// Waits until `probe` answers, or the child has ended, or the guest cannot work, or for
    /// [`PATIENCE`].
    pub fn wait_until<T>(&mut self, probe: impl Fn(&Self) -> Option<T>) -> Option<T> {
        self.wait_within(PATIENCE, probe)
    }

    /// The same with another bound.
    pub fn wait_within<T>(
        &mut self,
        bound: Duration,
        probe: impl Fn(&Self) -> Option<T>,
    ) -> Option<T> {
        let deadline = Instant::now() + bound;
        loop {
            let began = Instant::now();
            if let Some(found) = probe(self) {
                return Some(found);
            }
            let took = began.elapsed();
            let ended = self.child.try_wait().expect("wait for the child").is_some();
            let is_given_up =
                self.lines.said().lines.iter().any(|line| line.starts_with("KF ERROR"));
            if ended || is_given_up || Instant::now() > deadline {
                // It may have said it since.
                return probe(self);
            }
            std::thread::sleep(rest(took));
        }
    }

    /// True while it runs.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("wait for the child").is_none()
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(exit) = self.child.try_wait().expect("wait for the child") {
                return exit;
            }
            assert!(Instant::now() < deadline, "it does not end; {}", self.report());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Sends a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).expect("a pid");
        rustix::process::kill_process(pid, signal).expect("send a signal");
    }

    /// What it said, for a failed test.
    pub fn report(&self) -> String {
        let lines = self.lines();
        let tail = lines[lines.len().saturating_sub(20)..].join("\n");
        format!("standard error:\n{}\nlast lines of the console:\n{tail}", self.errors())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        self.signal(rustix::process::Signal::TERM);
        let deadline = Instant::now() + Duration::from_secs(20);
        while Instant::now() < deadline {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The processes that process `pid` has started and has not waited for.
pub fn children(pid: u32) -> Vec<u32> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let lists =
        tasks.flatten().filter_map(|t| std::fs::read_to_string(t.path().join("children")).ok());
    lists
        .flat_map(|l| l.split_whitespace().filter_map(|n| n.parse().ok()).collect::<Vec<_>>())
        .collect()
}

/// How long to wait after a look that took so long: one that starts a program shall not take the
/// machine from what it looks at.
pub fn rest(took: Duration) -> Duration {
    (took * 5).clamp(Duration::from_millis(10), Duration::from_millis(250))
}

/// What comes out of a pipe.
struct Collected {
    pipe: OwnedFd,
    said: Mutex<Said>,
}

#[derive(Default)]
struct Said {
    lines: Vec<String>,
    /// A line without its end.
    begun: Vec<u8>,
    has_ended: bool,
}

impl Collected {
    fn of(pipe: OwnedFd) -> Arc<Self> {
        rustix::io::ioctl_fionbio(&pipe, true).expect("a pipe that does not block");
        let collected = Arc::new(Self { pipe, said: Mutex::default() });
        let other = Arc::clone(&collected);
        std::thread::spawn(move || {
            while !other.said().has_ended {
                let _ = poll(&mut [PollFd::new(&other.pipe, PollFlags::IN)], None);
            }
        });
        collected
    }

    /// All that was said until now.
    fn said(&self) -> MutexGuard<'_, Said> {
        let mut said = self.said.lock().ignore_poison();
        let mut buffer = [0; 4096];
        for _ in 0..READS_MAX {
            match rustix::io::read(&self.pipe, &mut buffer) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Ok(0) | Err(_) => {
                    said.has_ended = true;
                    break;
                }
                Ok(len) => said.take(&buffer[..len]),
            }
        }
        if said.has_ended && !said.begun.is_empty() {
            said.end_line();
        }
        said
    }
}

impl Said {
    fn take(&mut self, bytes: &[u8]) {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.begun.extend(part);
            if part.ends_with(b"\n") {
                self.end_line();
            }
        }
    }

    fn end_line(&mut self) {
        let text = String::from_utf8_lossy(&self.begun).trim_end_matches(['\r', '\n']).to_owned();
        self.begun.clear();
        self.lines.push(text);
    }
}
