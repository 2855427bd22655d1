//! The address of a checkpoint server, and how a client proves its right and trusts the server.
//!
//! ```text
//!   kf://HOST:PORT?fingerprint=SHA256
//!                  └ else KEYFRAME_SERVE_FINGERPRINT: the fingerprint that `keyframe serve` prints
//!                    else KEYFRAME_SERVE_CA: a file of certificate authorities
//!   KEYFRAME_TOKEN, else KEYFRAME_TOKEN_FILE: the token that allows this client to read
//! ```
//!
//! The token is not part of the address, because messages show addresses.

use super::wire::TOKEN_BYTES_MAX;
use crate::{Error, FileRefusal, Result};
use keyframe_tls::Fingerprint;
use std::fmt;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

const SCHEME: &str = "kf://";
/// The TCP port of a server's address that names no port.
pub const DEFAULT_PORT: u16 = 7420;
/// The name of the environment variable that holds the token.
pub const TOKEN_VARIABLE: &str = "KEYFRAME_TOKEN";
const TOKEN_FILE: &str = "KEYFRAME_TOKEN_FILE";
const FINGERPRINT: &str = "KEYFRAME_SERVE_FINGERPRINT";
const CA: &str = "KEYFRAME_SERVE_CA";

/// The address of a checkpoint server, and how a client recognises it.
#[derive(Clone)]
pub struct ServerAddress {
    /// The name in messages: `kf://HOST:PORT`.
    pub name: String,
    /// The host's name or IP address.
    pub host: String,
    /// The TCP port.
    pub port: u16,
    /// The way in which the client recognises the server.
    pub trust: Trust,
    /// The token with which the client identifies itself.
    pub token: Zeroizing<Vec<u8>>,
}

/// The way in which a client recognises its server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trust {
    /// The server has the certificate with this fingerprint.
    Pinned(Fingerprint),
    /// The certificate names the server and is signed by an authority in this file.
    Authority(PathBuf),
}

impl fmt::Debug for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} known by {:?}", self.name, self.trust)
    }
}

/// Returns true for the URL of a checkpoint server.
pub fn is_url(path: &Path) -> bool {
    crate::backend::has_scheme(path, SCHEME)
}

impl ServerAddress {
    /// Parses the URL `path`. `environment` returns the values of environment variables. Errors:
    /// the URL is invalid; the token or the server's identity is missing.
    pub fn parse(path: &Path, environment: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let text = path.to_string_lossy();
        let refused = |problem: &str| invalid(&text, problem);
        let variable = |name| environment(name).filter(|value| !value.is_empty());
        let rest = text.strip_prefix(SCHEME).ok_or_else(|| refused("not a kf:// address"))?;
        let (address, query) = rest.split_once('?').unwrap_or((rest, ""));
        let address = address.trim_end_matches('/');
        let (host, port) = split(address).ok_or_else(|| {
            refused("no valid server; write a host and a port, as in kf://node1:7420 or kf://[::1]:7420")
        })?;
        let asked = match query.split_once('=') {
            Some(("fingerprint", value)) => Some(value.to_owned()),
            None if query.is_empty() => None,
            _ => return Err(refused("unknown parameter; only ?fingerprint=SHA256 is known")),
        };
        let trust = match (asked.or_else(|| variable(FINGERPRINT)), variable(CA)) {
            (Some(text), _) => {
                let problem =
                    "a fingerprint has 64 hexadecimal digits, as keyframe serve prints it";
                Trust::Pinned(parse_fingerprint(&text).ok_or_else(|| refused(problem))?)
            }
            (None, Some(file)) => Trust::Authority(file.into()),
            (None, None) => {
                return Err(refused(
                    "no way to recognise the server: set KEYFRAME_SERVE_FINGERPRINT (the fingerprint \
                     that keyframe serve prints) or KEYFRAME_SERVE_CA (a file with the certificate \
                     of the authority that signed the server's)",
                ));
            }
        };
        let token = match (variable(TOKEN_VARIABLE), variable(TOKEN_FILE)) {
            (Some(token), _) => Zeroizing::new(token.trim().as_bytes().to_vec()),
            (None, Some(file)) => read_token(Path::new(&file))?,
            (None, None) => Zeroizing::default(),
        };
        if token.len() > TOKEN_BYTES_MAX {
            return Err(refused("the token is longer than 512 bytes"));
        }
        let name = format!("{SCHEME}{address}");
        Ok(Self { name, host, port, trust, token })
    }
}

/// Reads a token from a file, without white space at its ends. Errors: the file cannot be read;
/// others than its owner may access it; the token is empty or longer than 512 bytes.
pub fn read_token(file: &Path) -> Result<Zeroizing<Vec<u8>>> {
    let failed = |source| Error::Io {
        object: file.display().to_string(),
        operation: "read the token",
        source,
    };
    let mut bytes = Zeroizing::new(Vec::new());
    let opened = std::fs::File::open(file).map_err(failed)?;
    let mode = opened.metadata().map_err(failed)?.mode();
    // systemd lets a service read its credentials by an access control list, which shows as the
    // rights of the group.
    let credentials = std::env::var_os("CREDENTIALS_DIRECTORY");
    let is_credential = credentials.is_some_and(|folder| file.starts_with(folder));
    let others = if is_credential { 0o037 } else { 0o077 };
    if mode & others != 0 {
        let problem = format!("others may read or write it (mode {:03o})", mode & 0o777);
        let fix = format!("chmod 600 {}", file.display());
        let refusal = FileRefusal { problem, fix };
        return Err(failed(io::Error::new(io::ErrorKind::PermissionDenied, refusal)));
    }
    opened.take(TOKEN_BYTES_MAX as u64 + 1).read_to_end(&mut bytes).map_err(failed)?;
    let token = bytes.trim_ascii();
    if token.is_empty() || token.len() > TOKEN_BYTES_MAX {
        let problem = format!("a token has 1 to {TOKEN_BYTES_MAX} bytes");
        return Err(failed(io::Error::new(io::ErrorKind::InvalidData, problem)));
    }
    Ok(Zeroizing::new(token.to_vec()))
}

