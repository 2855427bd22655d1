//! What a QEMU binary offers: the binary is asked once, and the cache remembers the answer.
//!
//! ```text
//!   processor          a QEMU without a machine answers `query-target`
//!   log's header       a QEMU without a machine records, and ends at once: the log begins with it
//!   plugin interface   a QEMU without a machine loads plugins, until one says that it was called
//! ```
//!
//! Invariant: no probe shares anything with a VM but the binary.

use crate::vm::{inherited_path, memfd, supported_processor};
use crate::{Error, QemuIdentity, Result, binary, binary_cache, spawn};
use keyframe_machine::Processor;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// How long QEMU may take for a probe.
const TIMEOUT: Duration = Duration::from_secs(20);
/// The directories of the answers, in the cache.
const LOGS: &str = "log-headers";
const PLUGINS: &str = "plugin-interfaces";
/// The most that is read of QEMU's messages.
const MESSAGE_BYTES_MAX: u64 = 64 << 10;
/// The bytes with which a log begins.
const HEADER_BYTES: usize = 4;

/// A plugin to try.
#[derive(Clone, Debug)]
pub struct PluginCandidate {
    /// The version of the plugin interface for which it was built.
    pub interface: u32,
    /// The library.
    pub library: PathBuf,
    /// A text that it prints when it is called without arguments. It then refuses to be installed.
    pub refusal: &'static str,
}

/// An answer in the cache: the interface that a binary accepts, of those that were `tried`.
#[derive(Serialize, Deserialize)]
struct AcceptedPlugin {
    tried: Vec<u32>,
    accepted: usize,
}

/// Returns the first four bytes of the record/replay logs that the binary `qemu` writes. The
/// directory `cache`, if there is one, holds the answer for later.
///
/// Errors: [`Error::Probe`] if the binary cannot record; the binary cannot be run.
pub fn log_header(qemu: &QemuIdentity, cache: Option<&Path>) -> Result<[u8; HEADER_BYTES]> {
    let key = key(qemu);
    if let Some(header) = cache.and_then(|cache| binary_cache::load(cache, LOGS, &key)) {
        return Ok(header);
    }
    let log = memfd("log", [])?;
    let mut command = command(&qemu.path);
    command.arg("-icount").arg(format!("shift=0,rr=record,rrfile={}", inherited_path(&log)));
    command.args(["-qmp", "stdio"]);
    let quit = b"{\"execute\":\"qmp_capabilities\"}{\"execute\":\"quit\"}";
    let messages = run(command, quit, &[&log])?.messages;
    let mut header = [0; HEADER_BYTES];
    let read = File::from(log).read_exact_at(&mut header, 0);
    if read.is_err() || header == [0; HEADER_BYTES] {
        return Err(Error::Probe {
            path: qemu.path.clone(),
            feature: "record/replay",
            problem: last_line(&messages, "it wrote no log"),
        });
    }
    if let Some(cache) = cache {
        binary_cache::store(cache, LOGS, &key, &header);
    }
    Ok(header)
}

/// Returns the processor that the binary at `qemu` emulates.
///
/// Errors: [`Error::Binary`] if Keyframe does not support it; the binary cannot be run.
pub fn processor(qemu: &Path) -> Result<Processor> {
    let mut command = command(qemu);
    command.args(["-qmp", "stdio"]);
    let questions = b"{\"execute\":\"qmp_capabilities\"}{\"execute\":\"query-target\"}\
                      {\"execute\":\"quit\"}";
    let output = run(command, questions, &[])?;
    let mut answers = output.answers.lines().filter_map(|line| serde_json::from_str(line).ok());
    let arch = |answer: Value| Some(answer.get("return")?.get("arch")?.as_str()?.to_owned());
    match answers.find_map(arch) {
        Some(name) => supported_processor(&name, qemu),
        None => Err(Error::Probe {
            path: qemu.into(),
            feature: "query-target",
            problem: last_line(&output.messages, "it does not tell which processor it emulates"),
        }),
    }
}

