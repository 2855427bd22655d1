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
use keyframe_store::{CheckpointId, MachineMeta, Meta, Sealed, Store};
use keyframe_vm_disks::{moved_images, read_files};
use std::collections::BTreeSet;
use std::fs::{DirBuilder, File};
use std::io::{BufWriter, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The digits of a hash in the name of a file.
const HASH_DIGITS: usize = 16;
const NAME_CHARS_MAX: usize = 100;
/// The beginning of a bundle: the name of its first file in the header of a tar archive.
const BEGIN: &[u8] = b"store.json\0";

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
        let mut begin = [0; BEGIN.len()];
        let read = File::open(path).and_then(|mut file| file.read_exact(&mut begin));
        path.is_file() && read.is_ok() && begin == BEGIN
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
    /// `folder`, which is made if it is needed. Both keep what is there already. Calls `progress`
    /// before each file and before the checkpoint.
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
        let mut moved = Vec::with_capacity(self.files().len());
        for file in self.files() {
            let step = Step::File(file.path.clone());
            progress(&Progress { step, done_bytes: 0, total_bytes: file.len_bytes });
            moved.push(MovedFile { old: (&file.path).into(), new: self.extract(file, folder)? });
        }
        edited(&moved, self.sealed.meta.clone())?;
        // It has succeeded on the same description.
        let edit = |meta: &mut Meta| {
            if let Ok(new) = edited(&moved, meta.clone()) {
                *meta = new;
            }
        };
        let total_bytes = self.sealed.meta.ram.len_pages() * keyframe_units::PAGE_BYTES as u64;
        progress(&Progress { step: Step::Archive, done_bytes: 0, total_bytes });
        let ids = BTreeSet::from([self.sealed.id]);
        let report = self.store.copy_edited(target, &ids, &edit, &mut |_| ());
        // An error of the bundle names the bundle.
        let report = report.map_err(|e| Error::store(target, e))?;
        if let Some(failed) = report.damaged.into_iter().next() {
            let path = self.store.path().to_owned();
            return Err(Error::Damaged { path, problem: failed.problem });
        }
        let was_known = report.copied.is_empty();
        let copies = report.copied.iter().chain(&report.known).map(|copy| copy.to);
        let missing = || Error::NoBundle(self.store.path().to_owned());
        let id = copies.last().ok_or_else(missing)?;
        Ok(Imported { id, was_known, tags_left: report.tags_left })
    }

    /// Writes a file of the bundle into `folder`, unless it is there, and returns its absolute path.
    fn extract(&self, file: &BundledFile, folder: &Path) -> Result<PathBuf> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .map_err(Error::io("make directory", folder))?;
        let folder = std::path::absolute(folder).map_err(Error::io("resolve", folder))?;
        let hash = file.hash()?;
        let path = folder.join(file_name(file));
        if crate::files::hash(&path).is_ok_and(|found| found == (file.len_bytes, hash)) {
            return Ok(path);
        }
        let partial = path.with_extension("partial");
        let io = |operation| Error::io(operation, &partial);
        let open =
            File::options().write(true).create(true).truncate(true).mode(0o600).open(&partial);
        let mut out = BufWriter::new(open.map_err(io("create"))?);
        let read = self.store.read_bundled_file(&hash, file.len_bytes, &mut out);
        let written = read.map_err(|e| Error::store(&self.store, e)).and_then(|()| {
            out.flush().map_err(io("write"))?;
            out.get_ref().sync_all().map_err(io("sync"))?;
            std::fs::rename(&partial, &path).map_err(Error::io("put in place", &path))
        });
        if let Err(error) = written {
            let _ = std::fs::remove_file(&partial);
            return Err(error);
        }
        Ok(path)
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
    let mut found = BTreeSet::new();
    let members = meta.members.iter_mut().map(|member| &mut member.machine);
    for machine in members.chain([&mut meta.machine]) {
        // Their times are others here, and an image with images beneath it is whole now.
        machine.read_files = Some(described(machine));
        found.extend(machine.read_files.iter().flatten().map(|file| PathBuf::from(&file.path)));
    }
    match moved.iter().find(|file| !found.contains(&file.new)) {
        Some(file) => Err(Error::NotRewritten { path: file.old.display().to_string() }),
        None => Ok(meta),
    }
}

fn described(machine: &MachineMeta) -> Vec<keyframe_qemu::ReadFile> {
    read_files::describe(&machine.user_command, &machine.directory())
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
