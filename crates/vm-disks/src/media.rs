//! The media that a recorded guest can only read, served as its disks are: for the speed of the
//! answers alone.
//!
//! Nothing of it goes into a checkpoint: the image is the user's, and is not written.

use keyframe_disk::{Disks, ImageFormat, Spec};
use keyframe_failure::{Failure, chain};
use keyframe_qemu::{DiskServer, Medium};
use std::path::Path;
use tempfile::TempDir;

/// The socket, in a folder of its own.
const SOCKET: &str = "media.sock";

/// Media that are served, until this is dropped.
pub struct Media {
    disks: Option<Disks>,
    folder: TempDir,
}

impl Media {
    /// Serves `media`, whose paths hold in `directory`, from a folder of its own in `place`; none
    /// where there are none.
    ///
    /// Error: one of them cannot be served. QEMU can read it itself.
    pub fn serve(
        media: &[Medium],
        directory: &Path,
        place: &Path,
    ) -> Result<Option<Self>, Failure> {
        if media.is_empty() {
            return Ok(None);
        }
        let folder = tempfile::Builder::new().prefix("keyframe-media-").tempdir_in(place);
        let folder = folder
            .map_err(|e| Failure::new(format!("make a directory in {}: {e}", place.display())))?;
        let spec = |medium| spec(medium, directory, folder.path());
        let specs = media.iter().map(spec).collect::<Result<Vec<_>, _>>()?;
        let socket = folder.path().join(SOCKET);
        let disks = Disks::spawn(&mut super::server(), &socket, &specs)
            .map_err(|e| Failure::new(chain(&e)))?;
        Ok(Some(Self { disks: Some(disks), folder }))
    }

    /// Who serves them.
    pub fn server(&self) -> DiskServer {
        DiskServer { socket: self.folder.path().join(SOCKET), prefix: String::new() }
    }

    /// Requests are answered on `core`, on which the guest runs alone, before it runs on.
    pub fn answer_on(&mut self, core: u32) -> Result<(), Failure> {
        self.disks
            .as_mut()
            .map_or(Ok(()), |disks| disks.answer_on(core))
            .map_err(|e| Failure::new(chain(&e)))
    }
}

impl Drop for Media {
    fn drop(&mut self) {
        if let Some(disks) = self.disks.take() {
            // QEMU is gone, and nothing was written.
            let _ = disks.end();
        }
    }
}

/// How the server is to open a medium.
fn spec(medium: &Medium, directory: &Path, folder: &Path) -> Result<Spec, Failure> {
    let image = directory.join(&medium.image);
    let name = image.display();
    if !std::fs::metadata(&image).is_ok_and(|metadata| metadata.is_file()) {
        return Err(Failure::new(format!("{name} is no file")));
    }
    let format = match medium.format.as_deref() {
        Some(word) => ImageFormat::named(word)
            .ok_or_else(|| Failure::new(format!("{name} is in format {word}")))?,
        None => ImageFormat::probe(&image).map_err(|e| Failure::new(chain(&e)))?,
    };
    Ok(Spec {
        export: medium.name.clone(),
        base: image,
        format,
        blank_bytes: None,
        overlay: folder.join(&medium.name),
        layer: None,
        temporary: true,
    })
}
