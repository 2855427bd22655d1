//! A child process whose console is collected. Dropping it ends the process, and QEMU with it.
//!
//! Each look at the output first reads the pipe, so that it sees all output of a process that has
//! ended. A thread only keeps the pipe from filling up between the looks.

use keyframe_locks::IgnorePoison;
use keyframe_testing::{PATIENCE, pause_after};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Reads of 4 KiB at one look: more than a pipe holds. The rest of a faster output waits for the
/// next look.
const READS_MAX: usize = 64;

/// The running child.
pub struct Process {
    child: Child,
    input: ChildStdin,
    lines: Arc<OutputReader>,
    errors: Arc<OutputReader>,
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
        let lines = OutputReader::start(child.stdout.take().expect("standard output").into());
        let errors = OutputReader::start(child.stderr.take().expect("standard error").into());
        Self { child, input, lines, errors }
    }

    /// The child's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The console's lines so far, without line ends. If the process was killed, the last one may be
    /// incomplete.
    pub fn lines(&self) -> Vec<String> {
        self.lines.output().lines.clone()
    }

    /// The text on standard error so far.
    pub fn errors(&self) -> String {
        self.errors.output().lines.join("\n")
    }

    /// Writes a line to the console.
    pub fn type_line(&mut self, line: &str) {
        // The guest may have ended; the test notices that no answer comes.
        let _ = writeln!(self.input, "{line}");
        let _ = self.input.flush();
    }

    /// Waits for a console line that contains `text`.
    pub fn wait_for(&mut self, text: &str) -> String {
        self.wait_for_after(0, text)
    }

    /// Waits for a console line that contains `text`, after the first `skip` lines.
    pub fn wait_for_after(&mut self, skip: usize, text: &str) -> String {
        let found = self.wait_until(|p| {
            p.lines.output().lines.iter().skip(skip).find(|l| l.contains(text)).cloned()
        });
        found.unwrap_or_else(|| panic!("no line with {text:?}; {}", self.report()))
    }

    /// Waits until standard error contains `text`.
    pub fn wait_for_error(&mut self, text: &str) {
        let found = self.wait_until(|p| p.errors().contains(text).then_some(()));
        assert!(found.is_some(), "no {text:?} on standard error; {}", self.report());
    }

    /// Waits until `probe` returns a value. Returns `None` if the child ends, the guest reports an
    /// error, or [`PATIENCE`] is over.
    pub fn wait_until<T>(&mut self, probe: impl Fn(&Self) -> Option<T>) -> Option<T> {
        self.wait_within(PATIENCE, probe)
    }

    /// As [`Self::wait_until`], for at most `bound`.
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
            let has_failed =
                self.lines.output().lines.iter().any(|line| line.starts_with("KF ERROR"));
            if ended || has_failed || Instant::now() > deadline {
                // The output may have grown since the first look.
                return probe(self);
            }
            std::thread::sleep(pause_after(took));
        }
    }

    /// True until the process has ended.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("wait for the child").is_none()
    }

    /// Waits until the process ends; fails after [`PATIENCE`].
    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(exit) = self.child.try_wait().expect("wait for the child") {
                return exit;
            }
            assert!(Instant::now() < deadline, "the process does not end; {}", self.report());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Sends a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).expect("a pid");
        rustix::process::kill_process(pid, signal).expect("send a signal");
    }

    /// The output, for the message of a failed assertion.
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

/// The child processes of process `pid` that it has not waited for.
pub fn children(pid: u32) -> Vec<u32> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let lists =
        tasks.flatten().filter_map(|t| std::fs::read_to_string(t.path().join("children")).ok());
    lists
        .flat_map(|l| l.split_whitespace().filter_map(|n| n.parse().ok()).collect::<Vec<_>>())
        .collect()
}

/// Collects the output of a pipe.
struct OutputReader {
    pipe: OwnedFd,
    output: Mutex<Output>,
}

#[derive(Default)]
struct Output {
    lines: Vec<String>,
    /// A line whose end is still to come.
    partial: Vec<u8>,
    has_ended: bool,
}

impl OutputReader {
    fn start(pipe: OwnedFd) -> Arc<Self> {
        rustix::io::ioctl_fionbio(&pipe, true).expect("a pipe that does not block");
        let collected = Arc::new(Self { pipe, output: Mutex::default() });
        let other = Arc::clone(&collected);
        std::thread::spawn(move || {
            while !other.output().has_ended {
                let _ = poll(&mut [PollFd::new(&other.pipe, PollFlags::IN)], None);
            }
        });
        collected
    }

    /// The output until now.
    fn output(&self) -> MutexGuard<'_, Output> {
        let mut output = self.output.lock().ignore_poison();
        let mut buffer = [0; 4096];
        for _ in 0..READS_MAX {
            match rustix::io::read(&self.pipe, &mut buffer) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Ok(0) | Err(_) => {
                    output.has_ended = true;
                    break;
                }
                Ok(len) => output.append(&buffer[..len]),
            }
        }
        if output.has_ended && !output.partial.is_empty() {
            output.end_line();
        }
        output
    }
}

impl Output {
    fn append(&mut self, bytes: &[u8]) {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.partial.extend(part);
            if part.ends_with(b"\n") {
                self.end_line();
            }
        }
    }

    fn end_line(&mut self) {
        let text = String::from_utf8_lossy(&self.partial).trim_end_matches(['\r', '\n']).to_owned();
        self.partial.clear();
        self.lines.push(text);
    }
}
