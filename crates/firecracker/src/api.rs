//! Firecracker's API: the requests that Keyframe makes.
//!
//! A connection is kept, because it works also when the socket's file is gone. If it breaks, one
//! new one is tried: a single request here may be repeated.
//!
//! Requests that are sent at once are carried out with no request of another client in between:
//! Firecracker takes all that one read of [`BATCH_BYTES_MAX`] bytes has brought, one after the other.
//! Such a batch is not repeated.

use crate::config::VmConfig;
use crate::http::{Answer, Connection, Failure, Request, text_of};
use crate::{Error, Result};
use keyframe_vmm::TapChoice;
use serde::Deserialize;
use serde_json::{Value, json};
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The most bytes that Firecracker reads of a connection before it looks at others.
pub const BATCH_BYTES_MAX: usize = 1024;
/// How long a request may take, other than those that follow.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long a save or load of a VM may take: Firecracker reads or writes all RAM.
const LOAD_TIMEOUT: Duration = Duration::from_mins(2);

/// The run state that Firecracker tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum InstanceState {
    /// The VM runs.
    Running,
    /// The VM is paused.
    Paused,
    /// No VM has been started or loaded.
    #[serde(rename = "Not started")]
    NotStarted,
}

/// What `GET /` tells.
#[derive(Clone, Debug, Deserialize)]
pub struct Instance {
    /// The instance's id.
    pub id: String,
    /// The run state.
    pub state: InstanceState,
    /// The version of Firecracker.
    pub vmm_version: String,
    /// `Firecracker`.
    pub app_name: String,
}

