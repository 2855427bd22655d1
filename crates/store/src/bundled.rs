//! The files that a bundle holds beside its checkpoint, and their description.
//!
//! ```text
//!   files/HASH            content, compressed; HASH: the BLAKE3 hash of the content
//!   files/manifest.json   what the bundle is of, and the paths of its files
//! ```
//!
//! Only a store that becomes a bundle has them. The same content is stored once. The hash is
//! compared when a file is read, so a changed file is noticed.

use crate::open_store::OpenStore;
use crate::store::Store;
use crate::{Error, Result};
use keyframe_store_backend::layout::{self, FILES, MANIFEST};
use std::io::{self, Read, Write};

/// The longest description that is read, in bytes.
const MANIFEST_BYTES_MAX: u64 = 1 << 20;
const CHUNK_BYTES: usize = 1 << 20;
/// Kernels and CDs hardly become smaller, so little time is spent on them.
const ZSTD_LEVEL: i32 = 1;

impl Store {
    /// Stores the `content` of a file whose BLAKE3 hash is `hash`, compressed. A file of that name
    /// that an interrupted attempt left is replaced. Calls `progress` with the number of bytes read.
    ///
    /// Errors: the store cannot be written; [`Error::Damaged`] if `content` has another hash, because
    /// the file has changed meanwhile.
    pub fn put_bundled_file(
        &self,
        hash: &blake3::Hash,
        content: &mut dyn Read,
        progress: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let files = &self.inner().backend;
        let name = layout::bundled_file(&hash.to_hex());
        files.remove(&name)?;
        let mut file = files.create(&name)?;
        let mut append = |bytes: &[u8]| file.append(bytes).map_err(io::Error::other);
        let mut hasher = blake3::Hasher::new();
        let io_error = |operation| {
            let object = files.describe(&name);
            move |source| Error::Io { object, operation, source }
        };
        let out = AppendTo(&mut append);
        let mut encoder =
            zstd::stream::Encoder::new(out, ZSTD_LEVEL).map_err(io_error("compress"))?;
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut done = 0;
        loop {
            let read = content.read(&mut chunk).map_err(io_error("read the content of"))?;
            if read == 0 {
                break;
            }
            hasher.update(&chunk[..read]);
            encoder.write_all(&chunk[..read]).map_err(io_error("write"))?;
            done += read as u64;
            progress(done);
        }
        encoder.finish().map_err(io_error("write"))?;
        file.sync()?;
        if hasher.finalize() == *hash {
            return Ok(());
        }
        files.remove(&name)?;
        let problem = "the file that it is made of changed while it was read".to_owned();
        Err(Error::Damaged { object: files.describe(&name), problem })
    }

    /// Writes the file whose hash is `hash` and whose length is `len_bytes` to `out`. Calls `progress`
    /// with the number of bytes written.
    ///
    /// Errors: there is no such file; [`Error::Damaged`] if its content has another hash or length,
    /// and then a part of it may be in `out`; `out` cannot be written.
    pub fn read_bundled_file(
        &self,
        hash: &blake3::Hash,
        len_bytes: u64,
        out: &mut dyn Write,
        progress: &mut dyn FnMut(u64),
    ) -> Result<()> {
        self.inner().read_bundled_file(hash, Some(len_bytes), out, progress)
    }

    /// Stores the description of the bundle. Error: the store cannot be written.
    pub fn put_bundle_manifest(&self, json: &[u8]) -> Result<()> {
        self.inner().backend.put(MANIFEST, json)
    }

    /// Returns the description of the bundle; `None` if this store is none. Error: it cannot be read.
    pub fn bundle_manifest(&self) -> Result<Option<Vec<u8>>> {
        match self.inner().backend.read(MANIFEST, MANIFEST_BYTES_MAX) {
            Err(e) if e.is_not_found() => Ok(None),
            other => other.map(Some),
        }
    }
}

impl OpenStore {
    /// Returns the hashes of the files of a bundle; none for another store. Error: the folder cannot
    /// be listed.
    pub fn bundled_files(&self) -> Result<Vec<blake3::Hash>> {
        let names = self.backend.list(FILES)?;
        Ok(names.iter().filter_map(|name| blake3::Hash::from_hex(name).ok()).collect())
    }

    /// Reads a file as [`Store::read_bundled_file`] does, of any length if `len_bytes` is `None`.
    pub fn read_bundled_file(
        &self,
        hash: &blake3::Hash,
        len_bytes: Option<u64>,
        out: &mut dyn Write,
        progress: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let files = &self.backend;
        let name = layout::bundled_file(&hash.to_hex());
        let object = files.describe(&name);
        let file = files.open(&name)?;
        let source = ReadFrom { len_bytes: file.len_bytes()?, file: &file, at: 0 };
        let damaged = |problem: String| Error::Damaged { object: object.clone(), problem };
        let unpack = |e: io::Error| damaged(format!("it cannot be unpacked: {e}"));
        let decoder = zstd::stream::Decoder::new(source).map_err(unpack)?;
        // One byte more than there is to be: a longer content is noticed, and does not fill the disk.
        let mut decoder = decoder.take(len_bytes.map_or(u64::MAX, |len| len.saturating_add(1)));
        let mut hasher = blake3::Hasher::new();
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let read = decoder.read(&mut chunk).map_err(unpack)?;
            if read == 0 {
                break;
            }
            hasher.update(&chunk[..read]);
            out.write_all(&chunk[..read]).map_err(|source| Error::Io {
                object: format!("the copy of {object}"),
                operation: "write",
                source,
            })?;
            progress(hasher.count());
        }
        if hasher.finalize() != *hash || len_bytes.is_some_and(|len| hasher.count() != len) {
            return Err(damaged("its content has another hash".into()));
        }
        Ok(())
    }
}

/// Writes into a file that grows.
struct AppendTo<'a>(&'a mut dyn FnMut(&[u8]) -> io::Result<()>);

impl Write for AppendTo<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (self.0)(bytes).map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads a file of a store from its beginning to its end.
struct ReadFrom<'a> {
    file: &'a crate::files::StoreFile,
    len_bytes: u64,
    at: u64,
}

impl Read for ReadFrom<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.len_bytes.saturating_sub(self.at);
        let len = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        self.file.read_at(self.at, &mut buffer[..len]).map_err(io::Error::other)?;
        self.at += len as u64;
        Ok(len)
    }
}
