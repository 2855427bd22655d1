//! A store of checkpoints over any database of keys and values: each page content once, found by
//! its hash.
//!
//! ```text
//!   'P' XXH3-128 of a page   ──▶ the page
//!   'M' number of checkpoint ──▶ page number (u32), hash ... of the pages put into it     page number + NO_HASH: zeros
//! ```
//!
//! XXH3 is the cheapest hash there is, and not safe against a guest that constructs collisions:
//! peers have that advantage.

use crate::target::{PageSink, Reading, Store, Writing};
use crate::{Error, Result};
use keyframe_units::{Page, PageIndex, ZERO_PAGE};
use rustc_hash::FxHashMap;
use std::path::Path;
use xxhash_rust::xxh3::xxh3_128;

/// Bytes of a key.
pub const KEY_BYTES: usize = 17;
/// A key.
pub type Key = [u8; KEY_BYTES];

/// Stands for a page of zeros in a map.
const NO_HASH: u128 = 0;
const ENTRY_BYTES: usize = 20;

/// A database.
pub trait KeyValue: Sized {
    /// Its name in messages.
    const NAME: &'static str;

    /// Opens it in `dir`, which is there; makes it where it is not.
    fn open(dir: &Path) -> Result<Self>;

    /// Adds all of them. One that is there keeps its value. Once this returns, all survive power
    /// loss.
    fn add_all(&mut self, entries: &mut dyn Iterator<Item = (Key, &[u8])>) -> Result<()>;

    /// Gives the value of `key` to `sink`, if it is there.
    fn get(&mut self, key: &Key, sink: &mut dyn FnMut(&[u8])) -> Result<bool>;

    /// Ends it.
    fn close(self) -> Result<()>;

    /// An error of this database.
    fn failed(operation: &str, problem: impl std::fmt::Display) -> Error {
        Error::failed(format!("{}: {operation}", Self::NAME), problem)
    }
}

/// The key of a page.
pub fn key_of(hash: u128) -> Key {
    key(b'P', hash)
}

fn key(kind: u8, number: u128) -> Key {
    let mut key = [kind; KEY_BYTES];
    key[1..].copy_from_slice(&number.to_be_bytes());
    key
}

/// Any database as a store.
#[derive(Debug)]
pub struct KeyedStore<D>(std::marker::PhantomData<D>);

impl<D> KeyedStore<D> {
    /// Of database `D`.
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
    fn create(&self, dir: &Path, _image_pages: u64) -> Result<Box<dyn Writing>> {
        std::fs::create_dir_all(dir).map_err(Error::file("make", dir))?;
        Ok(Box::new(Keyed { database: D::open(dir)?, checkpoints: 0 }))
    }

    fn open(&self, dir: &Path) -> Result<Box<dyn Reading>> {
        Ok(Box::new(Keyed { database: D::open(dir)?, checkpoints: 0 }))
    }
}

/// An open one.
#[derive(Debug)]
pub struct Keyed<D> {
    database: D,
    checkpoints: u128,
}

impl<D: KeyValue> Writing for Keyed<D> {
    fn checkpoint(&mut self, pages: &[(PageIndex, &Page)]) -> Result<()> {
        let mut map = Vec::with_capacity(pages.len() * ENTRY_BYTES);
        let mut pages = pages.iter();
        let map_key = key(b'M', self.checkpoints);
        // Each page is hashed as it goes in, so that it is read from memory once; behind the last
        // one comes the map.
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

impl<D: KeyValue> Reading for Keyed<D> {
    fn image(&mut self, checkpoint: usize, sink: PageSink<'_>) -> Result<()> {
        let mut pages = FxHashMap::<u32, u128>::default();
        for number in 0..=checkpoint {
            let there = self.database.get(&key(b'M', number as u128), &mut |map| {
                for entry in map.chunks_exact(ENTRY_BYTES) {
                    let page = u32::from_le_bytes(std::array::from_fn(|at| entry[at]));
                    pages
                        .insert(page, u128::from_le_bytes(std::array::from_fn(|at| entry[4 + at])));
                }
            })?;
            if !there {
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
