//! Writes a disk out as an image: base, layer and overlay as one.
//!
//! Left out: qcow2 (convert the raw image), and writing into the base in place.

use crate::{Disk, Error, Result};
use std::os::unix::fs::FileExt;
use std::path::Path;

const CHUNK_BYTES: u64 = 1 << 20;
/// How many ranges are looked at in one go.
const RANGES_MAX: usize = 1024;

/// Writes `disk` to a new raw image at `path`, sparse where it is zero. It is there whole and durable, or not at all.
///
/// Error: also where something is at `path` already.
pub fn to_new_raw(disk: &Disk, path: &Path) -> Result<()> {
    let name = path.display().to_string();
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = tempfile::NamedTempFile::new_in(folder).map_err(Error::io(&name, "make a file beside"))?;
    file.as_file().set_len(disk.disk_bytes()).map_err(Error::io(&name, "set the length of"))?;
    let mut at = 0;
    let mut chunk = vec![0; CHUNK_BYTES as usize];
    while at < disk.disk_bytes() {
        for (start, bytes, zero) in disk.status(at, disk.disk_bytes() - at, RANGES_MAX)? {
            at = start + bytes;
            let mut from = if zero { at } else { start };
            while from < at {
                let part = &mut chunk[..(at - from).min(CHUNK_BYTES) as usize];
                disk.read(from, part)?;
                file.as_file().write_all_at(part, from).map_err(Error::io(&name, "write"))?;
                from += part.len() as u64;
            }
        }
    }
    file.as_file().sync_all().map_err(Error::io(&name, "sync"))?;
    file.persist_noclobber(path).map_err(|e| Error::io(&name, "put in place")(e.error))?;
    let folder = std::fs::File::open(folder).and_then(|folder| folder.sync_all());
    folder.map_err(Error::io(name, "sync the directory of"))
}
