//! Serves the control socket: status from shared state at once, everything else through the
//! engine's own loop.

use super::{EngineRequest, EngineResponse, EngineStatus, LINE_BYTES_MAX};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Connections served at once; further ones are turned away.
const CLIENTS_MAX: usize = 16;

/// A request that the engine must answer itself.
pub struct Pending {
    /// The request.
    pub request: EngineRequest,
    /// The channel for the answer.
    pub answer: Sender<EngineResponse>,
}

/// The status that clients are shown; the engine keeps it up to date.
pub type SharedStatus = Arc<Mutex<EngineStatus>>;

/// A function that passes a request to the engine. It returns false if the engine has ended.
pub trait Deliver: Fn(Pending) -> bool + Clone + Send + 'static {}
impl<F: Fn(Pending) -> bool + Clone + Send + 'static> Deliver for F {}

/// Listens at the control socket in `run_dir` until the process ends. Answers requests for the
/// status itself; requests that change something go to `deliver`. Error: the socket cannot be made.
pub fn listen(run_dir: &Path, status: &SharedStatus, deliver: impl Deliver) -> io::Result<Socket> {
    let path = run_dir.join("control.sock");
    let listener = UnixListener::bind(&path)?;
    let status = Arc::clone(status);
    let clients = Arc::new(());
    std::thread::Builder::new().name("control".into()).spawn(move || {
        for stream in listener.incoming() {
            let Ok(stream) = stream else { continue };
            if Arc::strong_count(&clients) > CLIENTS_MAX {
                continue;
            }
            let (deliver, status, client) =
                (deliver.clone(), Arc::clone(&status), Arc::clone(&clients));
            let served =
                std::thread::Builder::new().name("control-client".into()).spawn(move || {
                    // A client that went away is its own affair.
                    let _ = serve(&stream, &deliver, &status);
                    drop(client);
                });
            drop(served);
        }
    })?;
    Ok(Socket(path))
}

/// The file of a control socket. Dropping it removes the file.
pub struct Socket(PathBuf);

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn serve(stream: &UnixStream, deliver: &impl Deliver, status: &SharedStatus) -> io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.set_write_timeout(Some(Duration::from_secs(5)))?;
    let mut line = String::new();
    BufReader::new(stream.take(LINE_BYTES_MAX)).read_line(&mut line)?;
    let response = match serde_json::from_str(&line) {
        Ok(EngineRequest::Status) => match status.lock() {
            Ok(status) => EngineResponse::Status(Box::new(status.clone())),
            Err(_) => EngineResponse::Failed("the engine has failed".into()),
        },
        Ok(request) => {
            let (answer, answered) = channel();
            if deliver(Pending { request, answer }) {
                answered.recv().unwrap_or(EngineResponse::Failed("the engine has ended".into()))
            } else {
                EngineResponse::Failed("the engine is ending".into())
            }
        }
        Err(e) => EngineResponse::Failed(format!("not a request: {e}")),
    };
    let mut text = serde_json::to_string(&response)?;
    text.push('\n');
    (&*stream).write_all(text.as_bytes())
}
