//! The secret that opens an encrypted store: a key file, or a passphrase from the environment or
//! the terminal.
//!
//! ```text
//!   --key-file FILE, KEYFRAME_KEY_FILE ──▶ key file         KEYFRAME_PASSPHRASE, else /dev/tty ──▶ passphrase
//!                                   └─▶ for __disks and __watchdog, in their environment ◀─┘
//! ```
//!
//! The target of a copy has a secret of its own: `--to-key-file`, `KEYFRAME_TO_KEY_FILE`,
//! `KEYFRAME_TO_PASSPHRASE`. So has a bundle: `--bundle-key-file`, `KEYFRAME_BUNDLE_KEY_FILE`,
//! `KEYFRAME_BUNDLE_PASSPHRASE`.
//!
//! Invariants: a passphrase is never on the command line, where other users could read it. The
//! terminal is asked only if a store needs a passphrase. A secret for a store that is not encrypted
//! is an error, because the user who gives it expects encryption. A key file that others than its
//! owner may access is refused.

use keyframe_store::{Error, Secret, SecretKind, Store};
use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use zeroize::Zeroizing;

const PASSPHRASE: &str = "KEYFRAME_PASSPHRASE";
const KEY_FILE: &str = "KEYFRAME_KEY_FILE";
const TO_PASSPHRASE: &str = "KEYFRAME_TO_PASSPHRASE";
const TO_KEY_FILE: &str = "KEYFRAME_TO_KEY_FILE";
const TERMINAL: &str = "/dev/tty";
const BYTES_MAX: u64 = 64 << 10;

/// The secret that opened a store in this process, for its child processes.
static OPENED_WITH: OnceLock<Given> = OnceLock::new();

enum Given {
    File(PathBuf),
    Passphrase(Zeroizing<String>),
}

/// The error of a cluster job whose store is opened by a passphrase: Keyframe cannot pass a
/// passphrase to a job in secret.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the store is opened by a passphrase, which no job can be given in secret")]
pub struct PassphraseInJob;

impl PassphraseInJob {
    /// Returns what the user can do about the error.
    pub fn fix(self) -> &'static str {
        "keep checkpoints for the cluster in a store with a key file: keyframe init --encrypt --key-file FILE"
    }
}

/// The command-line option for the secret of an encrypted store. The environment is used if the
/// option is not given.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct KeyArg {
    /// The key file of an encrypted store [env: KEYFRAME_KEY_FILE]. Without it, keyframe uses the
    /// passphrase in KEYFRAME_PASSPHRASE, or asks for the passphrase
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
}

/// The command-line option for the secret of the encrypted store that `keyframe copy` writes to.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct TargetKeyArg {
    /// The key file of the target store, if that is encrypted [env: KEYFRAME_TO_KEY_FILE]. Without
    /// it, keyframe uses the passphrase in KEYFRAME_TO_PASSPHRASE, or asks for the passphrase.
    /// --key-file opens the source store
    #[arg(long, value_name = "FILE")]
    to_key_file: Option<PathBuf>,
}

impl TargetKeyArg {
    /// Opens the target store, encrypted or not.
    ///
    /// Errors: those of [`Store::open`]; a missing, unreadable or wrong secret.
    pub fn open(&self, store: &Path) -> Result<Store, Error> {
        Keys { option: self.to_key_file.as_deref(), place: &TARGET }.open(store)
    }
}

/// The command-line option for the secret of an encrypted bundle.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct BundleKeyArg {
    /// The key file of an encrypted bundle [env: KEYFRAME_BUNDLE_KEY_FILE]. Without it, keyframe uses
    /// the passphrase in KEYFRAME_BUNDLE_PASSPHRASE, or asks for the passphrase. --key-file opens the
    /// store
    #[arg(long, value_name = "FILE")]
    bundle_key_file: Option<PathBuf>,
}

