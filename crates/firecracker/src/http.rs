//! One connection to an API over a Unix socket: HTTP/1.1. Several requests can be sent at once; their
//! answers come in the same order.
//!
//! Crate `httparse` reads the heads of answers. A client with connection pools and proxies is not
//! needed: the API is a local socket, answers are short, and each has a length.
//!
//! Invariants: each wait is bounded; an answer is bounded before memory is taken for it. After an
//! error the connection is unusable, because an answer may still be on its way.

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, socket_with,
};
use std::io::{self, Write};
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

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The method.
    pub method: &'a str,
    /// The path.
    pub path: &'a str,
    /// The body, in JSON; `None` if there is none.
    pub body: Option<&'a str>,
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
    /// What has been read and belongs to no whole answer yet.
    read: Vec<u8>,
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
        Ok(Self { stream: socket.into(), read: Vec::new() })
    }

    /// Returns what to poll for the end of the connection.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Sends a request, and returns its answer, which must come within `timeout`.
    pub fn request(&mut self, request: Request<'_>, timeout: Duration) -> Result<Answer, Failure> {
        let deadline = Instant::now() + timeout;
        self.send(&text_of(&[request]), deadline)?;
        let answer = self.answer(deadline)?;
        self.require_no_more().map(|()| answer)
    }

    /// Sends `text`, which [`text_of`] made, until `deadline`.
    pub fn send(&mut self, text: &str, deadline: Instant) -> Result<(), Failure> {
        self.patience(deadline)?;
        self.stream.write_all(text.as_bytes()).map_err(of_write)
    }

    /// Returns the next answer, which must come until `deadline`.
    pub fn answer(&mut self, deadline: Instant) -> Result<Answer, Failure> {
        loop {
            if let Some(answer) = self.take_answer()? {
                return Ok(answer);
            }
            self.patience(deadline)?;
            self.read_more(RecvFlags::empty())?;
        }
    }

    /// Returns the next answer, if it has come.
    pub fn answer_so_far(&mut self) -> Result<Option<Answer>, Failure> {
        loop {
            if let Some(answer) = self.take_answer()? {
                return Ok(Some(answer));
            }
            match self.read_more(RecvFlags::DONTWAIT) {
                Ok(()) => {}
                Err(Failure::Timeout) => return Ok(None),
                Err(failure) => return Err(failure),
            }
        }
    }

    /// Checks that nothing came beyond the answers that were taken.
    pub fn require_no_more(&self) -> Result<(), Failure> {
        if self.read.is_empty() {
            return Ok(());
        }
        Err(Failure::Answer("it is longer than it says".into()))
    }

    /// Takes the first answer out of what has been read, if it is whole.
    fn take_answer(&mut self) -> Result<Option<Answer>, Failure> {
        let Some((head_bytes, status, length)) = parse_head(&self.read)? else {
            if self.read.len() > HEAD_BYTES_MAX {
                return Err(Failure::Answer("its head is too long".into()));
            }
            return Ok(None);
        };
        if self.read.len() < head_bytes + length {
            return Ok(None);
        }
        let rest = self.read.split_off(head_bytes + length);
        let mut answer = std::mem::replace(&mut self.read, rest);
        Ok(Some(Answer { status, body: answer.split_off(head_bytes) }))
    }

    fn read_more(&mut self, flags: RecvFlags) -> Result<(), Failure> {
        let mut chunk = [0; 4096];
        match recv(&self.stream, &mut chunk[..], flags) {
            Ok((0, _)) if self.read.is_empty() => {
                Err(Failure::Closed(io::ErrorKind::UnexpectedEof.into()))
            }
            Ok((0, _)) => Err(Failure::Io(io::ErrorKind::UnexpectedEof.into())),
            Ok((len, _)) => {
                self.read.extend_from_slice(chunk.get(..len).unwrap_or_default());
                Ok(())
            }
            Err(Errno::INTR) => Ok(()),
            Err(Errno::AGAIN) => Err(Failure::Timeout),
            Err(error @ Errno::CONNRESET) if self.read.is_empty() => {
                Err(Failure::Closed(error.into()))
            }
            Err(error) => Err(Failure::Io(error.into())),
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

/// Returns the text of `requests`, to be sent at once.
pub fn text_of(requests: &[Request<'_>]) -> String {
    let text = |request: &Request<'_>| {
        let Request { method, path, body } = *request;
        let body = body.unwrap_or_default();
        format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    requests.iter().map(text).collect()
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
    use std::io::Read;
    use std::os::unix::net::UnixListener;

    const GET: Request<'_> = Request { method: "GET", path: "/", body: None };
    const PATCH: Request<'_> = Request { method: "PATCH", path: "/vm", body: Some("{}") };

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
        let first = connection.request(GET, PATIENCE).unwrap();
        assert_eq!(first, Answer { status: 200, body: b"{}".to_vec() });
        let second = connection.request(PATCH, PATIENCE).unwrap();
        assert_eq!(second, Answer { status: 204, body: Vec::new() });
        let third = connection.request(GET, PATIENCE);
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
            let answer = connection.request(GET, PATIENCE);
            assert!(matches!(answer, Err(Failure::Answer(_))), "{bad:?}: {answer:?}");
        }
        let (_dir, mut connection) = server(&[b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}"]);
        assert!(matches!(connection.request(GET, PATIENCE), Err(Failure::Io(_))));
    }

    #[test]
    fn requests_that_are_sent_at_once_are_answered_in_their_order() {
        let (_dir, mut connection) =
            server(&[b"HTTP/1.1 200 \r\nContent-Length: 2\r\n\r\n{}HTTP/1.1 204 \r\n\r\n\
              HTTP/1.1 400 \r\nContent-Length: 3\r\n\r\nbad"]);
        let deadline = Instant::now() + PATIENCE;
        let text = text_of(&[GET, PATCH, PATCH]);
        assert_eq!(text.matches("HTTP/1.1\r\n").count(), 3);
        connection.send(&text, deadline).unwrap();
        assert_eq!(connection.answer(deadline).unwrap().body, b"{}");
        let mut later = Vec::new();
        while later.len() < 2 {
            assert!(Instant::now() < deadline);
            later.extend(connection.answer_so_far().unwrap());
        }
        assert_eq!(later[0].status, 204);
        assert_eq!((later[1].status, &*later[1].body), (400, &b"bad"[..]));
        connection.require_no_more().unwrap();
    }

    #[test]
    fn an_answer_that_does_not_come_is_a_timeout() {
        let dir = tempfile::tempdir().unwrap();
        let _listener = UnixListener::bind(dir.path().join("s")).unwrap();
        let mut connection = Connection::open(&dir.path().join("s"), PATIENCE).unwrap();
        let answer = connection.request(GET, Duration::from_millis(20));
        assert!(matches!(answer, Err(Failure::Timeout)), "{answer:?}");
    }
}
