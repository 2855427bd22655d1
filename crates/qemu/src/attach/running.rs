//! What `/proc` tells of a QEMU that runs: its line, its binary, where it stands.

use crate::binary::QemuIdentity;
use crate::{Error, Qmp, Result};
use keyframe_qemu_cmdline::{options, vm_name, word_text};
use serde_json::Value;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// A running QEMU: its binary and its command line.
pub struct Running {
    /// The words of its command line, the binary first.
    pub words: Vec<String>,
    /// The binary.
    pub binary: PathBuf,
    vm_name: Option<String>,
}

impl Running {
    /// Reads binary, command line and name of process `pid`. Errors: [`Error::Attach`] if the
    /// process has no binary or command line that this user may read; [`Error::Io`] if reading
    /// fails.
    pub fn read(pid: u32) -> Result<Self> {
        let fail = |problem: String, fix: &str| Error::Attach { pid, problem, fix: fix.into() };
        let binary = binary(pid).map_err(|e| match e.kind() {
            std::io::ErrorKind::PermissionDenied if rustix::process::geteuid().is_root() => {
                fail("the kernel does not let root look at it".into(), crate::lifetime::FIND)
            }
            std::io::ErrorKind::PermissionDenied => {
                fail("it belongs to another user".into(), "run keyframe as that user, or as root")
            }
            _ => fail(format!("its binary cannot be looked up: {e}"), crate::lifetime::FIND),
        })?;
        let path = format!("/proc/{pid}/cmdline");
        let bytes = std::fs::read(&path).map_err(Error::io(format!("read {path}")))?;
        let words = words(&bytes)?;
        if words.is_empty() {
            return Err(fail("it has no command line".into(), crate::lifetime::FIND));
        }
        // A line that cannot be taken apart is no QEMU's.
        let vm_name = options::parse(words.get(1..).unwrap_or_default())
            .map_or(None, |arguments| vm_name(&arguments));
        Ok(Self { words, binary, vm_name })
    }

    /// Checks that the process, which has the id `pid`, is the QEMU of libvirt's `domain`, a name
    /// or a UUID. Error: [`Error::Attach`] if it is not.
    pub fn check_domain(&self, pid: u32, domain: &str) -> Result<()> {
        let uuid =
            self.words.windows(2).any(|w| w[0] == "-uuid" && w[1].eq_ignore_ascii_case(domain));
        if uuid || self.vm_name.as_deref() == Some(domain) {
            return Ok(());
        }
        let name = self.vm_name.as_deref().unwrap_or("none");
        Err(Error::Attach {
            pid,
            problem: format!("it is not the QEMU of libvirt's domain {domain}: its name is {name}"),
            fix: format!("`pgrep -f guest={domain}` finds the domain's QEMU"),
        })
    }
}

fn words(bytes: &[u8]) -> Result<Vec<String>> {
    let bytes = bytes.strip_suffix(b"\0").unwrap_or(bytes);
    if bytes.is_empty() {
        return Ok(Vec::new());
    }
    bytes.split(|b| *b == 0).map(|word| Ok(word_text(OsString::from_vec(word.to_vec()))?)).collect()
}

fn binary(pid: u32) -> std::io::Result<PathBuf> {
    let path = std::fs::read_link(format!("/proc/{pid}/exe"))?;
    // What a package upgrade replaced.
    let name = path.to_string_lossy();
    Ok(name.strip_suffix(" (deleted)").map_or_else(|| path.clone(), PathBuf::from))
}

/// Returns true if the name of the binary of process `pid` contains `qemu`.
pub fn is_qemu(pid: u32) -> bool {
    binary(pid).is_ok_and(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().contains("qemu"))
    })
}

/// Returns the identity of the binary that runs as process `pid`. The version comes from its
/// monitor `qmp`. Error: the binary cannot be read, or QEMU does not answer.
pub fn identity(qmp: &mut Qmp, pid: u32) -> Result<QemuIdentity> {
    let exe = format!("/proc/{pid}/exe");
    let path = binary(pid).map_err(Error::io(format!("look up {exe}")))?;
    let answer = qmp.execute("query-version", None)?;
    let version = version(&answer).ok_or_else(|| qmp.unexpected("query-version", &answer))?;
    QemuIdentity::hashed(Path::new(&exe), path, version)
}

/// Returns the version in the form of `--version`.
fn version(answer: &Value) -> Option<String> {
    let part = |key: &str| answer.get("qemu")?.get(key)?.as_u64();
    let release = format!("{}.{}.{}", part("major")?, part("minor")?, part("micro")?);
    match answer.get("package").and_then(Value::as_str).map(|p| p.trim().trim_matches(['(', ')'])) {
        None | Some("") => Some(release),
        Some(package) => Some(format!("{release} ({package})")),
    }
}

/// Returns the directory in which process `pid` was started with the words `words`. Error:
/// [`Error::Io`] if the process has ended, or if this user may not inspect it.
pub fn directory(pid: u32, words: &[String]) -> Result<PathBuf> {
    let path = format!("/proc/{pid}/cwd");
    let directory = std::fs::read_link(&path).map_err(Error::io(format!("look up {path}")))?;
    if words.iter().any(|w| w == "-daemonize" || w == "--daemonize") {
        // It has moved to the root since, when it had opened its files.
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let started = environment.split(|b| *b == 0).find_map(|v| v.strip_prefix(b"PWD="));
        let started = started.map(|v| PathBuf::from(OsString::from_vec(v.to_vec())));
        return Ok(started.filter(|dir| dir.is_absolute()).unwrap_or(directory));
    }
    Ok(directory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_line_is_read_word_by_word() {
        assert_eq!(
            words(b"qemu\0-append\0a b\0-name\0\0").unwrap(),
            ["qemu", "-append", "a b", "-name", ""]
        );
        assert!(words(b"").unwrap().is_empty());
        assert!(words(b"qemu\0\xff\0").is_err(), "not UTF-8");
    }

    #[test]
    fn a_version_is_the_one_that_the_binary_prints() {
        let qemu = json!({ "major": 7, "minor": 2, "micro": 22 });
        let answer = json!({ "qemu": qemu, "package": "Debian 1:7.2+dfsg-7+deb12u18" });
        assert_eq!(version(&answer).unwrap(), "7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)");
        assert_eq!(version(&json!({ "qemu": qemu, "package": "" })).unwrap(), "7.2.22");
        assert_eq!(version(&json!({})), None);
    }

    #[test]
    fn a_process_that_is_no_qemu_has_a_line_all_the_same() {
        let ours = Running::read(std::process::id()).unwrap();
        assert!(!ours.words.is_empty() && ours.binary.is_absolute());
        assert!(ours.check_domain(1, "web").unwrap_err().to_string().contains("web"));
    }
}
