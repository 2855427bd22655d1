//! Options of a command line that write to the host, listen on it, lock memory or choose: what
//! becomes of each when the line is run once more ([`TABLE`], `docs/host-effects.md`).
//!
//! ```text
//!   -D q.log                          ─▶ -D q.log.restored
//!   -serial file:con.log              ─▶ -chardev file,...,path=con.log,append=on -serial chardev:...
//!   -qmp unix:s,server=on  (s in use) ─▶ -qmp unix:s.restored,server=on
//!   -netdev user,hostfwd=tcp::22-:22  (port in use) ─▶ refused, with the option that replaces it
//! ```
//!
//! Invariant: a line that is run again destroys no file of the first run, and takes nothing from a
//! program that runs.
//!
//! This module opens no file and no socket: a [`HostProbe`] of the caller looks at the host.

mod address;
mod character;
mod table;

pub use table::{EffectRow, Rule, TABLE};

use crate::options::{self, Argument, escape, properties, value_of};
use crate::{CommandLineError, Result};
use address::{DisplayAddress, Forward};
use std::path::{Path, PathBuf};

/// Looks at the host on which a command line is to be run. Paths may be relative to the VM's
/// directory.
pub trait HostProbe {
    /// Returns true if there is a file of this name.
    fn exists(&self, path: &Path) -> bool;
    /// Returns true if a process has this file open.
    fn is_open(&self, path: &Path) -> bool;
    /// Returns true if a process listens at this unix socket.
    fn is_served(&self, path: &Path) -> bool;
    /// Returns true if a process listens at this port. An empty `host` means all addresses.
    fn port_in_use(&self, host: &str, port: u16, udp: bool) -> bool;
    /// Returns true if a process in this network namespace has this tap interface open.
    fn tap_in_use(&self, name: &str) -> bool;
}

/// A host without files, listeners and interfaces, for a command line that is not run on this host.
#[derive(Clone, Copy, Debug)]
pub struct NoHost;

impl HostProbe for NoHost {
    fn exists(&self, _: &Path) -> bool {
        false
    }
    fn is_open(&self, _: &Path) -> bool {
        false
    }
    fn is_served(&self, _: &Path) -> bool {
        false
    }
    fn port_in_use(&self, _: &str, _: u16, _: bool) -> bool {
        false
    }
    fn tap_in_use(&self, _: &str) -> bool {
        false
    }
}

/// The purpose for which a kept command line is run again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineUse<'a> {
    /// One VM goes on with it.
    Restore {
        /// True if the VM runs before all of its RAM is there.
        lazy: bool,
    },
    /// One of several VMs goes on with it. Its files are in this directory.
    Clone(&'a Path),
    /// A recorded interval is executed again, without any effect on the host.
    Replay,
}

impl Default for LineUse<'_> {
    fn default() -> Self {
        Self::Restore { lazy: false }
    }
}

/// A difference from the kept command line, in words for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Note {
    /// A file or a socket has another name.
    FreshName(String),
    /// An option is removed.
    Removed(String),
}

impl Note {
    /// Returns the note as a text for the user.
    pub fn into_text(self) -> String {
        match self {
            Self::FreshName(text) | Self::Removed(text) => text,
        }
    }
}

/// The arguments that take the place of one, and notes for the user.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Rewritten {
    pub arguments: Vec<Argument>,
    pub notes: Vec<Note>,
}

impl Rewritten {
    fn same(argument: &Argument) -> Self {
        Self { arguments: vec![argument.clone()], notes: Vec::new() }
    }

    fn value(argument: &Argument, value: String) -> Self {
        let arguments = vec![Argument::Option(argument.name().into(), value)];
        Self { arguments, notes: Vec::new() }
    }

    fn noted(mut self, note: Note) -> Self {
        self.notes.push(note);
        self
    }
}

/// Applies the rules of [`TABLE`] to the arguments of one line.
pub(crate) struct HostEffects<'a> {
    probe: &'a dyn HostProbe,
    line_use: LineUse<'a>,
    /// The number of character devices that got a `-chardev` of their own.
    made: usize,
    /// Fresh names that are given already.
    given: Vec<PathBuf>,
}

