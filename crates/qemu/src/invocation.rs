//! The user's command line: the definition of the VM.

use crate::binary::{self, QemuIdentity};
use crate::drives::{self, DiskServer, Drive};
use crate::gate::{NicSockets, net_gate};
use crate::media::{self, Medium};
use crate::options::{self, Argument};
use crate::record::{self, Clock, Wanted};
use crate::{Error, Result};
use jiff::Zoned;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Options that leave Keyframe no VM to protect, with why and what to do instead.
const REFUSED: &[(&str, &str, &str)] = &[
    (
        "incoming",
        "the VM's first state would come from elsewhere",
        "leave it out; `keyframe restore` starts a VM from a checkpoint",
    ),
    (
        "daemonize",
        "QEMU would leave the process that Keyframe started and watches",
        "leave it out, and put `keyframe run` itself into the background",
    ),
    (
        "loadvm",
        "the VM's state would be replaced after Keyframe has looked at it",
        "leave it out; `keyframe restore` starts a VM from a checkpoint",
    ),
    ("preconfig", "the machine would not exist yet when Keyframe looks at it", "leave it out"),
    ("h", "this prints help and starts no VM", "run it without keyframe"),
    ("help", "this prints help and starts no VM", "run it without keyframe"),
    ("version", "this prints a version and starts no VM", "run it without keyframe"),
];

/// A QEMU command line as the user gave it, understood as far as needed.
#[derive(Clone, Debug)]
pub struct Invocation {
    binary: PathBuf,
    words: Vec<String>,
    arguments: Vec<Argument>,
    vm_name: Option<String>,
    server: Option<DiskServer>,
    /// Who serves the media that it can only read.
    media: Option<DiskServer>,
    log: Option<PathBuf>,
    /// Behind all others.
    added: Vec<String>,
}

impl Invocation {
    /// Takes a line apart whose first word is the QEMU binary, which must exist and be one.
    ///
    /// Errors: [`Error::Binary`]; [`Error::CommandLine`] for an option that Keyframe cannot work
    /// under, and for words that are not UTF-8 (checkpoints keep the line as text).
    pub fn parse(words: Vec<OsString>) -> Result<Self> {
        let words = words.into_iter().map(text).collect::<Result<Vec<_>>>()?;
        let (name, rest) =
            words.split_first().map_or(("", &[][..]), |(name, rest)| (name.as_str(), rest));
        let arguments = options::parse(rest)?;
        for argument in &arguments {
            refuse(argument)?;
        }
        let binary = binary::find(name)?;
        binary::version(&binary)?;
        let vm_name = vm_name(&arguments);
        Ok(Self {
            binary,
            words,
            arguments,
            vm_name,
            server: None,
            media: None,
            log: None,
            added: Vec::new(),
        })
    }

    /// Which QEMU it is.
    pub fn identity(&self) -> Result<QemuIdentity> {
        QemuIdentity::of(&self.binary)
    }

    /// The binary that will be run.
    pub fn binary(&self) -> &Path {
        &self.binary
    }

    /// The VM's name from `-name`.
    pub fn vm_name(&self) -> Option<&str> {
        self.vm_name.as_deref()
    }

    /// True where the user wants the VM to start paused (`-S`).
    pub fn starts_paused(&self) -> bool {
        self.arguments.iter().any(|a| a.name() == "S")
    }

    /// The disks that the guest can write to. Error: [`Error::CommandLine`] for one that cannot be
    /// served.
    pub fn drives(&self) -> Result<Vec<Drive>> {
        drives::find(&self.arguments)
    }

    /// Has these disks served by `server`: the line that is run names it in place of the images.
    pub fn serve_drives(&mut self, server: &DiskServer) -> Result<()> {
        drives::rewrite(&self.arguments, server)?;
        self.server = Some(server.clone());
        Ok(())
    }

    /// The media that the guest can only read, and that a recording may have served.
    pub fn media(&self) -> Vec<Medium> {
        media::find(&self.arguments)
    }

    /// Has these served by `server`, where the VM is recorded.
    pub fn serve_media(&mut self, server: &DiskServer) {
        self.media = Some(server.clone());
    }

    /// Has the VM's network go through a gate with its sockets in `folder`, and tells these.
    ///
    /// Error: [`Error::CommandLine`] where packets could leave another way.
    pub fn gate(&mut self, folder: &Path) -> Result<Vec<NicSockets>> {
        let gate = net_gate(self.words.get(1..).unwrap_or_default(), folder)?;
        self.added = gate.words;
        Ok(gate.nics)
    }

    /// Has the VM recorded into `log`. What a person should know of how it differs from the user's.
    ///
    /// Error: [`Error::CommandLine`] for what cannot be recorded exactly.
    pub fn record(&mut self, log: &Path) -> Result<Vec<String>> {
        self.log = Some(log.into());
        Ok(self.run_words()?.1)
    }

