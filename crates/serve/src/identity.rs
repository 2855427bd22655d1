//! The certificate by which clients recognize a server: the user gives it, or the server makes it.
//!
//! A server keeps a certificate that it made in a file. So a client that has pinned the fingerprint
//! recognizes the server after a restart.

use crate::{Error, Result};
use keyframe_store_backend::served::{Fingerprint, fingerprint};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

const KEPT: &str = "identity.pem";
const NAME: &str = "keyframe serve";

/// The certificate of a server, with the chain of its signers, and its key.
#[derive(Debug)]
pub struct ServerIdentity {
    pub(crate) tls: keyframe_tls::Identity,
    /// True if Keyframe made the certificate. No authority signed it, so clients must pin it.
    pub is_own: bool,
}

impl ServerIdentity {
    /// Reads the identity from PEM files: the certificate with its chain, and the key. Errors: a
    /// file cannot be read, or is not PEM; the key is not the certificate's.
    pub fn of_files(certificate: &Path, key: &Path) -> Result<Self> {
        let bad = |path: &Path, problem: String| Error::Certificate {
            object: path.display().to_string(),
            problem,
        };
        let chain = CertificateDer::pem_file_iter(certificate)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .map_err(|e| bad(certificate, e.to_string()))?;
        if chain.is_empty() {
            return Err(bad(certificate, "there is no certificate in it".into()));
        }
        let key = PrivateKeyDer::from_pem_file(key).map_err(|e| bad(key, e.to_string()))?;
        Ok(Self { tls: keyframe_tls::Identity { chain, key }, is_own: false })
    }

    /// Reads the identity that a server keeps in the directory `folder`. Makes a new one if there
    /// is none. Errors: [`Error::Io`] if it cannot be written; [`Error::Certificate`] if it cannot
    /// be read.
    pub fn kept(folder: &Path) -> Result<Self> {
        let path = folder.join(KEPT);
        let failed = |operation| {
            let object = path.display().to_string();
            move |source| Error::Io { object, operation, source }
        };
        if !path.exists() {
            std::fs::DirBuilder::new()
                .mode(0o700)
                .recursive(true)
                .create(folder)
                .map_err(failed("make the directory of"))?;
            // Only its owner can read it, from its first moment. If another process makes one at
            // the same time, the file of the first process stays.
            let written = tempfile::NamedTempFile::new_in(folder).and_then(|mut file| {
                file.write_all(made()?.as_bytes())?;
                file.as_file().sync_all()?;
                match file.persist_noclobber(&path) {
                    Err(error) if error.error.kind() != io::ErrorKind::AlreadyExists => {
                        Err(error.error)
                    }
                    _ => Ok(()),
                }
            });
            written.map_err(failed("write"))?;
        }
        Ok(Self { is_own: true, ..Self::of_files(&path, &path)? })
    }

    /// Makes a key and a certificate for this process alone. Error: the certificate cannot be made.
    pub fn fresh() -> Result<Self> {
        let failed = |problem: String| Error::Certificate { object: NAME.into(), problem };
        let pem = made().map_err(|e| failed(e.to_string()))?;
        let chain = CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<Vec<_>, _>>();
        let key =
            PrivateKeyDer::from_pem_slice(pem.as_bytes()).map_err(|e| failed(e.to_string()))?;
        let chain = chain.map_err(|e| failed(e.to_string()))?;
        Ok(Self { tls: keyframe_tls::Identity { chain, key }, is_own: true })
    }

    /// Returns the SHA-256 of the certificate, by which clients know the server.
    pub fn fingerprint(&self) -> Fingerprint {
        self.tls.chain.first().map(|certificate| fingerprint(certificate)).unwrap_or_default()
    }
}

/// A new key, and a certificate for it, as PEM.
fn made() -> io::Result<String> {
    let key = rcgen::KeyPair::generate().map_err(io::Error::other)?;
    let mut params =
        rcgen::CertificateParams::new(vec!["localhost".to_owned()]).map_err(io::Error::other)?;
    params.distinguished_name.push(rcgen::DnType::CommonName, NAME);
    let certificate = params.self_signed(&key).map_err(io::Error::other)?;
    Ok(certificate.pem() + &key.serialize_pem())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn one_that_was_made_is_found_again_and_is_for_its_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("serve");
        let first = ServerIdentity::kept(&folder).unwrap();
        assert_eq!(ServerIdentity::kept(&folder).unwrap().fingerprint(), first.fingerprint());
        assert_ne!(ServerIdentity::fresh().unwrap().fingerprint(), first.fingerprint());
        let mode = std::fs::metadata(folder.join(KEPT)).unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0);
        std::fs::write(folder.join(KEPT), "nonsense").unwrap();
        let error = ServerIdentity::kept(&folder).unwrap_err();
        assert!(error.to_string().contains(KEPT) && error.fix().is_some(), "{error}");
    }
}
