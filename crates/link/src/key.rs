//! The shared key, and the TLS identity that a host derives from it.

use crate::{Channel, Error, Result};
use keyframe_tls::{Identity, ServerTrust, client_config, server_config};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, PKCS_ED25519};
use rustls::pki_types::{PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use zeroize::Zeroizing;

/// The shortest secret that is accepted, in bytes.
const SECRET_BYTES_MIN: usize = 16;
const SECRET_BYTES_MAX: u64 = 64 << 10;
const CONTEXT: &str = "keyframe 2026-11 replication authority";
const AUTHORITY: &str = "keyframe replication authority";
/// The name in every certificate. It identifies no host; only the key proves that a host belongs to
/// the group.
const NAME: &str = "keyframe-replication";
/// The start of an Ed25519 private key in PKCS #8 form; the 32 key bytes follow (RFC 8410).
const PKCS8_HEAD: [u8; 16] = [
    0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20,
];

/// A key of 32 bytes, derived from the secret that the user gives to all hosts. Hosts with the same
/// key accept each other.
pub struct SharedKey(Zeroizing<[u8; 32]>);

impl SharedKey {
    /// Reads the key from a file. Error: [`Error::Key`] if the file cannot be read, if others than
    /// its owner may access it, or if its secret is too short or too long.
    pub fn read(path: &Path) -> Result<Self> {
        let bad = |problem: String| Error::Key { path: path.display().to_string(), problem };
        let known = std::fs::metadata(path).map_err(|e| bad(e.to_string()))?;
        if known.len() > SECRET_BYTES_MAX {
            return Err(bad(format!("{} bytes are too long for a key", known.len())));
        }
        if known.mode() & 0o077 != 0 {
            return Err(bad(format!(
                "others may read or write it (mode {:03o}): chmod 600",
                known.mode() & 0o777
            )));
        }
        let bytes = Zeroizing::new(std::fs::read(path).map_err(|e| bad(e.to_string()))?);
        Self::of(&bytes).ok_or_else(|| {
            bad(format!("fewer than {SECRET_BYTES_MIN} bytes are too short for a secret"))
        })
    }

    /// Derives the key from a secret, without the white space at its ends. Returns `None` if the
    /// secret is shorter than 16 bytes.
    #[must_use]
    pub fn of(secret: &[u8]) -> Option<Self> {
        let secret = secret.trim_ascii();
        (secret.len() >= SECRET_BYTES_MIN)
            .then(|| Self(Zeroizing::new(blake3::derive_key(CONTEXT, secret))))
    }
}

/// A host that has the key. It connects to others and accepts connections.
#[derive(Clone)]
pub struct Party {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl Party {
    /// Creates the certificate that this process uses until it ends. Error: the certificate cannot
    /// be made.
    pub fn new(key: &SharedKey) -> Result<Self> {
        Self::made(key).map_err(|problem| Error::Tls { peer: "this host".into(), problem })
    }

    fn made(key: &SharedKey) -> Result<Self, String> {
        let text = |e: rcgen::Error| e.to_string();
        let document = Zeroizing::new([&PKCS8_HEAD[..], &key.0[..]].concat());
        let document = PrivatePkcs8KeyDer::from(document.to_vec());
        let authority_key =
            KeyPair::from_pkcs8_der_and_sign_algo(&document, &PKCS_ED25519).map_err(text)?;
        let mut authority = CertificateParams::new(Vec::<String>::new()).map_err(text)?;
        authority.distinguished_name.push(DnType::CommonName, AUTHORITY);
        authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        let root = authority.self_signed(&authority_key).map_err(text)?;
        let issuer = Issuer::new(authority, authority_key);
        let own_key = KeyPair::generate_for(&PKCS_ED25519).map_err(text)?;
        let mut own = CertificateParams::new(vec![NAME.to_owned()]).map_err(text)?;
        own.distinguished_name.push(DnType::CommonName, NAME);
        let own = own.signed_by(&own_key, &issuer).map_err(text)?;
        let mut roots = RootCertStore::empty();
        roots.add(root.der().clone()).map_err(|e| e.to_string())?;
        let roots = Arc::new(roots);
        let identity = Identity {
            chain: vec![own.der().clone()],
            key: PrivatePkcs8KeyDer::from(own_key.serialize_der()).into(),
        };
        let text = |e: keyframe_tls::Error| e.to_string();
        let server = server_config(identity.clone(), Some(Arc::clone(&roots))).map_err(text)?;
        let client =
            client_config(ServerTrust::Authorities(roots), Some(identity)).map_err(text)?;
        Ok(Self { client, server })
    }

    /// Connects to the host that listens at `address`, within `timeout`, and returns the
    /// connection. Errors: [`Error::Io`] if the network fails or the time has passed;
    /// [`Error::Tls`] if that host does not prove that it has the key.
    pub fn connect(&self, address: SocketAddr, timeout: Duration) -> Result<Channel> {
        let peer = address.to_string();
        let stream = TcpStream::connect_timeout(&address, timeout).map_err(|source| Error::Io {
            operation: "connect to",
            peer: peer.clone(),
            source,
        })?;
        let name = ServerName::try_from(NAME)
            .map_err(|e| Error::Tls { peer: peer.clone(), problem: e.to_string() })?;
        let tls = ClientConnection::new(Arc::clone(&self.client), name)
            .map_err(|e| Error::Tls { peer, problem: e.to_string() })?;
        Channel::new(stream, tls.into(), timeout)
    }

    /// Completes the handshake of the accepted connection `stream`, within `timeout`, and returns
    /// the connection. Errors: [`Error::Io`] if the network fails or the time has passed;
    /// [`Error::Tls`] if the other host does not prove that it has the key.
    pub fn accept(&self, stream: TcpStream, timeout: Duration) -> Result<Channel> {
        let tls = ServerConnection::new(Arc::clone(&self.server)).map_err(|e| Error::Tls {
            peer: stream.peer_addr().map_or_else(|_| "a client".into(), |a| a.to_string()),
            problem: e.to_string(),
        })?;
        Channel::new(stream, tls.into(), timeout)
    }
}