/// Returns the number of the first of `candidates` that the binary `qemu` accepts. The directory
/// `cache`, if there is one, holds the answer for later. If the file at the binary's path is another
/// one by now, that one is asked.
///
/// Errors: [`Error::Probe`] if it accepts none, with its reason for refusing the first one; the
/// binary cannot be run.
pub fn plugin_interface(
    qemu: &QemuIdentity,
    candidates: &[PluginCandidate],
    cache: Option<&Path>,
) -> Result<usize> {
    let qemu = &QemuIdentity::of_known(&binary::find(&qemu.path.to_string_lossy())?, qemu)?;
    let key = key(qemu);
    let tried: Vec<u32> = candidates.iter().map(|candidate| candidate.interface).collect();
    let known = cache.and_then(|cache| binary_cache::load(cache, PLUGINS, &key));
    let known = known.filter(|known: &AcceptedPlugin| known.tried == tried);
    if let Some(known) = known.filter(|known| known.accepted < candidates.len()) {
        return Ok(known.accepted);
    }
    let mut refusal = None;
    for (accepted, candidate) in candidates.iter().enumerate() {
        let mut command = command(&qemu.path);
        let library = candidate.library.display().to_string().replace(',', ",,");
        command.arg("-plugin").arg(format!("file={library}"));
        let messages = run(command, b"", &[])?.messages;
        if messages.contains(candidate.refusal) {
            if let Some(cache) = cache {
                binary_cache::store(cache, PLUGINS, &key, &AcceptedPlugin { tried, accepted });
            }
            return Ok(accepted);
        }
        refusal.get_or_insert_with(|| last_line(&messages, "it says nothing"));
    }
    let refusal = refusal.unwrap_or_default();
    let problem = format!("{refusal} (Keyframe has plugins for the interfaces {tried:?})");
    Err(Error::Probe { path: qemu.path.clone(), feature: "plugins", problem })
}

/// The name of a binary in the cache. A wrapper script stays the same when the QEMU that it runs is
/// another one; its version does not.
fn key(qemu: &QemuIdentity) -> String {
    let text = format!("{} {}", qemu.blake3, qemu.version);
    blake3::hash(text.as_bytes()).to_hex().to_string()
}

/// The binary `qemu` without a machine.
fn command(qemu: &Path) -> Command {
    let mut command = Command::new(qemu);
    command.args(["-S", "-no-user-config", "-nodefaults", "-display", "none"]);
    command.args(["-machine", "none", "-accel", "tcg"]);
    command
}

/// The output of a probe.
struct Output {
    /// What its monitor answered.
    answers: String,
    /// Its messages.
    messages: String,
}

/// Runs `command` with `input` as its standard input until it ends. It inherits `descriptors`.
///
/// Errors: it cannot be run, or it does not end in time.
fn run(mut command: Command, input: &[u8], descriptors: &[&OwnedFd]) -> Result<Output> {
    let failed = format!("probe {}", command.get_program().to_string_lossy());
    // Files take all output, however much it is.
    let (answers, messages) =
        (File::from(memfd("answers", [])?), File::from(memfd("messages", [])?));
    let copy = |file: &File| file.try_clone().map_err(Error::io(failed.clone()));
    command.stdin(Stdio::piped()).stdout(copy(&answers)?).stderr(copy(&messages)?);
    keyframe_kernel::child_setup::kill_with_parent(&mut command);
    let mut child = spawn::start(&mut command, descriptors)?;
    if let Some(mut stdin) = child.stdin.take() {
        // One that has ended takes no input.
        let _ = stdin.write_all(input);
    }
    if spawn::wait(&mut child, TIMEOUT)?.is_none() {
        spawn::kill(&mut child)?;
        let late = std::io::Error::new(std::io::ErrorKind::TimedOut, "it did not end in time");
        return Err(Error::io(failed.clone())(late));
    }
    let read = |file| text(file).map_err(Error::io(failed.clone()));
    Ok(Output { answers: read(answers)?, messages: read(messages)? })
}