/// Where a VM that is loaded finds its RAM.
#[derive(Clone, Copy, Debug)]
pub enum MemoryBackend<'a> {
    /// A file, which Firecracker maps privately.
    File(&'a Path),
    /// A socket, through which Firecracker passes a userfaultfd.
    Uffd(&'a Path),
}

/// What Firecracker has answered to [`Api::begin_whole_pause`].
#[derive(Debug)]
pub struct WholePause {
    /// The run state just before the pause.
    pub before: InstanceState,
    /// Whether the devices were saved.
    pub saved: Result<()>,
    /// Whether the VM was resumed; that it was not asked for is no error.
    pub resumed: Result<()>,
}

/// A client of the API.
#[derive(Debug)]
pub struct Api {
    socket: PathBuf,
    connection: Option<Connection>,
    /// The answers so far to the requests of a whole pause; `None` if none are due.
    answers: Option<DueAnswers>,
}

#[derive(Debug)]
struct DueAnswers {
    answers: Vec<Answer>,
    /// Whether the VM was to be paused and resumed.
    runs: bool,
}

const STATE: Request<'_> = Request { method: "GET", path: "/", body: None };
const PAUSE: Request<'_> =
    Request { method: "PATCH", path: "/vm", body: Some(r#"{"state":"Paused"}"#) };
const RESUME: Request<'_> =
    Request { method: "PATCH", path: "/vm", body: Some(r#"{"state":"Resumed"}"#) };
/// The path of the request that saves a VM.
const SAVE: &str = "/snapshot/create";

impl Api {
    /// Connects to the API at `socket`. Error: [`Error::Gone`] if no process serves it.
    pub fn connect(socket: &Path) -> Result<Self> {
        let mut api = Self { socket: socket.to_owned(), connection: None, answers: None };
        api.connection = Some(api.open("connect")?);
        Ok(api)
    }

    /// Returns the socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the kept connection, to poll for its end; `None` if it has broken.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.connection.as_ref().map(Connection::descriptor)
    }

    fn open(&self, operation: &str) -> Result<Connection> {
        Connection::open(&self.socket, TIMEOUT).map_err(|source| self.gone(operation, source))
    }

    fn gone(&self, operation: &str, source: io::Error) -> Error {
        Error::Gone { socket: self.socket.clone(), operation: operation.into(), source }
    }

    /// Returns what Firecracker tells about itself.
    pub fn instance(&mut self) -> Result<Instance> {
        self.get("/")
    }

    /// Returns the configuration of the VM, and its text.
    pub fn config(&mut self) -> Result<(VmConfig, String)> {
        let value: Value = self.get("/vm/config")?;
        let config = VmConfig::of(&value).map_err(|error| Error::Answer {
            operation: "GET /vm/config".into(),
            problem: error.to_string(),
        })?;
        Ok((config, value.to_string()))
    }

    /// Pauses the VM. Returns the run state that it had: no other client changes it in between.
    pub fn pause(&mut self) -> Result<InstanceState> {
        // The batch needs a connection that works.
        self.instance()?;
        let deadline = Instant::now() + TIMEOUT;
        let mut connection = self.take_connection()?;
        let mut exchange = || -> Result<[Answer; 2], Failure> {
            connection.send(&text_of(&[STATE, PAUSE]), deadline)?;
            let answers = [connection.answer(deadline)?, connection.answer(deadline)?];
            connection.require_no_more().map(|()| answers)
        };
        let [state, paused] = exchange().map_err(|failure| self.failed(PAUSE, TIMEOUT, failure))?;
        self.connection = Some(connection);
        done(PAUSE, paused)?;
        state_of(state)
    }

    /// Resumes the VM. Has no effect if it runs.
    pub fn resume(&mut self) -> Result<()> {
        self.send(RESUME, TIMEOUT)
    }

    /// Asks Firecracker to save the VM's devices to `state`; if the VM `runs`, to pause it before and
    /// to resume it after that. No other client's request is carried out in between.
    /// [`Api::whole_pause`] returns the answers. Returns false, and asks nothing, if the path is too
    /// long for a batch.
    pub fn begin_whole_pause(&mut self, runs: bool, state: &Path, memory: &Path) -> Result<bool> {
        let body = save_body("Full", state, memory).to_string();
        let save = Request { method: "PUT", path: SAVE, body: Some(&body) };
        let text =
            if runs { text_of(&[STATE, PAUSE, save, RESUME]) } else { text_of(&[STATE, save]) };
        if text.len() > BATCH_BYTES_MAX {
            return Ok(false);
        }
        let mut connection = self.take_connection()?;
        let sent = connection.send(&text, Instant::now() + TIMEOUT);
        sent.map_err(|failure| self.failed(PAUSE, TIMEOUT, failure))?;
        self.connection = Some(connection);
        self.answers = Some(DueAnswers { answers: Vec::new(), runs });
        Ok(true)
    }

    /// Returns the answers to [`Api::begin_whole_pause`], once all have come. Errors: the
    /// connection has failed; the VM was not paused.
    pub fn whole_pause(&mut self) -> Result<Option<WholePause>> {
        let Some(DueAnswers { mut answers, runs }) = self.answers.take() else {
            return Err(self.gone(&operation(PAUSE), io::ErrorKind::NotConnected.into()));
        };
        let mut connection = self.take_connection()?;
        let mut read = || -> Result<bool, Failure> {
            while answers.len() < if runs { 4 } else { 2 } {
                let Some(answer) = connection.answer_so_far()? else { return Ok(false) };
                answers.push(answer);
            }
            connection.require_no_more().map(|()| true)
        };
        let has_all = read().map_err(|failure| self.failed(PAUSE, TIMEOUT, failure))?;
        self.connection = Some(connection);
        if !has_all {
            self.answers = Some(DueAnswers { answers, runs });
            return Ok(None);
        }
        let mut answers = answers.into_iter();
        let mut next = |request| {
            let missing =
                || Error::Answer { operation: operation(request), problem: "there is none".into() };
            answers.next().ok_or_else(missing)
        };
        let before = next(STATE)?;
        if runs {
            done(PAUSE, next(PAUSE)?)?;
        }
        let save = Request { method: "PUT", path: SAVE, body: None };
        let saved = done(save, next(save)?);
        let resumed = if runs { done(RESUME, next(RESUME)?) } else { Ok(()) };
        Ok(Some(WholePause { before: state_of(before)?, saved, resumed }))
    }

    /// Gives the connection up: answers to what was asked may still come.
    pub fn disconnect(&mut self) {
        (self.connection, self.answers) = (None, None);
    }

    /// Has the paused VM's devices and its RAM written to files. Error: [`Error::Refused`] with
    /// Firecracker's reason.
    pub fn save(&mut self, state: &Path, memory: &Path) -> Result<()> {
        self.create_snapshot("Full", state, memory)
    }

    /// Has the paused VM's devices written to a file, and to another one the pages of its RAM that
    /// were written since the last snapshot, at their offsets. Error: [`Error::Refused`] with
    /// Firecracker's reason; the VM needs `track_dirty_pages`.
    pub fn save_changes(&mut self, state: &Path, memory: &Path) -> Result<()> {
        self.create_snapshot("Diff", state, memory)
    }

    fn create_snapshot(&mut self, kind: &str, state: &Path, memory: &Path) -> Result<()> {
        self.put(SAVE, &save_body(kind, state, memory), LOAD_TIMEOUT)
    }

    /// Loads a VM, and leaves it paused. The network cards of `taps` get those taps instead of the
    /// ones in the state. Error: [`Error::Refused`] with Firecracker's reason.
    pub fn load(
        &mut self,
        state: &Path,
        memory: MemoryBackend<'_>,
        taps: &[TapChoice],
    ) -> Result<()> {
        let (backend, path) = match memory {
            MemoryBackend::File(path) => ("File", path),
            MemoryBackend::Uffd(path) => ("Uffd", path),
        };
        let mut body = json!({
            "snapshot_path": state,
            "mem_backend": { "backend_type": backend, "backend_path": path },
            "resume_vm": false,
        });
        if !taps.is_empty() {
            let overrides = taps
                .iter()
                .map(|TapChoice { card, tap }| json!({ "iface_id": card, "host_dev_name": tap }));
            body["network_overrides"] = overrides.collect();
        }
        self.put("/snapshot/load", &body, LOAD_TIMEOUT)
    }

    /// Gives the loaded VM's drive `id` the file at `path`.
    pub fn set_drive(&mut self, id: &str, path: &Path) -> Result<()> {
        let body = json!({ "drive_id": id, "path_on_host": path });
        let (path, body) = (format!("/drives/{id}"), body.to_string());
        self.send(Request { method: "PATCH", path: &path, body: Some(&body) }, TIMEOUT)
    }

    /// Returns the data of the metadata service; null if there are none.
    pub fn metadata(&mut self) -> Result<Value> {
        self.get("/mmds")
    }

    /// Replaces the data of the metadata service.
    pub fn set_metadata(&mut self, data: &Value) -> Result<()> {
        self.put("/mmds", data, TIMEOUT)
    }

    fn get<T: serde::de::DeserializeOwned>(&mut self, path: &str) -> Result<T> {
        let request = Request { method: "GET", path, body: None };
        let answer = self.request(request, TIMEOUT)?;
        value_of(request, answer)
    }

    fn put(&mut self, path: &str, body: &Value, timeout: Duration) -> Result<()> {
        self.send(Request { method: "PUT", path, body: Some(&body.to_string()) }, timeout)
    }

    fn send(&mut self, request: Request<'_>, timeout: Duration) -> Result<()> {
        let answer = self.request(request, timeout)?;
        done(request, answer)
    }

    fn request(&mut self, request: Request<'_>, timeout: Duration) -> Result<Answer> {
        if self.answers.is_some() {
            // They would be taken for those to this request.
            self.disconnect();
        }
        let mut is_new = self.connection.is_none();
        loop {
            let mut connection = match self.connection.take() {
                Some(connection) => connection,
                None => self.open(&operation(request))?,
            };
            match connection.request(request, timeout) {
                Ok(answer) => {
                    self.connection = Some(connection);
                    return Ok(answer);
                }
                Err(Failure::Closed(_)) if !is_new => is_new = true,
                Err(failure) => return Err(self.failed(request, timeout, failure)),
            }
        }
    }

    fn take_connection(&mut self) -> Result<Connection> {
        self.connection
            .take()
            .ok_or_else(|| self.gone(&operation(PAUSE), io::ErrorKind::NotConnected.into()))
    }

    fn failed(&self, request: Request<'_>, timeout: Duration, failure: Failure) -> Error {
        let operation = operation(request);
        match failure {
            Failure::Closed(source) | Failure::Io(source) => self.gone(&operation, source),
            Failure::Timeout => self.timeout(operation, timeout),
            Failure::Answer(problem) => Error::Answer { operation, problem },
        }
    }

    /// The error of an `operation` that has not been answered for `waited`.
    pub(crate) fn timeout(&self, operation: impl Into<String>, waited: Duration) -> Error {
        Error::Timeout {
            socket: self.socket.clone(),
            operation: operation.into(),
            waited_ms: u64::try_from(waited.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

fn operation(request: Request<'_>) -> String {
    format!("{} {}", request.method, request.path)
}

/// The body of the request that saves a VM.
fn save_body(kind: &str, state: &Path, memory: &Path) -> Value {
    json!({ "snapshot_type": kind, "snapshot_path": state, "mem_file_path": memory })
}

/// The run state in the answer to [`STATE`].
fn state_of(answer: Answer) -> Result<InstanceState> {
    value_of(STATE, answer).map(|instance: Instance| instance.state)
}

/// The value in the body of an answer. Errors: the request was refused; it is another value.
fn value_of<T: serde::de::DeserializeOwned>(request: Request<'_>, answer: Answer) -> Result<T> {
    let answer = accepted(request, answer)?;
    serde_json::from_slice(&answer.body).map_err(|error| Error::Answer {
        operation: operation(request),
        problem: error.to_string(),
    })
}

/// Checks that the answer says that the request was carried out.
fn done(request: Request<'_>, answer: Answer) -> Result<()> {
    accepted(request, answer).map(drop)
}

/// The body of an answer that refuses.
#[derive(Deserialize)]
struct Fault {
    fault_message: String,
}

/// The answer, if it says that the request was carried out.
fn accepted(request: Request<'_>, answer: Answer) -> Result<Answer> {
    if (200..300).contains(&answer.status) {
        return Ok(answer);
    }
    let message = match serde_json::from_slice::<Fault>(&answer.body) {
        Ok(fault) => fault.fault_message,
        Err(_) => String::from_utf8_lossy(&answer.body).chars().take(200).collect(),
    };
    Err(Error::Refused { operation: operation(request), status: answer.status, message })
}
