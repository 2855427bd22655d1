//! Starts Firecracker with the user's command line.
//!
//! Firecracker has no option to start a VM paused. So the configuration file is audited before
//! Firecracker starts, and what is refused later ends a guest that has run for some milliseconds.

use crate::api::{Api, InstanceState};
use crate::config::VmConfig;
use crate::process::Lifetime;
use crate::vm::FirecrackerVm;
use crate::{Error, Result, audit, identity::Identity};
use keyframe_vmm::{AuditFinding, Severity, VmOrigin, WritableDrive};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// How long Firecracker may take to start its VM.
const START_TIMEOUT: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// A command line of Firecracker that Keyframe can run.
#[derive(Clone, Debug)]
pub struct CommandLine {
    words: Vec<OsString>,
    binary: PathBuf,
    socket: PathBuf,
    config: VmConfig,
}

/// Returns true if `program` is Firecracker by its name.
pub fn is_firecracker(program: &OsStr) -> bool {
    let name = Path::new(program).file_name().unwrap_or_default().to_string_lossy();
    name == "firecracker" || name.starts_with("firecracker-")
}

impl CommandLine {
    /// Reads the command line `words`, the binary first, and its configuration file. Error: an
    /// option is missing, or does not fit; the file cannot be read.
    pub fn parse(words: Vec<OsString>) -> Result<Self> {
        let refuse = |subject: &str, reason: &str, fix: &str| Error::CommandLine {
            subject: subject.into(),
            reason: reason.into(),
            fix: fix.into(),
        };
        let binary = find(words.first().map_or(OsStr::new(""), OsString::as_os_str))?;
        if words.iter().any(|word| word == "--no-api") {
            return Err(refuse(
                "--no-api",
                "Keyframe pauses the VM through the API",
                "replace it by --api-sock SOCKET",
            ));
        }
        let socket = value(&words, "--api-sock").ok_or_else(|| {
            refuse("firecracker", "its API has no socket", "add --api-sock SOCKET")
        })?;
        let file = value(&words, "--config-file").ok_or_else(|| {
            refuse(
                "firecracker",
                "it has no configuration to start a VM with",
                "add --config-file FILE; or start the VM by yourself, and use keyframe attach --api",
            )
        })?;
        let text = std::fs::read_to_string(&file)
            .map_err(Error::io(format!("read {}", file.display())))?;
        let config = VmConfig::parse(&text).map_err(|error| {
            refuse(
                &file.display().to_string(),
                &format!("it is no configuration of Firecracker: {error}"),
                "try the same command line without keyframe",
            )
        })?;
        if std::fs::exists(&socket).unwrap_or(false) {
            return Err(refuse(
                &socket.display().to_string(),
                "the API's socket is there already, and Firecracker refuses it",
                "remove it, if no other Firecracker uses it",
            ));
        }
        Ok(Self { words, binary, socket, config })
    }

    /// Returns what the configuration file has that prevents exact checkpoints. Error: the binary
    /// is not Firecracker.
    pub fn refusals(&self) -> Result<Vec<AuditFinding>> {
        let identity = Identity::of_binary(&self.binary)?;
        let mut found = audit::audit(&self.config, &identity.version);
        found.retain(|finding| finding.severity == Severity::Refused);
        Ok(found)
    }

    /// Returns the drives to which the guest will be able to write. Error: the file of a drive
    /// cannot be looked at.
    pub fn writable_drives(&self) -> Result<Vec<WritableDrive>> {
        let directory =
            std::env::current_dir().map_err(Error::io("look up the working directory"))?;
        self.config.writable_drives(&directory)
    }

    /// Returns the size of the guest's RAM in bytes.
    pub fn ram_bytes(&self) -> u64 {
        self.config.machine.mem_size_mib << 20
    }
}

