//! Writing a checkpoint's RAM as an image or as a migration stream.

use crate::error::Result;
use crate::guest_memory::{Guest, StoredPages};
use keyframe_image::Image;
use keyframe_qemu::stream;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const CHUNK_BYTES: u64 = 1 << 20;
/// Zeros of this length and alignment become a hole.
const HOLE_BYTES: usize = 4096;

/// An export of the RAM of one VM.
pub struct RamExport<'a> {
    /// The pages.
    pub pages: StoredPages<'a>,
    /// Set to true to end the export early.
    pub interrupted: Arc<AtomicBool>,
    /// Called with the number of bytes that have been written since the last call.
    pub progress: &'a dyn Fn(u64),
}

impl RamExport<'_> {
    /// Writes `image` to the empty file `file`, with holes where it is zero. Error: a page cannot be
    /// read, the file cannot be written, or the export was interrupted.
    pub fn sparse(&self, image: &Image, file: &File) -> io::Result<()> {
        file.set_len(image.len_bytes())?;
        let mut bytes = vec![0; CHUNK_BYTES as usize];
        let mut before = 0;
        for (at, len) in image.stretches(CHUNK_BYTES) {
            self.check()?;
            let chunk = bytes.get_mut(..len as usize).unwrap_or_default();
            image.read_at(&self.pages, at, chunk)?;
            let mut offset = at;
            for run in chunk.chunks(HOLE_BYTES) {
                if run.iter().any(|byte| *byte != 0) {
                    file.write_all_at(run, offset)?;
                }
                offset += run.len() as u64;
            }
            (self.progress)(at + len - before);
            before = at + len;
        }
        Ok(())
    }

    /// Writes `image` to `out`, or a migration stream of `guest` if it is `None`, from its first byte
    /// to its last. Error: a page cannot be read, `out` cannot be written, the device state cannot be
    /// read, or the export was interrupted.
    pub fn stream(&self, image: Option<&Image>, guest: &Guest, out: &mut dyn Write) -> Result<()> {
        let mut out = BufWriter::with_capacity(CHUNK_BYTES as usize, Watched { export: self, out });
        let Some(image) = image else {
            let (machine, state) = (&guest.machine, &guest.device_state);
            let (machine_type, processor) = (&*machine.machine_type, machine.processor);
            let head = stream::MigrationHead { machine_type, processor };
            return Ok(stream::export(&head, &guest.ram, &self.pages, state, &mut out)?);
        };
        let mut bytes = vec![0; CHUNK_BYTES as usize];
        let mut at = 0;
        while at < image.len_bytes() {
            let read = image.read_at(&self.pages, at, &mut bytes)?;
            out.write_all(bytes.get(..read).unwrap_or_default())?;
            at += read as u64;
        }
        Ok(out.flush()?)
    }

    fn check(&self) -> io::Result<()> {
        if self.interrupted.load(Ordering::Relaxed) {
            return Err(io::Error::new(io::ErrorKind::Interrupted, "it was given up"));
        }
        Ok(())
    }
}

/// Counts what is written, and ends when asked to.
struct Watched<'a> {
    export: &'a RamExport<'a>,
    out: &'a mut dyn Write,
}

impl Write for Watched<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Not as `Interrupted`, which would be tried again.
        self.export.check().map_err(|e| io::Error::other(e.to_string()))?;
        let written = self.out.write(bytes)?;
        (self.export.progress)(written as u64);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Creates the file at `path` completely or not at all: `write` fills a temporary file beside it, which
/// is then renamed. With `replaces` it replaces an existing file. Errors: those of
/// `write`; one that `failed` makes if the file cannot be made, or if there is one already.
pub fn write_whole<E>(
    path: &Path,
    replaces: bool,
    failed: impl Fn(io::Error) -> E,
    write: impl FnOnce(&File) -> Result<(), E>,
) -> Result<(), E> {
    let directory = path.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let temporary = tempfile::Builder::new()
        .prefix(".keyframe-export-")
        .tempfile_in(directory)
        .map_err(&failed)?;
    write(temporary.as_file())?;
    temporary.as_file().sync_all().map_err(&failed)?;
    let kept = if replaces { temporary.persist(path) } else { temporary.persist_noclobber(path) };
    kept.map(drop).map_err(|e| failed(e.error))
}
