//! Serves the control socket: status from shared state at once, everything else through the
//! engine's own loop.

use super::{EngineRequest, EngineResponse, EngineStatus, LINE_BYTES_MAX};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// Connections served at once; further ones are turned away.
const CLIENTS_MAX: usize = 16;
/// How long a client may take to write its request, and to read the answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(5);

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

/// Listens at the control socket in `run_dir` until the socket is dropped. Answers requests for the
/// status itself; requests that change something go to `deliver`, in the order in which their
/// clients have made them. Returns the socket. Error: the socket cannot be made.
pub fn listen(run_dir: &Path, status: &SharedStatus, deliver: impl Deliver) -> io::Result<Socket> {
    let path = run_dir.join("control.sock");
    let listener = UnixListener::bind(&path)?;
    listener.set_nonblocking(true)?;
    let answering = Arc::new(());
    let (is_dropped, serves) = io::pipe()?;
    let socket = Socket { path, answering: Arc::downgrade(&answering), _serves: serves };
    let status = Arc::clone(status);
    let mut server =
        Server { listener, is_dropped, waiting: Vec::new(), answering, status, deliver };
    std::thread::Builder::new()
        .name("control".into())
        .spawn(move || while server.turn().is_ok_and(|goes_on| goes_on) {})?;
    Ok(socket)
}

/// The state of the control socket's thread.
///
/// A client that has written its request before another connects is served before it. So the
/// thread reads from the clients in the order of their connections, and only then accepts others.
struct Server<D> {
    listener: UnixListener,
    /// Its other end is closed once the [`Socket`] is dropped.
    is_dropped: PipeReader,
    /// The clients whose requests are not complete yet, the first one first.
    waiting: Vec<Client>,
    /// Held by each thread that waits for an answer.
    answering: Arc<()>,
    status: SharedStatus,
    deliver: D,
}

/// A client whose request is not complete yet.
struct Client {
    stream: UnixStream,
    line: Vec<u8>,
    until: Instant,
}

impl<D: Deliver> Server<D> {
    /// Waits until there is something to do, and does it. Returns false if there is nothing left to do
    /// and the socket is dropped. Error: the listening socket failed.
    fn turn(&mut self) -> io::Result<bool> {
        let now = Instant::now();
        self.waiting.retain(|client| client.until > now);
        let mut fds = vec![
            PollFd::new(&self.is_dropped, PollFlags::IN),
            PollFd::new(&self.listener, PollFlags::IN),
        ];
        fds.extend(self.waiting.iter().map(|c| PollFd::new(&c.stream, PollFlags::IN)));
        let first_end = self.waiting.iter().map(|client| client.until - now).min();
        let limit = first_end.and_then(|wait| Timespec::try_from(wait).ok());
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let is_dropped = fds.first().is_some_and(is_ready);
        let connects = fds.get(1).is_some_and(is_ready);
        let is_busy = fds.iter().skip(1).any(is_ready);
        drop(fds);
        // Each of them is asked, also one that has written since the wait ended.
        for mut client in std::mem::take(&mut self.waiting) {
            match client.read() {
                Ok(Some(line)) => self.serve(client.stream, &line),
                Ok(None) => self.waiting.push(client),
                // The client has gone, and waits for no answer.
                Err(_) => {}
            }
        }
        if connects {
            match self.listener.accept() {
                Ok((stream, _)) => self.greet(stream),
                // Its client has gone, or this process has too many files open for now.
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        Ok(is_busy || !is_dropped)
    }

    fn greet(&mut self, stream: UnixStream) {
        let clients = self.waiting.len() + Arc::strong_count(&self.answering) - 1;
        if clients < CLIENTS_MAX && stream.set_nonblocking(true).is_ok() {
            let until = Instant::now() + CLIENT_TIMEOUT;
            self.waiting.push(Client { stream, line: Vec::new(), until });
        }
    }

    /// Delivers a request. A thread waits for its answer.
    fn serve(&self, stream: UnixStream, line: &[u8]) {
        // Before the request is delivered: the engine may answer it and end at once.
        let client = Arc::clone(&self.answering);
        let answer = match serde_json::from_slice(line) {
            Ok(EngineRequest::Status) => Answer::Now(match self.status.lock() {
                Ok(status) => EngineResponse::Status(Box::new(status.clone())),
                Err(_) => EngineResponse::Failed("the engine has failed".into()),
            }),
            Ok(request) => {
                let (answer, answered) = channel();
                if (self.deliver)(Pending { request, answer }) {
                    Answer::Later(answered)
                } else {
                    Answer::Now(EngineResponse::Failed("the engine is ending".into()))
                }
            }
            Err(e) => Answer::Now(EngineResponse::Failed(format!("not a request: {e}"))),
        };
        let thread = std::thread::Builder::new().name("control-client".into());
        let spawned = thread.spawn(move || {
            let _ = answer.send(&stream);
            drop(client);
        });
        drop(spawned);
    }
}

impl Client {
    /// Reads what has come. `Some` once the request is complete.
    fn read(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut chunk = [0; 4096];
        loop {
            match (&self.stream).read(&mut chunk) {
                Ok(0) => return Ok(Some(std::mem::take(&mut self.line))),
                Ok(len) => self.line.extend_from_slice(chunk.get(..len).unwrap_or_default()),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
            let end = self.line.iter().position(|byte| *byte == b'\n');
            if end.is_some() || self.line.len() as u64 >= LINE_BYTES_MAX {
                let mut line = std::mem::take(&mut self.line);
                line.truncate(end.unwrap_or(line.len()));
                return Ok(Some(line));
            }
        }
    }
}

/// The answer to a request.
enum Answer {
    Now(EngineResponse),
    Later(Receiver<EngineResponse>),
}

impl Answer {
    /// Waits for it, and writes it to the client.
    fn send(self, stream: &UnixStream) -> io::Result<()> {
        let response = match self {
            Self::Now(response) => response,
            Self::Later(answered) => {
                answered.recv().unwrap_or(EngineResponse::Failed("the engine has ended".into()))
            }
        };
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(CLIENT_TIMEOUT))?;
        let mut text = serde_json::to_string(&response)?;
        text.push('\n');
        (&*stream).write_all(text.as_bytes())
    }
}

/// A control socket. Dropping it removes its file, and waits a bounded time until the answers that
/// were given are written: a process that ends right after its engine would take them along.
pub struct Socket {
    path: PathBuf,
    /// Held by the server and by each thread that waits for an answer.
    answering: Weak<()>,
    /// The server's thread ends once this is closed.
    _serves: PipeWriter,
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        let until = Instant::now() + CLIENT_TIMEOUT;
        while self.answering.strong_count() > 1 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[cfg(test)]
mod tests;