type Keys = Vec<(String, String)>;

impl<'a> HostEffects<'a> {
    pub fn new(probe: &'a dyn HostProbe, line_use: LineUse<'a>) -> Self {
        Self { probe, line_use, made: 0, given: Vec::new() }
    }

    /// Rewrites `argument` by the rule for its option. Returns the arguments that take its place,
    /// and notes for the user.
    ///
    /// Error: [`CommandLineError::Argument`] if it needs an address that another program uses.
    pub fn apply(&mut self, argument: &Argument) -> Result<Rewritten> {
        let value = argument.value();
        match argument.name() {
            "D" | "qtest-log" => Ok(self.log(argument)),
            "trace" => Ok(self.key(argument, &["file"], "enable")),
            "audiodev" => Ok(self.sound(argument)),
            "object" => Ok(self.object(argument)),
            "device" if mentions_key(value, "pcap") => Ok(self.key(argument, &["pcap"], "driver")),
            "chardev" => self.chardev(argument),
            "serial" | "parallel" | "debugcon" | "monitor" | "qmp" | "qmp-pretty" | "gdb" => {
                self.character(argument)
            }
            "s" => self.gdb_port(argument),
            "vnc" => self.display(argument, value, ""),
            "display" => match value.strip_prefix("vnc=") {
                Some(address) => self.display(argument, address, "vnc="),
                None => Ok(Rewritten::same(argument)),
            },
            "spice" => self.spice(argument),
            "netdev" | "nic" => self.network(argument),
            "overcommit" => Ok(self.overcommit(argument)),
            _ => Ok(Rewritten::same(argument)),
        }
    }

    fn is_replay(&self) -> bool {
        self.line_use == LineUse::Replay
    }

    /// A path that no file has: beside `path`, or in the clone's directory.
    fn fresh(&mut self, path: &str) -> String {
        let wanted = match self.line_use {
            LineUse::Clone(directory) => {
                let name = Path::new(path).file_name().unwrap_or_default();
                let own = directory.join(name);
                if self.is_free(&own) {
                    return self.give(own);
                }
                own
            }
            _ => PathBuf::from(path),
        };
        for number in 1..10_000u32 {
            let suffix = if number == 1 { String::new() } else { format!("-{number}") };
            let name = format!("{}.restored{suffix}", wanted.to_string_lossy());
            if self.is_free(Path::new(&name)) {
                return self.give(name.into());
            }
        }
        // There are 10,000 files of this name, all of earlier restores. QEMU overwrites the first.
        self.give(format!("{}.restored", wanted.to_string_lossy()).into())
    }

    fn is_free(&self, path: &Path) -> bool {
        !self.given.iter().any(|given| given == path) && !self.probe.exists(path)
    }

    fn give(&mut self, path: PathBuf) -> String {
        let text = path.to_string_lossy().into_owned();
        self.given.push(path);
        text
    }

    /// The path to which a file that QEMU can append to goes, if it must differ from `path`.
    fn appended(&mut self, path: &str) -> Option<String> {
        if is_device(path) || self.line_use_owns(path) {
            return None;
        }
        let elsewhere =
            matches!(self.line_use, LineUse::Clone(_)) || self.probe.is_open(Path::new(path));
        elsewhere.then(|| self.fresh(path))
    }

    /// True if `path` is in the clone's own directory.
    fn line_use_owns(&self, path: &str) -> bool {
        matches!(self.line_use, LineUse::Clone(directory) if Path::new(path).starts_with(directory))
    }

    /// The path that takes the place of `path`, which QEMU would empty.
    fn emptied(&mut self, path: &str) -> Option<String> {
        if is_device(path) || self.line_use_owns(path) {
            return None;
        }
        let is_clone = matches!(self.line_use, LineUse::Clone(_));
        (is_clone || self.probe.exists(Path::new(path))).then(|| self.fresh(path))
    }

