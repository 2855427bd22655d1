//! Commands of `keyframe` with `--json`, which a signal to this program ends.

use crate::interrupt::Interrupt;
use crate::{Error, Options};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

/// The time after which a command that was asked to end is killed.
const END_S: u32 = 60;

/// Runs commands of `keyframe`.
#[derive(Clone, Copy)]
pub struct KeyframeJson<'a> {
    pub options: &'a Options,
    pub interrupt: &'a Interrupt,
}

/// A command that runs. Dropping it asks it to end, and kills it if it does not.
pub struct RunningCommand {
    name: String,
    child: Child,
    output: Option<JoinHandle<Vec<u8>>>,
    problems: Option<JoinHandle<Vec<u8>>>,
}

/// Returns the number `name` of an object that a command has printed. Error: there is none.
pub fn number(object: &Value, name: &str) -> Result<f64, Error> {
    let number = object.get(name).and_then(Value::as_f64);
    number.ok_or_else(|| Error::failed("read the output of keyframe", format!("no number {name}")))
}

impl KeyframeJson<'_> {
    /// Runs `keyframe BEFORE PATH AFTER` to its end and returns its output.
    pub fn run(self, before: &[&str], path: &Path, after: &[&str]) -> Result<Value, Error> {
        self.start(before, path, after)?.wait(self.interrupt)
    }

    /// Starts `keyframe BEFORE PATH AFTER`.
    pub fn start(
        self,
        before: &[&str],
        path: &Path,
        after: &[&str],
    ) -> Result<RunningCommand, Error> {
        let name = format!("keyframe {}", before.first().unwrap_or(&""));
        let mut command = Command::new(&self.options.keyframe);
        command.args(before).arg(path).args(after);
        RunningCommand::start(name, command)
    }
}

impl RunningCommand {
    /// Starts `command`, which errors call `name`.
    pub fn start(name: String, mut command: Command) -> Result<Self, Error> {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(Error::io(format!("run {name}")))?;
        let output = child.stdout.take().map(read_in_background);
        let problems = child.stderr.take().map(read_in_background);
        Ok(Self { name, child, output, problems })
    }

    /// Waits for its end and returns its output. Fails if the program is interrupted.
    pub fn wait(mut self, interrupt: &Interrupt) -> Result<Value, Error> {
        let status = loop {
            interrupt.check()?;
            match self.child.try_wait().map_err(Error::io(format!("wait for {}", self.name)))? {
                Some(status) => break status,
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        let read = |thread: Option<JoinHandle<Vec<u8>>>| {
            thread.and_then(|thread| thread.join().ok()).unwrap_or_default()
        };
        let (output, problems) = (read(self.output.take()), read(self.problems.take()));
        let parsed = serde_json::from_slice(&output);
        // An analysis whose two results differ fails with a complete report; the caller warns.
        let differs =
            parsed.as_ref().is_ok_and(|report: &Value| report["equals_sequential"] == false);
        if !status.success() && !differs {
            interrupt.check()?;
            return Err(Error::failed(&self.name, String::from_utf8_lossy(&problems).trim()));
        }
        parsed.map_err(|e| Error::failed(format!("read {} --json", self.name), e))
    }
}

impl Drop for RunningCommand {
    fn drop(&mut self) {
        let has_ended = |child: &mut Child| matches!(child.try_wait(), Ok(Some(_)));
        if has_ended(&mut self.child) {
            return;
        }
        if let Some(pid) = Pid::from_raw(self.child.id() as i32) {
            let _ = kill_process(pid, Signal::TERM);
        }
        for _ in 0..END_S * 20 {
            if has_ended(&mut self.child) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns how long the start of QEMU took before an interval of an `analyze` report, in nanoseconds;
/// `None` if a worker went on to the interval in the same QEMU. The copy of the RAM overlaps the
/// loading of the devices.
pub fn start_ns(interval: &Value) -> Result<Option<f64>, Error> {
    let start = &interval["start"];
    let step = |name: &str| {
        let missing =
            || Error::failed("read the start of an interval", format!("no number {name}"));
        start[name].as_f64().ok_or_else(missing)
    };
    if !start.is_object() {
        return Ok(None);
    }
    let steps = ["checkpoint_ns", "process_ns", "devices_ns"];
    steps.into_iter().map(step).sum::<Result<f64, Error>>().map(Some)
}

fn read_in_background(mut from: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // What was read before a failure is still worth showing.
        let _ = from.read_to_end(&mut bytes);
        bytes
    })
}