impl BundleKeyArg {
    fn keys(&self) -> Keys<'_> {
        Keys { option: self.bundle_key_file.as_deref(), place: &BUNDLE }
    }

    /// Returns true if the user gave a secret, whether it is needed or not.
    pub fn is_given(&self) -> bool {
        self.keys().is_given()
    }

    /// Opens a bundle, or the store that becomes one; encrypted or not.
    ///
    /// Errors: those of [`Store::open`]; a missing, unreadable or wrong secret.
    pub fn open(&self, bundle: &Path) -> Result<Store, Error> {
        self.keys().open(bundle)
    }

    /// Creates an encrypted store that becomes a bundle.
    ///
    /// Errors: those of the store; a missing or unreadable secret.
    pub fn init(&self, store: &Path) -> Result<Store, Error> {
        self.keys().init(store)
    }
}

impl KeyArg {
    /// Makes the option of a command that takes its secret from the environment only.
    pub fn from_environment() -> Self {
        Self::default()
    }

    fn keys(&self) -> Keys<'_> {
        Keys { option: self.key_file.as_deref(), place: &STORE }
    }

    /// Makes the option with a key file; `None` to take the secret from the environment.
    pub fn of_file(key_file: Option<PathBuf>) -> Self {
        Self { key_file }
    }

    /// Returns true if the user gave a secret, whether it is needed or not.
    pub fn is_given(&self) -> bool {
        self.keys().is_given()
    }

    /// Opens a store, encrypted or not.
    ///
    /// Errors: those of [`Store::open`]; a missing, unreadable or wrong secret.
    pub fn open(&self, store: &Path) -> Result<Store, Error> {
        self.keys().open(store)
    }

    /// Creates an encrypted store that this secret opens.
    ///
    /// Errors: those of the store; a missing or unreadable secret.
    pub fn init(&self, store: &Path) -> Result<Store, Error> {
        self.keys().init(store)
    }
}

/// The places to look for a secret, in addition to the command line.
struct SecretSource {
    passphrase: &'static str,
    key_file: &'static str,
    prompt: &'static str,
    /// Whether child processes get the secret, too.
    passed_on: bool,
}

const STORE: SecretSource = SecretSource {
    passphrase: PASSPHRASE,
    key_file: KEY_FILE,
    prompt: "passphrase of the store: ",
    passed_on: true,
};

const TARGET: SecretSource = SecretSource {
    passphrase: TO_PASSPHRASE,
    key_file: TO_KEY_FILE,
    prompt: "passphrase of the store to copy to: ",
    passed_on: false,
};

const BUNDLE: SecretSource = SecretSource {
    passphrase: "KEYFRAME_BUNDLE_PASSPHRASE",
    key_file: "KEYFRAME_BUNDLE_KEY_FILE",
    prompt: "passphrase of the bundle: ",
    passed_on: false,
};

/// The secret of one store.
struct Keys<'a> {
    option: Option<&'a Path>,
    place: &'static SecretSource,
}

impl Keys<'_> {
    fn is_given(&self) -> bool {
        self.file().is_some() || self.passphrase().is_some()
    }

    /// The key file. An empty variable counts as not set.
    fn file(&self) -> Option<PathBuf> {
        let variable = || std::env::var_os(self.place.key_file).filter(|file| !file.is_empty());
        self.option.map(PathBuf::from).or_else(|| variable().map(PathBuf::from))
    }

    fn passphrase(&self) -> Option<Zeroizing<String>> {
        std::env::var(self.place.passphrase)
            .ok()
            .filter(|words| !words.is_empty())
            .map(Zeroizing::new)
    }

    fn open(&self, store: &Path) -> Result<Store, Error> {
        let opened = Store::open_with(store, &|kind| self.secret(kind, false))?;
        if !opened.is_encrypted() && self.is_given() {
            return Err(Error::NotEncrypted { object: store.display().to_string() });
        }
        Ok(opened)
    }

    fn init(&self, store: &Path) -> Result<Store, Error> {
        let kind = if self.file().is_some() { SecretKind::KeyFile } else { SecretKind::Passphrase };
        let secret = self.secret(kind, true)?;
        let object = || store.display().to_string();
        Store::init_with(
            store,
            Some(&secret.ok_or_else(|| Error::KeyNeeded { object: object(), kind })?),
        )
    }

    /// The secret of this kind. Asks twice for the passphrase of a new store.
    fn secret(&self, kind: SecretKind, is_new: bool) -> Result<Option<Secret>, Error> {
        let io = |object: &Path, operation| {
            let object = object.display().to_string();
            move |source| Error::Io { object, operation, source }
        };
        let secret = match (kind, self.file()) {
            (SecretKind::KeyFile, None) => return Ok(None),
            (SecretKind::KeyFile, Some(file)) => {
                let bytes = read_key_file(&file)?;
                let file = std::path::absolute(&file).map_err(io(&file, "resolve"))?;
                self.remember(Given::File(file));
                Secret::KeyFile(bytes)
            }
            (SecretKind::Passphrase, _) => {
                let Some(words) = self
                    .passphrase()
                    .map(Ok)
                    .or_else(|| ask(self.place.prompt, is_new).transpose())
                else {
                    return Ok(None);
                };
                let words = words.map_err(io(Path::new(TERMINAL), "ask for the passphrase"))?;
                self.remember(Given::Passphrase(words.clone()));
                Secret::Passphrase(words)
            }
        };
        Ok(Some(secret))
    }

    fn remember(&self, given: Given) {
        if self.place.passed_on {
            let _ = OPENED_WITH.set(given);
        }
    }
}

