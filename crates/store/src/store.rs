//! An open store: names, lists and loads checkpoints. Readers need no lock.

use crate::checkpoint::{self, CHECKPOINT_BYTES_MAX, CheckpointFile};
use crate::config::{Config, STORE_JSON_BYTES_MAX};
use crate::disk_map::DiskMap;
use crate::files::StoreFiles;
use crate::index::{Bond, Folder, MaskKey};
use crate::map_run::{MAP_BYTES_MAX, MapRun};
use crate::meta::{Meta, Sealed};
use crate::pack_file::PackFile;
use crate::page_map::PageMap;
use crate::prune::packs;
use crate::secret::{Secret, SecretKind};
use crate::writer::{Tuning, Writer};
use crate::{Error, Loaded, Result, Unmapped, local};
use keyframe_bytes::hex::to_hex;
use keyframe_store_backend::layout;
use keyframe_store_backend::layout::STORE_JSON;
use keyframe_store_backend::{Backend, EncryptedBackend, is_remote};
use keyframe_units::CheckpointId;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Threads that read checkpoints for a listing, at most; fewer checkpoints than these are not worth
/// one.
const LISTING_THREADS_MAX: usize = 8;
const LISTED_ALONE: usize = 64;
/// The folder of what the index of deduplication spills.
const INDEX: &str = "index";

/// A store of checkpoints. Cloning it is cheap and shares open files.
#[derive(Clone, Debug)]
pub struct Store {
    inner: Arc<Inner>,
    id: Arc<str>,
}

/// What everything that belongs to one open store shares.
#[derive(Debug)]
pub(crate) struct Inner {
    pub backend: StoreFiles,
    pub path: PathBuf,
    pub config: Config,
    /// Open packs.
    pub packs: Arc<Mutex<FxHashMap<u32, Arc<PackFile>>>>,
}

impl Inner {
    /// Where the index of deduplication may be spilled: in the store's directory, or where this
    /// host keeps what belongs to it.
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
        Some(Folder { path: path.join(INDEX), bond: Bond { store: self.config.id.0, mask } })
    }

    /// The same store, written to another way; who closes a pack closes it for both.
    pub fn on(&self, backend: StoreFiles) -> Arc<Self> {
        let (path, config) = (self.path.clone(), self.config.clone());
        Arc::new(Self { backend, path, config, packs: Arc::clone(&self.packs) })
    }
}

impl Store {
    /// Makes an empty store. Refuses a place that holds anything ([`Error::Exists`]); the directory
    /// is made readable by its owner alone, for it will hold the memory of guests.
    pub fn init(path: &Path) -> Result<Self> {
        Self::init_with(path, None)
    }

    /// The same; what goes into the store is encrypted with keys that `secret` opens, where there
    /// is one.
    pub fn init_with(path: &Path, secret: Option<&Secret>) -> Result<Self> {
        // Refused before anything is made.
        let config = Config::fresh(secret)?;
        Self::init_as(keyframe_store_backend::create(path)?, path, config)
    }

