//! One connection to a checkpoint server: TLS, the greeting, requests and their answers in order.
//!
//! Invariants: no wait is longer than [`WAIT_MAX`]; nothing is asked, and no token shown, before
//! the server has shown that it is the one that is meant.

use super::place::{Fingerprint, Place, Trust};
use super::wire::{self, Answer, Code, Request};
use crate::backend::Refusal;
use crate::bytes::to_hex;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{
    CertificateError, ClientConfig, ClientConnection, DigitallySignedStruct, RootCertStore,
    SignatureScheme, StreamOwned,
};
use sha2::{Digest, Sha256};
use std::io::{self, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

/// A server that says nothing for so long is gone.
const WAIT_MAX: Duration = Duration::from_secs(20);
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// A connection on which the server has welcomed this client.
pub struct Link {
    stream: StreamOwned<ClientConnection, TcpStream>,
    /// The store that is served.
    pub store: [u8; 16],
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Link to {:?}", self.stream.sock.peer_addr())
    }
}

/// Why there is no connection, or no more of it.
#[derive(Debug)]
pub enum Broken {
    /// Another attempt may help.
    Gone(io::Error),
    /// It would not: the server, or this client, is not the right one.
    ForGood(io::ErrorKind, Refusal),
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        Self::Gone(error)
    }
}

/// How servers at a place are told from others.
pub fn config(place: &Place) -> Result<Arc<ClientConfig>, Broken> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let bad = |problem: String| {
        let fix = "look at KEYFRAME_SERVE_CA: a file of certificates, as PEM";
        Broken::ForGood(io::ErrorKind::InvalidData, Refusal { problem, fix: Some(fix.into()) })
    };
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|e| bad(e.to_string()))?;
    let config = match &place.trust {
        Trust::Pinned(fingerprint) => {
            let verifier = Pinned { fingerprint: *fingerprint, provider };
            builder
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(verifier))
                .with_no_client_auth()
        }
        Trust::Authority(file) => {
            let mut roots = RootCertStore::empty();
            let said = |e: &dyn std::fmt::Display| bad(format!("{}: {e}", file.display()));
            for certificate in CertificateDer::pem_file_iter(file).map_err(|e| said(&e))? {
                roots.add(certificate.map_err(|e| said(&e))?).map_err(|e| said(&e))?;
            }
            let verifier =
                WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build();
            builder.with_webpki_verifier(verifier.map_err(|e| said(&e))?).with_no_client_auth()
        }
    };
    Ok(Arc::new(config))
}

impl Link {
    /// Connects, and is welcomed.
    pub fn new(place: &Place, config: &Arc<ClientConfig>) -> Result<Self, Broken> {
        let socket = connect(place)?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(WAIT_MAX))?;
        socket.set_write_timeout(Some(WAIT_MAX))?;
        let name = ServerName::try_from(place.host.clone()).map_err(|e| {
            for_good(
                io::ErrorKind::InvalidInput,
                format!("{}: {e}", place.host),
                "name the host otherwise",
            )
        })?;
        let connection =
            ClientConnection::new(Arc::clone(config), name).map_err(io::Error::other)?;
        let mut stream = StreamOwned::new(connection, socket);
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock).map_err(|error| judged(error, place))?;
        }
        let mut this = Self { stream, store: [0; 16] };
        let hello = Request::Hello { token: place.token.to_vec() };
        this.send(std::slice::from_ref(&hello))?;
        let (answer, _) = this.receive(&hello)?;
        match answer {
            Answer::Data(bytes) => {
                let strange = |problem| {
                    for_good(
                        io::ErrorKind::InvalidData,
                        problem,
                        "look at the address, and at the versions of both sides",
                    )
                };
                this.store = wire::welcomed(&bytes).map_err(strange)?;
                Ok(this)
            }
            Answer::Refused(Code::Token, said) => Err(for_good(
                io::ErrorKind::PermissionDenied,
                format!("the server refuses this client: {said}"),
                "put the token of keyframe serve into KEYFRAME_TOKEN, or the name of a file with it into KEYFRAME_TOKEN_FILE",
            )),
            Answer::Refused(_, said) => Err(for_good(
                io::ErrorKind::InvalidData,
                said,
                "use the same version of keyframe on both sides",
            )),
            Answer::Same => Err(for_good(
                io::ErrorKind::InvalidData,
                "no welcome".into(),
                "is it keyframe serve?",
            )),
        }
    }

    /// Sends requests, whose answers come in this order.
    pub fn send(&mut self, requests: &[Request]) -> io::Result<()> {
        let mut bytes = Vec::new();
        for request in requests {
            request.encode(&mut bytes);
        }
        self.stream.write_all(&bytes)?;
        self.stream.flush()
    }

    /// The answer to the oldest request that has none yet, which was this one; and its length.
    pub fn receive(&mut self, to: &Request) -> io::Result<(Answer, u64)> {
        Answer::read(&mut self.stream, to.answer_bytes_max())
    }
}

fn for_good(kind: io::ErrorKind, problem: String, fix: &str) -> Broken {
    Broken::ForGood(kind, Refusal { problem, fix: Some(fix.into()) })
}

fn connect(place: &Place) -> Result<TcpStream, Broken> {
    let mut last =
        io::Error::new(io::ErrorKind::NotFound, "the name of the host stands for no address");
    for address in (place.host.as_str(), place.port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT_MAX) {
            Ok(socket) => return Ok(socket),
            Err(error) => last = error,
        }
    }
    Err(last.into())
}

/// A handshake that failed because of who the other side is fails the next time, too.
fn judged(error: io::Error, place: &Place) -> Broken {
    use rustls::Error as Tls;
    match error.get_ref().and_then(|inner| inner.downcast_ref::<Tls>()) {
        Some(Tls::InvalidCertificate(CertificateError::Other(other))) => {
            let problem = format!("another server than the one that is meant: {other}");
            let fix = "compare KEYFRAME_SERVE_FINGERPRINT with what keyframe serve said when it began; where they differ and nobody \
                       renewed the certificate, somebody stands between";
            for_good(io::ErrorKind::PermissionDenied, problem, fix)
        }
        Some(Tls::InvalidCertificate(problem)) => {
            let problem =
                format!("the certificate of {} is not to be trusted: {problem}", place.host);
            for_good(
                io::ErrorKind::PermissionDenied,
                problem,
                "look at KEYFRAME_SERVE_CA, and at the name in the address",
            )
        }
        Some(Tls::InvalidMessage(_)) => {
            let problem = "what answers speaks no TLS".to_owned();
            for_good(
                io::ErrorKind::InvalidData,
                problem,
                "look at the address: is it keyframe serve?",
            )
        }
        _ => Broken::Gone(error),
    }
}

/// Takes one certificate alone, whoever made it and whatever it says of itself.
#[derive(Debug)]
struct Pinned {
    fingerprint: Fingerprint,
    provider: Arc<CryptoProvider>,
}

/// What an unknown server showed.
#[derive(Debug, thiserror::Error)]
#[error("its fingerprint is {0}")]
struct Unknown(String);

/// SHA-256 of a certificate.
pub fn fingerprint(certificate: &[u8]) -> Fingerprint {
    Sha256::digest(certificate).into()
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let shown = fingerprint(certificate);
        if shown == self.fingerprint {
            return Ok(ServerCertVerified::assertion());
        }
        let unknown = Unknown(to_hex(&shown));
        Err(CertificateError::Other(rustls::OtherError(Arc::new(unknown))).into())
    }

    // That it has the key of that certificate is proved as always.
    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(
            message,
            certificate,
            signed,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(
            message,
            certificate,
            signed,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