/// Reads a key file. Errors: [`Error::ExposedKey`] if others than its owner may access it; it cannot
/// be read.
fn read_key_file(file: &Path) -> Result<Zeroizing<Vec<u8>>, Error> {
    let object = || file.display().to_string();
    let io = |source| Error::Io { object: object(), operation: "read the key file", source };
    let open = File::open(file).map_err(io)?;
    let mode = open.metadata().map_err(io)?.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(Error::ExposedKey { object: object(), mode });
    }
    let mut bytes = Zeroizing::new(Vec::new());
    open.take(BYTES_MAX).read_to_end(&mut bytes).map_err(io)?;
    Ok(bytes)
}

/// Adds the secret that opened the store to the environment of a child process. Does nothing if no
/// secret was used.
pub fn pass_on(command: &mut Command) {
    match OPENED_WITH.get() {
        Some(Given::File(file)) => command.env(KEY_FILE, file),
        Some(Given::Passphrase(words)) => command.env(PASSPHRASE, words.as_str()),
        None => return,
    };
}

/// Returns the absolute path of the key file that opened the store, for processes on other hosts;
/// `None` if the store is not encrypted.
///
/// Error: [`PassphraseInJob`] if a passphrase opened it: every reader of the job's script could see
/// the passphrase.
pub fn file_for_jobs() -> Result<Option<PathBuf>, PassphraseInJob> {
    match OPENED_WITH.get() {
        None => Ok(None),
        Some(Given::File(file)) => Ok(Some(file.clone())),
        Some(Given::Passphrase(_)) => Err(PassphraseInJob),
    }
}

/// Returns what the user can do about an error with the key of the store that `keyframe copy`
/// writes to; `None` for other errors.
pub fn fix_of_target(error: &Error) -> Option<String> {
    Some(match error {
        Error::KeyNeeded { kind: SecretKind::KeyFile, .. } => {
            "name it with --to-key-file FILE, or in KEYFRAME_TO_KEY_FILE; --key-file is that of the store to copy from".into()
        }
        Error::KeyNeeded { .. } => {
            "put it into KEYFRAME_TO_PASSPHRASE, or run this at a terminal; KEYFRAME_PASSPHRASE is that of the store to copy from"
                .into()
        }
        Error::NotEncrypted { .. } => "leave out --to-key-file, KEYFRAME_TO_KEY_FILE and KEYFRAME_TO_PASSPHRASE if this \
             is the store you mean; --key-file and the others are for the store to copy from"
            .into(),
        other => return fix(other),
    })
}

