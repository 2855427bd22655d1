//! Making a bundle.
//!
//! ```text
//!   FILE.partial/   a store: files, one whole checkpoint   ─▶ FILE.partial/archive ─▶ renamed to FILE
//! ```
//!
//! Invariant: each step leaves `FILE.partial` so that the same command goes on with it. Only what was
//! sealed or described there counts; other bytes in it are written again, or deduplicated.

use crate::error::{Error, Result};
use crate::files::{self, NeededFile};
use crate::manifest::{BundledFile, Manifest};
use crate::{machines, whole};
use keyframe_qemu::cmdline::MovedFile;
use keyframe_store::{CheckpointId, Meta, Store};
use keyframe_store_backend::archive::write_archive;
use keyframe_store_backend::layout::{FILES, MANIFEST, STORE_JSON, bundled_file};
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

const ARCHIVE: &str = "archive";

/// What a bundle is made of.
pub struct BundleRequest<'a> {
    /// The store of the checkpoint.
    pub store: &'a Store,
    /// The checkpoint.
    pub checkpoint: CheckpointId,
    /// The description of the checkpoint, with moved images and media at their present places.
    pub meta: &'a Meta,
    /// The file to make.
    pub output: &'a Path,
    /// Images and media that have moved since the checkpoint, as the user named them.
    pub moved: &'a [MovedFile],
    /// Whether disks that were left out of the checkpoint are bundled as they are now.
    pub left_out_as_now: bool,
    /// Whether the bundle is to be encrypted.
    pub encrypted: bool,
    /// Opens the store in a directory that an interrupted command left, or makes it: the second
    /// argument is true if it is there.
    pub staging: &'a dyn Fn(&Path, bool) -> keyframe_store::Result<Store>,
}

/// A step of a bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// A file that the VM only reads is added.
    File(String),
    /// The RAM is added.
    Ram,
    /// A disk is added.
    Disk(String),
    /// The file of the bundle is written, or its checkpoint imported.
    Archive,
}

/// The progress of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The step.
    pub step: Step,
    /// The number of bytes that are done.
    pub done_bytes: u64,
    /// The number of all bytes.
    pub total_bytes: u64,
}

/// A bundle that was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BundleReport {
    /// Its length, in bytes.
    pub bundle_bytes: u64,
    /// The files that the VM only reads.
    pub files: Vec<BundledFile>,
    /// The names of the disks.
    pub disks: Vec<String>,
    /// The options of the command lines whose files the bundle does not hold.
    pub left_behind: Vec<String>,
}

/// Makes a bundle. Calls `progress` often.
///
/// Errors: [`Error::Exists`] if there is a file of that name; [`Error::Recorded`],
/// [`Error::OpenedByQemu`], [`Error::NotRegular`] if a bundle cannot hold the checkpoint;
/// [`Error::OtherPartial`] if what an interrupted command left is of another one; the store, an image
/// or a file cannot be read, or has changed; the bundle cannot be written.
pub fn write(
    request: &BundleRequest<'_>,
    progress: &mut dyn FnMut(&Progress),
) -> Result<BundleReport> {
    let output = request.output;
    let partial = partial_path(output);
    let has_partial = partial.join(STORE_JSON).exists();
    if !has_partial {
        require_free(output)?;
    }
    let folder = output.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
        return Err(Error::NoDirectory(folder.to_owned()));
    }
    let meta = request.meta;
    if machines(meta).any(|machine| machine.recorded.is_some()) {
        return Err(Error::Recorded(request.checkpoint));
    }
    whole::require_readable(request)?;
    let needed = files::needed(machines(meta))?;
    let disks: Vec<String> = meta.disks.iter().map(|disk| disk.name.clone()).collect();
    let left_behind = files::left_behind(machines(meta));
    let report = |bundle_bytes, files| BundleReport { bundle_bytes, files, disks, left_behind };
    let open = |path: &Path, exists| {
        (request.staging)(path, exists)
            .map_err(|e| Error::Store { store: path.to_owned(), source: Box::new(e) })
    };
    let target = open(&partial, has_partial)?;
    if target.is_encrypted() != request.encrypted {
        return Err(Error::OtherPartial(partial));
    }
    // The last command made the bundle, and was interrupted before its end.
    if let Ok(about) = output.symlink_metadata() {
        let made = open(output, true).ok().filter(|made| made.id() == target.id());
        let made = made.ok_or_else(|| Error::Exists(output.to_owned()))?;
        let files = Manifest::read(&made)?.map(|manifest| manifest.files).unwrap_or_default();
        remove_partial(&partial).map_err(Error::io("remove", &partial))?;
        return Ok(report(about.len(), files));
    }
    let of_target = |e| Error::store(&target, e);
    let mut writer = target.lock_writer("keyframe bundle").map_err(of_target)?;
    let expected =
        Manifest::new(request.store, request.checkpoint, meta.taken_at, options(request));
    let is_empty = target.ids().map_err(of_target)?.is_empty();
    let mut manifest = match Manifest::read(&target)? {
        Some(manifest) if manifest.is_of_same(&expected) => manifest,
        None if is_empty => {
            expected.put(&target)?;
            expected
        }
        _ => return Err(Error::OtherPartial(partial)),
    };
    for file in &needed {
        if manifest.files.iter().all(|known| known.path != file.path) {
            let added = add_file(&target, &partial, file, &manifest, progress)?;
            manifest.files.push(added);
            manifest.put(&target)?;
        }
    }
    if is_empty {
        whole::copy(request, &target, &mut writer, progress)?;
    }
    let [id] = target.ids().map_err(of_target)?[..] else {
        return Err(Error::OtherPartial(partial));
    };
    let source = request.store.sealed(request.checkpoint);
    for tag in source.map_err(|e| Error::store(request.store, e))?.names() {
        writer.set_tag(tag, id).map_err(of_target)?;
    }
    remove_unlisted(&partial, &manifest).map_err(Error::io("clean", &partial))?;
    let bundle_bytes = pack(&partial, output, progress)?;
    drop((writer, target));
    remove_partial(&partial).map_err(Error::io("remove", &partial))?;
    Ok(report(bundle_bytes, manifest.files))
}

