//! The user's command line with the QEMU binary that it names.

#[cfg(doc)]
use crate::Error;
use crate::Result;
use crate::binary::{self, QemuIdentity};
use crate::probe;
use jiff::Zoned;
use keyframe_qemu_cmdline::options::{keys, value_of};
use keyframe_qemu_cmdline::{
    Argument, CommandLine, DiskServer, Drive, LineDrive, Medium, NicSockets, config_options,
    line_drives,
};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The size of RAM without `-m`.
const RAM_BYTES_DEFAULT: u64 = 128 << 20;

/// The most bytes of a configuration file.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Puts the options of configuration files in their place. Leaves a file to QEMU that cannot be
/// read, is no regular file, or has groups that are not known.
fn with_config_options(words: Vec<OsString>) -> Vec<OsString> {
    let mut out = Vec::with_capacity(words.len());
    let mut words = words.into_iter().peekable();
    while let Some(word) = words.next() {
        let is_config = matches!(word.to_str(), Some("-readconfig" | "--readconfig"));
        match words.peek().filter(|_| is_config).and_then(|path| options_of(Path::new(path))) {
            Some(options) => {
                words.next();
                out.extend(options.iter().flat_map(Argument::words).map(OsString::from));
            }
            None => out.push(word),
        }
    }
    out
}

fn options_of(path: &Path) -> Option<Vec<Argument>> {
    let about = std::fs::metadata(path).ok()?;
    if !about.is_file() || about.len() > CONFIG_BYTES_MAX {
        return None;
    }
    config_options(&std::fs::read_to_string(path).ok()?)
}

/// A QEMU command line as the user gave it, whose binary exists.
#[derive(Clone, Debug)]
pub struct Invocation {
    binary: PathBuf,
    line: CommandLine,
    vm_name: Option<String>,
}

impl Invocation {
    /// Parses a command line whose first word names the QEMU binary, and looks for that binary.
    /// Files of `-readconfig` are read, and their options take their place.
    ///
    /// Errors: [`Error::Binary`](crate::Error::Binary) if it is missing or not QEMU's system
    /// emulator, and those of [`CommandLine::parse`].
    pub fn parse(words: Vec<OsString>) -> Result<Self> {
        // First of all: another program has other options.
        let program = words.first().and_then(|word| word.to_str()).unwrap_or_default();
        let binary = binary::find(program)?;
        binary::version(&binary)?;
        let line = CommandLine::parse(with_config_options(words))?;
        let vm_name = line.vm_name();
        Ok(Self { binary, line, vm_name })
    }

    /// Returns the identity of the QEMU binary: path, version and hash. Error: the binary cannot be
    /// read, or does not answer as a QEMU.
    pub fn identity(&self) -> Result<QemuIdentity> {
        QemuIdentity::of(&self.binary)
    }

    /// Returns the path of the binary that will be run.
    pub fn binary(&self) -> &Path {
        &self.binary
    }

    /// Returns the command line.
    pub fn line(&self) -> &CommandLine {
        &self.line
    }

    /// Returns the VM's name from `-name`; `None` if the command line has none.
    pub fn vm_name(&self) -> Option<&str> {
        self.vm_name.as_deref()
    }

    /// Returns true if the user wants the VM to start paused (`-S`).
    pub fn starts_paused(&self) -> bool {
        self.line.starts_paused()
    }

    /// Returns the disks that the guest can write to, also those that cannot be served. Error:
    /// [`crate::Error::CommandLine`] for a node that is malformed JSON.
    pub fn line_drives(&self) -> Result<Vec<LineDrive>> {
        Ok(line_drives(self.line.arguments())?)
    }

    /// Returns the disks that the guest can write to. Errors: those of [`CommandLine::drives`].
    pub fn drives(&self) -> Result<Vec<Drive>> {
        Ok(self.line.drives()?)
    }

