//! Starts QEMU: which descriptors it inherits, which signals it does not see, and how its end is
//! noticed.
//!
//! QEMU stays in our process group, because `-serial stdio` needs the terminal, which belongs to
//! the group. The terminal's Ctrl-C would thus reach QEMU too and end the guest before we can bring
//! the run to an orderly end, so QEMU starts with SIGINT blocked: a child inherits the mask of the
//! thread that starts it, and QEMU's own handler is then never run. The same holds for SIGQUIT
//! (Ctrl-\).
//!
//! Descriptors are made with close-on-exec. Those meant for QEMU lose it for the moment of the
//! start, under a lock, so that no other QEMU started by us inherits them.

use crate::{Error, Result};
use keyframe_locks::IgnorePoison;
use keyframe_qemu_cmdline::{Argument, CommandLineError, waiting_socket};
use keyframe_qemu_stream::StreamError;
use nix::sys::signal::{SigSet, Signal};
use rustix::io::FdFlags;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Child, Command, ExitStatus};
use std::sync::Mutex;
use std::time::{Duration, Instant};

static STARTING: Mutex<()> = Mutex::new(());

/// How long a killed process may take to be gone.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// How long to look for the exit of a QEMU that closed a connection.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// The environment variables with secrets of Keyframe. QEMU does not get them, because a guest may
/// break into it.
const SECRETS: [&str; 4] =
    ["KEYFRAME_PASSPHRASE", "KEYFRAME_KEY_FILE", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"];

/// The signals that a terminal sends to a whole process group at a key press.
const TERMINAL_KEYS: [Signal; 2] = [Signal::SIGINT, Signal::SIGQUIT];

/// Starts `command`, which inherits `descriptors` under their own numbers and has Ctrl-C and Ctrl-\
/// blocked. Error: [`Error::Io`] if it cannot be started.
pub fn start(command: &mut Command, descriptors: &[&OwnedFd]) -> Result<Child> {
    for secret in SECRETS {
        command.env_remove(secret);
    }
    start_with_secrets(command, descriptors)
}

/// Starts `command` as [`start`] does, with the secrets of Keyframe in its environment: for a
/// process of Keyframe itself. Error: [`Error::Io`] if it cannot be started.
pub fn start_with_secrets(command: &mut Command, descriptors: &[&OwnedFd]) -> Result<Child> {
    let operation = || format!("start {}", command.get_program().to_string_lossy());
    let failed = operation();
    let _alone = STARTING.lock().ignore_poison();
    let mut blocked = SigSet::empty();
    blocked.extend(TERMINAL_KEYS);
    let before = blocked
        .thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_BLOCK)
        .map_err(|e| Error::io(format!("block SIGINT to {failed}"))(std::io::Error::from(e)))?;
    let child = inheriting(descriptors, || command.spawn());
    // Our own Ctrl-C must work again whatever happened.
    let restored = before.thread_set_mask();
    let mut child = child.map_err(Error::io(failed))?;
    if let Err(e) = restored {
        kill(&mut child)?;
        return Err(Error::io("unblock SIGINT")(std::io::Error::from(e)));
    }
    Ok(child)
}

fn inheriting(
    descriptors: &[&OwnedFd],
    spawn: impl FnOnce() -> std::io::Result<Child>,
) -> std::io::Result<Child> {
    let set = |flags: FdFlags| {
        descriptors
            .iter()
            .try_for_each(|fd| rustix::io::fcntl_setfd(fd.as_fd(), flags).map_err(Into::into))
    };
    let child = set(FdFlags::empty()).and_then(|()| spawn());
    set(FdFlags::CLOEXEC).and(child)
}

/// Returns the number under which a child that inherits `fd` finds it.
pub fn number(fd: &OwnedFd) -> i32 {
    fd.as_fd().as_raw_fd()
}

/// Checks that `child` runs. Errors: [`Error::Exited`] if it has ended, with `when`, the step in
/// which it should run; [`Error::Io`] if the kernel does not tell.
pub fn alive(child: &mut Child, when: &'static str) -> Result<()> {
    match exit_status(child)? {
        Some(status) => Err(Error::Exited { status, when }),
        None => Ok(()),
    }
}

/// Returns the exit status of `child`; `None` while it runs. Error: [`Error::Io`] if the kernel
/// does not tell.
pub fn exit_status(child: &mut Child) -> Result<Option<ExitStatus>> {
    child.try_wait().map_err(Error::io(format!("wait for QEMU (pid {})", child.id())))
}

