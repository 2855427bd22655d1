//! Finds a running engine, and asks it.

use super::{EngineRequest, EngineResponse, LINE_BYTES_MAX};
use crate::error::{ControlError, Error, Result, RunDirError};
use crate::run_dir;
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

/// The longest time in which an engine says which store it writes to.
const STORE_WAIT: Duration = Duration::from_secs(10);

/// Returns the directory of the engine whose checkpoints go into `store`; with `name`, of the engine
/// of that VM. Errors: no such engine runs; several do; one that might be meant does not answer.
pub fn find_by_store(name: Option<&str>, store: &Path) -> Result<PathBuf> {
    let engines = match name {
        Some(name) => vec![run_dir::find(Some(name))?],
        None => run_dir::all()?,
    };
    let (mut found, mut silent) = (Vec::new(), None);
    for (engine, answer) in ask_all(&engines, &EngineRequest::Status, STORE_WAIT) {
        match answer {
            Ok(EngineResponse::Status(status)) if is_same_store(&status.store, store) => {
                found.push(engine.to_owned());
            }
            // It may have ended since it was listed.
            Err(error) if run_dir::lives(engine) => silent = Some(error),
            Ok(_) | Err(_) => {}
        }
    }
    match (found.len(), silent) {
        (1, _) => Ok(found.swap_remove(0)),
        (0, Some(error)) => Err(error),
        (0, None) => Err(RunDirError::NotOfStore { store: store.into() }.into()),
        (_, _) => {
            let running = found.iter().map(|engine| run_dir::name_of(engine)).collect();
            Err(RunDirError::Several { running }.into())
        }
    }
}

/// Returns whether `one`, as a status has it, and `other`, as a user writes it, are the same store.
pub fn is_same_store(one: &str, other: &Path) -> bool {
    let one = Path::new(one);
    // The address of a remote store is no path.
    one == other
        || one.canonicalize().is_ok_and(|one| other.canonicalize().is_ok_and(|other| one == other))
}
