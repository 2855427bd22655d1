//! The description of a bundle: `files/manifest.json` in it.

use crate::error::{Error, Result};
use jiff::Timestamp;
use keyframe_store::{CheckpointId, Store};
use serde::{Deserialize, Serialize};
use std::path::Path;

const FORMAT: &str = "keyframe-bundle";
const VERSION: u32 = 1;
/// The most files of a bundle.
const FILES_MAX: usize = 4096;

/// The description of a bundle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    format: String,
    version: u32,
    /// The id of the store of the checkpoint.
    pub store: String,
    /// The number of the checkpoint in that store.
    pub checkpoint: CheckpointId,
    /// The time of the checkpoint.
    pub taken_at: Timestamp,
    /// The options that changed what is bundled.
    pub options: Vec<String>,
    /// The files that the VM only reads, each path once.
    pub files: Vec<BundledFile>,
}

/// A file that the VM only reads: a kernel, a firmware, a CD, a read-only disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BundledFile {
    /// The absolute path on the machine where the bundle was made.
    pub path: String,
    /// The length, in bytes.
    pub len_bytes: u64,
    /// The BLAKE3 hash of the content, in hexadecimal. It names the file in the bundle.
    pub blake3: String,
}

impl BundledFile {
    /// Returns the hash. Error: the text is no hash.
    pub fn hash(&self) -> Result<blake3::Hash> {
        let problem = |_| Error::Manifest(format!("{:?} is no hash", self.blake3));
        blake3::Hash::from_hex(&self.blake3).map_err(problem)
    }
}

impl Manifest {
    /// Creates the description of a bundle without files.
    pub fn new(
        store: &Store,
        checkpoint: CheckpointId,
        taken_at: Timestamp,
        options: Vec<String>,
    ) -> Self {
        Self {
            format: FORMAT.into(),
            version: VERSION,
            store: store.id().into(),
            checkpoint,
            taken_at,
            options,
            files: Vec::new(),
        }
    }

    /// Returns true if both are of the same checkpoint and made with the same options.
    pub fn is_of_same(&self, other: &Self) -> bool {
        (&self.store, self.checkpoint, self.taken_at, &self.options)
            == (&other.store, other.checkpoint, other.taken_at, &other.options)
    }

    /// Reads the description in `store`; `None` if it is no bundle. Errors: [`Error::Manifest`] if
    /// it is invalid or of another version; it cannot be read.
    pub fn read(store: &Store) -> Result<Option<Self>> {
        let bytes = store.bundle_manifest().map_err(|e| Error::store(store, e))?;
        bytes.map(|bytes| Self::decode(&bytes)).transpose()
    }

    /// Stores the description in `store`. Error: the store cannot be written.
    pub fn put(&self, store: &Store) -> Result<()> {
        let json = serde_json::to_vec_pretty(self).map_err(|e| Error::Manifest(e.to_string()))?;
        store.put_bundle_manifest(&json).map_err(|e| Error::store(store, e))
    }

    fn decode(bytes: &[u8]) -> Result<Self> {
        let manifest: Self =
            serde_json::from_slice(bytes).map_err(|e| Error::Manifest(e.to_string()))?;
        let problem = |text: String| Err(Error::Manifest(text));
        if manifest.format != FORMAT || manifest.version != VERSION {
            let Self { format, version, .. } = manifest;
            return problem(format!("it is {format} version {version}, not {FORMAT} {VERSION}"));
        }
        if manifest.files.len() > FILES_MAX {
            return problem(format!("{} files; at most {FILES_MAX}", manifest.files.len()));
        }
        for file in &manifest.files {
            file.hash()?;
            if !Path::new(&file.path).is_absolute() {
                return problem(format!("{:?} is no absolute path", file.path));
            }
        }
        Ok(manifest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_description_of_this_version_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::init(&dir.path().join("S")).unwrap();
        assert_eq!(Manifest::read(&store).unwrap(), None);
        let mut manifest = Manifest::new(&store, CheckpointId(3), Timestamp::now(), Vec::new());
        let hash = blake3::hash(b"k").to_hex().to_string();
        let file = BundledFile { path: "/k".into(), len_bytes: 1, blake3: hash };
        manifest.files.push(file.clone());
        manifest.put(&store).unwrap();
        assert_eq!(Manifest::read(&store).unwrap(), Some(manifest.clone()));
        let refused = |manifest: &Manifest| {
            manifest.put(&store).unwrap();
            Manifest::read(&store).unwrap_err().to_string()
        };
        let with = |file| Manifest { files: vec![file], ..manifest.clone() };
        assert!(refused(&Manifest { version: 2, ..manifest.clone() }).contains("version 2"));
        assert!(
            refused(&with(BundledFile { blake3: "0a".into(), ..file.clone() })).contains("hash")
        );
        assert!(refused(&with(BundledFile { path: "../k".into(), ..file })).contains("absolute"));
    }
}
