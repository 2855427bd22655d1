//! A child process with its console collected. Dropping it ends it, and QEMU with it.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

type Collected = Arc<Mutex<Vec<String>>>;

/// The running child.
pub struct Process {
    child: Child,
    input: ChildStdin,
    lines: Collected,
    errors: Collected,
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
        let lines = collect(child.stdout.take().expect("standard output"));
        let errors = collect(child.stderr.take().expect("standard error"));
        Self { child, input, lines, errors }
    }

    /// The child's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Console lines so far, without their line ends. The last one may be incomplete where the guest was cut off.
    pub fn lines(&self) -> Vec<String> {
        held(&self.lines).clone()
    }

    /// What it said on standard error so far.
    pub fn errors(&self) -> String {
        held(&self.errors).join("\n")
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
        let found =
            self.wait_until(120, |p| held(&p.lines).iter().skip(skip).find(|l| l.contains(text)).cloned());
        found.unwrap_or_else(|| panic!("no line with {text:?}; {}", self.report()))
    }

    /// Waits until standard error contains `text`.
    pub fn wait_for_error(&mut self, text: &str) {
        let found = self.wait_until(120, |p| p.errors().contains(text).then_some(()));
        assert!(found.is_some(), "no {text:?} on standard error; {}", self.report());
    }

    /// Waits until `probe` answers, or the child has ended, or the guest cannot work, or `seconds` have passed.
    pub fn wait_until<T>(&mut self, seconds: u64, probe: impl Fn(&Self) -> Option<T>) -> Option<T> {
        let deadline = Instant::now() + Duration::from_secs(seconds);
        loop {
            if let Some(found) = probe(self) {
                return Some(found);
            }
            let ended = self.child.try_wait().expect("wait for the child").is_some();
            let is_given_up = held(&self.lines).iter().any(|line| line.starts_with("KF ERROR"));
            if ended || is_given_up || Instant::now() > deadline {
                // What it said last may still be in the pipe.
                std::thread::sleep(Duration::from_millis(100));
                return probe(self);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// True while it runs.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("wait for the child").is_none()
    }

    /// Waits for its end, two minutes at most.
    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + Duration::from_secs(120);
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
        let lines = held(&self.lines);
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

fn held(lines: &Collected) -> MutexGuard<'_, Vec<String>> {
    lines.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn collect(from: impl Read + Send + 'static) -> Collected {
    let lines = Collected::default();
    let collected = Arc::clone(&lines);
    std::thread::spawn(move || {
        let mut reader = BufReader::new(from);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
            let text = String::from_utf8_lossy(&line).trim_end_matches(['\r', '\n']).to_owned();
            held(&collected).push(text);
            line.clear();
        }
    });
    lines
}