/// The options that change what is bundled, as words.
fn options(request: &BundleRequest<'_>) -> Vec<String> {
    let word =
        |moved: &MovedFile| format!("--image {}={}", moved.old.display(), moved.new.display());
    let left_out = request.left_out_as_now.then(|| "--left-out-as-now".to_owned());
    request.moved.iter().map(word).chain(left_out).collect()
}

/// Removes the store in the directory `partial`. The file by which it is recognized goes last.
fn remove_partial(partial: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(partial)? {
        let path = entry?.path();
        if path.is_dir() {
            std::fs::remove_dir_all(path)?;
        } else if path != partial.join(STORE_JSON) {
            std::fs::remove_file(path)?;
        }
    }
    std::fs::remove_dir_all(partial)
}

/// The directory for a bundle that is being made.
fn partial_path(output: &Path) -> PathBuf {
    let mut name = output.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    output.with_file_name(name)
}

fn require_free(output: &Path) -> Result<()> {
    match output.symlink_metadata() {
        Ok(_) => Err(Error::Exists(output.to_owned())),
        Err(_) => Ok(()),
    }
}

fn add_file(
    target: &Store,
    partial: &Path,
    file: &NeededFile,
    manifest: &Manifest,
    progress: &mut dyn FnMut(&Progress),
) -> Result<BundledFile> {
    let content = file.content(partial)?;
    let (len_bytes, hash) = files::hash(&content).map_err(Error::io("read", &content))?;
    let added =
        BundledFile { path: file.path.clone(), len_bytes, blake3: hash.to_hex().to_string() };
    if manifest.files.iter().all(|known| known.blake3 != added.blake3) {
        let mut open = File::open(&content).map_err(Error::io("open", &content))?;
        let mut watch = |done_bytes| {
            let step = Step::File(file.path.clone());
            progress(&Progress { step, done_bytes, total_bytes: len_bytes });
        };
        target
            .put_bundled_file(&hash, &mut open, &mut watch)
            .map_err(|e| Error::store(target, e))?;
    }
    if content != Path::new(&file.path) {
        std::fs::remove_file(&content).map_err(Error::io("remove", &content))?;
    }
    Ok(added)
}

/// Removes what an interrupted command left of a file that has changed since.
fn remove_unlisted(partial: &Path, manifest: &Manifest) -> std::io::Result<()> {
    let listed: Vec<_> =
        manifest.files.iter().map(|file| partial.join(bundled_file(&file.blake3))).collect();
    for entry in std::fs::read_dir(partial.join(FILES))? {
        let path = entry?.path();
        if path != partial.join(MANIFEST) && !listed.contains(&path) {
            std::fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// Writes the store in the directory `partial` as an archive, and renames that to `output`. Returns
/// its length.
fn pack(partial: &Path, output: &Path, progress: &mut dyn FnMut(&Progress)) -> Result<u64> {
    let total_bytes = bytes_below(partial).map_err(Error::io("measure", partial))?;
    let path = partial.join(ARCHIVE);
    // Only the owner can read it, because it holds the memory of guests.
    let open = File::options().write(true).create(true).truncate(true).mode(0o600).open(&path);
    let archive = open.map_err(Error::io("create", &path))?;
    let mut watch =
        |done_bytes| progress(&Progress { step: Step::Archive, done_bytes, total_bytes });
    write_archive(partial, &archive, &mut watch)
        .map_err(|e| Error::Store { store: partial.to_owned(), source: Box::new(e.into()) })?;
    archive.sync_all().map_err(Error::io("sync", &path))?;
    require_free(output)?;
    std::fs::rename(&path, output).map_err(Error::io("put in place", output))?;
    let folder = output.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(Error::io("sync the directory of", output))?;
    Ok(archive.metadata().map_err(Error::io("look at", output))?.len())
}

/// The length of all files in the folders of a store.
fn bytes_below(store: &Path) -> std::io::Result<u64> {
    let mut sum = 0;
    for folder in std::fs::read_dir(store)? {
        let folder = folder?.path();
        if folder.is_dir() {
            for file in std::fs::read_dir(folder)? {
                sum += file?.metadata()?.len();
            }
        }
    }
    Ok(sum)
}
