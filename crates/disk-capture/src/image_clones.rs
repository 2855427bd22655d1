//! Clones of image files, made in each pause by file systems that can (btrfs, XFS).
//!
//! ```text
//!   begin: empty files beside the images ─▶ sync the images ─▶ stop ─▶ cut: FICLONE ─▶ cont
//!   encoder: sync the clones, make them read-only, describe them ─▶ the checkpoint's base of each disk
//!   sealed: they stay      failed: they are removed      engine gone: the next one removes what no checkpoint names
//!
//!   DIR/disk.qcow2
//!   DIR/.disk.qcow2.keyframe-1a2b3c4d-web-17      beside the image, so that backing files are found by the same names
//! ```
//!
//! Invariant: a checkpoint names its clone only when the clone is durable, and no clone that a
//! checkpoint of this store names is removed.

use crate::error::{CloneObstacle, DiskError, Result};
use crate::event::{DiskEvent, DiskStep, EventSink, SharedDiskEventSink, tell_failed};
use keyframe_capture::BoxError;
use keyframe_disk::ImageFormat;
use keyframe_disk::chain::image_files;
use keyframe_store::{Run, Store};
use keyframe_vm_disks::base_image;
use std::collections::{BTreeMap, HashSet};
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The most bytes of an image's name in the name of its clones.
const STEM_BYTES_MAX: usize = 100;
/// More clones than a user keeps beside an image.
const CLONES_MAX: u64 = 1 << 32;
/// The longest time of a cheap clone. A slower one has no advantage over the other methods.
const CHEAP: Duration = Duration::from_millis(5);

/// A clone of a disk in a capture.
#[derive(Clone, Debug)]
struct Made {
    disk: usize,
    path: PathBuf,
    format: ImageFormat,
}

/// The clones of a capture. They are known once its pause has begun.
#[derive(Clone, Debug)]
pub struct ClonedCut(Arc<OnceLock<Vec<Made>>>);

/// An image that is cloned.
pub(crate) struct Source {
    /// The number of its disk in the checkpoints.
    pub disk: usize,
    /// Its path.
    pub image: PathBuf,
    /// Its file.
    pub file: File,
    /// Its format.
    pub format: ImageFormat,
}

impl Source {
    /// Opens the image of disk number `disk`. Error: it cannot be opened.
    pub fn open(disk: usize, image: &Path, format: ImageFormat) -> Result<Self> {
        let file = File::open(image).map_err(|e| io_error("open", image, e))?;
        Ok(Self { disk, image: image.to_owned(), file, format })
    }
}

/// The clones of some images, for the engine's thread. The encoder takes them through a
/// [`ClonedCut`].
pub(crate) struct ImageClones {
    sources: Vec<Source>,
    /// Whose clones they are, in their names.
    owner: String,
    events: SharedDiskEventSink,
    next: u64,
    prepared: Vec<(Made, File)>,
    current: Option<ClonedCut>,
    in_flight: BTreeMap<u64, ClonedCut>,
}

impl ImageClones {
    /// Prepares to clone `sources` for the checkpoints of `vm` in `store`. Removes the files that a
    /// killed engine has left. Error: the store or a folder cannot be read.
    pub fn new(
        store: &Store,
        vm: &str,
        sources: Vec<Source>,
        events: SharedDiskEventSink,
    ) -> Result<Self> {
        let owner =
            format!("keyframe-{:.8}-{}", store.id(), keyframe_vm_disks::vm_name::name_from(vm));
        let next = remove_left_over(store, &sources, &owner, &*events)? + 1;
        let (prepared, in_flight) = (Vec::new(), BTreeMap::new());
        Ok(Self { sources, owner, events, next, prepared, current: None, in_flight })
    }

    /// Clones `sources` from the next capture on.
    pub fn change_sources(&mut self, sources: Vec<Source>) {
        self.sources = sources;
    }

    /// Begins a capture: makes files to clone into, and flushes the images so that little is left
    /// to flush in the pause. Error: a file cannot be made.
    pub fn begin(&mut self) -> Result<ClonedCut, BoxError> {
        self.discard_prepared();
        for source in &self.sources {
            let (path, file) = claim(&source.image, &self.owner, &mut self.next)?;
            self.prepared.push((Made { disk: source.disk, path, format: source.format }, file));
        }
        self.sync()?;
        let cut = ClonedCut(Arc::default());
        self.current = Some(cut.clone());
        Ok(cut)
    }

    /// Flushes the images, so that little is left to flush in the pause. Error: an image cannot be
    /// flushed.
    pub fn sync(&self) -> Result<(), BoxError> {
        for source in &self.sources {
            source.file.sync_data().map_err(|e| io_error("sync", &source.image, e))?;
        }
        Ok(())
    }

