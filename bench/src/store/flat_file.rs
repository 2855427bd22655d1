//! The flat file of the thesis: each page content once in an append-only file, found by its hash.
//!
//! ```text
//!   pages    | page | page | ...                               page n at n * 4096
//!   maps     | entries (u64) | page (u32), slot (u32) | ...     one for each checkpoint
//!                                                              slots from 1; 0: zeros
//! ```
//!
//! Both files are synced at the end of a checkpoint, the pages first. The hashes are in memory, as in
//! the thesis. The flat file verifies and compresses nothing, so it is a measure and no store for
//! checkpoints.

use keyframe_bench_feed::{Error, FeedSink, Result, Store, StoreReader, StoreWriter};
use keyframe_units::{PAGE_BYTES, Page, PageIndex, ZERO_PAGE};
use rustc_hash::FxHashMap;
use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use xxhash_rust::xxh3::xxh3_128;

/// The size of one write.
const BUFFER_BYTES: usize = 1 << 20;
const PAGES: &str = "pages";
const MAPS: &str = "maps";

/// The hash that identifies a page.
#[derive(Clone, Copy)]
pub enum Hash {
    /// Fast, and unsafe against a guest that constructs collisions.
    Xxh3,
    /// Keyed and safe, as in Keyframe.
    Blake3,
}

/// The flat file as a store.
pub struct FlatFile(pub Hash);

impl Store for FlatFile {
    fn create(&self, dir: &Path, _image_pages: u64) -> Result<Box<dyn StoreWriter>> {
        std::fs::create_dir_all(dir).map_err(Error::file("make", dir))?;
        let make =
            |name| File::create_new(dir.join(name)).map_err(Error::file("make", &dir.join(name)));
        let (pages, maps) = (make(PAGES)?, make(MAPS)?);
        let buffer = Vec::with_capacity(BUFFER_BYTES + PAGE_BYTES);
        Ok(Box::new(FlatFileWriter {
            hash: self.0,
            pages,
            maps,
            buffer,
            known: FxHashMap::default(),
        }))
    }

    fn open(&self, dir: &Path) -> Result<Box<dyn StoreReader>> {
        let open = |name| File::open(dir.join(name)).map_err(Error::file("open", &dir.join(name)));
        Ok(Box::new(FlatFileReader {
            pages: open(PAGES)?,
            maps: BufReader::new(open(MAPS)?),
            read: Vec::new(),
        }))
    }
}

struct FlatFileWriter {
    hash: Hash,
    pages: File,
    maps: File,
    buffer: Vec<u8>,
    known: FxHashMap<u128, u32>,
}

impl FlatFileWriter {
    fn key(&self, page: &Page) -> u128 {
        match self.hash {
            Hash::Xxh3 => xxh3_128(page),
            Hash::Blake3 => {
                let hash = blake3::keyed_hash(&[7; 32], page);
                u128::from_le_bytes(std::array::from_fn(|at| hash.as_bytes()[at]))
            }
        }
    }

    /// Returns the slot of a page, from 1. Appends the page if it is new.
    fn slot(&mut self, page: &Page) -> Result<u32> {
        let (key, next) = (self.key(page), self.known.len() as u32 + 1);
        let slot = *self.known.entry(key).or_insert(next);
        if slot == next {
            self.buffer.extend_from_slice(page);
            if self.buffer.len() >= BUFFER_BYTES {
                self.flush()?;
            }
        }
        Ok(slot)
    }

    fn flush(&mut self) -> Result<()> {
        self.pages.write_all(&self.buffer).map_err(failed("append pages"))?;
        self.buffer.clear();
        Ok(())
    }
}

impl StoreWriter for FlatFileWriter {
    fn checkpoint(&mut self, pages: &[(PageIndex, &Page)]) -> Result<()> {
        let mut map = (pages.len() as u64).to_le_bytes().to_vec();
        for (page, content) in pages {
            let slot = if **content == ZERO_PAGE { 0 } else { self.slot(content)? };
            map.extend_from_slice(&(page.0 as u32).to_le_bytes());
            map.extend_from_slice(&slot.to_le_bytes());
        }
        self.flush()?;
        self.pages.sync_data().map_err(failed("sync pages"))?;
        self.maps.write_all(&map).map_err(failed("append a map"))?;
        self.maps.sync_data().map_err(failed("sync maps"))
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

struct FlatFileReader {
    pages: File,
    maps: BufReader<File>,
    /// The maps that were read so far.
    read: Vec<Vec<(u32, u32)>>,
}

impl FlatFileReader {
    fn number<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.maps.read_exact(&mut bytes).map_err(failed("read a map"))?;
        Ok(bytes)
    }
}

impl StoreReader for FlatFileReader {
    fn image(&mut self, checkpoint: usize, sink: FeedSink<'_>) -> Result<()> {
        while self.read.len() <= checkpoint {
            let entries = u64::from_le_bytes(self.number()?);
            let mut map = Vec::new();
            for _ in 0..entries {
                map.push((u32::from_le_bytes(self.number()?), u32::from_le_bytes(self.number()?)));
            }
            self.read.push(map);
        }
        let newest: FxHashMap<u32, u32> =
            self.read[..=checkpoint].iter().flatten().copied().collect();
        let mut slots: Vec<(u32, u32)> =
            newest.into_iter().map(|(page, slot)| (slot, page)).collect();
        slots.sort_unstable();
        let mut content = ZERO_PAGE;
        for (slot, page) in slots.into_iter().filter(|(slot, _)| *slot != 0) {
            let at = u64::from(slot - 1) * PAGE_BYTES as u64;
            self.pages.read_exact_at(&mut content, at).map_err(failed("read a page"))?;
            sink(PageIndex(page.into()), &content);
        }
        Ok(())
    }
}

fn failed(operation: &str) -> impl FnOnce(std::io::Error) -> Error {
    Error::io(format!("flat file: {operation}"))
}