    /// `-D`: QEMU empties the file at its first line of output.
    fn log(&mut self, argument: &Argument) -> Rewritten {
        let path = argument.value();
        if self.is_replay() {
            return Rewritten::default();
        }
        // QEMU puts its process id there.
        if path.contains("%d") {
            return Rewritten::same(argument);
        }
        match self.emptied(path) {
            Some(fresh) => {
                let note = moved(&argument.display(), &fresh);
                Rewritten::value(argument, fresh).noted(note)
            }
            None => Rewritten::same(argument),
        }
    }

    /// An option of which each of `names` is a file that QEMU empties.
    fn key(&mut self, argument: &Argument, names: &[&str], implied: &str) -> Rewritten {
        let Some(keys) = plain_keys(argument.value(), implied) else {
            return Rewritten::same(argument);
        };
        let (mut changed, mut notes) = (keys.clone(), Vec::new());
        for name in names {
            let Some(path) = value_of(&keys, name) else { continue };
            if self.is_replay() {
                changed.retain(|(key, _)| key != name);
            } else if let Some(fresh) = self.emptied(path) {
                notes.push(moved(&format!("-{} {name}={path}", argument.name()), &fresh));
                set(&mut changed, name, fresh);
            }
        }
        if changed == keys {
            return Rewritten::same(argument);
        }
        Rewritten { notes, ..Rewritten::value(argument, joined(&changed, implied)) }
    }

    /// `-audiodev wav`: QEMU empties the file `path`, which is `qemu.wav` by default.
    fn sound(&mut self, argument: &Argument) -> Rewritten {
        let Some(mut keys) = plain_keys(argument.value(), "driver") else {
            return Rewritten::same(argument);
        };
        if value_of(&keys, "driver") != Some("wav") {
            return Rewritten::same(argument);
        }
        let path = value_of(&keys, "path").unwrap_or("qemu.wav").to_owned();
        let fresh =
            if self.is_replay() { Some("/dev/null".to_owned()) } else { self.emptied(&path) };
        let Some(fresh) = fresh else { return Rewritten::same(argument) };
        let note = moved(&format!("-audiodev wav,path={path}"), &fresh);
        set(&mut keys, "path", fresh);
        let made = Rewritten::value(argument, joined(&keys, "driver"));
        if self.is_replay() { made } else { made.noted(note) }
    }

    /// `-object filter-dump`: QEMU empties the file, and writes a header into it.
    fn object(&mut self, argument: &Argument) -> Rewritten {
        let Some(object) = options::Object::parse(argument.value()) else {
            return Rewritten::same(argument);
        };
        if object.qom_type != "filter-dump" {
            return Rewritten::same(argument);
        }
        if self.is_replay() {
            return Rewritten::default();
        }
        let Some(path) = value_of(&object.properties, "file") else {
            return Rewritten::same(argument);
        };
        let Some(fresh) = self.emptied(path) else { return Rewritten::same(argument) };
        let note = moved(&format!("-object filter-dump,file={path}"), &fresh);
        let mut keys = properties(argument.value(), "qom-type").unwrap_or_default();
        set(&mut keys, "file", fresh);
        Rewritten::value(argument, joined(&keys, "qom-type")).noted(note)
    }

    fn gdb_port(&mut self, argument: &Argument) -> Result<Rewritten> {
        self.require_port(argument, "", address::GDB_PORT, false, GDB_FIX)?;
        Ok(Rewritten::same(argument))
    }

    /// Refuses a port that another program uses.
    fn require_port(
        &self,
        argument: &Argument,
        host: &str,
        port: u16,
        udp: bool,
        fix: &str,
    ) -> Result<()> {
        if port == 0 || !self.probe.port_in_use(host, port, udp) {
            return Ok(());
        }
        Err(CommandLineError::Argument {
            argument: argument.display(),
            reason: format!(
                "port {port} is in use on this host, perhaps by the VM of which the checkpoint \
                 was taken"
            ),
            fix: fix.into(),
        })
    }