    /// Has `server` serve the disks that the guest can write to. Errors: those of
    /// [`CommandLine::serve_drives`].
    pub fn serve_drives(&mut self, server: &DiskServer) -> Result<()> {
        Ok(self.line.serve_drives(server)?)
    }

    /// Returns the media that the guest can only read and that a server can serve.
    pub fn media(&self) -> Vec<Medium> {
        self.line.media()
    }

    /// Has `server` serve the read-only media if the VM is recorded.
    pub fn serve_media(&mut self, server: &DiskServer) {
        self.line.serve_media(server);
    }

    /// Makes the VM's packets pass a gate with its sockets in the directory `folder`. Returns the
    /// sockets of each NIC. Errors: those of [`CommandLine::add_net_gate`].
    pub fn gate(&mut self, folder: &Path) -> Result<Vec<NicSockets>> {
        Ok(self.line.add_net_gate(folder)?)
    }

    /// Has QEMU record the VM into the file `log`. Returns the differences from the user's machine,
    /// as texts for the user. Errors: those of [`CommandLine::record`]; [`Error::Binary`] if
    /// Keyframe does not support the processor that QEMU emulates.
    pub fn record(&mut self, log: &Path) -> Result<Vec<String>> {
        let version = binary::version(&self.binary)?;
        let processor = probe::processor(&self.binary)?;
        Ok(self.line.record(log, &version, processor, Zoned::now())?)
    }

    /// Returns the size of the guest's RAM at its start as `-m` gives it, or QEMU's default, in
    /// bytes.
    pub fn ram_bytes(&self) -> u64 {
        let given = self.arguments().iter().rev().find(|a| a.name() == "m");
        let size =
            given.and_then(|a| value_of(&keys(a.value(), "size"), "size").and_then(size_bytes));
        size.unwrap_or(RAM_BYTES_DEFAULT)
    }

    /// Returns the words as the user gave them.
    pub fn words(&self) -> &[String] {
        self.line.words()
    }

    pub(crate) fn arguments(&self) -> &[Argument] {
        self.line.arguments()
    }
}

/// A size of `-m`: MiB unless a unit follows.
fn size_bytes(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "m" => 20,
        "b" => 0,
        "k" => 10,
        "g" => 30,
        "t" => 40,
        _ => return None,
    };
    Some((number.parse::<f64>().ok()? * (1u64 << shift) as f64) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn the_size_of_ram_is_read_in_each_form() {
        let of = |line: &str| parse(&format!("qemu-system-x86_64 {line}")).unwrap().ram_bytes();
        assert_eq!(of("-m 512"), 512 << 20);
        assert_eq!(of("-m size=1.5G,slots=2,maxmem=4G"), 3 << 29);
        assert_eq!(of("-m 256 -m 64M"), 64 << 20);
        assert_eq!(of("-smp 2"), 128 << 20);
        assert_eq!(of("-m lots"), 128 << 20);
    }

    fn parse(line: &str) -> Result<Invocation> {
        Invocation::parse(line.split(' ').map(OsString::from).collect())
    }

    #[test]
    fn a_binary_that_is_missing_or_not_qemu_is_named() {
        let error = parse("/bin/true -l").unwrap_err();
        assert!(matches!(&error, Error::Binary { .. }), "{error}");
        for name in ["no-such-qemu-7", "/bin/true", "/no/such/qemu", "/etc", ""] {
            let error = parse(name).unwrap_err();
            assert!(
                matches!(&error, Error::Binary { path, .. }
                    if path.as_os_str().is_empty() == name.is_empty()),
                "{error}"
            );
            assert!(error.to_string().contains(name) && error.fix().is_some(), "{error}");
        }
    }

    #[test]
    fn binaries_are_told_apart_by_their_identity() {
        let identity = parse("qemu-system-x86_64").unwrap().identity().unwrap();
        assert!(identity.version.starts_with(|c: char| c.is_ascii_digit()), "{identity:?}");
        assert_eq!(identity.blake3.len(), 64);
        assert!(identity.path.is_absolute());
    }
}
