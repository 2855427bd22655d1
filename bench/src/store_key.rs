//! The key of an encrypted store, from `--key-file` or the environment.

use keyframe_store::{Error, Secret, SecretKind, Store};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

const KEY_FILE: &str = "KEYFRAME_KEY_FILE";
const PASSPHRASE: &str = "KEYFRAME_PASSPHRASE";
/// Largest key file, in bytes.
const KEY_BYTES_MAX: u64 = 64 << 10;

/// Opens `store`. An encrypted store is opened with `key_file`, or with the key file or the
/// passphrase that the environment names. Fails if a key is given for a store without encryption.
pub fn open(store: &Path, key_file: Option<&Path>) -> Result<Store, Error> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let key_file = key_file.map(PathBuf::from).or_else(|| variable(KEY_FILE).map(PathBuf::from));
    let passphrase = std::env::var(PASSPHRASE).ok().filter(|words| !words.is_empty());
    let passphrase = passphrase.map(Zeroizing::new);
    let opened = Store::open_with(store, &|kind| match kind {
        SecretKind::KeyFile => key_file.as_deref().map(read_key_file).transpose(),
        SecretKind::Passphrase => Ok(passphrase.clone().map(Secret::Passphrase)),
    })?;
    if !opened.is_encrypted() && (key_file.is_some() || passphrase.is_some()) {
        return Err(Error::NotEncrypted { object: store.display().to_string() });
    }
    Ok(opened)
}

fn read_key_file(path: &Path) -> Result<Secret, Error> {
    let mut bytes = Zeroizing::new(Vec::new());
    match File::open(path).and_then(|file| file.take(KEY_BYTES_MAX).read_to_end(&mut bytes)) {
        Ok(_) => Ok(Secret::KeyFile(bytes)),
        Err(source) => {
            let object = path.display().to_string();
            Err(Error::Io { object, operation: "read the key file", source })
        }
    }
}

/// Returns what the user can do about an error with a key, if that is known.
pub fn fix(error: &Error) -> Option<&'static str> {
    Some(match error {
        Error::KeyNeeded { kind: SecretKind::KeyFile, .. } => {
            "name it with --key-file FILE, or in KEYFRAME_KEY_FILE"
        }
        Error::KeyNeeded { .. } => "put it into KEYFRAME_PASSPHRASE",
        Error::WrongKey { .. } => "give the key that the store was made with",
        Error::NotEncrypted { .. } => {
            "leave out --key-file, KEYFRAME_KEY_FILE and KEYFRAME_PASSPHRASE"
        }
        _ => return None,
    })
}
