//! Importing a bundle.
//!
//! ```text
//!   files of the bundle ──▶ FILES/HASH-NAME, each whole under its name
//!   checkpoint ───────────▶ copied; its command lines name those files
//! ```

use crate::error::{Error, Result};
use crate::manifest::{BundledFile, Manifest};
use crate::write::{Progress, Step};
use keyframe_qemu::cmdline::MovedFile;
use keyframe_store::{CheckpointId, Meta, Sealed, Store};
use keyframe_store_backend::archive::is_archive;
use keyframe_vm_disks::{moved_images, read_files};
use std::collections::BTreeSet;
use std::fs::{DirBuilder, File};
use std::io::{BufWriter, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The digits of a hash in the name of a file.
const HASH_DIGITS: usize = 16;
const NAME_CHARS_MAX: usize = 100;

/// An open bundle.
pub struct Bundle {
    store: Store,
    manifest: Manifest,
    sealed: Sealed,
}

/// A bundle that was imported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// The checkpoint in the store.
    pub id: CheckpointId,
    /// True if the store had it already.
    pub was_known: bool,
    /// Tags of the bundle that are other checkpoints' in the store, and stay there.
    pub tags_left: Vec<String>,
}

impl Bundle {
    /// Returns true if `path` is a file that begins as a bundle does.
    pub fn is_bundle(path: &Path) -> bool {
        is_archive(path)
    }

    /// Reads the description of a bundle, which was opened as a store. Errors: [`Error::NoBundle`]
    /// for another store; [`Error::Manifest`], [`Error::CheckpointCount`] if it is invalid; it cannot
    /// be read.
    pub fn of(store: Store) -> Result<Self> {
        let path = || store.path().to_owned();
        let manifest = Manifest::read(&store)?.ok_or_else(|| Error::NoBundle(path()))?;
        let ids = store.ids().map_err(|e| Error::store(&store, e))?;
        let [id] = ids[..] else {
            return Err(Error::CheckpointCount { path: path(), count: ids.len() });
        };
        let sealed = store.sealed(id).map_err(|e| Error::store(&store, e))?;
        Ok(Self { store, manifest, sealed })
    }

    /// Returns the name of the VM.
    pub fn vm(&self) -> &str {
        &self.sealed.meta.vm
    }

    /// Returns the files that the VM only reads.
    pub fn files(&self) -> &[BundledFile] {
        &self.manifest.files
    }

