//! Runs a job in a process of its own, so that its memory and CPU time are those of one store.
//!
//! ```text
//!   keyframe-bench store ─┬▶ keyframe-bench store --job JOB     Keyframe, flat file, borg, restic
//!                         └▶ keyframe-bench-peers JOB           databases
//! ```
//!
//! The process ends with its parent. If it fails, its standard error is the cause.

use crate::Error;
use crate::interrupt::Interrupt;
use keyframe_bench_feed::{Job, StoreMeasurement};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Longest time for one store.
const JOB_MAX: Duration = Duration::from_mins(30);
/// The largest result, in bytes.
const ANSWER_BYTES_MAX: u64 = 1 << 20;

/// Runs `job` with `program`, whose arguments are `args` and the job's line.
pub fn measure(
    program: &Path,
    args: &[&str],
    job: &Job,
    interrupt: &Interrupt,
) -> Result<StoreMeasurement, Error> {
    let operation = format!("measure {}", job.store);
    let words = job.dir.join("words");
    let line = job.line().map_err(|e| Error::failed(&operation, e))?;
    let messages = File::create(&words).map_err(Error::io(format!("make {}", words.display())))?;
    let mut child = Command::new(program)
        .args(args)
        .arg(line)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(messages)
        .spawn()
        .map_err(Error::io(format!("run {}", program.display())))?;
    let deadline = Instant::now() + JOB_MAX;
    let status = loop {
        if let Some(status) = child.try_wait().map_err(Error::io(&operation))? {
            break status;
        }
        let problem = match () {
            () if interrupt.is_set() => "interrupted".into(),
            () if Instant::now() > deadline => format!("not done within {} s", JOB_MAX.as_secs()),
            () => {
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
        };
        child.kill().and_then(|()| child.wait()).map_err(Error::io(&operation))?;
        return Err(Error::failed(operation, problem));
    };
    if !status.success() {
        let said = std::fs::read_to_string(&words).unwrap_or_default();
        let problem =
            if said.trim().is_empty() { status.to_string() } else { said.trim().to_owned() };
        return Err(Error::failed(operation, problem));
    }
    let mut answer = String::new();
    if let Some(out) = child.stdout.take() {
        out.take(ANSWER_BYTES_MAX).read_to_string(&mut answer).map_err(Error::io(&operation))?;
    }
    serde_json::from_str(&answer).map_err(|e| Error::failed(operation, format!("its result: {e}")))
}