    /// The socket that takes the place of the unix socket `path`, if a program listens there.
    fn other_socket(&mut self, path: &str) -> Option<String> {
        let taken = !self.line_use_owns(path) && self.probe.is_served(Path::new(path));
        taken.then(|| self.fresh(path))
    }

    /// A VNC server at `address`; `prefix` stands before it in the argument's value.
    fn display(&mut self, argument: &Argument, address: &str, prefix: &str) -> Result<Rewritten> {
        match DisplayAddress::parse(address) {
            DisplayAddress::Socket { path, rest } => Ok(match self.other_socket(&path) {
                Some(fresh) => {
                    let note = socket_note(argument, &path, &fresh);
                    let value = format!("{prefix}unix:{}{rest}", escape(&fresh));
                    Rewritten::value(argument, value).noted(note)
                }
                None => Rewritten::same(argument),
            }),
            DisplayAddress::Port { host, port } => {
                let fix = "choose another display, which replaces this one: `-- -vnc 127.0.0.1:7` \
                           (or `-- -vnc none`)";
                self.require_port(argument, &host, port, false, fix)?;
                Ok(Rewritten::same(argument))
            }
            DisplayAddress::Other => Ok(Rewritten::same(argument)),
        }
    }

    fn spice(&mut self, argument: &Argument) -> Result<Rewritten> {
        let keys = options::keys(argument.value(), "");
        let host = value_of(&keys, "addr").unwrap_or_default();
        if options::is_on(&keys, "unix") {
            let Some(fresh) = self.other_socket(host) else {
                return Ok(Rewritten::same(argument));
            };
            let note = socket_note(argument, host, &fresh);
            let mut keys = keys.clone();
            set(&mut keys, "addr", fresh);
            return Ok(Rewritten::value(argument, options::joined(&keys)).noted(note));
        }
        for name in ["port", "tls-port"] {
            let port = value_of(&keys, name).and_then(|port| port.parse().ok());
            let fix = "choose another port, which replaces this one: `-- -spice port=5999,...`";
            self.require_port(argument, host, port.unwrap_or(0), false, fix)?;
        }
        Ok(Rewritten::same(argument))
    }

    /// A network that listens, or that is an interface of the host.
    fn network(&mut self, argument: &Argument) -> Result<Rewritten> {
        let keys = properties(argument.value(), "type").unwrap_or_default();
        let id = value_of(&keys, "id").unwrap_or("ID");
        let replaced = |with: &str| match argument.name() {
            "netdev" => format!("give the card another network: `-- -netdev {with}`"),
            _ => "end the program that uses it, or use `keyframe branch -n 1`, whose clone has no \
                  part of the host's network"
                .to_owned(),
        };
        match value_of(&keys, "type").unwrap_or_default() {
            "user" => {
                for Forward { host, port, udp } in address::forwards(&keys) {
                    let fix = replaced(&format!(
                        "user,id={id}` (with another port: `-- -netdev \
                         user,id={id},hostfwd=tcp::PORT-:GUESTPORT"
                    ));
                    let fix = if argument.name() == "netdev" { format!("{fix})") } else { fix };
                    self.require_port(argument, &host, port, udp, &fix)?;
                }
            }
            "tap" => {
                let name = value_of(&keys, "ifname").unwrap_or_default();
                if !name.is_empty() && self.probe.tap_in_use(name) {
                    return Err(CommandLineError::Argument {
                        argument: argument.display(),
                        reason: format!(
                            "the interface {name} is in use, perhaps by the VM of which the \
                             checkpoint was taken"
                        ),
                        fix: replaced(&format!(
                            "tap,id={id},ifname=tap9,script=no,downscript=no` (make it before: \
                             `ip tuntap add dev tap9 mode tap`)"
                        ))
                        .trim_end_matches('`')
                        .to_owned(),
                    });
                }
            }
            "socket" => {
                if let Some((host, port)) = value_of(&keys, "listen").and_then(address::host_port) {
                    let fix = replaced(&format!("socket,id={id},listen=:PORT`"));
                    self.require_port(argument, host, port, false, &fix)?;
                }
            }
            "stream" if options::is_on(&keys, "server") => {
                return self.stream_server(
                    argument,
                    &keys,
                    &replaced(&format!(
                        "stream,id={id},server=on,addr.type=inet,addr.host=...,addr.port=PORT`"
                    )),
                );
            }
            _ => {}
        }
        Ok(Rewritten::same(argument))
    }

