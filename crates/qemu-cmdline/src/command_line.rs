//! The command line that a user gave, with the changes that a launch makes.

use crate::drives::{DiskServer, Drive, drives, rewrite_drives};
use crate::media::{Medium, media};
use crate::net_gate::{NicSockets, net_gate};
use crate::options::{self, Argument};
use crate::recording::{RecordingClock, RecordingLineOptions, RecordingMode, recording_arguments};
use crate::{CommandLineError, Result};
use jiff::Zoned;
use keyframe_machine::Processor;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Options under which Keyframe has no VM to control: name, reason, fix.
const REFUSED: &[(&str, &str, &str)] = &[
    (
        "incoming",
        "the VM's first state would come from elsewhere",
        "remove it; `keyframe restore` starts a VM from a checkpoint",
    ),
    (
        "daemonize",
        "QEMU would leave the process that Keyframe started and watches",
        "remove it, and run `keyframe run` itself in the background",
    ),
    (
        "loadvm",
        "the VM's state would be replaced after Keyframe has audited it",
        "remove it; `keyframe restore` starts a VM from a checkpoint",
    ),
    ("preconfig", "the machine would not exist yet when Keyframe audits it", "remove it"),
    ("h", "this prints help and starts no VM", "run it without keyframe"),
    ("help", "this prints help and starts no VM", "run it without keyframe"),
    ("version", "this prints a version and starts no VM", "run it without keyframe"),
];

/// A QEMU command line as the user gave it, and the changes for its run.
#[derive(Clone, Debug)]
pub struct CommandLine {
    words: Vec<String>,
    arguments: Vec<Argument>,
    disk_server: Option<DiskServer>,
    /// Serves the media that the guest can only read, if the VM is recorded.
    media_server: Option<DiskServer>,
    recording: Option<Recording>,
    /// Words after all others.
    appended: Vec<String>,
}

/// How a VM is recorded.
#[derive(Clone, Debug)]
struct Recording {
    log: PathBuf,
    qemu_version: String,
    processor: Processor,
    started: Zoned,
}

/// The words of a command line to run, the binary first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunWords {
    /// The words.
    pub words: Vec<String>,
    /// The differences from the user's machine that the user should know, a text each.
    pub notes: Vec<String>,
}

impl CommandLine {
    /// Parses a command line whose first word names the QEMU binary.
    ///
    /// Error: [`CommandLineError::Argument`] for an option under which Keyframe has no VM to
    /// control, and for a word that is not UTF-8 (checkpoints keep the line as text).
    pub fn parse(words: Vec<OsString>) -> Result<Self> {
        let words = words.into_iter().map(word_text).collect::<Result<Vec<_>>>()?;
        let arguments = options::parse(words.get(1..).unwrap_or_default())?;
        for argument in &arguments {
            refuse(argument)?;
        }
        Ok(Self {
            words,
            arguments,
            disk_server: None,
            media_server: None,
            recording: None,
            appended: Vec::new(),
        })
    }

    /// Returns the words as the user gave them.
    pub fn words(&self) -> &[String] {
        &self.words
    }

    /// Returns the arguments as the user gave them.
    pub fn arguments(&self) -> &[Argument] {
        &self.arguments
    }

    /// Returns the VM's name from `-name`; `None` if the command line has none.
    pub fn vm_name(&self) -> Option<String> {
        vm_name(&self.arguments)
    }

    /// Returns true if the user wants the VM to start paused (`-S`).
    pub fn starts_paused(&self) -> bool {
        self.arguments.iter().any(|a| a.name() == "S")
    }

    /// Returns the disks that the guest can write to.
    ///
    /// Error: [`CommandLineError::Argument`] for a disk that cannot be served.
    pub fn drives(&self) -> Result<Vec<Drive>> {
        drives(&self.arguments)
    }

    /// Has `server` serve the disks that the guest can write to.
    ///
    /// Error: [`CommandLineError::Argument`] for a disk that cannot be served.
    pub fn serve_drives(&mut self, server: &DiskServer) -> Result<()> {
        rewrite_drives(&self.arguments, server)?;
        self.disk_server = Some(server.clone());
        Ok(())
    }

    /// Returns the server of the disks; `None` before [`CommandLine::serve_drives`].
    pub fn disk_server(&self) -> Option<&DiskServer> {
        self.disk_server.as_ref()
    }

    /// Returns the media that the guest can only read and that a server can serve.
    pub fn media(&self) -> Vec<Medium> {
        media(&self.arguments)
    }

    /// Has `server` serve the read-only media if the VM is recorded.
    pub fn serve_media(&mut self, server: &DiskServer) {
        self.media_server = Some(server.clone());
    }

