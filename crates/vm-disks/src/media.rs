//! Serves the read-only media of a recorded guest like its disks, so that the guest gets answers
//! sooner.
//!
//! A checkpoint holds no content of a medium: its image belongs to the user and is never written.

use crate::error::{Error, Result};
use keyframe_disk::{DiskSpec, Disks, ImageFormat};
use keyframe_qemu::{DiskServer, Medium};
use std::path::Path;
use tempfile::TempDir;

/// The server's socket, in the server's own folder.
const SOCKET: &str = "media.sock";

/// A server of read-only media. Dropping it ends the server.
pub struct Media {
    disks: Option<Disks>,
    folder: TempDir,
}

impl Media {
    /// Starts a server for `media`, with a directory of its own in `place`. Relative paths of
    /// images begin in `directory`. Returns `None` if `media` is empty.
    ///
    /// Error: a medium cannot be served. QEMU can still read it itself.
    pub fn serve(media: &[Medium], directory: &Path, place: &Path) -> Result<Option<Self>> {
        if media.is_empty() {
            return Ok(None);
        }
        let folder = tempfile::Builder::new().prefix("keyframe-media-").tempdir_in(place);
        let folder = folder.map_err(|e| Error::io("make a directory in", place, e))?;
        let spec = |medium| spec(medium, directory, folder.path());
        let specs = media.iter().map(spec).collect::<Result<Vec<_>, _>>()?;
        let socket = folder.path().join(SOCKET);
        let disks = Disks::spawn(super::server(), &socket, &specs)?;
        Ok(Some(Self { disks: Some(disks), folder }))
    }

    /// Returns the address of the server, for QEMU's command line.
    pub fn server(&self) -> DiskServer {
        DiskServer::at(self.folder.path().join(SOCKET))
    }

    /// Makes the server answer on CPU `core`, which the guest's thread uses too, so that an answer
    /// comes before the guest runs on. Error: the server does not answer.
    pub fn answer_on(&mut self, core: u32) -> Result<()> {
        Ok(self.disks.as_mut().map_or(Ok(()), |disks| disks.answer_on(core))?)
    }
}

impl Drop for Media {
    fn drop(&mut self) {
        if let Some(disks) = self.disks.take() {
            // QEMU has ended, and a medium has no written data.
            let _ = disks.end();
        }
    }
}

/// Tells the server how to open `medium`.
fn spec(medium: &Medium, directory: &Path, folder: &Path) -> Result<DiskSpec> {
    let image = directory.join(&medium.image);
    if !std::fs::metadata(&image).is_ok_and(|metadata| metadata.is_file()) {
        return Err(Error::MediumNotAFile(image));
    }
    let format = match medium.format.as_deref() {
        Some(word) => ImageFormat::named(word)
            .ok_or_else(|| Error::MediumFormat { path: image.clone(), format: word.to_owned() })?,
        None => ImageFormat::probe(&image)?,
    };
    Ok(DiskSpec {
        export: medium.name.clone(),
        base: image,
        format,
        blank_bytes: None,
        overlay: folder.join(&medium.name),
        layer: None,
        temporary: true,
    })
}
