//! A store of checkpoints in any database of keys and values: each page content once, found by its
//! hash.
//!
//! ```text
//!   'P' XXH3-128 of a page   ──▶ the page
//!   'M' number of checkpoint ──▶ page number (u32), hash, ... of its pages; NO_HASH: zeros
//! ```
//!
//! XXH3 is a very fast hash and unsafe against a guest that constructs collisions. Peers therefore
//! have an advantage.

use crate::store::{FeedSink, Store, StoreReader, StoreWriter};
use crate::{Error, Result};
use keyframe_units::{Page, PageIndex, ZERO_PAGE};
use rustc_hash::FxHashMap;
use std::path::Path;
use xxhash_rust::xxh3::xxh3_128;

/// The length of a key in bytes.
pub const KEY_BYTES: usize = 17;
/// The key of an entry.
pub type Key = [u8; KEY_BYTES];

/// The hash of a page of zeros in a map.
const NO_HASH: u128 = 0;
const ENTRY_BYTES: usize = 20;

/// A database.
pub trait KeyValue: Sized {
    /// Its name in messages.
    const NAME: &'static str;

    /// Opens the database in the existing directory `dir`; makes it if it is missing.
    fn open(dir: &Path) -> Result<Self>;

    /// Adds all entries. An existing key keeps its value. When this returns, all entries survive a
    /// loss of power.
    fn add_all(&mut self, entries: &mut dyn Iterator<Item = (Key, &[u8])>) -> Result<()>;

    /// Passes the value of `key` to `sink`. Returns false if the key is missing.
    fn get(&mut self, key: &Key, sink: &mut dyn FnMut(&[u8])) -> Result<bool>;

    /// Closes the database.
    fn close(self) -> Result<()>;

    /// Makes an error of this database.
    fn failed(operation: &str, problem: impl std::fmt::Display) -> Error {
        Error::failed(format!("{}: {operation}", Self::NAME), problem)
    }
}

/// Returns the key of the page with this hash.
pub fn key_of(hash: u128) -> Key {
    key(b'P', hash)
}

fn key(kind: u8, number: u128) -> Key {
    let mut key = [kind; KEY_BYTES];
    key[1..].copy_from_slice(&number.to_be_bytes());
    key
}

/// A store in database `D`.
#[derive(Debug)]
pub struct KeyedStore<D>(std::marker::PhantomData<D>);

impl<D> KeyedStore<D> {
    /// Makes a store in database `D`.
    pub fn new() -> Self {
        Self(std::marker::PhantomData)
    }
}

impl<D> Default for KeyedStore<D> {
    fn default() -> Self {
        Self::new()
    }
}

impl<D: KeyValue + 'static> Store for KeyedStore<D> {
    fn create(&self, dir: &Path, _image_pages: u64) -> Result<Box<dyn StoreWriter>> {
        std::fs::create_dir_all(dir).map_err(Error::file("make", dir))?;
        Ok(Box::new(KeyValueAccess { database: D::open(dir)?, checkpoints: 0 }))
    }

    fn open(&self, dir: &Path) -> Result<Box<dyn StoreReader>> {
        Ok(Box::new(KeyValueAccess { database: D::open(dir)?, checkpoints: 0 }))
    }
}

/// An open store in a database.
#[derive(Debug)]
pub struct KeyValueAccess<D> {
    database: D,
    checkpoints: u128,
}

impl<D: KeyValue> StoreWriter for KeyValueAccess<D> {
    fn checkpoint(&mut self, pages: &[(PageIndex, &Page)]) -> Result<()> {
        let mut map = Vec::with_capacity(pages.len() * ENTRY_BYTES);
        let mut pages = pages.iter();
        let map_key = key(b'M', self.checkpoints);
        // Each page is hashed when it is added, so that it is read from memory once. The map follows
        // the last page.
        let complete = std::cell::OnceCell::<Vec<u8>>::new();
        let mut each = std::iter::from_fn(|| {
            for (page, content) in pages.by_ref() {
                map.extend_from_slice(&(page.0 as u32).to_le_bytes());
                if **content == ZERO_PAGE {
                    map.extend_from_slice(&NO_HASH.to_le_bytes());
                    continue;
                }
                let hash = xxh3_128(*content);
                map.extend_from_slice(&hash.to_le_bytes());
                return Some((key_of(hash), &content[..]));
            }
            complete.set(std::mem::take(&mut map)).ok()?;
            complete.get().map(|map| (map_key, &map[..]))
        });
        self.database.add_all(&mut each)?;
        self.checkpoints += 1;
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<()> {
        self.database.close()
    }
}

impl<D: KeyValue> StoreReader for KeyValueAccess<D> {
    fn image(&mut self, checkpoint: usize, sink: FeedSink<'_>) -> Result<()> {
        let mut pages = FxHashMap::<u32, u128>::default();
        for number in 0..=checkpoint {
            let is_present = self.database.get(&key(b'M', number as u128), &mut |map| {
                for entry in map.chunks_exact(ENTRY_BYTES) {
                    let page = u32::from_le_bytes(std::array::from_fn(|at| entry[at]));
                    pages
                        .insert(page, u128::from_le_bytes(std::array::from_fn(|at| entry[4 + at])));
                }
            })?;
            if !is_present {
                return Err(D::failed("read a map", format!("checkpoint {number} has none")));
            }
        }
        let mut pages: Vec<_> = pages.into_iter().filter(|(_, hash)| *hash != NO_HASH).collect();
        pages.sort_unstable();
        for (page, hash) in pages {
            let mut fits = false;
            self.database.get(&key_of(hash), &mut |content| {
                if let Ok(content) = <&Page>::try_from(content) {
                    fits = true;
                    sink(PageIndex(page.into()), content);
                }
            })?;
            if !fits {
                return Err(D::failed("read a page", format!("page {page} is missing or damaged")));
            }
        }
        Ok(())
    }
}
