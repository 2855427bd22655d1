//! The consoles of a running VM that are unix sockets, by what they are for.

use crate::error::Result;
use crate::vm::Vm;
use keyframe_qemu_cmdline::{CloneConsole, console_purpose};
use serde_json::Value;
use std::path::PathBuf;

impl Vm {
    /// Returns the consoles of the guest at which QEMU listens on a unix socket, in the order of
    /// QEMU's list. Monitors are not among them. Error: QEMU does not answer, or its command line
    /// cannot be parsed.
    pub fn console_sockets(&mut self) -> Result<Vec<CloneConsole>> {
        let answer = self.qmp().execute("query-chardev", None)?;
        let Some(devices) = answer.as_array() else {
            return Err(self.qmp().unexpected("query-chardev", &answer));
        };
        let mut consoles: Vec<CloneConsole> = Vec::new();
        for device in devices {
            let text = |key| device.get(key).and_then(Value::as_str).unwrap_or_default();
            let Some(socket) = listens_at(text("filename")) else { continue };
            let Some(purpose) = console_purpose(self.full_command(), text("label"))? else {
                continue;
            };
            let count = consoles.iter().filter(|known| is_numbered(&known.name, &purpose)).count();
            let name = if count == 0 { purpose } else { format!("{purpose}-{}", count + 1) };
            consoles.push(CloneConsole { name, socket });
        }
        Ok(consoles)
    }
}

/// True for `purpose` and for `purpose-NUMBER`.
fn is_numbered(name: &str, purpose: &str) -> bool {
    let rest = name.strip_prefix(purpose);
    rest.is_some_and(|rest| {
        let number = rest.strip_prefix('-').unwrap_or(rest);
        number.bytes().all(|byte| byte.is_ascii_digit())
    })
}

/// The socket of a listening character device, as `query-chardev` describes it:
/// `unix:PATH,server=on`, or `disconnected:unix:PATH,server=on` while no client is connected.
fn listens_at(filename: &str) -> Option<PathBuf> {
    let described = filename.strip_prefix("disconnected:").unwrap_or(filename);
    let (path, options) = described.strip_prefix("unix:")?.rsplit_once(",server")?;
    (options.is_empty() || options.starts_with(['=', ','])).then(|| path.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listening_socket_is_read_from_its_description() {
        for described in [
            "unix:/run/a,b.sock,server=on",
            "disconnected:unix:/run/a,b.sock,server=on",
            "unix:/run/a,b.sock,server",
        ] {
            assert_eq!(listens_at(described), Some("/run/a,b.sock".into()), "{described}");
        }
        for described in ["unix:/run/a.sock", "pty:/dev/pts/1", "stdio", "vc", ""] {
            assert_eq!(listens_at(described), None, "{described}");
        }
    }

    #[test]
    fn names_are_counted_by_purpose() {
        assert!(is_numbered("serial", "serial") && is_numbered("serial-2", "serial"));
        assert!(!is_numbered("serial-port", "serial") && !is_numbered("agent", "serial"));
    }
}
