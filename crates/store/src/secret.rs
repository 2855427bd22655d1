//! The keys of an encrypted store, and the secret that locks them.
//!
//! ```text
//!   passphrase ──Argon2id(salt, memory, passes, lanes)──┐
//!   key file ────BLAKE3 derive_key(salt, contents)──────┴─▶ 32 bytes ──XChaCha20-Poly1305──▶ "keys" in store.json
//!                                                                           └ also authenticates the id and all parameters
//!   "keys": hash key (32, finds pages) · data key (32, encrypts files)
//! ```
//!
//! Invariants: both keys are random and made with the store. Neither is in `store.json` in plain
//! text, nor in any `Debug` form. Their memory is cleared. The memory and time that a foreign
//! `store.json` can ask for are bounded.

use crate::secret_kind::SecretKind;
use crate::{Error, Result};
use argon2::{Algorithm, Argon2, Params, Version};
use chacha20poly1305::aead::{Aead, Payload};
use chacha20poly1305::{KeyInit, XChaCha20Poly1305, XNonce};
use keyframe_bytes::hex::{from_hex, to_hex};
use keyframe_store_backend::{DataKey, random_bytes};
use keyframe_store_format::page_hash::HashKey;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

const CIPHER: &str = "xchacha20-poly1305";
const KEY_FILE_CONTEXT: &str = "keyframe 2026-11 key file of a store";
/// The shortest key file: as long as a key.
const KEY_FILE_BYTES_MIN: usize = 32;
const PASSPHRASE_BYTES_MIN: usize = 8;
/// The second recommendation of RFC 9106, for limited memory.
const ARGON: Argon = Argon { memory_kib: 64 << 10, passes: 3, lanes: 4 };
const ARGON_MAX: Argon = Argon { memory_kib: 1 << 20, passes: 64, lanes: 64 };

/// The secret that opens an encrypted store. Its `Debug` form does not show it.
#[derive(Clone)]
pub enum Secret {
    /// A passphrase of at least 8 bytes.
    Passphrase(Zeroizing<String>),
    /// The contents of a key file of at least 32 bytes.
    KeyFile(Zeroizing<Vec<u8>>),
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Secret({}, hidden)", self.kind())
    }
}

impl Secret {
    /// Returns the kind of the secret.
    pub fn kind(&self) -> SecretKind {
        match self {
            Self::Passphrase(_) => SecretKind::Passphrase,
            Self::KeyFile(_) => SecretKind::KeyFile,
        }
    }

    /// Refuses a secret that is too short to lock a store with.
    fn check(&self) -> Result<()> {
        let (len, min) = match self {
            Self::Passphrase(words) => (words.len(), PASSPHRASE_BYTES_MIN),
            Self::KeyFile(bytes) => (bytes.len(), KEY_FILE_BYTES_MIN),
        };
        if len >= min { Ok(()) } else { Err(Error::WeakKey { kind: self.kind(), len, min }) }
    }
}

/// The locked keys of a store: a part of `store.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lock {
    cipher: String,
    with: SecretKind,
    #[serde(skip_serializing_if = "Option::is_none")]
    argon2id: Option<Argon>,
    salt: String,
    nonce: String,
    keys: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Argon {
    memory_kib: u32,
    passes: u32,
    lanes: u32,
}

impl Lock {
    /// Locks the keys of the store that `identity` names with `secret`. Errors: [`Error::WeakKey`]
    /// if the secret is too short; the system gives no random numbers; the encryption fails.
    pub fn close(secret: &Secret, key: &HashKey, data: &DataKey, identity: &str) -> Result<Self> {
        secret.check()?;
        let nonce: [u8; 24] = random_bytes()?;
        let mut lock = Self {
            cipher: CIPHER.into(),
            with: secret.kind(),
            argon2id: (secret.kind() == SecretKind::Passphrase).then_some(ARGON),
            salt: to_hex(&random_bytes::<16>()?),
            nonce: to_hex(&nonce),
            keys: String::new(),
        };
        let keys = Zeroizing::new([key.0, *data.0].concat());
        let cipher = lock
            .cipher(secret)
            .ok_or_else(|| Error::damaged(identity, "its keys cannot be locked"))?;
        let authenticated = lock.authenticated(identity);
        let payload = Payload { msg: keys.as_slice(), aad: authenticated.as_bytes() };
        let locked = cipher.encrypt(&XNonce::from(nonce), payload);
        lock.keys =
            to_hex(&locked.map_err(|_| Error::damaged(identity, "its keys cannot be locked"))?);
        Ok(lock)
    }

    /// Returns the kind of secret that opens the lock.
    pub fn kind(&self) -> SecretKind {
        self.with
    }

