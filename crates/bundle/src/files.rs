//! The files that the VM of a checkpoint only reads, and how a bundle holds each.
//!
//! A read-only qcow2 image with images beneath it becomes one qcow2 image, since its header names
//! the others by paths of this machine.

use crate::error::{Error, Result};
use keyframe_disk::chain::image_files;
use keyframe_disk::{Base, Below, ImageFormat, commit};
use keyframe_qemu::cmdline::options;
use keyframe_qemu::named_files;
use keyframe_store::MachineMeta;
use keyframe_vm_disks::read_files;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// A file that a bundle is to hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NeededFile {
    /// The absolute path that the command line means.
    pub path: String,
    /// The format of the image, if other images lie beneath it.
    pub chained: Option<ImageFormat>,
}

/// Returns the files that `machines` only read, each path once, in the order of their paths. Leaves
/// out what a command line names and is no file here, such as the firmware that QEMU looks for in its
/// own directory.
///
/// Errors: [`Error::NotRegular`] for a device; [`Error::OwnLayers`]; a file that the checkpoint knows,
/// or an image beneath another one, cannot be read.
pub fn needed<'a>(machines: impl Iterator<Item = &'a MachineMeta>) -> Result<Vec<NeededFile>> {
    let mut files = BTreeMap::new();
    for machine in machines {
        let directory = machine.directory();
        let mut known = machine.read_files.clone().unwrap_or_default();
        known.extend(read_files::describe(&machine.user_command, &directory));
        for named in named_files(&machine.user_command) {
            let path = directory.join(&named.path);
            let Some(file) = known.iter().find(|file| Path::new(&file.path) == path) else {
                continue;
            };
            if named.has_own_layers && names_layer_files(&machine.user_command, &named.path) {
                return Err(Error::OwnLayers { path: file.path.clone(), option: named.option });
            }
            let is_file = std::fs::metadata(&path).map_err(Error::io("look at", &path))?.is_file();
            if !is_file {
                let (path, option) = (file.path.clone(), named.option);
                return Err(Error::NotRegular { path, option });
            }
            // The header of an image with layers of its own does not say what lies beneath it.
            let is_chained = named.is_medium && !named.has_own_layers;
            let chained = if is_chained { chained(&path, named.format.as_deref())? } else { None };
            files.insert(file.path.clone(), NeededFile { path: file.path.clone(), chained });
        }
    }
    Ok(files.into_values().collect())
}

/// The format of the image at `path` if other images lie beneath it.
fn chained(path: &Path, format: Option<&str>) -> Result<Option<ImageFormat>> {
    let format = match format.and_then(ImageFormat::named) {
        Some(format) => format,
        None => match ImageFormat::probe(path) {
            Ok(format) => format,
            // Of another format: QEMU reads it as it is.
            Err(_) => return Ok(None),
        },
    };
    let has_layers = image_files(path, format)?.len() > 1;
    Ok(Some(format).filter(|_| has_layers))
}

/// True if an option of `words` that names `path` also names files of images beneath it, which no
/// bundle holds.
fn names_layer_files(words: &[String], path: &str) -> bool {
    const LAYERS: [&str; 3] = ["backing.", "\"backing\":{", "data-file"];
    let names = |word: &&String| word.contains(path) || word.contains(&path.replace(',', ",,"));
    words.iter().filter(names).any(|word| LAYERS.iter().any(|layer| word.contains(layer)))
}