    /// Clones the images. Called while the VMs are paused and no write of theirs is under way.
    /// Error: an image cannot be cloned.
    pub fn cut(&mut self) -> Result<(), BoxError> {
        let Some(current) = &self.current else { return Ok(()) };
        for (source, (made, file)) in self.sources.iter().zip(&self.prepared) {
            rustix::fs::ioctl_ficlone(file, &source.file).map_err(|e| DiskError::Clone {
                image: source.image.clone(),
                clone: made.path.clone(),
                source: e.into(),
            })?;
        }
        let made = self.prepared.drain(..).map(|(made, _)| made).collect();
        current.0.set(made).map_err(|_| DiskError::CutTwice.into())
    }

    /// Records the end of a capture: it has number `seq`, or failed if `seq` is `None`.
    pub fn captured(&mut self, seq: Option<u64>) {
        self.discard_prepared();
        let Some(cut) = self.current.take() else { return };
        match seq {
            Some(seq) => {
                self.in_flight.insert(seq, cut);
            }
            None => cut.discard(&*self.events),
        }
    }

    /// Records that the checkpoint of capture `seq` is sealed, and has its clones.
    pub fn sealed(&mut self, seq: u64) {
        self.in_flight.remove(&seq);
    }

    /// Removes the clones of the captures `lost`, whose checkpoints are lost.
    pub fn failed(&mut self, lost: &[u64]) {
        for cut in lost.iter().filter_map(|seq| self.in_flight.remove(seq)) {
            cut.discard(&*self.events);
        }
    }

    fn discard_prepared(&mut self) {
        for (made, _) in self.prepared.drain(..) {
            discard(&made.path, &*self.events);
        }
    }
}

impl Drop for ImageClones {
    fn drop(&mut self) {
        self.captured(None);
    }
}

impl ClonedCut {
    /// Makes the clones durable, and makes them the bases of the disks in the checkpoint in
    /// progress of `run`. Calls `fault` before each clone.
    ///
    /// Errors: that of `fault`; the disks were not cut; a clone cannot be written to its medium or
    /// described; the run refuses a base.
    pub fn put(
        &self,
        run: &mut Run,
        fault: &mut dyn FnMut() -> Result<(), BoxError>,
    ) -> Result<(), BoxError> {
        for made in self.0.get().ok_or(DiskError::NotCut)? {
            fault()?;
            let path = &made.path;
            let durable = || {
                let file = File::open(path)?;
                file.set_permissions(Permissions::from_mode(0o400))?;
                file.sync_all()?;
                File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
            };
            durable().map_err(|e| io_error("sync", path, e))?;
            let base = base_image::describe(path, made.format).map_err(DiskError::from)?;
            run.set_base(made.disk, base)?;
        }
        Ok(())
    }

    /// Returns a cut of no disk.
    pub(crate) fn nothing() -> Self {
        Self(Arc::new(OnceLock::from(Vec::new())))
    }

    fn discard(&self, events: &dyn EventSink<DiskEvent>) {
        self.0.get().into_iter().flatten().for_each(|made| discard(&made.path, events));
    }
}

/// Tries to clone the image. Returns the reason why it cannot be cloned, or `None`; with `cheaply`,
/// a clone that takes long is a reason too.
pub fn objection(
    image: &Path,
    format: Option<ImageFormat>,
    cheaply: bool,
) -> Option<CloneObstacle> {
    tried(image, format, cheaply).err()
}

fn tried(image: &Path, format: Option<ImageFormat>, cheaply: bool) -> Result<(), CloneObstacle> {
    let path = || image.to_owned();
    let io = |operation, source| CloneObstacle::Io { operation, path: path(), source };
    if format.is_none() {
        return Err(CloneObstacle::Format(path()));
    }
    let source = File::open(image).map_err(|e| io("open", e))?;
    if !source.metadata().map_err(|e| io("look at", e))?.is_file() {
        return Err(CloneObstacle::NotRegular(path()));
    }
    if format == Some(ImageFormat::Qcow2) {
        if let Err(keyframe_disk::Error::Refused { .. }) = image_files(image, ImageFormat::Qcow2) {
            let reason = "has a backing image that Keyframe does not read";
            return Err(CloneObstacle::NotWhole { path: path(), reason });
        }
        stands_alone(&source).map_err(|reason| CloneObstacle::NotWhole { path: path(), reason })?;
    }
    let folder = image.parent().unwrap_or(Path::new("/"));
    let target = tempfile::Builder::new().prefix(".keyframe-try-").tempfile_in(folder);
    let target = target.map_err(|e| io("make a file beside", e))?;
    source.sync_data().map_err(|e| io("sync", e))?;
    let began = Instant::now();
    rustix::fs::ioctl_ficlone(&target, &source)
        .map_err(|e| CloneObstacle::NoClones { path: path(), source: e.into() })?;
    let took = began.elapsed();
    if cheaply && took > CHEAP {
        let took_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        return Err(CloneObstacle::Slow { path: path(), took_ms });
    }
    Ok(())
}

