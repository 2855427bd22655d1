//! Firecracker's API: the requests that Keyframe makes.
//!
//! A connection is kept, because it works also when the socket's file is gone. If it breaks, one
//! new one is tried: all requests here may be repeated.

use crate::config::VmConfig;
use crate::http::{Answer, Connection, Failure};
use crate::{Error, Result};
use keyframe_vmm::TapChoice;
use serde::Deserialize;
use serde_json::{Value, json};
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

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

/// A client of the API.
#[derive(Debug)]
pub struct Api {
    socket: PathBuf,
    connection: Option<Connection>,
}

impl Api {
    /// Connects to the API at `socket`. Error: [`Error::Gone`] if no process serves it.
    pub fn connect(socket: &Path) -> Result<Self> {
        let mut api = Self { socket: socket.to_owned(), connection: None };
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

    /// Pauses the VM.
    pub fn pause(&mut self) -> Result<()> {
        self.send("PATCH", "/vm", &json!({ "state": "Paused" }), TIMEOUT)
    }

    /// Resumes the VM. Has no effect if it runs.
    pub fn resume(&mut self) -> Result<()> {
        self.send("PATCH", "/vm", &json!({ "state": "Resumed" }), TIMEOUT)
    }

    /// Has the paused VM's devices and its RAM written to files. Error: [`Error::Refused`] with
    /// Firecracker's reason.
    pub fn save(&mut self, state: &Path, memory: &Path) -> Result<()> {
        let body = json!({
            "snapshot_type": "Full", "snapshot_path": state, "mem_file_path": memory,
        });
        self.send("PUT", "/snapshot/create", &body, LOAD_TIMEOUT)
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
        self.send("PUT", "/snapshot/load", &body, LOAD_TIMEOUT)
    }

    fn get<T: serde::de::DeserializeOwned>(&mut self, path: &str) -> Result<T> {
        let operation = format!("GET {path}");
        let answer = self.request("GET", path, None, TIMEOUT)?;
        let answer = accepted(&operation, answer)?;
        serde_json::from_slice(&answer.body)
            .map_err(|error| Error::Answer { operation, problem: error.to_string() })
    }

    fn send(&mut self, method: &str, path: &str, body: &Value, timeout: Duration) -> Result<()> {
        let answer = self.request(method, path, Some(&body.to_string()), timeout)?;
        accepted(&format!("{method} {path}"), answer).map(drop)
    }

    fn request(
        &mut self,
        method: &str,
        path: &str,
        body: Option<&str>,
        timeout: Duration,
    ) -> Result<Answer> {
        let operation = format!("{method} {path}");
        let mut is_new = self.connection.is_none();
        loop {
            let mut connection = match self.connection.take() {
                Some(connection) => connection,
                None => self.open(&operation)?,
            };
            match connection.request(method, path, body, timeout) {
                Ok(answer) => {
                    self.connection = Some(connection);
                    return Ok(answer);
                }
                Err(Failure::Closed(_)) if !is_new => is_new = true,
                Err(Failure::Closed(source) | Failure::Io(source)) => {
                    return Err(self.gone(&operation, source));
                }
                Err(Failure::Timeout) => {
                    let waited_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
                    return Err(Error::Timeout {
                        socket: self.socket.clone(),
                        operation,
                        waited_ms,
                    });
                }
                Err(Failure::Answer(problem)) => return Err(Error::Answer { operation, problem }),
            }
        }
    }
}

/// The body of an answer that refuses.
#[derive(Deserialize)]
struct Fault {
    fault_message: String,
}

/// The answer, if it says that the request was carried out.
fn accepted(operation: &str, answer: Answer) -> Result<Answer> {
    if (200..300).contains(&answer.status) {
        return Ok(answer);
    }
    let message = match serde_json::from_slice::<Fault>(&answer.body) {
        Ok(fault) => fault.fault_message,
        Err(_) => String::from_utf8_lossy(&answer.body).chars().take(200).collect(),
    };
    Err(Error::Refused { operation: operation.into(), status: answer.status, message })
}