    /// Whether it is.
    pub(crate) fn is_recorded(&self) -> bool {
        self.log.is_some()
    }

    /// The words to be run, and what differs.
    fn run_words(&self) -> Result<(Vec<String>, Vec<String>)> {
        let (line, notes) = match (&self.log, &self.server) {
            (None, None) => return Ok((self.words.clone(), Vec::new())),
            (None, Some(server)) => (drives::rewrite(&self.arguments, server)?, Vec::new()),
            (Some(log), server) => {
                let version = binary::version(&self.binary)?;
                let (mode, disks) = (record::Mode::Record, server.as_ref());
                let clock = Clock::From(&Zoned::now());
                record::made(
                    &self.arguments,
                    Wanted {
                        mode,
                        log,
                        disks,
                        media: self.media.as_ref(),
                        version: &version,
                        console: None,
                        clock,
                    },
                )?
            }
        };
        let binary = self.words.iter().take(1).cloned();
        Ok((binary.chain(line.iter().flat_map(Argument::words)).collect(), notes))
    }

    /// The line as the user gave it.
    pub fn words(&self) -> &[String] {
        &self.words
    }

    pub(crate) fn into_parts(self) -> Result<Parts> {
        let mut run = self.run_words()?.0;
        run.extend(self.added);
        let disks = self.server.map(|server| server.socket);
        Ok(Parts { binary: self.binary, user: self.words, run, disks })
    }

    pub(crate) fn arguments(&self) -> &[Argument] {
        &self.arguments
    }
}

/// What a launch needs.
pub(crate) struct Parts {
    pub binary: PathBuf,
    /// The user's words.
    pub user: Vec<String>,
    /// Those to be run.
    pub run: Vec<String>,
    /// The socket of the disks' server.
    pub disks: Option<PathBuf>,
}

fn refuse(argument: &Argument) -> Result<()> {
    match REFUSED.iter().find(|(name, ..)| *name == argument.name()) {
        Some((_, reason, fix)) => Err(Error::CommandLine {
            argument: argument.display(),
            reason: (*reason).into(),
            fix: (*fix).into(),
        }),
        None => Ok(()),
    }
}

/// A word as text.
pub(crate) fn text(word: OsString) -> Result<String> {
    word.into_string().map_err(|word| Error::CommandLine {
        argument: word.to_string_lossy().into_owned(),
        reason: "this is not UTF-8".into(),
        fix: "use paths and names that are UTF-8: checkpoints keep the line as text".into(),
    })
}

/// The guest's name: the last one given.
pub(crate) fn vm_name(arguments: &[Argument]) -> Option<String> {
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

    fn parse(line: &str) -> Result<Invocation> {
        Invocation::parse(line.split(' ').map(OsString::from).collect())
    }

    #[test]
    fn lines_that_leave_no_vm_to_protect_are_refused_with_a_way_out() {
        for line in ["-incoming tcp:0:1", "--daemonize", "-loadvm x", "-preconfig", "-version"] {
            let error = parse(&format!("qemu-system-x86_64 -m 64 {line}")).unwrap_err();
            assert!(error.to_string().contains(line.trim_start_matches('-')), "{error}");
            assert!(error.fix().is_some(), "{error}");
        }
        // The same words as values are none of these options.
        parse("qemu-system-x86_64 -append -incoming -name -daemonize").unwrap();
    }

    #[test]
    fn a_binary_that_is_missing_or_no_qemu_is_named() {
        for name in ["no-such-qemu-7", "/bin/true", "/no/such/qemu", "/etc", ""] {
            let error = parse(name).unwrap_err();
            assert!(
                matches!(&error, Error::Binary { path, .. } if path.as_os_str().is_empty() == name.is_empty()),
                "{error}"
            );
            assert!(error.to_string().contains(name) && error.fix().is_some(), "{error}");
        }
    }

    #[test]
    fn the_name_is_the_guests() {
        let name = |line: &str| {
            parse(&format!("qemu-system-x86_64 {line}")).unwrap().vm_name().map(str::to_owned)
        };
        assert_eq!(name("-name web1").as_deref(), Some("web1"));
        assert_eq!(name("-name guest=db,,2,debug-threads=on").as_deref(), Some("db,2"));
        assert_eq!(name("-name a -name process=x").as_deref(), Some("a"));
        assert_eq!(name("-S"), None);
    }

    #[test]
    fn the_identity_tells_binaries_apart() {
        let identity = parse("qemu-system-x86_64").unwrap().identity().unwrap();
        assert!(identity.version.starts_with(|c: char| c.is_ascii_digit()), "{identity:?}");
        assert_eq!(identity.blake3.len(), 64);
        assert!(identity.path.is_absolute());
    }
}
