//! The kinds of secrets that open an encrypted store.

use serde::{Deserialize, Serialize};

/// The kind of secret that a store needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SecretKind {
    /// A passphrase.
    Passphrase,
    /// A key file.
    KeyFile,
}

impl std::fmt::Display for SecretKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Passphrase => "passphrase",
            Self::KeyFile => "key file",
        })
    }
}