/// Returns what the user can do about an error with the key of a bundle; `None` for other errors.
pub fn fix_of_bundle(error: &Error) -> Option<String> {
    Some(match error {
        Error::KeyNeeded { kind: SecretKind::KeyFile, .. } => {
            "name it with --bundle-key-file FILE, or in KEYFRAME_BUNDLE_KEY_FILE; --key-file is that of the store".into()
        }
        Error::KeyNeeded { .. } => {
            "put it into KEYFRAME_BUNDLE_PASSPHRASE, or run this at a terminal; KEYFRAME_PASSPHRASE is that of the store"
                .into()
        }
        Error::NotEncrypted { .. } => {
            "leave out --bundle-key-file, KEYFRAME_BUNDLE_KEY_FILE and KEYFRAME_BUNDLE_PASSPHRASE if this is the bundle \
             you mean"
                .into()
        }
        other => return fix(other),
    })
}

/// Returns what the user can do about an error with the key of a store; `None` for other errors.
pub fn fix(error: &Error) -> Option<String> {
    Some(match error {
        Error::KeyNeeded { kind: SecretKind::KeyFile, .. } => {
            "name it with --key-file FILE, or in KEYFRAME_KEY_FILE".into()
        }
        Error::KeyNeeded { .. } => "put it into KEYFRAME_PASSPHRASE, or run this at a terminal".into(),
        Error::WrongKey { kind, .. } => {
            format!("give the {kind} that the store was made with; nothing was changed")
        }
        Error::NotEncrypted { .. } => {
            "leave out --key-file, KEYFRAME_KEY_FILE and KEYFRAME_PASSPHRASE if this is the store you mean"
                .into()
        }
        Error::WeakKey { kind: SecretKind::KeyFile, .. } => {
            "make one with: (umask 077; head -c 32 /dev/urandom > FILE)".into()
        }
        Error::WeakKey { .. } => "take several words".into(),
        _ => return None,
    })
}

/// Asks at the terminal without echo. `None` if there is no terminal.
fn ask(prompt: &str, is_new: bool) -> io::Result<Option<Zeroizing<String>>> {
    let Ok(terminal) = File::options().read(true).write(true).open(TERMINAL) else {
        return Ok(None);
    };
    let words = ask_once(&terminal, prompt)?;
    if is_new && *ask_once(&terminal, "the same again: ")? != *words {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the two differ"));
    }
    Ok(Some(words))
}

fn ask_once(mut terminal: &File, prompt: &str) -> io::Result<Zeroizing<String>> {
    terminal.write_all(prompt.as_bytes())?;
    let shown = tcgetattr(terminal)?;
    let mut hidden = shown.clone();
    hidden.local_modes.remove(LocalModes::ECHO);
    tcsetattr(terminal, OptionalActions::Flush, &hidden)?;
    let mut line = Zeroizing::new(String::new());
    let read = BufReader::new(terminal.take(BYTES_MAX)).read_line(&mut line);
    tcsetattr(terminal, OptionalActions::Flush, &shown)?;
    terminal.write_all(b"\n")?;
    read?;
    Ok(Zeroizing::new(line.trim_end_matches(['\n', '\r']).to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_key_file_that_others_may_access_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (file, store) = (dir.path().join("key"), dir.path().join("store"));
        std::fs::write(&file, [7; 32]).unwrap();
        let set_mode =
            |mode| std::fs::set_permissions(&file, Permissions::from_mode(mode)).unwrap();
        let key = KeyArg::of_file(Some(file.clone()));
        for mode in [0o604, 0o640, 0o602, 0o620] {
            set_mode(mode);
            let refused = key.init(&store).unwrap_err();
            assert!(matches!(refused, Error::ExposedKey { .. }), "{mode:o}: {refused}");
            assert!(refused.fix().is_some_and(|fix| fix.starts_with("chmod 600 ")));
            assert!(!store.exists());
        }
        for mode in [0o600, 0o400] {
            set_mode(mode);
            assert_eq!(*read_key_file(&file).unwrap(), [7_u8; 32]);
        }
        key.init(&store).unwrap();
        set_mode(0o644);
        assert!(matches!(key.open(&store), Err(Error::ExposedKey { .. })));
        set_mode(0o600);
        assert!(key.open(&store).unwrap().is_encrypted());
    }
}
