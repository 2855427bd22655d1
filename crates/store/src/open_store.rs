//! An open store: its files, its keys, and the packs that are open.

use crate::Result;
use crate::config::{Config, STORE_JSON_BYTES_MAX};
use crate::error::Error;
use crate::files::StoreFiles;
use crate::local;
use crate::pack_file::PackFile;
use crate::writers::OwnSlot;
use keyframe_bytes::hex::to_hex;
use keyframe_deduplication_index::{Bond, Folder, MaskKey};
use keyframe_locks::IgnorePoison;
use keyframe_store_backend::layout::STORE_JSON;
use keyframe_store_backend::{is_remote, layout};
use keyframe_store_format::page_ref::PageRef;
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// The directory of the index's spills.
const INDEX: &str = "index";

/// Everything that the handles of one open store share.
#[derive(Debug)]
pub(crate) struct OpenStore {
    pub backend: StoreFiles,
    pub path: PathBuf,
    pub config: Config,
    /// The place among the writers, if this process writes through this.
    pub own_slot: Option<Arc<OwnSlot>>,
    /// The packs that were opened, by number.
    packs: Arc<Mutex<FxHashMap<u32, Arc<PackFile>>>>,
}

impl OpenStore {
    /// Creates an open store from its files, its path or address, and its identity.
    pub fn new(backend: StoreFiles, path: PathBuf, config: Config) -> Self {
        Self { backend, path, config, own_slot: None, packs: Arc::default() }
    }

    /// Returns the same store with other files. Both share the open packs.
    pub fn with_backend(&self, backend: StoreFiles) -> Arc<Self> {
        let (path, config) = (self.path.clone(), self.config.clone());
        let (own_slot, packs) = (self.own_slot.clone(), Arc::clone(&self.packs));
        Arc::new(Self { backend, path, config, own_slot, packs })
    }

    /// Returns the same store as the writer in `slot` uses it. Both share the open packs.
    pub fn with_slot(&self, slot: OwnSlot) -> Arc<Self> {
        let (backend, path, config) =
            (self.backend.clone(), self.path.clone(), self.config.clone());
        let (own_slot, packs) = (Some(Arc::new(slot)), Arc::clone(&self.packs));
        Arc::new(Self { backend, path, config, own_slot, packs })
    }

    /// Returns the directory for spills of the deduplication index: in the store's directory, or in
    /// this host's directory for the store. Returns `None` if there is no such place.
    pub fn index_folder(&self) -> Option<Folder> {
        if !self.backend.is_persistent() {
            return None;
        }
        let is_near = !is_remote(&self.path) && self.config.encryption.is_none();
        let path = if is_near {
            std::path::absolute(&self.path).ok()?
        } else {
            local::path(&to_hex(&self.config.id.0))?
        };
        let mask = self.config.encryption.as_ref().map(|_| {
            MaskKey(blake3::derive_key(
                "keyframe 2026-11 places in a spilled index",
                &self.config.key.0,
            ))
        });
        let mut path = path.join(INDEX);
        // Each writer has its own spills.
        if let Some(number) = self.own_slot.as_ref().and_then(|own| own.number()).filter(|n| *n > 0)
        {
            path.push(format!("{number:02}"));
        }
        Some(Folder { path, bond: Bond { store: self.config.id.0, mask } })
    }

    /// Opens pack `number` and checks its header. Errors: the pack is missing or its header is
    /// damaged; the backend fails.
    pub fn open_pack(&self, number: u32) -> Result<PackFile> {
        PackFile::open(&self.backend, self.config.id, number)
    }

    /// Returns pack `number`. The pack is opened at the first call and stays open. Errors: those of
    /// [`Self::open_pack`].
    pub fn pack(&self, number: u32) -> Result<Arc<PackFile>> {
        let mut packs = self.packs.lock().ignore_poison();
        if let Some(pack) = packs.get(&number) {
            return Ok(pack.clone());
        }
        let pack = Arc::new(self.open_pack(number)?);
        packs.insert(number, pack.clone());
        Ok(pack)
    }

    /// Returns the numbers of the packs that are open.
    #[cfg(test)]
    pub fn open_packs(&self) -> Vec<u32> {
        self.packs.lock().ignore_poison().keys().copied().collect()
    }

    /// Closes all packs, because their files were replaced.
    pub fn close_packs(&self) {
        self.packs.lock().ignore_poison().clear();
    }

    /// Closes the packs `numbers`, unless a reader of this process holds them.
    pub fn close_unheld(&self, numbers: &BTreeSet<u32>) {
        let mut packs = self.packs.lock().ignore_poison();
        packs.retain(|number, pack| !numbers.contains(number) || Arc::strong_count(pack) > 1);
    }

    /// Removes packs that nothing needs. Closes all packs that do not exist any more, unless a
    /// reader of this process holds them. Error: the backend fails.
    pub fn remove_packs(&self, numbers: &BTreeSet<u32>) -> Result<()> {
        let names: Vec<String> = numbers.iter().map(|number| layout::pack(*number)).collect();
        self.backend.remove_all(layout::PACKS, &names)?;
        let existing: BTreeSet<u32> = self.pack_numbers()?.into_iter().collect();
        let mut packs = self.packs.lock().ignore_poison();
        packs.retain(|number, pack| existing.contains(number) || Arc::strong_count(pack) > 1);
        Ok(())
    }

    /// Returns the numbers of all packs, in rising order. Error: the folder cannot be listed.
    pub fn pack_numbers(&self) -> Result<Vec<u32>> {
        let listed = self.backend.list(layout::PACKS)?;
        let mut numbers: Vec<u32> =
            listed.iter().filter_map(|file| layout::parse_pack(file)).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Returns the highest number of a pack, or 0 if there is none. Error: the folder cannot be
    /// listed.
    pub fn newest_pack(&self) -> Result<u32> {
        Ok(self.pack_numbers()?.last().copied().unwrap_or(0))
    }

    /// Returns the error of a damaged record.
    pub fn damaged_at(&self, at: PageRef, problem: impl Into<String>) -> Error {
        let object = self.backend.describe(&layout::pack(at.pack()));
        Error::damaged(format!("{object} at offset {}", at.offset()), problem)
    }

    /// Reads `store.json` again and checks that it is the one with which the store was opened.
    /// Errors: it is another one; it cannot be read.
    pub fn check_identity(&self) -> Result<()> {
        let object = self.backend.describe(STORE_JSON);
        let bytes = self.backend.read(STORE_JSON, STORE_JSON_BYTES_MAX)?;
        let config = Config::decode(&bytes, &object)?;
        if self.config.is(&config) {
            return Ok(());
        }
        Err(Error::damaged(object, "it is that of another store"))
    }
}
