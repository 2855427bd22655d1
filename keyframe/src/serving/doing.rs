//! What the page may have done beside pins and tags: a running VM put back to a checkpoint, by its engine; a clone started, by
//! `keyframe branch` in a process of its own that outlives this one.

use super::listed::Listed;
use super::said;
use crate::control::{Request, Response, client};
use crate::failure::Failure;
use crate::{keys, output, rundir};
use keyframe_web::Problem;
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A page waits no longer.
const PATIENCE: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Of what a clone that does not start has said.
const SAID_BYTES_MAX: u64 = 16 << 10;

/// Puts the VM that checkpoint `id` is of, and that runs, back to it.
pub fn roll_back(listed: &Listed, id: u64) -> Result<String, Problem> {
    let listing = listed.listing()?;
    let one = listing.get(id).ok_or_else(|| Problem::Unknown(format!("there is no checkpoint {id}")))?;
    let failed = |failure: Failure| Problem::Failed(said(&failure));
    let engine = rundir::find(Some(&one.vm)).map_err(|failure| Problem::Unknown(said(&failure)))?;
    let ask = |request: &Request| client::ask(&engine, request, PATIENCE).map_err(failed);
    // Another VM of that name may write to another store.
    match ask(&Request::Status)? {
        Response::Status(status) if Path::new(&status.store) == listed.place() => {}
        _ => return Err(Problem::Unknown(format!("VM {} runs, and does not write to this store", one.vm))),
    }
    match ask(&Request::Rollback { checkpoint: id.to_string() })? {
        Response::RolledBack(done) => Ok(format!(
            "VM {} is back at checkpoint {id} after {}; what it was is checkpoint {}",
            done.vm,
            output::duration(done.stood_ns),
            done.before
        )),
        other => Err(Problem::Failed(format!("unexpected answer: {other:?}"))),
    }
}

/// Starts a clone of checkpoint `id`.
pub fn branch(listed: &Listed, id: u64) -> Result<String, Problem> {
    let io = |e: std::io::Error| Problem::Failed(format!("start a clone: {e}"));
    let (out, err) = (tempfile::tempfile().map_err(io)?, tempfile::tempfile().map_err(io)?);
    let mut command = Command::new("/proc/self/exe");
    command.arg0("keyframe").args(["branch", "-n", "1", "--json", "--quiet", "--store"]);
    command.arg(listed.place()).arg(id.to_string());
    keys::pass_on(&mut command);
    // Ctrl-C is for the server alone.
    command.stdin(Stdio::null()).process_group(0);
    command.stdout(out.try_clone().map_err(io)?).stderr(err.try_clone().map_err(io)?);
    let mut child = command.spawn().map_err(io)?;
    let (pid, deadline) = (child.id(), Instant::now() + PATIENCE);
    let answer = loop {
        if let Ok(clones) = serde_json::from_slice::<Vec<Value>>(&written(&out)) {
            break Ok(told(&clones, pid));
        }
        if child.try_wait().map_err(io)?.is_some() {
            let words = String::from_utf8_lossy(&written(&err)).trim().replace('\n', "; ");
            break Err(Problem::Failed(words));
        }
        if Instant::now() > deadline {
            break Ok(format!("a clone of checkpoint {id} is being started; end it with: kill {pid}"));
        }
        std::thread::sleep(LOOK_EVERY);
    };
    // Somebody has to be told of its end.
    let waits = std::thread::Builder::new().name("clone".into()).spawn(move || child.wait());
    waits.map_err(io)?;
    answer
}

fn told(clones: &[Value], pid: u32) -> String {
    let text = |clone: &Value, key: &str| clone[key].as_str().unwrap_or_default().to_owned();
    let said = clones.iter().map(|clone| {
        let (name, qemu, folder) = (text(clone, "name"), &clone["qemu_pid"], text(clone, "directory"));
        format!("clone {name} runs: QEMU {qemu}, sockets and console in {folder}; end it with: kill {pid}")
    });
    said.collect::<Vec<_>>().join("; ")
}

fn written(file: &File) -> Vec<u8> {
    let len = file.metadata().map_or(0, |meta| meta.len()).min(SAID_BYTES_MAX);
    let mut bytes = vec![0; len as usize];
    let read = file.read_at(&mut bytes, 0).unwrap_or(0);
    bytes.truncate(read);
    bytes
}