impl FirecrackerVm {
    /// Starts Firecracker by `line`. Its VM runs when this returns. Errors: Firecracker cannot be
    /// started, ends, or does not start its VM. No process is left then.
    pub fn launch(line: &CommandLine) -> Result<Self> {
        let mut command = Command::new(&line.binary);
        command.args(line.words.get(1..).unwrap_or_default());
        let mut lifetime = Lifetime::start(&mut command, &[])?;
        let waited = wait_for_vm(&mut lifetime, &line.socket);
        if let Err(error) = waited {
            let _ = lifetime.kill();
            let _ = std::fs::remove_file(&line.socket);
            return Err(error);
        }
        Self::take(lifetime, &line.socket, VmOrigin::Launched)
    }
}

/// Waits until the API at `socket` answers.
pub(crate) fn wait_for_api(lifetime: &mut Lifetime, socket: &Path) -> Result<Api> {
    let until = Instant::now() + START_TIMEOUT;
    loop {
        if let Some(exit) = lifetime.wait(Duration::ZERO)? {
            return Err(Error::Exited { status: exit.status(), when: "as it started" });
        }
        match Api::connect(socket).and_then(|mut api| api.instance().map(|_| api)) {
            Ok(api) => return Ok(api),
            Err(Error::Gone { .. }) if Instant::now() < until => std::thread::sleep(LOOK_EVERY),
            Err(error) => return Err(error),
        }
    }
}

fn wait_for_vm(lifetime: &mut Lifetime, socket: &Path) -> Result<()> {
    let mut api = wait_for_api(lifetime, socket)?;
    let until = Instant::now() + START_TIMEOUT;
    while api.instance()?.state == InstanceState::NotStarted {
        if let Some(exit) = lifetime.wait(LOOK_EVERY)? {
            return Err(Error::Exited { status: exit.status(), when: "as it started" });
        }
        if Instant::now() >= until {
            return Err(Error::Answer {
                operation: "start the VM".into(),
                problem: "Firecracker has not started it for 30 s".into(),
            });
        }
    }
    Ok(())
}

/// The value of the option `name`: the next word, or what follows `=`.
fn value(words: &[OsString], name: &str) -> Option<PathBuf> {
    let mut words = words.iter();
    while let Some(word) = words.next() {
        if word == name {
            return words.next().map(PathBuf::from);
        }
        let text = word.to_str().and_then(|word| word.strip_prefix(name)?.strip_prefix('='));
        if let Some(text) = text {
            return Some(text.into());
        }
    }
    None
}

/// Finds `program` as a shell does.
pub(crate) fn find(program: &OsStr) -> Result<PathBuf> {
    let path = Path::new(program);
    if path.components().count() > 1 {
        return std::path::absolute(path).map_err(Error::io(format!("find {}", path.display())));
    }
    let directories = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&directories).map(|d| d.join(path)).find(|p| p.is_file());
    found.ok_or_else(|| Error::CommandLine {
        subject: path.display().to_string(),
        reason: "there is no such program in PATH".into(),
        fix: "name the binary of Firecracker by its path".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn firecracker_is_known_by_its_name() {
        for name in ["firecracker", "/opt/fc/firecracker", "firecracker-v1.12.1-x86_64"] {
            assert!(is_firecracker(OsStr::new(name)), "{name}");
        }
        assert!(!is_firecracker(OsStr::new("qemu-system-x86_64")));
        assert!(!is_firecracker(OsStr::new("/firecracker/run")));
    }

    #[test]
    fn a_line_without_socket_or_configuration_is_refused_with_a_fix() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("vm.json");
        std::fs::write(&file, "{}").unwrap();
        let (file, socket) = (file.display(), dir.path().join("s"));
        let parse = |line: &str| CommandLine::parse(words(line));
        let socket = socket.display();
        for bad in [
            "/bin/firecracker".to_owned(),
            format!("/bin/firecracker --api-sock {socket}"),
            format!("/bin/firecracker --config-file {file}"),
            format!("/bin/firecracker --no-api --config-file {file}"),
            format!("/bin/firecracker --api-sock {file} --config-file {file}"),
        ] {
            let error = parse(&bad).unwrap_err();
            assert!(error.fix().is_some(), "{bad}: {error}");
        }
        let line = parse(&format!("/bin/firecracker --api-sock={socket} --config-file {file}"));
        assert_eq!(line.unwrap().ram_bytes(), 128 << 20);
    }
}