/// The text in `file`, from its beginning.
fn text(mut file: File) -> std::io::Result<String> {
    let mut text = Vec::new();
    file.rewind()?;
    file.take(MESSAGE_BYTES_MAX).read_to_end(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// The last line of `messages` without the program's name; `otherwise` if there is none.
fn last_line(messages: &str, otherwise: &str) -> String {
    let line = messages.lines().map(str::trim).rfind(|line| !line.is_empty());
    let line = line.map(|line| line.split_once(": ").map_or(line, |(_, message)| message));
    line.unwrap_or(otherwise).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const REFUSAL: &str = "keyframe plugin: argument tool is missing";

    /// A script that runs the program `target`, and notes each run.
    fn script(dir: &Path, target: &str) -> QemuIdentity {
        let path = dir.join("qemu");
        let text = format!("#!/bin/sh\necho >> {}/runs\nexec {target} \"$@\"\n", dir.display());
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        QemuIdentity { blake3: binary::hash_of(&path).unwrap(), path, version: "1".into() }
    }

    fn runs(dir: &Path) -> usize {
        std::fs::read(dir.join("runs")).unwrap_or_default().len()
    }

    fn candidates(dir: &Path) -> Vec<PluginCandidate> {
        let all = [
            (7, keyframe_embedded_plugins::PLUGIN_7),
            (4, keyframe_embedded_plugins::PLUGIN_4),
            (1, keyframe_embedded_plugins::PLUGIN_1),
        ];
        let write = |(interface, bytes): (u32, &[u8])| {
            // QEMU takes a comma as the end of a path.
            let library = dir.join(format!("a,b{interface}.so"));
            std::fs::write(&library, bytes).unwrap();
            PluginCandidate { interface, library, refusal: REFUSAL }
        };
        all.into_iter().map(write).collect()
    }

    #[test]
    fn a_binary_is_asked_for_its_log_once() {
        let dir = tempfile::tempdir().unwrap();
        let qemu = script(dir.path(), "qemu-system-x86_64");
        let cache = dir.path().join("cache");
        for _ in 0..2 {
            let header = log_header(&qemu, Some(&cache)).unwrap();
            assert_eq!(header[..3], [0, 0xe0, 0x20]);
            assert_eq!(runs(dir.path()), 1);
        }
        let updated = QemuIdentity { version: "2".into(), ..qemu };
        log_header(&updated, Some(&cache)).unwrap();
        assert_eq!(runs(dir.path()), 2, "the script runs another QEMU now");
    }

    #[test]
    fn a_binary_is_asked_for_its_plugin_interface_once() {
        let dir = tempfile::tempdir().unwrap();
        let qemu = script(dir.path(), "qemu-system-x86_64");
        let (all, cache) = (candidates(dir.path()), dir.path().join("cache"));
        let accepted = plugin_interface(&qemu, &all, Some(&cache)).unwrap();
        let before = runs(dir.path());
        assert_eq!(plugin_interface(&qemu, &all, Some(&cache)).unwrap(), accepted);
        assert_eq!(runs(dir.path()), before);
        // The one that it accepts alone; then the others.
        assert_eq!(plugin_interface(&qemu, &all[accepted..=accepted], None).unwrap(), 0);
        let others: Vec<_> =
            all.iter().filter(|one| one.interface != all[accepted].interface).cloned().collect();
        let refused = plugin_interface(&qemu, &others, Some(&cache)).unwrap_err().to_string();
        assert!(refused.contains("plugins for the interfaces ["), "{refused}");
    }

    #[test]
    fn a_program_that_offers_nothing_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let qemu = script(dir.path(), "true");
        let refused = log_header(&qemu, None).unwrap_err();
        assert!(refused.to_string().contains("it wrote no log"), "{refused}");
        let refused = plugin_interface(&qemu, &candidates(dir.path()), None).unwrap_err();
        assert!(refused.to_string().contains("[7, 4, 1]"), "{refused}");
        let gone = QemuIdentity { path: dir.path().join("gone"), ..qemu };
        assert!(matches!(plugin_interface(&gone, &[], None), Err(Error::Binary { .. })));
    }
}