/// Returns the options of `machines` that name files or directories that no bundle holds, and that a
/// restore needs.
pub fn left_behind<'a>(machines: impl Iterator<Item = &'a MachineMeta>) -> Vec<String> {
    const KEYS: [&str; 4] = ["file=", "dir=", "\"file\"", "\"dir\""];
    let mut left = Vec::new();
    for machine in machines {
        let line = options::parse(machine.user_command.get(1..).unwrap_or_default());
        for argument in line.unwrap_or_default() {
            let value = argument.value();
            let names_file = match argument.name() {
                "readconfig" | "L" | "virtfs" | "fsdev" => true,
                "object" => {
                    let is_secret = value.contains("secret") || value.contains("tls-creds");
                    is_secret && KEYS.iter().any(|key| value.contains(key))
                }
                _ => false,
            };
            if names_file {
                left.push(format!("-{} {value}", argument.name()));
            }
        }
    }
    left.sort_unstable();
    left.dedup();
    left
}

impl NeededFile {
    /// Returns the path of a file with the content for the bundle: the file itself, or one that is
    /// made in the directory `scratch`. Error: an image cannot be read, or the file not be made.
    pub fn content(&self, scratch: &Path) -> Result<PathBuf> {
        let path = PathBuf::from(&self.path);
        let Some(format) = self.chained else { return Ok(path) };
        let whole = scratch.join("medium.qcow2");
        let image = Below::new(Base::open(&path, format)?, None);
        commit::to_file(&image, &whole, ImageFormat::Qcow2, true, &mut |_| Ok(()))?;
        Ok(whole)
    }
}

/// Returns the length and the hash of the file at `path`. Error: it cannot be read.
pub fn hash(path: &Path) -> io::Result<(u64, blake3::Hash)> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(File::open(path)?)?;
    Ok((hasher.count(), hasher.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_whose_line_names_its_layers_is_not_made_whole() {
        let words = |drive: &str| ["q", "-drive", drive].map(str::to_owned);
        for (drive, is_refused) in [
            ("file=/a.qcow2,readonly=on,backing=base", false),
            ("file=/a.qcow2,readonly=on,backing.file.filename=/b,backing.driver=raw", true),
            ("file=/a.qcow2,readonly=on", false),
        ] {
            assert_eq!(names_layer_files(&words(drive), "/a.qcow2"), is_refused, "{drive}");
        }
        let own = |drive: &str| named_files(&words(drive))[0].has_own_layers;
        assert!(own("file=/a.qcow2,readonly=on,backing=base") && !own("file=/a.qcow2,readonly=on"));
        let node = r#"{"driver":"qcow2","node-name":"f","read-only":true,"backing":null,"file":{"driver":"file","filename":"/a.qcow2"}}"#;
        let words = ["q", "-blockdev", node].map(str::to_owned);
        assert!(named_files(&words)[0].has_own_layers);
    }

    #[test]
    fn the_files_that_the_machine_reads_are_found_each_once() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).display().to_string();
        for name in ["kernel", "cd.iso", "disk.raw"] {
            std::fs::write(at(name), name).unwrap();
        }
        let line = format!(
            "q -kernel {} -bios bios.bin -cdrom cd.iso -drive file={},readonly=on -drive file=w.img",
            at("kernel"),
            at("cd.iso")
        );
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let mut machine = MachineMeta {
            read_files: Some(read_files::describe(&words, dir.path())),
            working_directory: dir.path().display().to_string(),
            user_command: words,
            ..MachineMeta::default()
        };
        let needed = |machine: &MachineMeta| needed([machine, machine].into_iter());
        let paths: Vec<_> = needed(&machine).unwrap().into_iter().map(|file| file.path).collect();
        assert_eq!(paths, [at("cd.iso"), at("kernel")]);
        machine.user_command.extend(["-readconfig".into(), "c.cfg".into()]);
        machine.user_command.extend(["-object".into(), "secret,id=s,file=key".into()]);
        let left = left_behind([&machine].into_iter());
        assert_eq!(left, ["-object secret,id=s,file=key", "-readconfig c.cfg"]);
        std::fs::remove_file(at("kernel")).unwrap();
        assert!(matches!(needed(&machine), Err(Error::Io { operation: "look at", .. })));
        machine.read_files = None;
        assert_eq!(needed(&machine).unwrap().len(), 1);
    }
}
