//! One connection to an API over a Unix socket: HTTP/1.1, a request and its answer at a time.
//!
//! Crate `httparse` reads the heads of answers. A client with connection pools and proxies is not
//! needed: the API is a local socket, answers are short, and each has a length.
//!
//! Invariants: each wait is bounded; an answer is bounded before memory is taken for it. After an
//! error the connection is unusable, because an answer may still be on its way.

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// The longest head of an answer.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// The most header lines of an answer.
const HEADERS_MAX: usize = 32;
/// The longest body of an answer.
const BODY_BYTES_MAX: usize = 4 << 20;

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// The body; empty if there is none.
    pub body: Vec<u8>,
}

/// A failed request.
#[derive(Debug)]
pub enum Failure {
    /// The peer closed the connection before it answered a single byte.
    Closed(io::Error),
    /// No answer came in time.
    Timeout,
    /// The connection failed.
    Io(io::Error),
    /// The answer is no HTTP, or too long.
    Answer(String),
}

/// A connection.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
}

impl Connection {
    /// Connects to `path`. Errors: no process listens there; the connection is not taken within
    /// `timeout`.
    pub fn open(path: &Path, timeout: Duration) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path)?;
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
        connect(&socket, &address)?;
        Ok(Self { stream: socket.into() })
    }

    /// Returns what to poll for the end of the connection.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Sends a request, and returns its answer, which must come within `timeout`.
    pub fn request(
        &mut self,
        method: &str,
        path: &str,
        body: Option<&str>,
        timeout: Duration,
    ) -> Result<Answer, Failure> {
        let deadline = Instant::now() + timeout;
        let body = body.unwrap_or_default();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        self.patience(deadline)?;
        self.stream.write_all(head.as_bytes()).map_err(of_write)?;
        let mut read = Vec::new();
        loop {
            if let Some((head_bytes, status, length)) = parse_head(&read)? {
                while read.len() < head_bytes + length {
                    self.read_more(&mut read, deadline)?;
                }
                if read.len() > head_bytes + length {
                    return Err(Failure::Answer("it is longer than it says".into()));
                }
                return Ok(Answer { status, body: read.split_off(head_bytes) });
            }
            if read.len() > HEAD_BYTES_MAX {
                return Err(Failure::Answer("its head is too long".into()));
            }
            self.read_more(&mut read, deadline)?;
        }
    }

    fn read_more(&mut self, read: &mut Vec<u8>, deadline: Instant) -> Result<(), Failure> {
        self.patience(deadline)?;
        let mut chunk = [0; 4096];
        match self.stream.read(&mut chunk) {
            Ok(0) if read.is_empty() => Err(Failure::Closed(io::ErrorKind::UnexpectedEof.into())),
            Ok(0) => Err(Failure::Io(io::ErrorKind::UnexpectedEof.into())),
            Ok(len) => {
                read.extend_from_slice(chunk.get(..len).unwrap_or_default());
                Ok(())
            }
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted => Ok(()),
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Err(Failure::Timeout),
                io::ErrorKind::ConnectionReset if read.is_empty() => Err(Failure::Closed(error)),
                _ => Err(Failure::Io(error)),
            },
        }
    }

    /// Bounds the next read and write by `deadline`.
    fn patience(&self, deadline: Instant) -> Result<(), Failure> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Failure::Timeout);
        }
        // The kernel counts in microseconds, and takes zero for no limit.
        let left = Some(left.max(Duration::from_micros(1)));
        self.stream
            .set_read_timeout(left)
            .and_then(|()| self.stream.set_write_timeout(left))
            .map_err(Failure::Io)
    }
}

fn of_write(error: io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Failure::Timeout,
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Failure::Closed(error),
        _ => Failure::Io(error),
    }
}

/// The length of the head, the status and the length of the body; `None` if the head is not whole.
fn parse_head(read: &[u8]) -> Result<Option<(usize, u16, usize)>, Failure> {
    let bad = |problem: String| Failure::Answer(problem);
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut response = httparse::Response::new(&mut headers);
    let parsed = response.parse(read).map_err(|e| bad(e.to_string()))?;
    let httparse::Status::Complete(head_bytes) = parsed else { return Ok(None) };
    let status = response.code.ok_or_else(|| bad("it has no status".into()))?;
    let header = |name: &str| response.headers.iter().find(|h| h.name.eq_ignore_ascii_case(name));
    if header("Transfer-Encoding").is_some() {
        return Err(bad("it has no length".into()));
    }
    let length = match header("Content-Length") {
        Some(header) => std::str::from_utf8(header.value)
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .ok_or_else(|| bad("its length is no number".into()))?,
        None => 0,
    };
    if length > BODY_BYTES_MAX {
        return Err(bad(format!("it is {length} bytes long")));
    }
    Ok(Some((head_bytes, status, length)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    /// Answers each request with the next of `answers`, a few bytes at a time.
    fn server(answers: &[&'static [u8]]) -> (tempfile::TempDir, Connection) {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("s")).unwrap();
        let answers = answers.to_vec();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            for answer in answers {
                let mut request = [0; 4096];
                if stream.read(&mut request).unwrap_or(0) == 0 {
                    return;
                }
                for piece in answer.chunks(7) {
                    if stream.write_all(piece).is_err() {
                        return;
                    }
                }
            }
        });
        let connection = Connection::open(&dir.path().join("s"), Duration::from_secs(20)).unwrap();
        (dir, connection)
    }

    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn answers_come_in_pieces_one_after_the_other() {
        let (_dir, mut connection) = server(&[
            b"HTTP/1.1 200 \r\nServer: Firecracker API\r\ncontent-length: 2\r\n\r\n{}",
            b"HTTP/1.1 204 \r\n\r\n",
        ]);
        let first = connection.request("GET", "/", None, PATIENCE).unwrap();
        assert_eq!(first, Answer { status: 200, body: b"{}".to_vec() });
        let second = connection.request("PATCH", "/vm", Some("{}"), PATIENCE).unwrap();
        assert_eq!(second, Answer { status: 204, body: Vec::new() });
        let third = connection.request("GET", "/", None, PATIENCE);
        assert!(matches!(third, Err(Failure::Closed(_))), "{third:?}");
    }

    #[test]
    fn answers_that_are_none_are_refused() {
        for bad in [
            &b"SSH-2.0-OpenSSH\r\n\r\n"[..],
            b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"HTTP/1.1 204 No Content\r\n\r\nmore",
        ] {
            let (_dir, mut connection) = server(&[bad]);
            let answer = connection.request("GET", "/", None, PATIENCE);
            assert!(matches!(answer, Err(Failure::Answer(_))), "{bad:?}: {answer:?}");
        }
        let (_dir, mut connection) = server(&[b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}"]);
        assert!(matches!(connection.request("GET", "/", None, PATIENCE), Err(Failure::Io(_))));
    }

    #[test]
    fn an_answer_that_does_not_come_is_a_timeout() {
        let dir = tempfile::tempdir().unwrap();
        let _listener = UnixListener::bind(dir.path().join("s")).unwrap();
        let mut connection = Connection::open(&dir.path().join("s"), PATIENCE).unwrap();
        let answer = connection.request("GET", "/", None, Duration::from_millis(20));
        assert!(matches!(answer, Err(Failure::Timeout)), "{answer:?}");
    }
}
