//! Asks a running engine.

use super::{EngineRequest, EngineResponse, LINE_BYTES_MAX};
use crate::error::{ControlError, Error, Result};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Sends `request` to the engine whose run directory is `run_dir`, waits up to `wait` for the
/// answer, and returns it. Errors: no engine answers in time; it has refused the request.
pub fn ask(run_dir: &Path, request: &EngineRequest, wait: Duration) -> Result<EngineResponse> {
    let path = run_dir.join("control.sock");
    let io = |operation| {
        let socket = path.clone();
        move |source| ControlError::Io { operation, socket, source }
    };
    let json = |operation| {
        let socket = path.clone();
        move |source| ControlError::Json { operation, socket, source }
    };
    let mut stream = UnixStream::connect(&path).map_err(io("connect to"))?;
    stream.set_read_timeout(Some(wait)).map_err(io("set a timeout on"))?;
    stream.set_write_timeout(Some(Duration::from_secs(5))).map_err(io("set a timeout on"))?;
    let mut line = serde_json::to_string(request).map_err(json("encode a request to"))?;
    line.push('\n');
    stream.write_all(line.as_bytes()).map_err(io("write to"))?;
    let mut answer = String::new();
    BufReader::new(stream.take(LINE_BYTES_MAX)).read_line(&mut answer).map_err(io("read from"))?;
    if answer.is_empty() {
        return Err(ControlError::NoAnswer(path).into());
    }
    match serde_json::from_str(&answer).map_err(json("understand the answer of"))? {
        EngineResponse::Failed(message) => Err(ControlError::Refused(message).into()),
        other => Ok(other),
    }
}

/// Engines that are asked at the same time.
const ASKED_MAX: usize = 16;

/// Sends `request` to several engines, many at a time, and waits up to `wait` for each answer.
/// Returns the answers in the order of `run_dirs`. Error: no engine answers in time, or it has
/// refused the request.
pub fn ask_all<'a>(
    run_dirs: &'a [PathBuf],
    request: &EngineRequest,
    wait: Duration,
) -> Vec<(&'a Path, Result<EngineResponse>)> {
    let mut answers = Vec::with_capacity(run_dirs.len());
    for some in run_dirs.chunks(ASKED_MAX) {
        answers.extend(std::thread::scope(|scope| {
            let asked: Vec<_> =
                some.iter().map(|dir| (dir, scope.spawn(|| ask(dir, request, wait)))).collect();
            let joined = asked.into_iter().map(|(dir, answer)| {
                let answer =
                    answer.join().unwrap_or_else(|_| Err(Error::from(ControlError::Panicked)));
                (dir.as_path(), answer)
            });
            joined.collect::<Vec<_>>()
        }));
    }
    answers
}
