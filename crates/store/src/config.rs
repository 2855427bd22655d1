//! `store.json`: the identity of a store and its keys. It makes a directory a store.
//!
//! ```text
//!   {
//!     "format": "keyframe-checkpoint-store",
//!     "version": 1,
//!     "id": "32 hexadecimal digits",
//!     "created": "2026-01-31T12:00:00Z",
//!     "hash_key": "64 hexadecimal digits",
//!     "checksum": "BLAKE3 of every byte before this line"
//!   }
//! ```
//!
//! In an encrypted store, `encryption` ([`crate::secret`]) replaces `hash_key`.
//!
//! Invariants: every version of the format has the same checksum line, so a reader distinguishes
//! another version from damage. The bytes after the checksum are fixed, so every byte of the file
//! is checked.

use crate::secret::{Lock, Secret};
use crate::secret_kind::SecretKind;
use crate::{Error, Result};
use jiff::Timestamp;
use keyframe_bytes::hex::{from_hex, to_hex};
use keyframe_store_backend::layout::STORE_JSON;
use keyframe_store_backend::{DataKey, random_bytes};
use keyframe_store_format::identity::{FORMAT_VERSION, StoreId};
use keyframe_store_format::page_hash::HashKey;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

/// The longest `store.json` that is read, in bytes; far more than it needs.
pub const STORE_JSON_BYTES_MAX: u64 = 64 << 10;

const FORMAT: &str = "keyframe-checkpoint-store";
/// The format of the stores that builds before the first release made.
const PRE_RELEASE_FORMAT: &str = "keyframe-store";
const CHECKSUM_FIELD: &str = "  \"checksum\": \"";
const CLOSING: &str = "\"\n}\n";

/// The identity and the keys of a store.
#[derive(Clone, Debug)]
pub struct Config {
    pub id: StoreId,
    pub created: Timestamp,
    pub key: HashKey,
    /// The keys of the encryption. `None` if the store is not encrypted.
    pub encryption: Option<Encryption>,
}

/// The keys that only an encrypted store has.
#[derive(Clone, Debug)]
pub struct Encryption {
    /// The lock of its keys.
    pub lock: Lock,
    pub data_key: DataKey,
}

/// The content of `store.json` as it was read, perhaps with locked keys.
#[derive(Clone, Debug)]
pub struct Stored {
    pub id: StoreId,
    created: Timestamp,
    pub keys: StoredKeys,
}

/// The keys of a store, as `store.json` holds them.
#[derive(Clone, Debug)]
pub enum StoredKeys {
    /// The key of the page hashes, of a store that is not encrypted.
    Plain(HashKey),
    /// All keys, locked by a secret.
    Locked(Lock),
}

#[derive(Serialize, Deserialize)]
struct Body {
    format: String,
    version: u32,
    id: String,
    created: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    hash_key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    encryption: Option<Lock>,
}

#[derive(Deserialize)]
struct AnyVersion {
    format: String,
    version: u32,
}

impl Config {
    /// Creates a new identity with keys from the system's random source. `secret` locks the keys;
    /// `None` for a store without encryption.
    ///
    /// Errors: [`Error::WeakKey`] if the secret is too short; the system gives no random numbers.
    pub fn fresh(secret: Option<&Secret>) -> Result<Self> {
        let (id, created, key) = (StoreId(random_bytes()?), now(), HashKey(random_bytes()?));
        let encryption = match secret {
            None => None,
            Some(secret) => {
                let data_key = DataKey(Zeroizing::new(random_bytes()?));
                Some(Encryption {
                    lock: Lock::close(secret, &key, &data_key, &name(id, created))?,
                    data_key,
                })
            }
        };
        Ok(Self { id, created, key, encryption })
    }

    /// Returns true if `stored` is the content from which this identity was read.
    pub fn is(&self, stored: &Stored) -> bool {
        let same_keys = match (&stored.keys, &self.encryption) {
            (StoredKeys::Plain(key), None) => key.0 == self.key.0,
            (StoredKeys::Locked(lock), Some(encryption)) => *lock == encryption.lock,
            _ => false,
        };
        stored.id == self.id && same_keys
    }