    /// Opens a store for reading. Errors: [`Error::NoStore`], [`Error::Damaged`],
    /// [`Error::OtherVersion`], [`Error::PreRelease`].
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_with(path, &|_| Ok(None))
    }

    /// The same; where it is encrypted, `ask` is asked for what opens it, of that kind. Errors
    /// beside: [`Error::KeyNeeded`], [`Error::WrongKey`].
    pub fn open_with(
        path: &Path,
        ask: &dyn Fn(SecretKind) -> Result<Option<Secret>>,
    ) -> Result<Self> {
        Self::open_on_with(keyframe_store_backend::open(path)?, path, ask)
    }

    /// Makes an empty store on any backend, which must be empty; `path` is what [`Store::path`]
    /// says.
    pub fn init_on(backend: Arc<dyn Backend>, path: &Path) -> Result<Self> {
        Self::init_as(backend, path, Config::fresh(None)?)
    }

    pub(crate) fn init_as(backend: Arc<dyn Backend>, path: &Path, config: Config) -> Result<Self> {
        backend.put(STORE_JSON, &config.encode()?)?;
        Ok(Self::new(backend, path, config))
    }

    /// Opens a store on any backend.
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
        let backend = backend.into();
        let inner = Inner { backend, path: path.to_path_buf(), config, packs: Arc::default() };
        Self { inner: Arc::new(inner), id }
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }

    /// Where the store is, as it was opened.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// The same for other processes, which may have another working directory.
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

    /// Where this host keeps what belongs to the store but cannot be in it: the store's directory.
    /// For one in object storage, and for an encrypted one, as this is not encrypted, a directory
    /// of the user's, which is made.
    pub fn local_folder(&self) -> Result<PathBuf> {
        let place = self.absolute_path()?;
        if is_remote(&place) || self.is_encrypted() {
            local::folder(self.id(), &place)
        } else {
            Ok(place)
        }
    }

    /// The store's id: 32 hexadecimal digits.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// True where what is in it is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.inner.config.encryption.is_some()
    }

    /// True where it is in object storage.
    pub fn is_remote(&self) -> bool {
        is_remote(self.path())
    }

    /// Bytes in packs that were not recompressed yet and that nobody writes to, as far as their
    /// names and heads tell: the newest one is not among them.
    pub fn cold_bytes(&self) -> Result<u64> {
        let numbers = packs::numbers(&self.inner)?;
        let mut cold_bytes = 0;
        for number in numbers.iter().rev().skip(1) {
            match PackFile::open(&self.inner, *number) {
                Ok(pack) if !pack.is_dense() => cold_bytes += pack.file.len_bytes()?,
                // Gone since it was listed, or nothing that a recompression helps.
                Ok(_) | Err(Error::Damaged { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(cold_bytes)
    }

    /// When the store was made.
    pub fn created(&self) -> jiff::Timestamp {
        self.inner.config.created
    }

    /// Becomes the one writer; `owner` is what others are told meanwhile ([`Error::Locked`]). Reads
    /// the indexes of all packs, and whole packs that an earlier writer did not finish.
    pub fn lock_writer(&self, owner: &str) -> Result<Writer> {
        self.lock_writer_tuned(owner, Tuning::default())
    }

    /// As [`Store::lock_writer`], with limits of the caller's choice.
    pub fn lock_writer_tuned(&self, owner: &str, tuning: Tuning) -> Result<Writer> {
        Writer::lock(self.inner.clone(), owner, tuning)
    }

    /// The sealed checkpoints, in rising order, as the store is at this moment. A damaged one hides
    /// no other.
    pub fn checkpoints(&self) -> Result<Listing> {
        let tags = self.tags_of_checkpoints()?;
        let mut listing = Listing::default();
        let ids = self.inner.checkpoint_ids()?;
        for (id, meta) in self.inner.read_metas(&ids) {
            match meta {
                Ok(meta) => {
                    let tags = tags.get(&id).cloned().unwrap_or_default();
                    listing.sealed.push(Sealed { id, meta, tags });
                }
                // Gone since it was listed.
                Err(Error::UnknownCheckpoint { .. }) => {}
                Err(error) => listing.unreadable.push((id, error)),
            }
        }
        Ok(listing)
    }

    /// The numbers of the sealed checkpoints, rising, without a look into them.
    pub fn ids(&self) -> Result<Vec<CheckpointId>> {
        self.inner.checkpoint_ids()
    }

    /// What one sealed checkpoint tells about itself.
    pub fn sealed(&self, id: CheckpointId) -> Result<Sealed> {
        let meta = self.inner.read_meta(id)?;
        let tags =
            self.tags()?.into_iter().filter(|(_, to)| *to == id).map(|(tag, _)| tag).collect();
        Ok(Sealed { id, meta, tags })
    }

    /// The checkpoint that a number, a tag or `latest` names.
    pub fn resolve(&self, name: &str) -> Result<CheckpointId> {
        let ids = self.inner.checkpoint_ids()?;
        let newest = ids.last().copied();
        let unknown = || Error::UnknownCheckpoint { name: name.into(), newest };
        if name == layout::LATEST {
            return newest.ok_or_else(unknown);
        }
        let is_number = !name.is_empty() && name.bytes().all(|c| c.is_ascii_digit());
        let id = if is_number {
            name.parse().ok().map(CheckpointId)
        } else if layout::is_tag(name) {
            self.inner.read_tag(name)?
        } else {
            None
        };
        let id = id.ok_or_else(unknown)?;
        match ids.binary_search(&id) {
            Ok(_) => Ok(id),
            Err(_) if is_number => Err(unknown()),
            Err(_) => Err(Error::damaged(
                self.inner.backend.describe(&layout::tag(name)),
                format!("it points to checkpoint {id}, which is not in the store"),
            )),
        }
    }

    /// Reads a checkpoint: what it tells about itself, its device state and the map of its pages
    /// (not the pages).
    pub fn load(&self, id: CheckpointId) -> Result<Loaded> {
        self.load_unmapped(id)?.load()
    }

    /// The same without the map, which can be read later ([`Unmapped::load`]).
    pub fn load_unmapped(&self, id: CheckpointId) -> Result<Unmapped> {
        Ok(Unmapped::new(self.inner.clone(), id, self.inner.read_checkpoint(id)?))
    }

    /// All tags and where they point.
    pub fn tags(&self) -> Result<BTreeMap<String, CheckpointId>> {
        self.inner.read_tags()
    }

    /// The same by checkpoint; of each in order.
    pub fn tags_of_checkpoints(&self) -> Result<BTreeMap<CheckpointId, Vec<String>>> {
        let mut tags = BTreeMap::<_, Vec<_>>::new();
        for (tag, id) in self.tags()? {
            tags.entry(id).or_default().push(tag);
        }
        Ok(tags)
    }
}

/// The file that makes a place a store, and how errors call it.
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

/// The id of the store on a backend, for who needs nothing else of it: no key, where it is
/// encrypted.
pub fn id_on(backend: &dyn Backend, path: &Path) -> Result<[u8; 16]> {
    let (bytes, object) = store_json(backend, path)?;
    Ok(Config::decode(&bytes, &object)?.id.0)
}

/// The checkpoints of a store.
#[derive(Debug, Default)]
pub struct Listing {
    /// Those that can be read, in rising order.
    pub sealed: Vec<Sealed>,
    /// Those whose file cannot be read, and why.
    pub unreadable: Vec<(CheckpointId, Error)>,
}

impl Inner {
    /// The numbers of the sealed checkpoints, rising.
    pub fn checkpoint_ids(&self) -> Result<Vec<CheckpointId>> {
        let files = self.backend.list(layout::CHECKPOINTS)?;
        let mut ids: Vec<CheckpointId> =
            files.iter().filter_map(|f| layout::parse_checkpoint(f)).collect();
        ids.sort_unstable();
        Ok(ids)
    }

    pub fn read_checkpoint(&self, id: CheckpointId) -> Result<CheckpointFile> {
        let (bytes, object) = self.checkpoint_bytes(id)?;
        checkpoint::decode(&bytes, id.0, self.config.id, &object)
    }

    /// What it tells about itself alone.
    pub fn read_meta(&self, id: CheckpointId) -> Result<Meta> {
        let (bytes, object) = self.checkpoint_bytes(id)?;
        checkpoint::decode_meta(&bytes, id.0, self.config.id, &object)
    }

    /// Its file, and how errors call that.
    fn checkpoint_bytes(&self, id: CheckpointId) -> Result<(Vec<u8>, String)> {
        let name = layout::checkpoint(id);
        match self.backend.read(&name, CHECKPOINT_BYTES_MAX) {
            Err(e) if e.is_not_found() => {
                let newest = self.checkpoint_ids()?.last().copied();
                Err(Error::UnknownCheckpoint { name: id.to_string(), newest })
            }
            other => Ok((other?, self.backend.describe(&name))),
        }
    }

    /// What checkpoints tell about themselves, in the order of `ids`; where they are many, several
    /// are read at a time.
    fn read_metas(&self, ids: &[CheckpointId]) -> Vec<(CheckpointId, Result<Meta>)> {
        let read = |id: &CheckpointId| (*id, self.read_meta(*id));
        let threads =
            std::thread::available_parallelism().map_or(1, NonZero::get).min(LISTING_THREADS_MAX);
        let share = ids.len().div_ceil(threads).max(LISTED_ALONE);
        let mut shares = ids.chunks(share);
        let first = shares.next().unwrap_or_default();
        std::thread::scope(|scope| {
            let others: Vec<_> = shares
                .map(|share| scope.spawn(move || share.iter().map(read).collect::<Vec<_>>()))
                .collect();
            let mut metas: Vec<_> = first.iter().map(read).collect();
            for other in others {
                match other.join() {
                    Ok(read) => metas.extend(read),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            metas
        })
    }

    pub fn read_map(&self, id: u64) -> Result<MapRun> {
        let name = layout::map(id);
        let object = self.backend.describe(&name);
        let bytes = self.backend.read(&name, MAP_BYTES_MAX).map_err(|e| {
            if e.is_not_found() { Error::damaged(&object, "the map is missing") } else { e }
        })?;
        MapRun::decode(&bytes, self.config.id, id, &object)
    }

    /// Reads the maps of a checkpoint, oldest first, and lays each over the ones before: of RAM,
    /// and of the disks.
    pub fn read_maps(&self, meta: &Meta) -> Result<(PageMap, DiskMap)> {
        let (mut map, mut disks) = (PageMap::default(), DiskMap::default());
        for (at, id) in meta.map_chain.iter().enumerate().rev() {
            let run = self.read_map(*id)?;
            let below = meta.map_chain.get(at + 1).copied();
            let fits = run.header.parent == below
                && to_hex(&run.header.run) == meta.run
                && Some(run.header.space_pages) == meta.space_pages();
            if !fits {
                let object = self.backend.describe(&layout::map(*id));
                return Err(Error::damaged(
                    object,
                    "it does not belong where a checkpoint's chain has it",
                ));
            }
            run.apply(meta.ram.len_pages(), &mut map, &mut disks);
        }
        Ok((map, disks))
    }
}
