//! Asks a running engine.

use super::{LINE_BYTES_MAX, Request, Response};
use keyframe_failure::Failure;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Sends `request` to the engine whose run directory is `run_dir`, and waits up to `wait` for the
/// answer.
pub fn ask(run_dir: &Path, request: &Request, wait: Duration) -> Result<Response, Failure> {
    let path = run_dir.join("control.sock");
    let failed = |what: &str, e: &dyn std::fmt::Display| {
        Failure::new(format!("{what} {}: {e}", path.display()))
            .fix("see what runs with: keyframe status")
    };
    let mut stream = UnixStream::connect(&path).map_err(|e| failed("connect to", &e))?;
    stream.set_read_timeout(Some(wait)).map_err(|e| failed("set a timeout on", &e))?;
    stream
        .set_write_timeout(Some(Duration::from_secs(5)))
        .map_err(|e| failed("set a timeout on", &e))?;
    let mut line = serde_json::to_string(request).map_err(|e| failed("encode a request to", &e))?;
    line.push('\n');
    stream.write_all(line.as_bytes()).map_err(|e| failed("write to", &e))?;
    let mut answer = String::new();
    BufReader::new(stream.take(LINE_BYTES_MAX))
        .read_line(&mut answer)
        .map_err(|e| failed("read from", &e))?;
    if answer.is_empty() {
        return Err(failed("read from", &"the engine ended without an answer"));
    }
    match serde_json::from_str(&answer).map_err(|e| failed("understand the answer of", &e))? {
        Response::Failed(message) => Err(Failure::new(message)),
        other => Ok(other),
    }
}

/// Engines that are asked at the same time.
const ASKED_MAX: usize = 16;

/// Asks several engines, many at a time; the answers in their order.
pub fn ask_all<'a>(
    run_dirs: &'a [PathBuf],
    request: &Request,
    wait: Duration,
) -> Vec<(&'a Path, Result<Response, Failure>)> {
    let mut answers = Vec::with_capacity(run_dirs.len());
    for some in run_dirs.chunks(ASKED_MAX) {
        answers.extend(std::thread::scope(|scope| {
            let asked: Vec<_> =
                some.iter().map(|dir| (dir, scope.spawn(|| ask(dir, request, wait)))).collect();
            let joined = asked.into_iter().map(|(dir, answer)| {
                let answer = answer
                    .join()
                    .unwrap_or_else(|_| Err(Failure::new("the thread that asked it panicked")));
                (dir.as_path(), answer)
            });
            joined.collect::<Vec<_>>()
        }));
    }
    answers
}