    /// Encodes `store.json`, with its checksum. Error: it cannot be written as JSON.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let body = Body {
            format: FORMAT.into(),
            version: FORMAT_VERSION,
            id: to_hex(&self.id.0),
            created: self.created,
            hash_key: self.encryption.is_none().then(|| to_hex(&self.key.0)),
            encryption: self.encryption.as_ref().map(|encryption| encryption.lock.clone()),
        };
        let text = serde_json::to_string_pretty(&body)
            .map_err(|e| Error::damaged(STORE_JSON, format!("cannot be written as JSON: {e}")))?;
        let mut out = format!("{},\n", text.strip_suffix("\n}").unwrap_or(&text));
        let checksum = blake3::hash(out.as_bytes());
        out.push_str(CHECKSUM_FIELD);
        out.push_str(&checksum.to_hex());
        out.push_str(CLOSING);
        Ok(out.into_bytes())
    }

    /// Parses `store.json`. `object` names the file in errors.
    ///
    /// Errors: [`Error::Damaged`] if the text or its checksum is invalid, [`Error::OtherVersion`]
    /// for another version of the format, [`Error::PreRelease`] for the format of a version before
    /// the first release.
    pub fn decode(bytes: &[u8], object: &str) -> Result<Stored> {
        let damaged = |problem: String| Error::damaged(object, problem);
        let text = std::str::from_utf8(bytes).map_err(|e| damaged(format!("not text: {e}")))?;
        let (covered, line) = text
            .rfind(CHECKSUM_FIELD)
            .and_then(|at| text.split_at_checked(at))
            .ok_or_else(|| damaged("has no checksum line".into()))?;
        let checksum = blake3::hash(covered.as_bytes()).to_hex();
        if line != format!("{CHECKSUM_FIELD}{checksum}{CLOSING}") {
            return Err(damaged("its checksum does not match".into()));
        }
        let json = |e: serde_json::Error| damaged(format!("not as expected: {e}"));
        let any: AnyVersion = serde_json::from_str(text).map_err(json)?;
        if any.format == PRE_RELEASE_FORMAT {
            return Err(Error::PreRelease { object: object.into(), found: any.version });
        }
        if any.format != FORMAT {
            return Err(damaged(format!("its format is \"{}\", not \"{FORMAT}\"", any.format)));
        }
        if any.version != FORMAT_VERSION {
            return Err(Error::OtherVersion { object: object.into(), found: any.version });
        }
        let body: Body = serde_json::from_str(text).map_err(json)?;
        let id = from_hex(&body.id)
            .ok_or_else(|| damaged("its id is not 32 hexadecimal digits".into()))?;
        let keys = match (body.encryption, body.hash_key) {
            (Some(lock), None) => StoredKeys::Locked(lock),
            (None, Some(key)) => from_hex(&key)
                .map(|key| StoredKeys::Plain(HashKey(key)))
                .ok_or_else(|| damaged("its key is not 64 hexadecimal digits".into()))?,
            _ => return Err(damaged("it must have either a key or locked keys".into())),
        };
        Ok(Stored { id: StoreId(id), created: body.created, keys })
    }
}

impl Stored {
    /// Unlocks the keys, and returns the identity with them. For locked keys, calls `ask` for the
    /// secret. `object` names the file in errors.
    ///
    /// Errors: [`Error::KeyNeeded`] if `ask` returns no secret, or one of another kind;
    /// [`Error::WrongKey`] if the secret is not that of the store; [`Error::Damaged`] if the lock
    /// is malformed; that of `ask`.
    pub fn unlock(
        self,
        ask: &dyn Fn(SecretKind) -> Result<Option<Secret>>,
        object: &str,
    ) -> Result<Config> {
        let Self { id, created, keys } = self;
        let (key, encryption) = match keys {
            StoredKeys::Plain(key) => (key, None),
            StoredKeys::Locked(lock) => {
                let kind = lock.kind();
                let secret =
                    ask(kind)?.ok_or_else(|| Error::KeyNeeded { object: object.into(), kind })?;
                let (key, data_key) = lock.open(&secret, &name(id, created), object)?;
                (key, Some(Encryption { lock, data_key }))
            }
        };
        Ok(Config { id, created, key, encryption })
    }
}

/// The text that a lock is bound to.
fn name(id: StoreId, created: Timestamp) -> String {
    format!("{FORMAT} {FORMAT_VERSION} {} {created}", to_hex(&id.0))
}

/// Returns the present time, in whole seconds.
pub fn now() -> Timestamp {
    let now = Timestamp::now();
    Timestamp::from_second(now.as_second()).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn another_version_and_a_pre_release_store_are_distinguished_from_damage() {
        let text = String::from_utf8(Config::fresh(None).unwrap().encode().unwrap()).unwrap();
        let with_checksum = |text: &str| {
            let covered = &text[..text.rfind(CHECKSUM_FIELD).unwrap()];
            let hash = blake3::hash(covered.as_bytes()).to_hex();
            format!("{covered}{CHECKSUM_FIELD}{hash}{CLOSING}")
        };
        let later = text.replace("\"version\": 1", "\"version\": 7,\n  \"novelty\": true");
        assert!(matches!(Config::decode(later.as_bytes(), "x"), Err(Error::Damaged { .. })));
        let error = Config::decode(with_checksum(&later).as_bytes(), "x").unwrap_err();
        assert!(matches!(error, Error::OtherVersion { found: 7, .. }), "{error}");
        let old =
            text.replace(FORMAT, PRE_RELEASE_FORMAT).replace("\"version\": 1", "\"version\": 8");
        let error = Config::decode(with_checksum(&old).as_bytes(), "x").unwrap_err();
        assert!(matches!(error, Error::PreRelease { found: 8, .. }), "{error}");
        assert!(error.to_string().contains("pre-release"), "{error}");
    }

    #[test]
    fn the_identity_comes_back_and_every_flipped_bit_is_noticed() {
        let config = Config::fresh(None).unwrap();
        let bytes = config.encode().unwrap();
        let back = Config::decode(&bytes, "x").unwrap();
        assert!(config.is(&back));
        let back = back.unlock(&|_| Ok(None), "x").unwrap();
        assert_eq!((back.id, back.created, back.key.0), (config.id, config.created, config.key.0));
        serde_json::from_slice::<serde_json::Value>(&bytes).expect("plain JSON");
        for at in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[at / 8] ^= 1 << (at % 8);
            assert!(Config::decode(&flipped, "x").is_err(), "bit {at}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..600), text in "\\PC{0,300}") {
            let _ = Config::decode(&bytes, "x");
            let _ = Config::decode(format!("{{{text}{CHECKSUM_FIELD}{text}").as_bytes(), "x");
        }
    }
}
