//! Runs the `keyframe` program with bounded waits.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a command may take.
const COMMAND_WAIT: Duration = Duration::from_secs(60);
/// How long a command may take to end after a signal.
const END_WAIT: Duration = Duration::from_secs(15);
/// How often a wait looks.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// The most of a command's messages that a report quotes, in bytes.
const QUOTED_BYTES: usize = 600;

/// The `keyframe` program, run in a directory of its own.
#[derive(Clone)]
pub(crate) struct Program<'a> {
    pub path: &'a Path,
    /// The working directory, with all files and sockets of the commands.
    pub directory: PathBuf,
    pub interrupted: &'a AtomicBool,
}

impl Program<'_> {
    /// Runs `keyframe WORDS` to its end, and returns its standard output. Fails if it fails.
    pub fn ok(&self, words: &[&str]) -> Result<String, String> {
        let mut running = self.start("command", words)?;
        let status = running.wait(COMMAND_WAIT)?;
        if status.success() {
            return Ok(running.output());
        }
        Err(running.problem(&format!("ended with {status}")))
    }

    /// As [`Program::ok`], for a command that prints JSON.
    pub fn json(&self, words: &[&str]) -> Result<Value, String> {
        let text = self.ok(words)?;
        serde_json::from_str(&text).map_err(|e| format!("keyframe {}: {e}", words.join(" ")))
    }

    /// Starts `keyframe WORDS`. `name` is unique among the commands that run at a time.
    pub fn start(&self, name: &str, words: &[&str]) -> Result<Running<'_>, String> {
        let file = |kind: &str| self.directory.join(format!("{name}.{kind}"));
        // The guest's command line is the same in all checks.
        let own: Vec<_> = words.iter().take_while(|word| **word != "--").copied().collect();
        let shown = format!("keyframe {}", own.join(" "));
        let failed = |e: std::io::Error| format!("start {shown}: {e}");
        let (output, errors) = (file("out"), file("err"));
        let child = Command::new(self.path)
            .args(words)
            .current_dir(&self.directory)
            .env("XDG_RUNTIME_DIR", &self.directory)
            .env_remove("KEYFRAME_STORE")
            .stdin(Stdio::null())
            .stdout(File::create(&output).map_err(failed)?)
            .stderr(File::create(&errors).map_err(failed)?)
            .spawn()
            .map_err(failed)?;
        Ok(Running { child, shown, output, errors, interrupted: self.interrupted })
    }

    /// The path of `name` in the working directory.
    pub fn path_of(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }
}

/// A command that runs. It is ended when it is dropped.
pub(crate) struct Running<'a> {
    child: Child,
    shown: String,
    output: PathBuf,
    errors: PathBuf,
    interrupted: &'a AtomicBool,
}

impl Running<'_> {
    /// What it has printed.
    pub fn output(&self) -> String {
        read(&self.output)
    }

    /// What it has written to standard error.
    pub fn errors(&self) -> String {
        read(&self.errors)
    }

    /// Waits until `look` returns a value. Fails if the command ends before.
    pub fn wait_until<T>(
        &mut self,
        what: &str,
        mut look: impl FnMut(&Self) -> Result<Option<T>, String>,
    ) -> Result<T, String> {
        let began = Instant::now();
        loop {
            let has_ended = self.status()?;
            if let Some(found) = look(self)? {
                return Ok(found);
            }
            if let Some(status) = has_ended {
                return Err(self.problem(&format!("ended with {status} before {what}")));
            }
            self.pause(began, COMMAND_WAIT, what)?;
        }
    }

    /// Waits for its end.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus, String> {
        let began = Instant::now();
        loop {
            if let Some(status) = self.status()? {
                return Ok(status);
            }
            self.pause(began, limit, "its end")?;
        }
    }

    /// Asks it to end, as Ctrl-C does, and waits for its end. Fails if it fails.
    pub fn end(mut self) -> Result<(), String> {
        self.signal(Signal::INT);
        let status = self.wait(END_WAIT)?;
        if status.success() { Ok(()) } else { Err(self.problem(&format!("ended with {status}"))) }
    }

    /// An error of this command, with what it has said last.
    pub fn problem(&self, what: &str) -> String {
        let errors = self.errors();
        let mut begin = errors.len().saturating_sub(QUOTED_BYTES);
        while !errors.is_char_boundary(begin) {
            begin += 1;
        }
        let said = errors.get(begin..).unwrap_or_default().trim().replace('\n', "; ");
        format!("{} {what}: {said}", self.shown)
    }

    fn status(&mut self) -> Result<Option<ExitStatus>, String> {
        self.child.try_wait().map_err(|e| format!("wait for {}: {e}", self.shown))
    }

    fn pause(&self, began: Instant, limit: Duration, what: &str) -> Result<(), String> {
        if self.interrupted.load(Ordering::Relaxed) {
            return Err("interrupted".into());
        }
        if began.elapsed() > limit {
            return Err(self.problem(&format!("waits for {what} after {} s", limit.as_secs())));
        }
        std::thread::sleep(LOOK_EVERY);
        Ok(())
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = Pid::from_raw(self.child.id().cast_signed()) {
            // It may have ended.
            let _ = kill_process(pid, signal);
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let began = Instant::now();
        // Keyframe ends its QEMU at this signal. A killed Keyframe would leave it.
        self.signal(Signal::TERM);
        while began.elapsed() < END_WAIT {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read(path: &Path) -> String {
    std::fs::read(path).map(|text| String::from_utf8_lossy(&text).into_owned()).unwrap_or_default()
}