/// Parses the 64 hexadecimal digits of a fingerprint, with or without colons. Returns `None` for
/// any other text.
pub fn parse_fingerprint(text: &str) -> Option<Fingerprint> {
    let digits: Vec<u8> = text.bytes().filter(|c| *c != b':').collect();
    if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    let mut out = [0; 32];
    for (to, pair) in out.iter_mut().zip(digits.chunks(2)) {
        *to = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(out)
}

/// Returns a fingerprint as messages show it: 64 hexadecimal digits.
pub fn show_fingerprint(fingerprint: &Fingerprint) -> String {
    keyframe_bytes::hex::to_hex(fingerprint)
}

fn split(address: &str) -> Option<(String, u16)> {
    let (host, port) = match address.strip_prefix('[') {
        Some(rest) => {
            let (host, behind) = rest.split_once(']')?;
            (host, behind.strip_prefix(':').or_else(|| behind.is_empty().then_some(""))?)
        }
        None => address.split_once(':').unwrap_or((address, "")),
    };
    let fits = |c: u8| c.is_ascii_alphanumeric() || b".-_:%".contains(&c);
    let port =
        if port.is_empty() { DEFAULT_PORT } else { port.parse().ok().filter(|port| *port > 0)? };
    (!host.is_empty() && host.len() <= 253 && host.bytes().all(fits))
        .then(|| (host.to_owned(), port))
}

fn invalid(object: &str, problem: &str) -> Error {
    Error::Io {
        object: object.into(),
        operation: "parse the address",
        source: io::Error::new(io::ErrorKind::InvalidInput, problem.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::PermissionsExt;

    const PRINT: &str = "00:01:02:03:04:05:06:07:08:09:0a:0b:0c:0d:0e:0f:10:11:12:13:14:15:16:17:18:19:1a:1b:1c:1d:1e:1F";

    fn parse(url: &str, variables: &[(&str, &str)]) -> Result<ServerAddress> {
        let of =
            |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        ServerAddress::parse(Path::new(url), &of)
    }

    #[test]
    fn the_address_goes_before_the_environment() {
        let address =
            parse("kf://node1/", &[(FINGERPRINT, PRINT), (TOKEN_VARIABLE, " secret\n")]).unwrap();
        assert_eq!(
            (address.name.as_str(), address.host.as_str(), address.port),
            ("kf://node1", "node1", DEFAULT_PORT)
        );
        let print: Fingerprint = std::array::from_fn(|at| at as u8);
        assert_eq!(
            (address.trust.clone(), address.token.as_slice()),
            (Trust::Pinned(print), &b"secret"[..])
        );
        assert!(!format!("{address:?}").contains("secret"));
        let asked = format!("kf://[::1]:9?fingerprint={}", "ab".repeat(32));
        let address = parse(&asked, &[(FINGERPRINT, PRINT), (CA, "/ca")]).unwrap();
        assert_eq!(
            (address.name.as_str(), address.host.as_str(), address.port),
            ("kf://[::1]:9", "::1", 9)
        );
        assert_eq!((address.trust, address.token.len()), (Trust::Pinned([0xab; 32]), 0));
        let address = parse("kf://127.0.0.1:7", &[(CA, "/ca")]).unwrap();
        assert_eq!(address.trust, Trust::Authority("/ca".into()));
    }

    #[test]
    fn what_cannot_be_meant_is_refused_with_the_reason() {
        let known = [(FINGERPRINT, PRINT)];
        for (url, variables, reason) in [
            ("kf://", &known[..], "host"),
            ("kf://a:0", &known, "port"),
            ("kf://a:99999", &known, "port"),
            ("kf://a b", &known, "host"),
            ("kf://a?token=x", &known, "fingerprint"),
            ("kf://a?fingerprint=12", &[], "64"),
            ("kf://a", &[], "KEYFRAME_SERVE_FINGERPRINT"),
            ("kf://a", &[(FINGERPRINT, PRINT), (TOKEN_FILE, "/no/such/file")], "No such file"),
        ] {
            let error = parse(url, variables).unwrap_err();
            assert!(error.to_string().contains(reason), "{url}: {error}");
        }
    }

    #[test]
    fn a_token_is_what_the_file_of_its_owner_holds_without_its_line_end() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        std::fs::write(&file, "secret words\n").unwrap();
        for mode in [0o640, 0o604, 0o620, 0o644] {
            set_permissions(&file, Permissions::from_mode(mode)).unwrap();
            let error = read_token(&file).unwrap_err();
            assert!(error.to_string().contains("others may read or write it"), "{error}");
            assert_eq!(error.fix(), Some(format!("chmod 600 {}", file.display())));
        }
        set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        assert_eq!(read_token(&file).unwrap().as_slice(), b"secret words");
        for bad in [" \n".to_owned(), "x".repeat(600)] {
            std::fs::write(&file, bad).unwrap();
            assert!(read_token(&file).is_err());
        }
    }

    proptest! {
        #[test]
        fn arbitrary_addresses_never_panic(rest in "\\PC{0,80}") {
            let _ = parse(&format!("kf://{rest}"), &[(FINGERPRINT, PRINT)]);
        }
    }
}
