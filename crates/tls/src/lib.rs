//! TLS settings for every connection that Keyframe makes or accepts.
//!
//! Both sides speak TLS 1.3 alone, with the `ring` provider. A client trusts a server through
//! certificate authorities or through the SHA-256 fingerprint of its certificate
//! ([`ServerTrust`]). A server may demand a client certificate.

mod pinned;

pub use pinned::{Fingerprint, UnknownFingerprint, fingerprint};

use rustls::client::WebPkiServerVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::sync::Arc;

/// The one protocol version.
static VERSIONS: [&rustls::SupportedProtocolVersion; 1] = [&rustls::version::TLS13];

/// The certificate that a server or a client shows, and its private key.
#[derive(Debug)]
pub struct Identity {
    /// The certificate, then those of the authorities that signed it.
    pub chain: Vec<CertificateDer<'static>>,
    /// The private key of the first certificate.
    pub key: PrivateKeyDer<'static>,
}

impl Clone for Identity {
    fn clone(&self) -> Self {
        Self { chain: self.chain.clone(), key: self.key.clone_key() }
    }
}

/// The rule by which a client recognizes a server.
#[derive(Clone, Debug)]
pub enum ServerTrust {
    /// An authority of this list signed the server's certificate, which names the host.
    Authorities(Arc<RootCertStore>),
    /// The server's certificate has this fingerprint. Its names and signer do not count.
    Pinned(Fingerprint),
}

/// The reason why TLS settings could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The certificate and the key cannot be used together, or not with TLS 1.3.
    #[error(transparent)]
    Identity(#[from] rustls::Error),
    /// The list of certificate authorities is empty or cannot be used.
    #[error(transparent)]
    Authorities(#[from] VerifierBuilderError),
}

/// Returns the settings of a server that shows `identity`.
///
/// With `client_authorities`, the server accepts only clients that show a certificate which one of
/// these authorities signed; with `None`, all clients. Errors: [`Error::Identity`] if the
/// certificate does not match the key; [`Error::Authorities`] if the list of authorities is empty.
pub fn server_config(
    identity: Identity,
    client_authorities: Option<Arc<RootCertStore>>,
) -> Result<Arc<ServerConfig>, Error> {
    let provider = provider();
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&VERSIONS)?;
    let builder = match client_authorities {
        Some(authorities) => builder.with_client_cert_verifier(
            WebPkiClientVerifier::builder_with_provider(authorities, provider).build()?,
        ),
        None => builder.with_no_client_auth(),
    };
    Ok(Arc::new(builder.with_single_cert(identity.chain, identity.key)?))
}

/// Returns the settings of a client that trusts servers as `trust` says.
///
/// With `identity`, the client shows that certificate to a server that demands one; with `None`, it
/// shows none. Errors: [`Error::Identity`] if the certificate does not match the key;
/// [`Error::Authorities`] if the list of authorities is empty.
pub fn client_config(
    trust: ServerTrust,
    identity: Option<Identity>,
) -> Result<Arc<ClientConfig>, Error> {
    let provider = provider();
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&VERSIONS)?;
    let builder = match trust {
        ServerTrust::Authorities(authorities) => builder.with_webpki_verifier(
            WebPkiServerVerifier::builder_with_provider(authorities, provider).build()?,
        ),
        ServerTrust::Pinned(fingerprint) => {
            let verifier = pinned::PinnedVerifier { fingerprint, provider };
            builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier))
        }
    };
    Ok(Arc::new(match identity {
        Some(identity) => builder.with_client_auth_cert(identity.chain, identity.key)?,
        None => builder.with_no_client_auth(),
    }))
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::pki_types::{PrivatePkcs8KeyDer, ServerName};
    use rustls::{CertificateError, ClientConnection, ServerConnection};

    fn identity() -> Identity {
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let certificate = params.self_signed(&key).unwrap();
        let key = PrivatePkcs8KeyDer::from(key.serialize_der());
        Identity { chain: vec![certificate.der().clone()], key: key.into() }
    }

    fn authorities(identity: &Identity) -> Arc<RootCertStore> {
        let mut roots = RootCertStore::empty();
        roots.add(identity.chain[0].clone()).unwrap();
        Arc::new(roots)
    }

    /// Runs a handshake in memory.
    fn handshake(
        client: Arc<ClientConfig>,
        server: Arc<ServerConfig>,
    ) -> Result<(), rustls::Error> {
        let name = ServerName::try_from("localhost").unwrap();
        let mut client = ClientConnection::new(client, name)?;
        let mut server = ServerConnection::new(server)?;
        for _ in 0..10 {
            let mut bytes = Vec::new();
            while client.wants_write() {
                client.write_tls(&mut bytes).unwrap();
            }
            server.read_tls(&mut &bytes[..]).unwrap();
            server.process_new_packets()?;
            bytes.clear();
            while server.wants_write() {
                server.write_tls(&mut bytes).unwrap();
            }
            client.read_tls(&mut &bytes[..]).unwrap();
            client.process_new_packets()?;
        }
        assert!(!client.is_handshaking() && !server.is_handshaking());
        Ok(())
    }

    #[test]
    fn a_pinned_certificate_is_accepted_and_another_is_refused() {
        let (shown, other) = (identity(), identity());
        let server = || server_config(shown.clone(), None).unwrap();
        let client = |identity: &Identity| {
            let pinned = fingerprint(&identity.chain[0]);
            client_config(ServerTrust::Pinned(pinned), None).unwrap()
        };
        handshake(client(&shown), server()).unwrap();
        let refused = handshake(client(&other), server()).unwrap_err();
        let rustls::Error::InvalidCertificate(CertificateError::Other(reason)) = refused else {
            panic!("{refused:?}");
        };
        let seen = reason.0.downcast_ref::<UnknownFingerprint>().unwrap();
        assert_eq!(seen.0, fingerprint(&shown.chain[0]));
    }

    #[test]
    fn each_side_is_checked_against_the_authorities() {
        let (ours, theirs) = (identity(), identity());
        let client = |trusted: &Identity, shown: Option<Identity>| {
            client_config(ServerTrust::Authorities(authorities(trusted)), shown).unwrap()
        };
        let open = server_config(ours.clone(), None).unwrap();
        handshake(client(&ours, None), open.clone()).unwrap();
        handshake(client(&theirs, None), open).unwrap_err();
        let mutual = server_config(ours.clone(), Some(authorities(&theirs))).unwrap();
        handshake(client(&ours, Some(theirs)), mutual.clone()).unwrap();
        handshake(client(&ours, None), mutual).unwrap_err();
    }

    #[test]
    fn an_empty_list_of_authorities_and_a_wrong_key_are_refused() {
        let none = ServerTrust::Authorities(Arc::new(RootCertStore::empty()));
        assert!(matches!(client_config(none, None), Err(Error::Authorities(_))));
        let mixed = Identity { chain: identity().chain, key: identity().key };
        assert!(matches!(server_config(mixed, None), Err(Error::Identity(_))));
    }
}