/// Returns [`Error::Exited`] if `error` says that a connection to QEMU broke and `child` has ended;
/// otherwise returns `error`.
pub fn exited_instead(error: Error, child: &mut Child, when: &'static str) -> Error {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset};
    let broken = match &error {
        Error::Gone { .. } => true,
        Error::Io { source, .. } | Error::Stream(StreamError::Io { source, .. }) => {
            matches!(source.kind(), BrokenPipe | ConnectionReset)
        }
        _ => false,
    };
    if !broken {
        return error;
    }
    match wait(child, EXIT_TIMEOUT) {
        Ok(Some(status)) => Error::Exited { status, when },
        _ => error,
    }
}

/// How long QEMU may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// The same for a QEMU that waits for the client of a socket, which may be started by hand.
const CLIENT_TIMEOUT: Duration = Duration::from_mins(10);

/// Returns the longest time that a QEMU with the command line `line` may take until it answers its
/// monitor.
pub fn start_timeout(line: &[Argument]) -> Duration {
    if waiting_socket(line).is_some() { CLIENT_TIMEOUT } else { START_TIMEOUT }
}

/// Returns an error that names the socket if `error` is a timeout and QEMU waits for a client of a
/// socket on its command line. Otherwise returns `error`.
pub fn waits_instead(error: Error, line: &[Argument]) -> Error {
    match (&error, waiting_socket(line)) {
        (Error::Timeout { .. }, Some(argument)) => CommandLineError::Argument {
            argument: argument.display(),
            reason: "QEMU waits for a client of this socket, and none has connected".into(),
            fix: "connect a client, or let QEMU not wait for it: wait=off".into(),
        }
        .into(),
        _ => error,
    }
}

/// Waits for the end of `child` for at most `timeout`. Returns its exit status; `None` if it still
/// runs then. Error: [`Error::Io`] if the kernel does not tell.
pub fn wait(child: &mut Child, timeout: Duration) -> Result<Option<ExitStatus>> {
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(status) = exit_status(child)? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Kills `child`, waits until it is gone, and returns its exit status. Error: [`Error::Io`] if the
/// kernel refuses, or if `child` is still there after 10 s.
pub fn kill(child: &mut Child) -> Result<ExitStatus> {
    let operation = format!("kill QEMU (pid {})", child.id());
    child.kill().map_err(Error::io(operation.clone()))?;
    wait(child, KILL_TIMEOUT)?.ok_or_else(|| {
        Error::io(operation)(std::io::Error::new(
            std::io::ErrorKind::TimedOut,
            "it is still there after 10 s",
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Stdio;

    #[test]
    fn a_child_is_not_told_the_keys_of_a_store() {
        let mut command = Command::new("env");
        command
            .env("KEYFRAME_PASSPHRASE", "open sesame")
            .env("OTHER", "kept")
            .stdout(Stdio::piped());
        let child = start(&mut command, &[]).unwrap();
        let told = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
        assert!(told.contains("OTHER=kept") && !told.contains("open sesame"), "{told}");
    }

    #[test]
    fn a_child_has_sigint_blocked_and_sees_the_given_descriptors_alone() {
        let given = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        // A number that `ls` does not use itself.
        let kept = rustix::io::fcntl_dupfd_cloexec(&given, 500).unwrap();
        // No shell: some reset the mask for their own children.
        let output = |program: &str, argument: &str, descriptors: &[&OwnedFd]| {
            let mut command = Command::new(program);
            command.arg(argument).stdin(Stdio::null()).stdout(Stdio::piped());
            let child = start(&mut command, descriptors).unwrap();
            String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap()
        };
        let text = output("cat", "/proc/self/status", &[]);
        let mask = text.lines().find_map(|l| l.strip_prefix("SigBlk:")).unwrap().trim();
        assert_eq!(u64::from_str_radix(mask, 16).unwrap() & 0b10, 0b10, "{mask}");
        let text = output("ls", "/proc/self/fd", &[&given]);
        let fds: Vec<&str> = text.split_whitespace().collect();
        assert!(fds.contains(&number(&given).to_string().as_str()), "{text}");
        assert!(!fds.contains(&number(&kept).to_string().as_str()), "{text}");
        assert!(rustix::io::fcntl_getfd(&given).unwrap().contains(FdFlags::CLOEXEC));
        let ours = SigSet::thread_get_mask().unwrap();
        assert!(!ours.contains(Signal::SIGINT));
    }
}