/// Checks that a clone of this qcow2 file is a complete image: the file holds all data, and its
/// tables are consistent after each flush of QEMU.
fn stands_alone(file: &File) -> Result<(), &'static str> {
    let mut header = [0u8; 88];
    let read = file.read_exact_at(&mut header, 0);
    let version = header[4..8].iter().fold(0u32, |n, b| n << 8 | u32::from(*b));
    if read.is_err() || version < 3 {
        return Ok(());
    }
    // The lowest byte of the incompatible features, and of the compatible ones.
    let (incompatible, compatible) = (header[79], header[87]);
    if incompatible & 4 != 0 {
        return Err("has its data in another file (data_file)");
    }
    if incompatible & 2 != 0 {
        return Err("is marked as corrupt");
    }
    if compatible & 1 != 0 {
        return Err("has lazy_refcounts, and is whole only when QEMU has ended");
    }
    Ok(())
}

/// Creates an empty file beside the image, to clone into. Returns its path and the open file.
fn claim(image: &Path, owner: &str, next: &mut u64) -> Result<(PathBuf, File), DiskError> {
    let folder = image.parent().unwrap_or(Path::new("/"));
    let stem = stem(image);
    while *next < CLONES_MAX {
        let path = folder.join(format!(".{stem}.{owner}-{next}"));
        *next += 1;
        match File::options().write(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => return Ok((path, file)),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(io_error("make", &path, e)),
        }
    }
    Err(DiskError::TooManyClones { folder: folder.to_owned(), image: image.to_owned() })
}

fn stem(image: &Path) -> String {
    let name = image.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let end = (0..=name.len().min(STEM_BYTES_MAX))
        .rev()
        .find(|at| name.is_char_boundary(*at))
        .unwrap_or(0);
    name[..end].to_owned()
}

/// Removes the clones that a killed engine of this VM has left: those of `owner` that no checkpoint
/// names. They lie beside the images. Returns the highest number of a clone.
///
/// A checkpoint may name a clone by another path, because the folder was moved or is reached through
/// a link. So a clone stays if a checkpoint names any file of its name. Clones of other VMs stay: an
/// engine of theirs may be making them.
fn remove_left_over(
    store: &Store,
    sources: &[Source],
    owner: &str,
    events: &dyn EventSink<DiskEvent>,
) -> Result<u64> {
    let mut highest = 0;
    let mut found = Vec::new();
    for source in sources {
        let folder = source.image.parent().unwrap_or(Path::new("/"));
        let entries = std::fs::read_dir(folder).map_err(|e| io_error("list", folder, e))?;
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if let Some(number) = number_of(&name, &source.image, owner) {
                highest = highest.max(number);
                found.push((name, path));
            }
        }
    }
    if found.is_empty() {
        return Ok(0);
    }
    // After the folders, so that no checkpoint is missing whose clone was found.
    let listing = store.checkpoints().map_err(|e| DiskError::store(store.path(), e))?;
    if !listing.unreadable.is_empty() {
        // What an unreadable checkpoint names is not known.
        return Ok(highest);
    }
    let disks = listing.sealed.iter().flat_map(|sealed| &sealed.meta.disks);
    let named: HashSet<_> =
        disks.filter_map(|disk| Path::new(&disk.base.path).file_name()?.to_str()).collect();
    for (_, path) in found.iter().filter(|(name, _)| !named.contains(&**name)) {
        discard(path, events);
    }
    Ok(highest)
}

/// Returns the number of the clone `name` of `image`; `None` if it is none of `owner`.
fn number_of(name: &str, image: &Path, owner: &str) -> Option<u64> {
    let number = name.strip_prefix(&format!(".{}.{owner}-", stem(image)))?;
    number.bytes().all(|byte| byte.is_ascii_digit()).then(|| number.parse().ok()).flatten()
}

fn discard(path: &Path, events: &dyn EventSink<DiskEvent>) {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            tell_failed(events, DiskStep::RemoveFile, Err(io_error("remove", path, e)));
        }
        _ => {}
    }
}

fn io_error(operation: &'static str, path: &Path, source: io::Error) -> DiskError {
    DiskError::Io { operation, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clone_is_told_from_those_of_other_vms_and_images() {
        let number = |name| number_of(name, Path::new("/d/a.img"), "keyframe-1a2b3c4d-web");
        assert_eq!(number(".a.img.keyframe-1a2b3c4d-web-17"), Some(17));
        assert_eq!(number(".a.img.keyframe-1a2b3c4d-web-1-17"), None, "VM web-1");
        assert_eq!(number(".a.img.keyframe-1a2b3c4d-web-"), None);
        assert_eq!(number(".a.img.keyframe-ffffffff-web-17"), None, "another store");
        assert_eq!(number(".b.img.keyframe-1a2b3c4d-web-17"), None);
    }
}
