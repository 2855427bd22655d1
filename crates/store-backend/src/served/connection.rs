//! One connection to a checkpoint server: TLS, greeting, then requests and answers in order.
//!
//! Invariants: every wait is bounded by [`WAIT_MAX`]. The client sends neither request nor token
//! before the server has proved its identity.

use super::address::{ServerAddress, Trust};
use super::wire::{self, Answer, RefusalCode, Request};
use crate::RemoteFailure;
use keyframe_tls::ServerTrust;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{CertificateError, ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::io::{self, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

/// The longest wait for a server that sends nothing.
const WAIT_MAX: Duration = Duration::from_secs(20);
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// A connection on which the server has accepted this client.
pub struct Connection {
    stream: StreamOwned<ClientConnection, TcpStream>,
    /// The id of the served store.
    pub store: [u8; 16],
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Connection to {:?}", self.stream.sock.peer_addr())
    }
}

/// The reason why a connection to a checkpoint server failed.
#[derive(Debug)]
pub enum ConnectionError {
    /// Another attempt may succeed.
    Retry(io::Error),
    /// Another attempt would fail too: it is the wrong server, or the wrong client.
    Fatal(io::ErrorKind, RemoteFailure),
}

impl From<io::Error> for ConnectionError {
    fn from(error: io::Error) -> Self {
        Self::Retry(error)
    }
}

/// The length of a [`ClientTls::anchor`] in bytes.
pub const ANCHOR_BYTES: usize = 16;

/// How a client recognises its server.
#[derive(Debug)]
pub struct ClientTls {
    /// The configuration that trusts only that server.
    pub config: Arc<ClientConfig>,
    /// A hash of what the server must prove: the pinned fingerprint, or the authorities with the
    /// host and port that the certificate must be for. Servers that cannot take each other's place
    /// have different ones.
    pub anchor: [u8; ANCHOR_BYTES],
}

/// Returns how a client recognises the server of `address`. Errors: the file of certificates cannot
/// be read or is invalid.
pub fn client_tls(address: &ServerAddress) -> Result<ClientTls, ConnectionError> {
    let bad = |problem: String| {
        let fix = "KEYFRAME_SERVE_CA must name a file of certificates in PEM format";
        fatal(io::ErrorKind::InvalidData, problem, fix)
    };
    let mut hasher = blake3::Hasher::new();
    let trust = match &address.trust {
        Trust::Pinned(fingerprint) => {
            hasher.update(b"fingerprint ").update(fingerprint);
            ServerTrust::Pinned(*fingerprint)
        }
        Trust::Authority(file) => {
            let said = |e: &dyn std::fmt::Display| bad(format!("{}: {e}", file.display()));
            hasher.update(format!("authority {}:{} ", address.host, address.port).as_bytes());
            let mut roots = RootCertStore::empty();
            for certificate in CertificateDer::pem_file_iter(file).map_err(|e| said(&e))? {
                let certificate = certificate.map_err(|e| said(&e))?;
                hasher.update(&certificate);
                roots.add(certificate).map_err(|e| said(&e))?;
            }
            ServerTrust::Authorities(Arc::new(roots))
        }
    };
    let mut anchor = [0; ANCHOR_BYTES];
    hasher.finalize_xof().fill(&mut anchor);
    let config = keyframe_tls::client_config(trust, None).map_err(|e| bad(e.to_string()))?;
    Ok(ClientTls { config, anchor })
}

impl Connection {
    /// Connects to the server and greets it. Errors: no connection; the server has another
    /// identity, or refuses the token.
    pub fn new(
        address: &ServerAddress,
        config: &Arc<ClientConfig>,
    ) -> Result<Self, ConnectionError> {
        let socket = connect(address)?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(WAIT_MAX))?;
        socket.set_write_timeout(Some(WAIT_MAX))?;
        let name = ServerName::try_from(address.host.clone()).map_err(|e| {
            fatal(
                io::ErrorKind::InvalidInput,
                format!("{}: {e}", address.host),
                "use another name or address of the host",
            )
        })?;
        let connection =
            ClientConnection::new(Arc::clone(config), name).map_err(io::Error::other)?;
        let mut stream = StreamOwned::new(connection, socket);
        while stream.conn.is_handshaking() {
            stream
                .conn
                .complete_io(&mut stream.sock)
                .map_err(|error| classify_handshake_error(error, address))?;
        }
        let mut this = Self { stream, store: [0; 16] };
        let hello = Request::Hello { token: address.token.to_vec() };
        this.send(std::slice::from_ref(&hello))?;
        let (answer, _) = this.receive(&hello)?;
        match answer {
            Answer::Data(bytes) => {
                let strange = |problem| {
                    fatal(
                        io::ErrorKind::InvalidData,
                        problem,
                        "check the address, and that both sides run the same version of keyframe",
                    )
                };
                this.store = wire::decode_welcome(&bytes).map_err(strange)?;
                Ok(this)
            }
            Answer::Refused(RefusalCode::Token, said) => Err(fatal(
                io::ErrorKind::PermissionDenied,
                format!("the server refuses this client: {said}"),
                "set KEYFRAME_TOKEN to the token of keyframe serve, or KEYFRAME_TOKEN_FILE to a file \
                 that holds it",
            )),
            Answer::Refused(_, said) => Err(fatal(
                io::ErrorKind::InvalidData,
                said,
                "use the same version of keyframe on both sides",
            )),
            Answer::Same => Err(fatal(
                io::ErrorKind::InvalidData,
                "no greeting".into(),
                "check the address: is keyframe serve running there?",
            )),
        }
    }

    /// Sends requests. Their answers come in this order. Error: the connection failed.
    pub fn send(&mut self, requests: &[Request]) -> io::Result<()> {
        let mut bytes = Vec::new();
        for request in requests {
            request.encode(&mut bytes);
        }
        self.stream.write_all(&bytes)?;
        self.stream.flush()
    }

    /// Receives the answer to `to`, the oldest unanswered request. Returns the answer and its
    /// length in bytes. Errors: the connection failed; the answer is invalid.
    pub fn receive(&mut self, to: &Request) -> io::Result<(Answer, u64)> {
        Answer::read(&mut self.stream, to.answer_bytes_max())
    }
}

