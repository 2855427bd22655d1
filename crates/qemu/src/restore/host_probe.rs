//! Looks at the host on which a checkpoint is restored: files that are open, sockets and ports in
//! use.
//!
//! Nothing is disturbed: a socket is asked in a way that no listener notices, and a port is taken
//! for a moment only if it is free.

use keyframe_qemu_cmdline::HostProbe;
use std::net::{TcpListener, UdpSocket};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The name of the kernel's device of tap interfaces.
const TUN: &str = "/dev/net/tun";

/// The present host. Relative paths begin in `directory`.
#[derive(Clone, Debug)]
pub(super) struct PresentHost {
    pub directory: PathBuf,
}

impl HostProbe for PresentHost {
    fn exists(&self, path: &Path) -> bool {
        self.directory.join(path).symlink_metadata().is_ok()
    }

    fn is_open(&self, path: &Path) -> bool {
        let Ok(wanted) = std::fs::metadata(self.directory.join(path)) else { return false };
        let identity = (wanted.dev(), wanted.ino());
        open_files().any(|descriptor| {
            std::fs::metadata(descriptor).is_ok_and(|found| (found.dev(), found.ino()) == identity)
        })
    }

    /// A datagram socket that connects to a socket of another kind learns that it is there, and its
    /// listener learns nothing.
    fn is_served(&self, path: &Path) -> bool {
        let Ok(socket) = std::os::unix::net::UnixDatagram::unbound() else { return false };
        match socket.connect(self.directory.join(path)) {
            Ok(()) => true,
            Err(error) => error.raw_os_error() == Some(nix::libc::EPROTOTYPE),
        }
    }

    fn port_in_use(&self, host: &str, port: u16, udp: bool) -> bool {
        let host = if host.is_empty() { "0.0.0.0" } else { host };
        let taken = if udp {
            UdpSocket::bind((host, port)).map(drop)
        } else {
            TcpListener::bind((host, port)).map(drop)
        };
        taken.is_err_and(|error| error.kind() == std::io::ErrorKind::AddrInUse)
    }

    fn tap_in_use(&self, name: &str) -> bool {
        let is_tun = |descriptor: &PathBuf| {
            std::fs::read_link(descriptor).is_ok_and(|target| target == Path::new(TUN))
        };
        let has_name = |descriptor: PathBuf| {
            let info = descriptor.to_string_lossy().replace("/fd/", "/fdinfo/");
            let text = std::fs::read_to_string(info).unwrap_or_default();
            let named = |line: &str| line.strip_prefix("iff:").map(str::trim) == Some(name);
            text.lines().any(named)
        };
        // Each network namespace has interfaces of its own, under the same names.
        let network = |process: &Path| std::fs::read_link(process.join("ns/net")).ok();
        let ours = network(Path::new("/proc/self"));
        let is_here = |descriptor: &PathBuf| {
            descriptor.ancestors().nth(2).is_some_and(|process| network(process) == ours)
        };
        open_files().filter(is_tun).filter(is_here).any(has_name)
    }
}

/// The descriptors of all processes that we may look into.
fn open_files() -> impl Iterator<Item = PathBuf> {
    let is_number = |name: &std::ffi::OsStr| {
        name.to_str().is_some_and(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = processes.filter(move |entry| is_number(&entry.file_name()));
    let descriptors = processes.filter_map(|entry| std::fs::read_dir(entry.path().join("fd")).ok());
    descriptors.flatten().flatten().map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn the_host_is_seen_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let host = PresentHost { directory: dir.path().to_owned() };
        let (file, socket) = (Path::new("log"), Path::new("s"));
        assert!(!host.exists(file) && !host.is_open(file) && !host.is_served(socket));
        let log = std::fs::File::create(dir.path().join(file)).unwrap();
        assert!(host.exists(file) && host.is_open(file));
        drop(log);
        assert!(!host.is_open(file));
        let listener = UnixListener::bind(dir.path().join(socket)).unwrap();
        listener.set_nonblocking(true).unwrap();
        assert!(host.is_served(socket));
        assert!(listener.accept().is_err(), "the listener noticed");
        drop(listener);
        assert!(host.exists(socket) && !host.is_served(socket));
        let port = TcpListener::bind("127.0.0.1:0").unwrap();
        let number = port.local_addr().unwrap().port();
        assert!(
            host.port_in_use("127.0.0.1", number, false) && host.port_in_use("", number, false)
        );
        drop(port);
        assert!(!host.port_in_use("127.0.0.1", number, false));
        assert!(!host.tap_in_use("no-such-tap"));
    }
}
