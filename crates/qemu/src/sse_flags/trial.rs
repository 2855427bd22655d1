//! The trial: a QEMU of the same binary whose virtual CPU raises known flags, one after the other.
//!
//! The trial shares nothing with the user's VM but the binary and its environment. Its guest has 2
//! MiB of RAM and a firmware of some instructions.

use super::firmware::{self, DIVISIONS};
use super::layout::{CpuLayout, DISTANCE_MAX, Trial};
use super::search::{self, CpuNames};
use crate::binary::hash_of;
use crate::spawn;
use crate::vm::{inherited_path, memfd};
use crate::{Error, Qmp, Result};
use keyframe_kernel::{Process, read_memory};
use keyframe_units::{HostVirt, PAGE_BYTES};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use serde_json::Value;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long QEMU may take to start, and the guest for all divisions.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The time between two looks at the guest.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// The error for flags that cannot be found, for the reason `problem`.
pub(super) fn unknown(problem: &str) -> Error {
    Error::SseFlags { problem: problem.into() }
}

/// The error for memory of a QEMU that cannot be read.
pub(super) fn unreadable(error: &keyframe_kernel::Error) -> Error {
    unknown(&format!("the memory of QEMU cannot be read: {error}"))
}

/// Finds out the layout of virtual CPUs in the QEMU binary that process `pid` runs, whose contents
/// have the BLAKE3 hash `binary`.
///
/// Errors: the binary cannot be run beside the process; no layout agrees with all divisions.
pub(super) fn run(pid: u32, binary: &str) -> Result<CpuLayout> {
    let (ours, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
    .map_err(Error::io("make a socket for the trial of a CPU"))?;
    let firmware = memfd("trial", firmware::image())?;
    let mut command = command(pid, binary)?;
    command.args(["-S", "-no-user-config", "-nodefaults", "-display", "none", "-vga", "none"]);
    command.args(["-nic", "none", "-m", "2", "-accel", "tcg"]);
    command.arg("-bios").arg(inherited_path(&firmware));
    command.arg("-chardev").arg(format!("socket,id=trial,fd={}", spawn::number(&theirs)));
    command.args(["-mon", "chardev=trial,mode=control"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    keyframe_kernel::child_setup::kill_with_parent(&mut command);
    let mut child = spawn::start(&mut command, &[&theirs, &firmware])?;
    drop(theirs);
    let trials = Qmp::over(ours, "of the trial of a CPU", TIMEOUT, &mut || {
        spawn::alive(&mut child, "before it answered its monitor")
    })
    .and_then(|qmp| try_divisions(qmp, &child));
    let killed = spawn::kill(&mut child);
    let (trials, names) = trials?;
    killed?;
    CpuLayout::of_trials(&trials, &names)
        .ok_or_else(|| unknown("its virtual CPUs lie in its memory in an unknown way"))
}

/// A command that runs the binary of process `pid`, whose contents have the BLAKE3 hash `binary`.
///
/// A process of the same user is no danger: its environment, by which a QEMU finds its modules,
/// counts too. The binary of another user's process runs with this user's rights only if no other
/// user could have changed it.
fn command(pid: u32, binary: &str) -> Result<Command> {
    let path = format!("/proc/{pid}/exe");
    let process = std::fs::metadata(format!("/proc/{pid}"))
        .map_err(Error::io(format!("read /proc/{pid}")))?;
    if process.uid() != rustix::process::geteuid().as_raw() {
        let installed = std::fs::read_link(&path).map_err(Error::io(format!("look up {path}")))?;
        let is_safe =
            is_beyond_others(&installed) && hash_of(&installed).is_ok_and(|found| found == binary);
        if !is_safe {
            return Err(unknown("another user could have changed its binary"));
        }
        return Ok(Command::new(installed));
    }
    let mut command = Command::new(path);
    let environment = std::fs::read(format!("/proc/{pid}/environ"))
        .map_err(Error::io(format!("read /proc/{pid}/environ")))?;
    command.env_clear();
    for variable in environment.split(|byte| *byte == 0) {
        let Some(at) = variable.iter().position(|byte| *byte == b'=') else { continue };
        let (name, value) = variable.split_at(at);
        let text = |bytes: &[u8]| std::ffi::OsString::from_vec(bytes.to_vec());
        if !name.is_empty() {
            command.env(text(name), text(value.get(1..).unwrap_or_default()));
        }
    }
    Ok(command)
}

/// True if only root and this user can change the file at `path`, or put another file in its place.
fn is_beyond_others(path: &Path) -> bool {
    let ours = rustix::process::geteuid().as_raw();
    path.is_absolute()
        && path.ancestors().all(|part| {
            std::fs::symlink_metadata(part).is_ok_and(|found| {
                [0, ours].contains(&found.uid()) && found.mode() & 0o022 == 0 && !found.is_symlink()
            })
        })
}

/// Has the guest of the trial do all divisions. Returns its CPU after each, and the names of its
/// model.
fn try_divisions(mut qmp: Qmp, child: &Child) -> Result<(Vec<Trial>, CpuNames)> {
    qmp.set_timeout(TIMEOUT);
    let process = Process::open(child.id()).map_err(|error| unreadable(&error))?;
    let names = CpuNames::of(&mut qmp)?;
    let mut registers = None;
    let mut trials = Vec::with_capacity(DIVISIONS.len());
    let deadline = Instant::now() + TIMEOUT;
    for number in 0..DIVISIONS.len() {
        if number == 0 {
            qmp.execute("cont", None)?;
        } else {
            qmp.execute("system_reset", None)?;
        }
        let (mxcsr, rip) = await_division(&mut qmp, number, deadline)?;
        let at = match registers {
            Some(at) => at,
            None => *registers.insert(find_registers(&process, number)?),
        };
        trials.push(Trial { memory: memory_at(&process, at), mxcsr, rip });
    }
    Ok((trials, names))
}

/// Waits until the guest has done the division `number`. Returns MXCSR with all flags, and the
/// instruction pointer.
fn await_division(qmp: &mut Qmp, number: usize, deadline: Instant) -> Result<(u32, u64)> {
    loop {
        let text = qmp.hmp("info registers")?;
        let field = |name: &str| {
            let (_, rest) = text.split_once(name)?;
            rest.split_whitespace().next()
        };
        let is_done = field("EAX=") == Some(&*firmware::eax())
            && field("ECX=") == Some(&*format!("{number:08x}"))
            && field("HLT=") == Some("1");
        if is_done {
            let hex = |name| u64::from_str_radix(field(name)?, 16).ok();
            return hex("MXCSR=")
                .and_then(|mxcsr| Some((u32::try_from(mxcsr).ok()?, hex("EIP=")?)))
                .ok_or_else(|| qmp.unexpected("info registers", &Value::Null));
        }
        if Instant::now() > deadline {
            return Err(unknown("its CPU did not carry out the trial"));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Returns the address of the CPU's registers after the division `number`.
fn find_registers(process: &Process, number: usize) -> Result<HostVirt> {
    let bytes: Vec<u8> =
        firmware::general(number).iter().flat_map(|register| register.to_le_bytes()).collect();
    match search::places_of(process, &bytes, &[])?[..] {
        [at] => Ok(HostVirt(at)),
        _ => Err(unknown("the registers of its CPU are not in one place of its memory")),
    }
}

/// Returns the memory from `at` on, as far as there is any.
fn memory_at(process: &Process, at: HostVirt) -> Vec<u8> {
    let mut memory = vec![0; DISTANCE_MAX];
    while read_memory(process, at, &mut memory).is_err() {
        let Some(shorter) = memory.len().checked_sub(PAGE_BYTES) else { break };
        memory.truncate(shorter);
    }
    memory
}
