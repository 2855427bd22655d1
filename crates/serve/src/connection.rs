//! One connection: TLS, the greeting, then requests and answers in turn.
//!
//! ```text
//!   accepted ──TLS, token: 10 s──▶ welcomed ──request──▶ answered ──▶ ... ──closed, or silent for 5 minutes──▶ ended
//!                └─ no token: one answer that says so, after a second
//! ```

use crate::files::{Refusal, Reply, ServedFiles};
use crate::server::ServerCounts;
use keyframe_store_backend::served::wire::{
    AnswerEncoding, AnswerHead, AnswerKind, HELLO_BYTES_MAX, REQUEST_BYTES_MAX, RefusalCode,
    Request, WRITE_REQUEST_BYTES_MAX,
};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// From the connection to the token.
const GREETING_MAX: Duration = Duration::from_secs(10);
/// A connection without a request for this time is closed. The client may connect again.
const IDLE_MAX: Duration = Duration::from_secs(300);
/// A client that receives nothing for this time counts as gone.
const WRITE_MAX: Duration = Duration::from_secs(30);
/// A client that receives an answer more slowly counts as gone too, because the answer takes memory
/// of the server.
const BYTES_PER_SECOND_MIN: u64 = 1 << 20;
/// A request that takes longer to arrive ends its connection.
const REQUEST_MAX: Duration = Duration::from_secs(60);
/// The pause after a wrong token, which slows down a search for tokens.
const WRONG_TOKEN_PAUSE: Duration = Duration::from_secs(1);
/// Below, compressing saves nothing.
const COMPRESS_MIN: usize = 256;
const LEVEL: i32 = 3;
/// What is encrypted ahead of the network.
const TLS_BUFFER_BYTES: usize = 256 << 10;

/// The objects that all connections share.
#[derive(Debug)]
pub struct Common {
    /// The files that clients can read.
    pub files: ServedFiles,
    /// The TLS settings of all connections.
    pub tls: Arc<ServerConfig>,
    /// The hash of the token that clients must send, because hashes are compared in constant time.
    /// `None` if no token is required.
    pub token: Option<blake3::Hash>,
    /// The counters of all connections.
    pub counts: ServerCounts,
}

/// A socket that has a time until when all has to be read, and one until when all has to be
/// written.
struct Timed {
    socket: TcpStream,
    until: Option<Instant>,
    write_until: Option<Instant>,
}

/// Returns the time from now to `until`. Error: it is past, of kind `TimedOut`.
fn time_left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let limit = self.until.map_or(Ok(IDLE_MAX), time_left)?;
        self.socket.set_read_timeout(Some(limit))?;
        self.socket.read(buffer)
    }
}

impl Write for Timed {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let limit = self.write_until.map_or(Ok(WRITE_MAX), time_left)?;
        self.socket.set_write_timeout(Some(limit.min(WRITE_MAX)))?;
        self.socket.write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.socket.flush()
    }
}

type Stream = StreamOwned<ServerConnection, Timed>;

impl Common {
    /// Serves one client until the client or the network ends the connection. An invalid request of
    /// the client ends its connection, and nothing else. Error: the connection failed.
    pub fn serve(&self, socket: TcpStream) -> io::Result<()> {
        socket.set_nodelay(true)?;
        let mut connection = ServerConnection::new(self.tls.clone()).map_err(io::Error::other)?;
        connection.set_buffer_limit(Some(TLS_BUFFER_BYTES));
        let until = Some(Instant::now() + GREETING_MAX);
        let timed = Timed { socket, until, write_until: None };
        let mut stream = StreamOwned::new(connection, timed);
        let hello = read_request(&mut stream, HELLO_BYTES_MAX)?;
        let reply = match hello {
            Some(Ok(request @ Request::Hello { .. })) if self.is_welcome(&request) => {
                self.files.answer(&request)
            }
            Some(Ok(Request::Hello { .. })) => {
                self.counts.refused.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(WRONG_TOKEN_PAUSE);
                return self.send(
                    &mut stream,
                    Err(Refusal(
                        RefusalCode::Token,
                        "the token is not the one of this server".into(),
                    )),
                );
            }
            Some(Err(problem)) => {
                return self.send(&mut stream, Err(Refusal(RefusalCode::Strange, problem)));
            }
            Some(Ok(_)) | None => return Ok(()),
        };
        self.send(&mut stream, reply)?;
        stream.sock.until = None;
        let accepts = self.files.writers().is_ok();
        let len_max = if accepts { WRITE_REQUEST_BYTES_MAX } else { REQUEST_BYTES_MAX };
        while let Some(request) = read_request(&mut stream, len_max)? {
            match request {
                Ok(request) => self.send(&mut stream, self.files.answer(&request))?,
                // Where the next request would begin is not known.
                Err(problem) => {
                    return self.send(&mut stream, Err(Refusal(RefusalCode::Strange, problem)));
                }
            }
        }
        Ok(())
    }

