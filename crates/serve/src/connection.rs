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
    Request,
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

/// A socket that has a time until when all has to be read.
struct Timed {
    socket: TcpStream,
    until: Option<Instant>,
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let limit = match self.until {
            Some(until) => until.saturating_duration_since(Instant::now()),
            None => IDLE_MAX,
        };
        if limit.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.socket.set_read_timeout(Some(limit))?;
        self.socket.read(buffer)
    }
}

impl Write for Timed {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
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
        socket.set_write_timeout(Some(WRITE_MAX))?;
        let mut connection = ServerConnection::new(self.tls.clone()).map_err(io::Error::other)?;
        connection.set_buffer_limit(Some(TLS_BUFFER_BYTES));
        let until = Some(Instant::now() + GREETING_MAX);
        let mut stream = StreamOwned::new(connection, Timed { socket, until });
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
        while let Some(request) = read_request(&mut stream, REQUEST_BYTES_MAX)? {
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
        let (kind, code, bytes, is_packed) = match reply {
            Ok(Reply::Data { bytes, is_packed }) => {
                (AnswerKind::Data, RefusalCode::None, bytes, is_packed)
            }
            Ok(Reply::Same) => (AnswerKind::Same, RefusalCode::None, Vec::new(), true),
            Err(Refusal(code, said)) => (
                AnswerKind::Refused,
                code,
                said.chars().take(1000).collect::<String>().into_bytes(),
                true,
            ),
        };
        let len_bytes = bytes.len() as u64;
        let packed = if is_packed || bytes.len() < COMPRESS_MIN {
            None
        } else {
            zstd::bulk::compress(&bytes, LEVEL).ok()
        };
        let (encoding, bytes) = match packed.filter(|packed| packed.len() < bytes.len()) {
            Some(packed) => (AnswerEncoding::Zstd, packed),
            None => (AnswerEncoding::Plain, bytes),
        };
        let head =
            AnswerHead { kind, encoding, code, wire_bytes: bytes.len() as u64, len_bytes }.encode();
        stream.write_all(&head)?;
        stream.write_all(&bytes)?;
        stream.flush()?;
        self.counts.requests.fetch_add(1, Ordering::Relaxed);
        self.counts.bytes_sent.fetch_add((head.len() + bytes.len()) as u64, Ordering::Relaxed);
        Ok(())
    }
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
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes)?;
    Ok(Some(Request::decode(&bytes)))
}
