//! VMs that the page starts: a clone with `keyframe branch`, or a checkpoint as it was with
//! `keyframe restore`. Each is a process of its own that outlives this one.

use super::listed::ListedStore;
use super::said;
use keyframe_session::run_dir::{self, RunKind};
use keyframe_store_keys as keys;
use keyframe_units::human_duration;
use keyframe_web::ApiError;
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The longest time for which a page waits for the VM.
const PATIENCE: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// The most bytes of the output of a VM that does not start.
const SAID_BYTES_MAX: u64 = 16 << 10;
/// The console's file of a restored VM, in its run directory.
const CONSOLE: &str = "console.log";

/// Starts a clone of checkpoint `id` with `keyframe branch`. Returns a text for the user. Errors:
/// the command cannot be started; it has ended, and the error holds its output.
pub fn branch(listed: &ListedStore, id: u64) -> Result<String, ApiError> {
    let (out, err) = (tempfile::tempfile().map_err(io)?, tempfile::tempfile().map_err(io)?);
    let words = ["branch", "-n", "1", "--json", "--quiet"];
    start((listed, id), &words, &out, &err, |pid| {
        let clones = serde_json::from_slice::<Vec<Value>>(&written(&out)).ok()?;
        Some(told(&clones, pid))
    })
}

fn told(clones: &[Value], pid: u32) -> String {
    let text = |clone: &Value, key: &str| clone[key].as_str().unwrap_or_default().to_owned();
    let said = clones.iter().map(|clone| {
        let (name, qemu, folder) = (text(clone, "name"), &clone["qemu_pid"], text(clone, "directory"));
        format!("clone {name} runs: QEMU {qemu}, sockets and console in {folder}; end it with: kill {pid}")
    });
    said.collect::<Vec<_>>().join("; ")
}

/// Starts the VM of checkpoint `id` with `keyframe restore`, and waits until it runs. Returns a
/// text for the user. If the VM does not run after 20 s, the text says that it is still being
/// started. Errors: the command cannot be started; it has ended, and the error holds its output.
pub fn restore(listed: &ListedStore, id: u64) -> Result<String, ApiError> {
    let folder = run_dir::of_restored().map_err(|e| ApiError::Failed(said(&e, e.fix())))?;
    // The VM's directory does not exist yet.
    let console = tempfile::Builder::new().prefix(".console-").tempfile_in(folder).map_err(io)?;
    let file = console.reopen().map_err(io)?;
    let mut console = Some(console);
    start((listed, id), &["restore", "--quiet"], &file, &file, |pid| {
        let all = run_dir::without_engine().ok()?;
        let own =
            |about: &run_dir::About| about.kind == RunKind::Restored && about.keyframe_pid == pid;
        let (directory, about) = all.into_iter().find(|(_, about)| own(about))?;
        let place = directory.join(CONSOLE);
        let kept = console.take().map(|console| console.persist(&place));
        let place = if matches!(kept, Some(Ok(_))) {
            format!(", console in {}", place.display())
        } else {
            String::new()
        };
        let (name, qemu) = (&about.vm, about.qemu_pid);
        Some(format!(
            "VM {name} runs as it was at checkpoint {id}: QEMU {qemu}{place}; end it with: keyframe stop --name {name}"
        ))
    })
}

/// Runs `keyframe WORDS --store STORE ID` until `runs` returns a text: the VM runs. Its output goes
/// to `out` and `err`.
fn start(
    (listed, id): (&ListedStore, u64),
    words: &[&str],
    out: &File,
    err: &File,
    mut runs: impl FnMut(u32) -> Option<String>,
) -> Result<String, ApiError> {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("keyframe").args(words).arg("--store").arg(listed.place()).arg(id.to_string());
    keys::pass_on(&mut command);
    // Ctrl-C is for the server alone.
    command.stdin(Stdio::null()).process_group(0);
    command.stdout(out.try_clone().map_err(io)?).stderr(err.try_clone().map_err(io)?);
    let mut child = command.spawn().map_err(io)?;
    let (pid, deadline) = (child.id(), Instant::now() + PATIENCE);
    let answer = loop {
        if let Some(text) = runs(pid) {
            break Ok(text);
        }
        if child.try_wait().map_err(io)?.is_some() {
            let words = String::from_utf8_lossy(&written(err)).trim().replace('\n', "; ");
            break Err(ApiError::Failed(words));
        }
        if Instant::now() > deadline {
            let after = human_duration(PATIENCE.as_nanos() as u64);
            break Ok(format!(
                "not there after {after}: checkpoint {id} is still being started; end it with: kill {pid}"
            ));
        }
        std::thread::sleep(LOOK_EVERY);
    };
    // The child's exit status must be collected.
    let waits = std::thread::Builder::new().name("started".into()).spawn(move || child.wait());
    waits.map_err(io)?;
    answer
}

#[expect(clippy::needless_pass_by_value, reason = "what map_err takes")]
fn io(e: std::io::Error) -> ApiError {
    ApiError::Failed(format!("start a VM: {e}"))
}

fn written(file: &File) -> Vec<u8> {
    let len = file.metadata().map_or(0, |meta| meta.len()).min(SAID_BYTES_MAX);
    let mut bytes = vec![0; len as usize];
    let read = file.read_at(&mut bytes, 0).unwrap_or(0);
    bytes.truncate(read);
    bytes
}