    /// Unlocks the keys of the store that `identity` names, and returns them. `object` names the
    /// file in errors.
    ///
    /// Errors: [`Error::KeyNeeded`] if the lock needs another kind of secret; [`Error::WrongKey`]
    /// if the secret is another one or the lock was changed; [`Error::Damaged`] if the lock is
    /// malformed or of an unknown cipher.
    pub fn open(
        &self,
        secret: &Secret,
        identity: &str,
        object: &str,
    ) -> Result<(HashKey, DataKey)> {
        let damaged = |problem: &str| Error::damaged(object, problem);
        if self.cipher != CIPHER {
            return Err(damaged(&format!(
                "is encrypted with {:?}, which this program does not know",
                self.cipher
            )));
        }
        if secret.kind() != self.with {
            return Err(Error::KeyNeeded { object: object.into(), kind: self.with });
        }
        let nonce: [u8; 24] = from_hex(&self.nonce)
            .ok_or_else(|| damaged("has a nonce that is not 24 bytes in hexadecimal digits"))?;
        let locked: [u8; 80] = from_hex(&self.keys)
            .ok_or_else(|| damaged("has keys that are not 80 bytes in hexadecimal digits"))?;
        let cipher =
            self.cipher(secret).ok_or_else(|| damaged("asks for more than a key may cost"))?;
        let authenticated = self.authenticated(identity);
        let payload = Payload { msg: &locked, aad: authenticated.as_bytes() };
        let wrong = || Error::WrongKey { object: object.into(), kind: self.with };
        let keys =
            Zeroizing::new(cipher.decrypt(&XNonce::from(nonce), payload).map_err(|_| wrong())?);
        let (hash, data) = keys.split_at_checked(32).ok_or_else(wrong)?;
        let hash = HashKey(hash.try_into().map_err(|_| wrong())?);
        Ok((hash, DataKey(Zeroizing::new(data.try_into().map_err(|_| wrong())?))))
    }

    /// The associated data of the encryption: the store's identity and every field that opening
    /// uses, with a space between two. This text is part of the store format.
    fn authenticated(&self, identity: &str) -> String {
        let Self { cipher, with, argon2id, salt, .. } = self;
        let derivation = match argon2id {
            Some(Argon { memory_kib, passes, lanes }) => {
                format!("argon2id memory_kib={memory_kib} passes={passes} lanes={lanes}")
            }
            None => "blake3".into(),
        };
        format!("{identity} {cipher} {with} {derivation} {salt}")
    }

    /// The cipher; `None` if the parameters of the lock are out of bounds.
    fn cipher(&self, secret: &Secret) -> Option<XChaCha20Poly1305> {
        let salt: [u8; 16] = from_hex(&self.salt)?;
        let mut key = Zeroizing::new([0; 32]);
        match (secret, self.argon2id) {
            (Secret::Passphrase(words), Some(Argon { memory_kib, passes, lanes })) => {
                let max = ARGON_MAX;
                if memory_kib > max.memory_kib || passes > max.passes || lanes > max.lanes {
                    return None;
                }
                let params = Params::new(memory_kib, passes, lanes, Some(key.len())).ok()?;
                let argon = Argon2::new(Algorithm::Argon2id, Version::V0x13, params);
                argon.hash_password_into(words.as_bytes(), &salt, &mut *key).ok()?;
            }
            (Secret::KeyFile(bytes), None) => {
                let material = Zeroizing::new([&salt, bytes.as_slice()].concat());
                *key = blake3::derive_key(KEY_FILE_CONTEXT, &material);
            }
            _ => return None,
        }
        Some(XChaCha20Poly1305::new((&*key).into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key_file(byte: u8) -> Secret {
        Secret::KeyFile(Zeroizing::new(vec![byte; 40]))
    }

    #[test]
    fn only_the_right_secret_opens_the_keys() {
        let (hash, data) = (HashKey([0xab; 32]), DataKey(Zeroizing::new([0xcd; 32])));
        let words = |text: &str| Secret::Passphrase(Zeroizing::new(text.into()));
        for (right, wrong) in
            [(key_file(1), key_file(2)), (words("correct horse"), words("correct hors3"))]
        {
            let lock = Lock::close(&right, &hash, &data, "id").unwrap();
            let (a, b) = lock.open(&right, "id", "x").unwrap();
            assert_eq!((a.0, *b.0), (hash.0, *data.0));
            for (secret, identity) in [(&wrong, "id"), (&right, "other")] {
                let error = lock.open(secret, identity, "x").unwrap_err();
                assert!(matches!(error, Error::WrongKey { .. }), "{error}");
            }
            let text =
                serde_json::to_string(&lock).unwrap() + &format!("{lock:?} {right:?} {data:?}");
            assert!(
                // Eight hexadecimal digits: four of them occur by chance in salt, nonce or keys.
                !text.contains("abababab") && !text.contains("cdcdcdcd") && !text.contains("horse"),
                "{text}"
            );
        }
    }

    #[test]
    fn changed_greedy_and_short_locks_are_refused() {
        let (hash, data) = (HashKey([1; 32]), DataKey(Zeroizing::new([2; 32])));
        let lock = Lock::close(&key_file(1), &hash, &data, "id").unwrap();
        let words = Secret::Passphrase(Zeroizing::new("long enough".into()));
        assert!(matches!(lock.open(&words, "id", "x"), Err(Error::KeyNeeded { .. })));
        let changed: [fn(&mut Lock); 5] = [
            |l| l.salt = to_hex(&[9; 16]),
            |l| l.nonce = to_hex(&[9; 24]),
            |l| l.keys.replace_range(..1, if l.keys.starts_with('0') { "1" } else { "0" }),
            |l| l.cipher = "none".into(),
            |l| l.keys = "00".into(),
        ];
        for change in changed {
            let mut other = lock.clone();
            change(&mut other);
            assert!(other.open(&key_file(1), "id", "x").is_err());
        }
        let mut greedy = lock.clone();
        greedy.with = SecretKind::Passphrase;
        greedy.argon2id = Some(Argon { memory_kib: u32::MAX, ..ARGON });
        assert!(matches!(greedy.open(&words, "id", "x"), Err(Error::Damaged { .. })));
        let short = Secret::KeyFile(Zeroizing::new(vec![0; 31]));
        assert!(matches!(
            Lock::close(&short, &hash, &data, "id"),
            Err(Error::WeakKey { len: 31, .. })
        ));
    }
}
