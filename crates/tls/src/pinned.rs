//! Trust in one certificate, known by its fingerprint.

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, DigitallySignedStruct, SignatureScheme};
use sha2::{Digest, Sha256};
use std::fmt::Write;
use std::sync::Arc;

/// SHA-256 of a certificate in DER form.
pub type Fingerprint = [u8; 32];

/// Returns the SHA-256 of a certificate in DER form.
pub fn fingerprint(certificate: &[u8]) -> Fingerprint {
    Sha256::digest(certificate).into()
}

/// The error of a server that showed a certificate with this fingerprint instead of the expected
/// one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownFingerprint(pub Fingerprint);

impl std::fmt::Display for UnknownFingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut digits = String::new();
        for byte in self.0 {
            write!(digits, "{byte:02x}")?;
        }
        write!(f, "its fingerprint is {digits}")
    }
}

impl std::error::Error for UnknownFingerprint {}

/// Verifies servers by the fingerprint of their certificate alone: accepts the certificate with the
/// fingerprint `fingerprint`, whatever its names and its signer. `provider` checks the signatures
/// of the handshake.
#[derive(Debug)]
pub struct PinnedVerifier {
    pub fingerprint: Fingerprint,
    pub provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for PinnedVerifier {
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
        let unknown = Arc::new(UnknownFingerprint(shown));
        Err(CertificateError::Other(rustls::OtherError(unknown)).into())
    }

    // The server still proves that it has the certificate's key.
    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