fn fatal(kind: io::ErrorKind, problem: String, fix: &str) -> ConnectionError {
    ConnectionError::Fatal(kind, RemoteFailure { problem, fix: Some(fix.into()) })
}

fn connect(address: &ServerAddress) -> Result<TcpStream, ConnectionError> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
    for address in (address.host.as_str(), address.port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT_MAX) {
            Ok(socket) => return Ok(socket),
            Err(error) => last = error,
        }
    }
    Err(last.into())
}

/// Sorts handshake errors: an untrusted server stays untrusted, so a retry cannot help.
fn classify_handshake_error(error: io::Error, address: &ServerAddress) -> ConnectionError {
    use rustls::Error as Tls;
    match error.get_ref().and_then(|inner| inner.downcast_ref::<Tls>()) {
        Some(Tls::InvalidCertificate(CertificateError::Other(other))) => {
            let problem = format!("this is another server: {other}");
            let fix = "compare KEYFRAME_SERVE_FINGERPRINT with the fingerprint that keyframe serve \
                       prints; if they differ although the certificate was not renewed, another \
                       host intercepts the connection";
            fatal(io::ErrorKind::PermissionDenied, problem, fix)
        }
        Some(Tls::InvalidCertificate(problem)) => {
            let problem = format!("the certificate of {} is not trusted: {problem}", address.host);
            fatal(
                io::ErrorKind::PermissionDenied,
                problem,
                "check KEYFRAME_SERVE_CA and the host name in the address",
            )
        }
        Some(Tls::InvalidMessage(_)) => {
            let problem = "the peer speaks no TLS".to_owned();
            fatal(
                io::ErrorKind::InvalidData,
                problem,
                "check the address: is keyframe serve running there?",
            )
        }
        _ => ConnectionError::Retry(error),
    }
}