    /// Makes the VM's packets pass a gate with its sockets in the directory `folder`. Returns the
    /// sockets of each NIC.
    ///
    /// Error: [`CommandLineError::Argument`] if packets could leave another way.
    pub fn add_net_gate(&mut self, folder: &Path) -> Result<Vec<NicSockets>> {
        let gate = net_gate(self.words.get(1..).unwrap_or_default(), folder)?;
        self.appended = gate.words;
        Ok(gate.nics)
    }

    /// Has QEMU, of version `qemu_version` and for the guest's `processor`, record the VM into the
    /// file `log`. The guest's real-time clock begins at `started`. Returns the differences from the user's machine, as
    /// texts for the user.
    ///
    /// Error: [`CommandLineError::Argument`] for a machine that cannot be recorded exactly.
    pub fn record(
        &mut self,
        log: &Path,
        qemu_version: &str,
        processor: Processor,
        started: Zoned,
    ) -> Result<Vec<String>> {
        let qemu_version = qemu_version.to_owned();
        self.recording = Some(Recording { log: log.into(), qemu_version, processor, started });
        Ok(self.run_words()?.notes)
    }

    /// Returns true if [`CommandLine::record`] has been called.
    pub fn is_recorded(&self) -> bool {
        self.recording.is_some()
    }

    /// Makes the words to run: the user's, with the changes that were asked for.
    ///
    /// Error: [`CommandLineError::Argument`] for a machine that cannot be recorded exactly.
    pub fn run_words(&self) -> Result<RunWords> {
        let (arguments, notes) = match (&self.recording, &self.disk_server) {
            (None, None) => {
                let words = self.words.iter().chain(&self.appended).cloned().collect();
                return Ok(RunWords { words, notes: Vec::new() });
            }
            (None, Some(server)) => (rewrite_drives(&self.arguments, server)?, Vec::new()),
            (Some(recording), server) => recording_arguments(
                &self.arguments,
                RecordingLineOptions {
                    mode: RecordingMode::Record,
                    log: &recording.log,
                    disks: server.as_ref(),
                    media: self.media_server.as_ref(),
                    qemu_version: &recording.qemu_version,
                    processor: recording.processor,
                    console: None,
                    clock: RecordingClock::StartAt(&recording.started),
                },
            )?,
        };
        let mut words: Vec<String> = self.words.iter().take(1).cloned().collect();
        words.extend(arguments.iter().flat_map(Argument::words));
        words.extend(self.appended.iter().cloned());
        Ok(RunWords { words, notes })
    }
}

fn refuse(argument: &Argument) -> Result<()> {
    match REFUSED.iter().find(|(name, ..)| *name == argument.name()) {
        Some((_, reason, fix)) => {
            Err(CommandLineError::argument(argument.display(), *reason, *fix))
        }
        None => Ok(()),
    }
}

/// Returns a word as text.
///
/// Error: [`CommandLineError::Argument`] for a word that is not UTF-8.
pub fn word_text(word: OsString) -> Result<String> {
    word.into_string().map_err(|word| {
        CommandLineError::argument(
            word.to_string_lossy(),
            "this is not UTF-8",
            "use paths and names in UTF-8: checkpoints keep the command line as text",
        )
    })
}

/// Returns the guest's name, from the last `-name` that has one; `None` if no `-name` has one.
pub fn vm_name(arguments: &[Argument]) -> Option<String> {
    let names = arguments.iter().rev().filter(|a| a.name() == "name");
    names
        .filter_map(|a| {
            options::value_of(&options::keys(a.value(), "guest"), "guest").map(str::to_owned)
        })
        .find(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<CommandLine> {
        CommandLine::parse(line.split(' ').map(OsString::from).collect())
    }

    #[test]
    fn lines_without_a_vm_to_control_are_refused_with_a_fix() {
        for line in ["-incoming tcp:0:1", "--daemonize", "-loadvm x", "-preconfig", "-version"] {
            let error = parse(&format!("qemu-system-x86_64 -m 64 {line}")).unwrap_err();
            assert!(error.to_string().contains(line.trim_start_matches('-')), "{error}");
            assert!(error.fix().is_some(), "{error}");
        }
        // The same words are allowed as values.
        parse("qemu-system-x86_64 -append -incoming -name -daemonize").unwrap();
    }

    #[test]
    fn the_name_is_the_guests() {
        let name = |line: &str| parse(&format!("qemu-system-x86_64 {line}")).unwrap().vm_name();
        assert_eq!(name("-name web1").as_deref(), Some("web1"));
        assert_eq!(name("-name guest=db,,2,debug-threads=on").as_deref(), Some("db,2"));
        assert_eq!(name("-name a -name process=x").as_deref(), Some("a"));
        assert_eq!(name("-S"), None);
    }
}
