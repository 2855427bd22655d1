//! Sockets for whose first client QEMU waits before it starts.

use crate::options::{self, Argument, value_of};

/// The options that may have such a socket.
const OPTIONS: &[&str] =
    &["chardev", "serial", "parallel", "monitor", "qmp", "qmp-pretty", "debugcon"];

/// Returns the first option of `line` for whose socket QEMU waits until a client has connected.
/// Returns `None` if there is none.
pub fn waiting_socket(line: &[Argument]) -> Option<&Argument> {
    line.iter().find(|argument| OPTIONS.contains(&argument.name()) && waits(argument.value()))
}

/// True if QEMU waits for a client of the socket with these properties.
fn waits(value: &str) -> bool {
    let keys = options::keys(value, "backend");
    let is_off = |key| matches!(value_of(&keys, key), Some("off" | "no" | "false" | "n"));
    value_of(&keys, "server").is_some() && !is_off("server") && !is_off("wait")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_waits_unless_it_says_otherwise() {
        let waiting = |line: &str| {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            let line = options::parse(&words).unwrap();
            waiting_socket(&line).map(Argument::display)
        };
        for line in [
            "-serial unix:/r/s,server=on",
            "-serial tcp::4444,server",
            "-chardev socket,id=c,path=/r/c,server=on,wait=on",
            "-monitor telnet:127.0.0.1:55,server,logfile=/l",
        ] {
            assert_eq!(waiting(line).as_deref(), Some(line));
        }
        for line in [
            "-serial unix:/r/s,server=on,wait=off",
            "-serial unix:/r/s,server,nowait",
            "-serial unix:/r/s",
            "-chardev socket,id=c,path=/r/c,server=off",
            "-netdev socket,id=n,listen=:1",
            "-serial stdio",
        ] {
            assert_eq!(waiting(line), None, "{line}");
        }
    }
}