    fn stream_server(&mut self, argument: &Argument, keys: &Keys, fix: &str) -> Result<Rewritten> {
        let of = |name: &str| value_of(keys, &format!("addr.{name}"));
        if let Some(port) = of("port").and_then(|port| port.parse().ok()) {
            self.require_port(argument, of("host").unwrap_or_default(), port, false, fix)?;
        }
        let Some(path) = of("path") else { return Ok(Rewritten::same(argument)) };
        let Some(fresh) = self.other_socket(path) else { return Ok(Rewritten::same(argument)) };
        let note = socket_note(argument, path, &fresh);
        let mut changed = keys.clone();
        set(&mut changed, "addr.path", fresh);
        Ok(Rewritten::value(argument, joined(&changed, "type")).noted(note))
    }

    /// `-overcommit mem-lock=on` makes QEMU touch all of its RAM: clones would not share theirs,
    /// and pages of a lazy restore that have not arrived would be there as zeros.
    fn overcommit(&mut self, argument: &Argument) -> Rewritten {
        let keys = options::keys(argument.value(), "");
        let reason = match self.line_use {
            LineUse::Clone(_) => "clones share the RAM that they do not write",
            LineUse::Restore { lazy: true } => "with --lazy the RAM arrives page by page",
            LineUse::Restore { lazy: false } => return Rewritten::same(argument),
            LineUse::Replay => "",
        };
        if !options::is_on(&keys, "mem-lock") {
            return Rewritten::same(argument);
        }
        let left: Keys = keys.into_iter().filter(|(key, _)| key != "mem-lock").collect();
        let mut made = if left.is_empty() {
            Rewritten::default()
        } else {
            Rewritten::value(argument, options::joined(&left))
        };
        if !reason.is_empty() {
            let text = format!("-overcommit mem-lock=on is removed: {reason}");
            made.notes.push(Note::Removed(text));
        }
        made
    }
}

fn moved(what: &str, fresh: &str) -> Note {
    Note::FreshName(format!(
        "{what}: this VM writes to {fresh}, so that the first VM's file stays as it is"
    ))
}

fn socket_note(argument: &Argument, path: &str, fresh: &str) -> Note {
    Note::FreshName(format!(
        "-{}: a program listens at {path}, perhaps the VM of which the checkpoint was taken: \
         this VM listens at {fresh}",
        argument.name()
    ))
}

const GDB_FIX: &str = "choose another port, which replaces this one: `-- -gdb tcp::PORT` (or `-- \
                       -gdb none`)";

/// True if `path` is no file that keeps what is written to it.
fn is_device(path: &str) -> bool {
    path.is_empty() || path.starts_with("/dev/") || path.starts_with("/proc/")
}

fn mentions_key(value: &str, name: &str) -> bool {
    value_of(&properties(value, "driver").unwrap_or_default(), name).is_some()
}

/// The keys of a value that is not JSON.
fn plain_keys(value: &str, implied: &str) -> Option<Keys> {
    (!value.trim_start().starts_with('{')).then(|| options::keys(value, implied))
}

/// Sets the key `name`, which may be repeated.
fn set(keys: &mut Keys, name: &str, value: String) {
    keys.retain(|(key, _)| key != name);
    keys.push((name.into(), value));
}

/// The text of `keys`. QEMU wants the value of the key `implied` first, and some options want it
/// without its name.
fn joined(keys: &Keys, implied: &str) -> String {
    let first = keys.iter().filter(|(key, _)| key == implied).map(|(_, value)| escape(value));
    let others = keys
        .iter()
        .filter(|(key, _)| key != implied)
        .map(|(key, value)| format!("{key}={}", escape(value)));
    first.chain(others).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests;