    fn is_welcome(&self, hello: &Request) -> bool {
        let Request::Hello { token } = hello else { return false };
        self.token.is_none_or(|expected| blake3::hash(token) == expected)
    }

    fn send(&self, stream: &mut Stream, reply: Result<Reply, Refusal>) -> io::Result<()> {
        // The share of the memory is given back when all is sent.
        let (kind, code, bytes, is_packed, _share) = match reply {
            Ok(Reply::Data { bytes, is_packed, share }) => {
                (AnswerKind::Data, RefusalCode::None, bytes, is_packed, share)
            }
            Ok(Reply::Same) => (AnswerKind::Same, RefusalCode::None, Vec::new(), true, None),
            Err(Refusal(code, said)) => (
                AnswerKind::Refused,
                code,
                said.chars().take(1000).collect::<String>().into_bytes(),
                true,
                None,
            ),
        };
        let len_bytes = bytes.len() as u64;
        let packed = if is_packed || bytes.len() < COMPRESS_MIN {
            None
        } else {
            zstd::bulk::compress(&bytes, LEVEL).ok()
        };
        let (encoding, bytes) = match packed.filter(|packed| packed.len() < bytes.len()) {
            Some(packed) => {
                drop(bytes);
                (AnswerEncoding::Zstd, packed)
            }
            None => (AnswerEncoding::Plain, bytes),
        };
        let head =
            AnswerHead { kind, encoding, code, wire_bytes: bytes.len() as u64, len_bytes }.encode();
        stream.sock.write_until = Some(Instant::now() + answer_max(bytes.len() as u64));
        stream.write_all(&head)?;
        stream.write_all(&bytes)?;
        stream.flush()?;
        stream.sock.write_until = None;
        self.counts.requests.fetch_add(1, Ordering::Relaxed);
        self.counts.bytes_sent.fetch_add((head.len() + bytes.len()) as u64, Ordering::Relaxed);
        Ok(())
    }
}

/// The longest time in which a client receives an answer of `len_bytes` bytes.
fn answer_max(len_bytes: u64) -> Duration {
    WRITE_MAX + Duration::from_secs(len_bytes / BYTES_PER_SECOND_MIN)
}

/// The next request, or what is wrong with it; none where the client has closed the connection.
fn read_request(
    stream: &mut Stream,
    len_max: usize,
) -> io::Result<Option<Result<Request, String>>> {
    let mut len = [0; 4];
    match stream.read(&mut len) {
        Ok(0) => return Ok(None),
        Ok(read) => stream.read_exact(len.get_mut(read..).unwrap_or_default())?,
        // Without the end that TLS has: a process that was killed.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let len = u32::from_le_bytes(len) as usize;
    if len > len_max {
        return Ok(Some(Err(format!(
            "a request of {len} bytes, where at most {len_max} make sense"
        ))));
    }
    // The time of the whole request: a client that sends a byte now and then gets no more.
    let until = stream.sock.until;
    stream.sock.until = until.or_else(|| Some(Instant::now() + REQUEST_MAX));
    let mut bytes = Vec::new();
    let read = stream.take(len as u64).read_to_end(&mut bytes);
    stream.sock.until = until;
    if read? < len {
        return Ok(None);
    }
    Ok(Some(Request::decode(&bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn an_answer_has_a_deadline_that_grows_with_its_length() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (socket, _) = listener.accept().unwrap();
        let mut timed = Timed { socket, until: None, write_until: Some(Instant::now()) };
        assert_eq!(timed.write(b"x").unwrap_err().kind(), io::ErrorKind::TimedOut);
        timed.write_until = Some(Instant::now() + answer_max(0));
        assert_eq!(timed.write(b"x").unwrap(), 1);
        drop(client);
        assert_eq!(answer_max(0), WRITE_MAX);
        // A file of 1 GiB at a MiB per second.
        assert_eq!(answer_max(1 << 30), WRITE_MAX + Duration::from_secs(1 << 10));
    }
}