    /// Imports the checkpoint into `target`, and the files that it needs into the directory
    /// `folder`, which is made if it is needed. The store and the directory keep what they have. If
    /// `target` has the checkpoint from an earlier import, the files go to where that one put them.
    /// Calls `progress` before each file and before the checkpoint.
    ///
    /// Errors: the bundle is damaged; the store or the directory cannot be written;
    /// [`Error::NotRewritten`] if the VM's command line cannot be changed. Then `target` has no new
    /// checkpoint.
    pub fn import(
        &self,
        target: &Store,
        folder: &Path,
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<Imported> {
        let of_target = |e| Error::store(target, e);
        if let Some(id) = target.copy_of(&self.store, self.sealed.id).map_err(of_target)? {
            let known = target.sealed(id).map_err(of_target)?.meta;
            self.extract_again(&known, progress)?;
            return Ok(Imported { id, was_known: true, tags_left: Vec::new() });
        }
        let folder = std::path::absolute(folder).map_err(Error::io("resolve", folder))?;
        if folder.to_str().is_none() {
            return Err(Error::NotUtf8(folder));
        }
        let mut moved = Vec::with_capacity(self.files().len());
        for file in self.files() {
            let path = folder.join(file_name(file));
            self.extract(file, &path, progress)?;
            moved.push(MovedFile { old: (&file.path).into(), new: path });
        }
        let edited = edited(&moved, self.sealed.meta.clone())?;
        let edit = |meta: &mut Meta| meta.clone_from(&edited);
        let total_bytes = self.sealed.meta.ram.len_pages() * keyframe_units::PAGE_BYTES as u64;
        progress(&Progress { step: Step::Archive, done_bytes: 0, total_bytes });
        let ids = BTreeSet::from([self.sealed.id]);
        let report = self.store.copy_edited(target, &ids, "keyframe import", &edit, &mut |_| ());
        let report = report.map_err(of_target)?;
        if let Some(failed) = report.damaged.into_iter().next() {
            let path = self.store.path().to_owned();
            return Err(Error::Damaged { path, problem: failed.problem });
        }
        // Another import may have been faster.
        let was_known = report.copied.is_empty();
        let id = report.copied.iter().chain(&report.known).map(|copy| copy.to).next_back();
        let id = id.ok_or_else(|| Error::NoBundle(self.store.path().to_owned()))?;
        Ok(Imported { id, was_known, tags_left: report.tags_left })
    }

    /// Writes the files of an earlier import, described by `known`, where they are missing.
    fn extract_again(&self, known: &Meta, progress: &mut dyn FnMut(&Progress)) -> Result<()> {
        let read = crate::machines(known).flat_map(|machine| machine.read_files.iter().flatten());
        let paths: BTreeSet<&Path> = read.map(|file| Path::new(&file.path)).collect();
        for file in self.files() {
            let name = file_name(file);
            let is_it = |path: &&&Path| path.file_name().is_some_and(|own| own == &*name);
            if let Some(path) = paths.iter().find(is_it) {
                self.extract(file, path, progress)?;
            }
        }
        Ok(())
    }

    /// Writes a file of the bundle to `path`, unless it is there.
    fn extract(
        &self,
        file: &BundledFile,
        path: &Path,
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<()> {
        let hash = file.hash()?;
        let is_there = || crate::files::hash(path).is_ok_and(|f| f == (file.len_bytes, hash));
        let (step, total_bytes) = (Step::File(file.path.clone()), file.len_bytes);
        progress(&Progress { step: step.clone(), done_bytes: 0, total_bytes });
        if is_there() {
            return Ok(());
        }
        let folder = path.parent().unwrap_or(Path::new("/"));
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .map_err(Error::io("make directory", folder))?;
        // A name of its own: another import may write the same file now.
        let made = tempfile::Builder::new().prefix(".keyframe-import-").tempfile_in(folder);
        let made = made.map_err(Error::io("make a file in", folder))?;
        let mut out = BufWriter::new(made.as_file());
        let mut watch =
            |done_bytes| progress(&Progress { step: step.clone(), done_bytes, total_bytes });
        self.store
            .read_bundled_file(&hash, file.len_bytes, &mut out, &mut watch)
            .map_err(|e| Error::store(&self.store, e))?;
        out.flush().map_err(Error::io("write", path))?;
        drop(out);
        // The same time at each import: it is a part of the file's identity in a checkpoint.
        let time = SystemTime::from(self.sealed.meta.taken_at);
        made.as_file().set_modified(time).map_err(Error::io("set the time of", path))?;
        made.as_file().sync_all().map_err(Error::io("sync", path))?;
        match made.persist_noclobber(path) {
            Ok(_) => {}
            Err(_) if is_there() => {}
            // Another file has the name, or a part of this one. The import replaces it.
            Err(e) => drop(e.file.persist(path).map_err(|e| Error::io("write", path)(e.error))?),
        }
        let synced = File::open(folder).and_then(|folder| folder.sync_all());
        synced.map_err(Error::io("sync the directory", folder))
    }
}

/// The name of a file here. One that was imported before keeps its name.
fn file_name(file: &BundledFile) -> String {
    let (digits, name) = (&file.blake3[..HASH_DIGITS], plain_name(&file.path));
    let is_imported = name.strip_prefix(digits).is_some_and(|rest| rest.starts_with('-'));
    if is_imported { name } else { format!("{digits}-{name}") }
}

/// The last part of `path` with letters, digits, dots, dashes and underscores only.
fn plain_name(path: &str) -> String {
    let name = path.rsplit('/').next().unwrap_or_default().chars();
    let plain = name.map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' });
    plain.take(NAME_CHARS_MAX).collect()
}

/// Returns the description `meta` with the files of the bundle at their places here.
fn edited(moved: &[MovedFile], mut meta: Meta) -> Result<Meta> {
    moved_images::apply(moved, &mut meta)?;
    let here: BTreeSet<&Path> = moved.iter().map(|file| &*file.new).collect();
    let mut found = BTreeSet::new();
    let members = meta.members.iter_mut().map(|member| &mut member.machine);
    for machine in members.chain([&mut meta.machine]) {
        // Their times are others here, and an image with images beneath it is whole now. Other files
        // that lie here by chance are not the VM's.
        let mut files = read_files::describe(&machine.user_command, &machine.directory());
        files.retain(|file| here.contains(Path::new(&file.path)));
        found.extend(files.iter().map(|file| PathBuf::from(&file.path)));
        machine.read_files = Some(files);
    }
    match moved.iter().find(|file| !found.contains(&file.new)) {
        Some(file) => Err(Error::NotRewritten { path: file.old.display().to_string() }),
        None => Ok(meta),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_from_a_bundle_leads_nowhere_else() {
        for (path, name) in [
            ("/k/vmlinuz-6.1", "vmlinuz-6.1"),
            ("/a/ü,b=c d.iso", "__b_c_d.iso"),
            ("/a/..", ".."),
            ("/", ""),
            (&format!("/{}", "x".repeat(300)), &"x".repeat(NAME_CHARS_MAX)),
        ] {
            assert_eq!(plain_name(path), name);
        }
    }
}
