//! `store.json`: what makes a directory a store.
//!
//! ```text
//!   {
//!     "format": "keyframe-store",
//!     "version": 1,
//!     "id": "32 hexadecimal digits",
//!     "created": "2026-01-31T12:00:00Z",
//!     "hash_key": "64 hexadecimal digits",
//!     "checksum": "BLAKE3 of every byte before this line"
//!   }
//! ```
//!
//! Invariant: the checksum line is the same in all versions of the format, so that a file of a later version is told
//! from a damaged one. The bytes behind the checksum are fixed, so that no byte of the file goes unchecked.

use crate::bytes::{from_hex, to_hex};
use crate::identity::HashKey;
use crate::{Error, Result};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::io::Read;

/// The file's name.
pub const STORE_JSON: &str = "store.json";
/// The version of the store format (of all its files) that is written, and the highest that is read.
pub const FORMAT_VERSION: u32 = 1;
/// Far above what any version needs.
pub const STORE_JSON_BYTES_MAX: u64 = 64 << 10;

const FORMAT: &str = "keyframe-store";
const CHECKSUM_FIELD: &str = "  \"checksum\": \"";
const CLOSING: &str = "\"\n}\n";

/// The identity of a store.
#[derive(Clone, Debug)]
pub struct Config {
    pub id: StoreId,
    pub created: Timestamp,
    pub key: HashKey,
}

/// The id that every file of a store carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreId(pub [u8; 16]);

#[derive(Serialize, Deserialize)]
struct Body {
    format: String,
    version: u32,
    id: String,
    created: Timestamp,
    hash_key: String,
}

#[derive(Deserialize)]
struct AnyVersion {
    format: String,
    version: u32,
}

impl Config {
    /// A new identity with a key from the system's random source.
    pub fn fresh() -> Result<Self> {
        Ok(Self { id: StoreId(random()?), created: now(), key: HashKey(random()?) })
    }

    pub fn encode(&self) -> Result<Vec<u8>> {
        let body = Body {
            format: FORMAT.into(),
            version: FORMAT_VERSION,
            id: to_hex(&self.id.0),
            created: self.created,
            hash_key: to_hex(&self.key.0),
        };
        let text = serde_json::to_string_pretty(&body)
            .map_err(|e| Error::damaged(STORE_JSON, format!("cannot be written as JSON: {e}")))?;
        let mut out = format!("{},\n", text.trim_end_matches(['}', '\n']));
        let checksum = blake3::hash(out.as_bytes());
        out.push_str(CHECKSUM_FIELD);
        out.push_str(&checksum.to_hex());
        out.push_str(CLOSING);
        Ok(out.into_bytes())
    }

    /// `object` is how errors call the file.
    pub fn decode(bytes: &[u8], object: &str) -> Result<Self> {
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
        if any.format != FORMAT {
            return Err(damaged(format!("is of format \"{}\", not \"{FORMAT}\"", any.format)));
        }
        if any.version > FORMAT_VERSION {
            let (found, known) = (any.version, FORMAT_VERSION);
            return Err(Error::LaterVersion { object: object.into(), found, known });
        }
        let body: Body = serde_json::from_str(text).map_err(json)?;
        let id = from_hex(&body.id).ok_or_else(|| damaged("its id is not 32 hexadecimal digits".into()))?;
        let key =
            from_hex(&body.hash_key).ok_or_else(|| damaged("its key is not 64 hexadecimal digits".into()))?;
        Ok(Self { id: StoreId(id), created: body.created, key: HashKey(key) })
    }
}

/// Bytes from the system's random source.
pub fn random<const N: usize>() -> Result<[u8; N]> {
    const SOURCE: &str = "/dev/urandom";
    let mut bytes = [0; N];
    std::fs::File::open(SOURCE).and_then(|mut f| f.read_exact(&mut bytes)).map_err(|source| Error::Io {
        object: SOURCE.into(),
        operation: "read",
        source,
    })?;
    Ok(bytes)
}

/// The time, in whole seconds.
pub fn now() -> Timestamp {
    let now = Timestamp::now();
    Timestamp::from_second(now.as_second()).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_later_version_is_told_from_a_damaged_file() {
        let text = String::from_utf8(Config::fresh().unwrap().encode().unwrap()).unwrap();
        let later = text.replace("\"version\": 1", "\"version\": 7,\n  \"novelty\": true");
        assert!(matches!(Config::decode(later.as_bytes(), "x"), Err(Error::Damaged { .. })));
        let covered = &later[..later.rfind(CHECKSUM_FIELD).unwrap()];
        let sealed =
            format!("{covered}{CHECKSUM_FIELD}{}{CLOSING}", blake3::hash(covered.as_bytes()).to_hex());
        let error = Config::decode(sealed.as_bytes(), "x").unwrap_err();
        assert!(matches!(error, Error::LaterVersion { found: 7, known: FORMAT_VERSION, .. }), "{error}");
    }

    #[test]
    fn the_identity_comes_back_and_every_flipped_bit_is_noticed() {
        let config = Config::fresh().unwrap();
        let bytes = config.encode().unwrap();
        let back = Config::decode(&bytes, "x").unwrap();
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
