//! The handle of an open store: making it, opening it, and its identity.

use crate::config::{Config, STORE_JSON_BYTES_MAX};
use crate::files::StoreFiles;
use crate::open_store::OpenStore;
use crate::secret::Secret;
use crate::secret_kind::SecretKind;
use crate::{Error, Result, local};
use keyframe_bytes::hex::to_hex;
use keyframe_store_backend::layout::STORE_JSON;
use keyframe_store_backend::{Backend, EncryptedBackend, is_read_only, is_remote};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A store of checkpoints. Cloning it is cheap and shares open files.
#[derive(Clone, Debug)]
pub struct Store {
    inner: Arc<OpenStore>,
    id: Arc<str>,
}

impl Store {
    /// Creates an empty store in the directory `path`. Only the directory's owner can read it,
    /// because it will hold the memory of guests. Errors: [`Error::Exists`] if the directory is not
    /// empty; it cannot be written.
    pub fn init(path: &Path) -> Result<Self> {
        Self::init_with(path, None)
    }

    /// Creates an empty store in the directory `path`. With `secret` the store is encrypted, and
    /// needs this secret to open; with `None` it is not. Errors: those of [`Self::init`];
    /// [`Error::WeakKey`] if the secret is too short.
    pub fn init_with(path: &Path, secret: Option<&Secret>) -> Result<Self> {
        // Refuses a weak secret before it makes anything.
        let config = Config::fresh(secret)?;
        Self::init_as(keyframe_store_backend::create(path)?, path, config)
    }

    /// Opens the store at `path` for reading; a plain one, because it gives no key.
    ///
    /// Errors: [`Error::NoStore`] if there is none, [`Error::KeyNeeded`] if it is encrypted,
    /// [`Error::Damaged`] if its file `store.json` is invalid, [`Error::OtherVersion`] or
    /// [`Error::PreRelease`] for another version of the format.
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_with(path, &|_| Ok(None))
    }

    /// Opens a store. If it is encrypted, calls `ask` for a secret of the right kind.
    ///
    /// Errors: those of [`Self::open`]; [`Error::KeyNeeded`] if `ask` returns no secret;
    /// [`Error::WrongKey`] if it is not the store's; that of `ask`.
    pub fn open_with(
        path: &Path,
        ask: &dyn Fn(SecretKind) -> Result<Option<Secret>>,
    ) -> Result<Self> {
        Self::open_on_with(keyframe_store_backend::open(path)?, path, ask)
    }

    /// Creates an empty store on any empty backend. `path` is the path or address that
    /// [`Store::path`] returns. Errors: the backend is not empty, or cannot be written.
    pub fn init_on(backend: Arc<dyn Backend>, path: &Path) -> Result<Self> {
        Self::init_as(backend, path, Config::fresh(None)?)
    }

    pub(crate) fn init_as(backend: Arc<dyn Backend>, path: &Path, config: Config) -> Result<Self> {
        backend.put(STORE_JSON, &config.encode()?)?;
        Ok(Self::new(backend, path, config))
    }

    /// Opens the store on `backend`. `path` is the path or address that [`Store::path`] returns.
    /// Errors: no store is there; its format is unknown; it cannot be read.
    pub fn open_on(backend: Arc<dyn Backend>, path: &Path) -> Result<Self> {
        Self::open_on_with(backend, path, &|_| Ok(None))
    }

    pub(crate) fn open_on_with(
        backend: Arc<dyn Backend>,
        path: &Path,
        ask: &dyn Fn(SecretKind) -> Result<Option<Secret>>,
    ) -> Result<Self> {
        let (bytes, object) = store_json(&*backend, path)?;
        let config = Config::decode(&bytes, &object)?.unlock(ask, &object)?;
        Ok(Self::new(backend, path, config))
    }

    fn new(backend: Arc<dyn Backend>, path: &Path, config: Config) -> Self {
        let id = to_hex(&config.id.0).into();
        let backend: Arc<dyn Backend> = match &config.encryption {
            Some(encryption) => Arc::new(EncryptedBackend::new(backend, &encryption.data_key)),
            None => backend,
        };
        let inner = OpenStore::new(StoreFiles::from(backend), path.to_path_buf(), config);
        Self { inner: Arc::new(inner), id }
    }

    pub(crate) fn inner(&self) -> &Arc<OpenStore> {
        &self.inner
    }

    /// Returns the path or address under which the store was opened.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// Returns the absolute path or the address, for processes with another working directory.
    /// Error: the working directory is unknown.
    pub fn absolute_path(&self) -> Result<PathBuf> {
        if is_remote(self.path()) {
            return Ok(self.path().into());
        }
        let io = |source| Error::Io {
            object: self.path().display().to_string(),
            operation: "resolve",
            source,
        };
        std::path::absolute(self.path()).map_err(io)
    }

    /// Returns the directory on this host for data that belongs to the store but cannot be in it.
    /// For a store in a directory it is the store's own. For a remote store and for a bundle it is a
    /// directory of the user, which is created. The same holds for an encrypted store, because this data is not
    /// encrypted.
    ///
    /// Error: the directory cannot be created, or the environment names no place for it.
    pub fn local_folder(&self) -> Result<PathBuf> {
        let place = self.absolute_path()?;
        if is_remote(&place) || is_read_only(&place) || self.is_encrypted() {
            local::folder(self.id(), &place)
        } else {
            Ok(place)
        }
    }

    /// Returns the store's id: 32 hexadecimal digits.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns true if the store is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.inner.config.encryption.is_some()
    }

    /// Returns true if the store is not a directory of this host.
    pub fn is_remote(&self) -> bool {
        is_remote(self.path())
    }

    /// Returns the number of bytes that can still be written to the store's medium. Returns `None` if
    /// the medium does not tell.
    pub fn free_bytes(&self) -> Option<u64> {
        self.inner.backend.space().map(|space| space.free_bytes)
    }

    /// Returns the time at which the store was made.
    pub fn created(&self) -> jiff::Timestamp {
        self.inner.config.created
    }
}

/// The content of `store.json`, and its name in errors.
fn store_json(backend: &dyn Backend, path: &Path) -> Result<(Vec<u8>, String)> {
    let bytes =
        backend.read(STORE_JSON, STORE_JSON_BYTES_MAX).map_err(|error| match error.io_kind() {
            Some(ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                Error::NoStore { object: path.display().to_string() }
            }
            _ => error.into(),
        })?;
    Ok((bytes, backend.describe(STORE_JSON)))
}

/// Returns the id of the store on `backend`. Needs no key. `path` names the store in errors. Error:
/// no store is there, or it cannot be read.
pub fn id_on(backend: &dyn Backend, path: &Path) -> Result<[u8; 16]> {
    let (bytes, object) = store_json(backend, path)?;
    Ok(Config::decode(&bytes, &object)?.id.0)
}
