//! Character devices: `-chardev` with keys, and the short form that `-serial`, `-monitor` and
//! others take (`file:PATH`, `unix:PATH,server=on`, `tcp:HOST:PORT,server=on`).

use super::{GDB_FIX, HostEffects, Keys, Rewritten, address, is_device, joined, plain_keys, set};
use crate::Result;
use crate::options::{self, Argument, escape, is_on, value_of};
use std::path::Path;

impl HostEffects<'_> {
    /// `-chardev BACKEND,id=X,...`.
    pub(super) fn chardev(&mut self, argument: &Argument) -> Result<Rewritten> {
        let Some(keys) = plain_keys(argument.value(), "backend") else {
            return Ok(Rewritten::same(argument));
        };
        let id = value_of(&keys, "id").unwrap_or("ID");
        let (mut changed, mut notes) = (keys.clone(), Vec::new());
        match value_of(&keys, "backend").unwrap_or_default() {
            "file" => self.file_keys(("path", "append"), &mut changed, &mut notes),
            "socket" if is_on(&keys, "server") => {
                if let Some(path) = value_of(&keys, "path") {
                    if let Some(fresh) = self.other_socket(path) {
                        notes.push(super::socket_note(argument, path, &fresh));
                        set(&mut changed, "path", fresh);
                    }
                } else if let Some(port) = value_of(&keys, "port").and_then(|p| p.parse().ok()) {
                    let host = value_of(&keys, "host").unwrap_or_default();
                    let fix = format!("choose another target: `-- -chardev null,id={id}`");
                    self.require_port(argument, host, port, false, &fix)?;
                }
            }
            "pipe" => {
                let path = value_of(&keys, "path").unwrap_or_default();
                let ends = [format!("{path}.in"), format!("{path}.out"), path.to_owned()];
                if ends.iter().any(|end| self.probe.is_open(Path::new(end))) {
                    return Err(crate::CommandLineError::argument(
                        argument.display(),
                        "another program has this pipe open, perhaps the VM of which the \
                         checkpoint was taken",
                        format!("choose another target: `-- -chardev null,id={id}`"),
                    ));
                }
            }
            _ => {}
        }
        if value_of(&keys, "logfile").is_some() {
            self.file_keys(("logfile", "logappend"), &mut changed, &mut notes);
        }
        if changed == keys {
            return Ok(Rewritten::same(argument));
        }
        Ok(Rewritten { notes, ..Rewritten::value(argument, joined(&changed, "backend")) })
    }

    /// Makes QEMU append to the file of the key `path`, or gives it another one.
    fn file_keys(
        &mut self,
        (path, append): (&str, &str),
        keys: &mut Keys,
        notes: &mut Vec<super::Note>,
    ) {
        let Some(file) = value_of(keys, path).map(str::to_owned) else { return };
        if is_device(&file) {
            return;
        }
        if let Some(fresh) = self.appended(&file) {
            notes.push(super::moved(&file, &fresh));
            set(keys, path, fresh);
        }
        set(keys, append, "on".into());
    }

    /// The short form.
    pub(super) fn character(&mut self, argument: &Argument) -> Result<Rewritten> {
        let value = argument.value();
        let name = argument.name();
        if let Some(path) = value.strip_prefix("file:").filter(|path| !is_device(path)) {
            return Ok(self.file(argument, path));
        }
        let (mux, text) = match value.strip_prefix("mon:") {
            Some(rest) => ("mon:", rest),
            None => ("", value),
        };
        if let Some(address) = text.strip_prefix("unix:") {
            let mut keys = options::keys(address, "path");
            let path = value_of(&keys, "path").unwrap_or_default().to_owned();
            let Some(fresh) = self.other_socket(&path).filter(|_| is_on(&keys, "server")) else {
                return Ok(Rewritten::same(argument));
            };
            let note = super::socket_note(argument, &path, &fresh);
            set(&mut keys, "path", fresh);
            let value = format!("{mux}unix:{}", joined(&keys, "path"));
            return Ok(Rewritten::value(argument, value).noted(note));
        }
        let address = ["tcp:", "telnet:", "websocket:"].iter().find_map(|p| text.strip_prefix(p));
        let Some(address) = address else { return Ok(Rewritten::same(argument)) };
        let keys = options::keys(address, "address");
        // The gdbstub is a server without being told.
        let listens = is_on(&keys, "server") || name == "gdb";
        let at = value_of(&keys, "address").and_then(address::host_port).filter(|_| listens);
        if let Some((host, port)) = at {
            let fix = match name {
                "gdb" => GDB_FIX.to_owned(),
                "monitor" | "qmp" | "qmp-pretty" => format!(
                    "choose another place, which replaces this one: `-- -{name} \
                     unix:PATH,server=on,wait=off` (or `-- -{name} none`)"
                ),
                _ => format!(
                    "choose another place: `-- -{name} stdio`, with as many -{name} as the VM has"
                ),
            };
            self.require_port(argument, host, port, false, &fix)?;
        }
        Ok(Rewritten::same(argument))
    }

    /// A file in the short form has no key for appending, so it gets a `-chardev` of its own.
    fn file(&mut self, argument: &Argument, path: &str) -> Rewritten {
        let fresh = self.appended(path);
        let to = fresh.as_deref().unwrap_or(path);
        let id = format!("keyframe-{}-file-{}", argument.name(), self.made);
        self.made += 1;
        let chardev = format!("file,id={id},path={},append=on", escape(to));
        let arguments = vec![
            Argument::Option("chardev".into(), chardev),
            Argument::Option(argument.name().into(), format!("chardev:{id}")),
        ];
        let notes = fresh.iter().map(|fresh| super::moved(&argument.display(), fresh)).collect();
        Rewritten { arguments, notes }
    }
}
