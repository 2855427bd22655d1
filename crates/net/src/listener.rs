//! Listening unix sockets and the VMs that connect to them.

use crate::{Error, Result};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// A listening unix socket. Dropping it removes its file.
pub struct LanListener {
    listener: UnixListener,
    path: PathBuf,
    name: String,
    /// Device and inode of the socket's file, so that another file at its path is not removed.
    identity: (u64, u64),
}

impl LanListener {
    /// Listens at `path`. Replaces a socket there on which no process listens. Error:
    /// [`Error::Listen`].
    pub fn bind(path: &Path) -> Result<Self> {
        let failed = |problem: String| Error::Listen { path: path.display().to_string(), problem };
        let Some(name) = path.to_str().map(str::to_owned) else {
            return Err(failed("the path is not UTF-8".into()));
        };
        if is_abandoned(path).map_err(&failed)? {
            std::fs::remove_file(path)
                .map_err(|e| failed(format!("remove the socket left there: {e}")))?;
        }
        let listener = UnixListener::bind(path).map_err(|e| failed(e.to_string()))?;
        let bound = |e: std::io::Error| failed(e.to_string());
        listener.set_nonblocking(true).map_err(bound)?;
        let metadata = std::fs::symlink_metadata(path).map_err(bound)?;
        Ok(Self {
            listener,
            path: path.to_owned(),
            name,
            identity: (metadata.dev(), metadata.ino()),
        })
    }

    /// Returns the path as text.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Accepts one waiting connection. Returns `None` if none waits, or if accepting it failed.
    pub fn accept(&self) -> Option<UnixStream> {
        let (stream, _) = self.listener.accept().ok()?;
        stream.set_nonblocking(true).ok()?;
        Some(stream)
    }
}

impl AsFd for LanListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for LanListener {
    fn drop(&mut self) {
        let ours = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino()) == self.identity;
        if std::fs::symlink_metadata(&self.path).is_ok_and(ours) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// True if the file at `path` is a socket on which no process listens. Error: there is something
/// that must stay.
fn is_abandoned(path: &Path) -> Result<bool, String> {
    match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e.to_string()),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            Err("the file there is not a socket".into())
        }
        Ok(_) => match UnixStream::connect(path) {
            Ok(_) => Err("another process listens there".into()),
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionRefused => Ok(true),
            Err(e) => Err(e.to_string()),
        },
    }
}

/// Returns the id of the process at the other end. 0 if the kernel does not tell (the process is in
/// a pid namespace that is not visible from here).
pub fn peer_pid(stream: &UnixStream) -> u32 {
    use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
    getsockopt(stream, PeerCredentials).map_or(0, |peer| peer.pid().unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_what_is_abandoned_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        std::fs::write(&path, "a file").unwrap();
        assert!(LanListener::bind(&path).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"a file");
        std::fs::remove_file(&path).unwrap();
        drop(UnixListener::bind(&path).unwrap());
        let listening = LanListener::bind(&path).unwrap();
        let error = LanListener::bind(&path).err().unwrap().to_string();
        assert!(error.contains("another process listens"), "{error}");
        let stream = UnixStream::connect(&path).unwrap();
        // The failed attempt above left a connection of its own.
        let accepted = listening.accept().and_then(|_| listening.accept()).unwrap();
        assert_eq!(
            (peer_pid(&accepted), peer_pid(&stream)),
            (std::process::id(), std::process::id())
        );
        drop(listening);
        assert!(!path.exists());
        // This listener does not own the file any more.
        let first = LanListener::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let _second = LanListener::bind(&path).unwrap();
        drop(first);
        assert!(path.exists());
    }
}
